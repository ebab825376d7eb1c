// What the address names: #r3@17/4 a request, its step, a node; #B:r3@17 in the second of two runs; #/analysis a view, #/pairs/2@40 a pair.
import { useEffect, useState } from "preact/hooks";
import { RUNS } from "./data.js";

export const VIEWS = ["overview", "pairs", "steps", "analysis", "rejections", "tune", "findings"];

/** REQUEST, REQUEST@STEP or REQUEST@STEP/NODE in a run: anything that is not the latter two is a request's name. */
export function readPlace(text) {
  const letter = /^([AB]):/.exec(text), run = letter && RUNS.length > 1 ? "AB".indexOf(letter[1]) : 0;
  const rest = letter && RUNS.length > 1 ? text.slice(2) : text;
  const [, name, index, node] = /^(.+)@(\d+)(?:\/(\d+))?$/s.exec(rest) ?? [null, rest];
  if (RUNS[run].byId.has(rest)) return { run, request: RUNS[run].byId.get(rest), index: null, node: null };
  if (!RUNS[run].byId.has(name)) return null;
  return { run, request: RUNS[run].byId.get(name), index: numberOf(index), node: numberOf(node) };
}

/** The place of a request's step of that number among all of its run; its first step where it has none of it. */
export function placeOf(run, request, index) {
  const { first, steps } = run.requests[request], { index: indices } = run.overview;
  for (let place = first; index !== null && place < first + steps; place++) if (indices[place] === index) return place;
  return first;
}

const encoded = (id) => encodeURIComponent(id).replaceAll("%40", "@").replaceAll("%3A", RUNS.length > 1 ? "%3A" : ":");

export function addressOf(run, request, index = null, node = null) {
  const id = encoded(RUNS[run].requests[request].id);
  return `#${RUNS.length > 1 ? `${"AB"[run]}:` : ""}${id}${index === null ? "" : `@${index}`}${node === null ? "" : `/${node}`}`;
}

/** The address of a reference as tables print it, r3@17/4; null where it names nothing here. */
export function linkOf(reference, run = 0) {
  const place = readPlace(RUNS.length > 1 && !/^[AB]:/.test(reference) ? `${"AB"[run]}:${reference}` : reference);
  return place && addressOf(place.run, place.request, place.index, place.node);
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

const numberOf = (text) => (text === undefined ? null : Number(text));

export function readAddress() {
  const text = decoded(location.hash.slice(1)), [, view, pair, at] = /^\/(\w+)(?:\/(\d+)(?:@(\d+))?)?$/.exec(text) ?? [];
  if (view) return { view: VIEWS.includes(view) ? view : "overview", pair: numberOf(pair), at: numberOf(at) };
  const place = text ? readPlace(text) : null;
  return place ? { view: "steps", ...place } : { view: "overview", missing: text || null };
}

export const go = (address) => {
  if (location.hash !== address) location.hash = address;
};

/** Change the address without an entry in the browser's history: for moves by one. */
export const move = (address) => {
  if (location.hash === address) return;
  try {
    history.replaceState(null, "", address);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } catch {
    location.hash = address; // in a frame without an address
  }
};

export function useRoute() {
  const [route, set] = useState(readAddress);
  useEffect(() => {
    const read = () => set(readAddress());
    addEventListener("hashchange", read);
    return () => removeEventListener("hashchange", read);
  }, []);
  return route;
}
