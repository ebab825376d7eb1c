// Two runs beside each other: what differs, where outputs part, and both trees at that place.
import { useState } from "preact/hooks";
import { Bars } from "./charts.jsx";
import { HEAD, RUNS } from "./data.js";
import { useLoaded } from "./hooks.js";
import { List } from "./list.jsx";
import { Node } from "./node.jsx";
import { count, number } from "./numbers.js";
import { addressOf, move } from "./route.js";
import { StepPanel, nodeOf } from "./steps.jsx";
import { Facts, Table } from "./table.jsx";

const COMPARISON = HEAD.comparison;
export const pairAddress = (pair, at = null) => `#/pairs/${pair}${at === null ? "" : `@${at}`}`;

export function Compared() {
  const { answer, summary, headline, reasons, missing, depths, header, tables } = COMPARISON;
  return (
    <main id="main" class="overview">
      <section class={`verdict ${answer === "different" ? "bad" : answer === "same" ? "good" : "unsure"}`}>
        <h2>{summary}</h2>
        <p class="strong">{headline}</p>
        {reasons.length > 0 && <ul>{reasons.map((line) => <li>{line}</li>)}</ul>}
        {COMPARISON.first !== null && <p><a href={pairAddress(COMPARISON.first)}>Look at the first difference</a></p>}
      </section>
      <div class="charts">
        <section class="panel"><h2>What is compared</h2><Facts pairs={header} />{missing.map((line) => <p class="note">{`– ${line}`}</p>)}</section>
        <Bars title="Acceptance by depth" x="depth" names={["A", "B"]} groups={depths.map(([a, b], i) => [i + 1, [a, b]])} />
      </div>
      {tables.map((table) => <Table table={table} />)}
    </main>
  );
}

/** Output tokens before each step of a request. */
function placesOf(run, id) {
  const { first, steps } = run.requests[run.byId.get(id)], places = [];
  for (let at = first, done = 0; at < first + steps; at++) {
    if (run.overview.kind[at] === 3) continue;
    places.push([done, at]);
    done += run.overview.emitted[at];
  }
  return places;
}

/** The step of a side that covers a place in the output. */
const covering = (places, at) => places.findLast(([begin]) => begin <= at)?.[1];

/** Where a step of either side begins. */
export function beside(pair) {
  const sides = [placesOf(RUNS[0], pair.a), placesOf(RUNS[1], pair.b)];
  const rows = [...new Set(sides.flatMap((places) => places.map(([begin]) => begin)))].sort((x, y) => x - y);
  return { sides, rows };
}

export const said = (pair) => {
  const other = pair.other === null ? "" : `; the first other decision is at token ${count(pair.other)}`;
  return pair.at === null ? `the same output${other}` : `the outputs part at token ${count(pair.at)}: ${pair.about}${other}`;
};

export function Pairs({ route }) {
  const picked = Math.min(route.pair ?? COMPARISON.first ?? 0, COMPARISON.pairs.length - 1), pair = COMPARISON.pairs[picked];
  const [nodes, setNodes] = useState([null, null]);
  if (!pair) return <main id="main" class="reading"><p>{`There is no pair of requests: ${COMPARISON.unpaired}.`}</p></main>;
  const { sides, rows } = beside(pair), at = route.at ?? pair.at ?? pair.other ?? 0;
  const show = (next, place = null) => { setNodes([null, null]); move(pairAddress(next, place)); };
  const pairRow = (i) => {
    const each = COMPARISON.pairs[i];
    return [<span class="name">{each.a === each.b ? each.a : `${each.a} / ${each.b}`}</span>, <span class="numbers">{`τ ${number(each.tau[0])} → ${number(each.tau[1])}`}</span>, <span class="title">{each.at === null ? "same output" : `token ${count(each.at)}: ${each.cause}`} {each.title}</span>];
  };
  const placeRow = (i) => [<span class="index">{count(rows[i])}</span>, ...sides.map((places, side) => <span class="text">{places.some(([begin]) => begin === rows[i]) ? `${"AB"[side]}@${RUNS[side].overview.index[covering(places, rows[i])]}` : ""}</span>), <span class="kind">{pair.at !== null && rows[i] <= pair.at && (rows[i + 1] ?? Infinity) > pair.at ? "» parts" : ""}</span>];
  return (
    <main id="main" class="pairs">
      <section class="panel requests" aria-label="Pairs"><header><h2>{`Pairs ${count(COMPARISON.pairs.length)}`}</h2></header>
        <List label="pairs" count={COMPARISON.pairs.length} picked={picked} height={52} row={pairRow} pick={(i) => show(i)} empty="no pair" />
      </section>
      <section class="panel request" aria-label="Places in the output"><header><h2>{pair.a === pair.b ? pair.a : `${pair.a} / ${pair.b}`}</h2></header>
        <p class="strong">{said(pair)}</p>
        <List label="places" className="of-steps" count={rows.length} picked={rows.findLastIndex((row) => row <= at)} height={26} row={placeRow} pick={(i) => show(picked, rows[i])} empty="no step" />
      </section>
      {[0, 1].map((side) => <Side key={side} side={side} pair={pair} place={covering(sides[side], at)} node={nodes[side]} pick={(node) => setNodes(nodes.map((each, i) => (i === side ? node : each)))} />)}
    </main>
  );
}

function Side({ side, pair, place, node, pick }) {
  const run = RUNS[side], step = useLoaded(() => (place === undefined ? undefined : run.step(place)), [run, place]);
  if (place === undefined) return <section class="panel side"><h2>{"AB"[side]}</h2><p class="faint">this side has no step here</p></section>;
  if (step?.place !== place) return <section class="panel side"><p class="faint">…</p></section>;
  const address = addressOf(side, run.byId.get([pair.a, pair.b][side]), step.index);
  return (
    <div class="side">
      <StepPanel step={step} node={nodeOf(step, node)} pick={pick} title={`${"AB"[side]} ${step.name}`} />
      <p class="note"><a href={address}>{`Open ${"AB"[side]} at this step`}</a></p>
      <Node step={step} number={nodeOf(step, node)} />
    </div>
  );
}
