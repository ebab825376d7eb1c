// The requests of a run: sorted, filtered, and which one is picked.
import { useMemo } from "preact/hooks";
import { List } from "./list.jsx";
import { count, number, percent } from "./numbers.js";

export const ORDERS = ["arrival", "τ", "rate", "tokens", "steps", "end"];
const named = (order) => (order === "arrival" ? "order of arrival" : `by ${order}`);
const VALUES = {
  arrival: (request) => request.first, τ: (request) => request.tau ?? Infinity, rate: (request) => request.rate ?? Infinity,
  tokens: (request) => -request.tokens, steps: (request) => -request.steps, end: (request) => request.end,
};

/** The numbers of the requests that a filter leaves, in an order. */
export function ordered(run, { order, reverse, filter, kind }) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean), value = VALUES[order];
  const fits = (request) => (!kind || request.kind === kind) && words.every((word) => `${request.id} ${request.title} ${request.facts} ${request.end}`.toLowerCase().includes(word));
  const places = run.requests.map((_, place) => place).filter((place) => fits(run.requests[place]));
  const compare = (a, b) => (value(run.requests[a]) < value(run.requests[b]) ? -1 : value(run.requests[a]) > value(run.requests[b]) ? 1 : a - b);
  places.sort(compare);
  return reverse ? places.reverse() : places;
}

export function Requests({ run, shown, picked, listing, set, pick }) {
  const kinds = useMemo(() => [...new Set(run.requests.map((request) => request.kind))].filter(Boolean).sort(), [run]);
  const row = (i) => {
    const request = run.requests[shown[i]];
    return [
      <span class="name">{request.id}{request.kind && <span class="tag">{request.kind}</span>}</span>,
      <span class="numbers">{`τ ${number(request.tau)} · ${percent(request.rate)} · ${count(request.tokens)} tok`}</span>,
      <span class="title">{request.title || request.end}</span>,
    ];
  };
  return (
    <section class="panel requests" aria-label="Requests">
      <header><h2>{`Requests ${count(shown.length)}`}</h2></header>
      <div class="tools">
        <input id="filter" type="search" placeholder="filter ( / )" aria-label="Filter the requests" value={listing.filter} onInput={(event) => set({ filter: event.currentTarget.value })} />
        {kinds.length > 1 && <select aria-label="Label kind" value={listing.kind} onChange={(event) => set({ kind: event.currentTarget.value })}><option value="">all kinds</option>{kinds.map((kind) => <option value={kind}>{kind}</option>)}</select>}
        <select aria-label="Sort the requests by" value={listing.order} onChange={(event) => set({ order: event.currentTarget.value })}>{ORDERS.map((order) => <option value={order}>{named(order)}</option>)}</select>
        <button type="button" aria-label="Reverse the sorting" aria-pressed={listing.reverse} onClick={() => set({ reverse: !listing.reverse })}>{listing.reverse ? "↑" : "↓"}</button>
      </div>
      <List label="requests" count={shown.length} picked={shown.indexOf(picked)} height={52} row={row} pick={(i) => pick(shown[i])} empty="no request fits the filter" />
    </section>
  );
}
