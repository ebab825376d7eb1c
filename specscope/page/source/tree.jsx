// A step's tree with every verdict, one node a line; the final token hangs where it was drawn.
import { probability } from "./numbers.js";
import { Place, coinOnLine, coinSign, draftP } from "./place.js";
import { MARKS, OUTCOMES, REJECTED, UNTRIED } from "./step.js";

const WIDE = 110, HIGH = 14;

/** The line from 0 to 1, its first part, a, thick; the coin on it, a ring where it fell beside that part. */
export function CoinLine({ a, coin, outcome }) {
  if (!Number.isFinite(a)) return null;
  const at = (value) => 5 + (WIDE - 10) * Math.min(Math.max(value, 0), 1), below = coin < a;
  const label = coin ? `coin ${probability(coin)} ${below ? "<" : "≥"} a ${probability(a)}` : `a ${probability(a)}`;
  return (
    <svg class="coin" width={WIDE} height={HIGH} viewBox={`0 0 ${WIDE} ${HIGH}`} role="img" aria-label={label}>
      <line class="rail" x1={at(0)} x2={at(1)} y1={7} y2={7} />
      <line class="won" x1={at(0)} x2={at(a)} y1={7} y2={7} />
      {coin > 0 && <circle class={`${OUTCOMES[outcome]} ${below ? "inside" : "beside"}`} cx={at(coin)} cy={7} r={4.2} />}
    </svg>
  );
}

const shown = (value) => (value === null || value === undefined ? "" : probability(value));

/** The columns for a step: [heading, its class, the cell of a node]. */
function columnsOf(step) {
  const tried = (node) => node.outcome !== UNTRIED;
  const raw = ["raw p", "w2", (node) => step.hasParents && shown(Place.at(step, node.number).rawP)], rank = ["rank", "w3", (node) => Place.at(step, node.number).rawRank ?? ""];
  const draft = ["draft p", "w2", (node) => shown(draftP(step, node))];
  const drafts = step.nodes.some((node) => draft[2](node)) ? [draft] : [];
  if (step.greedy) return [["raw p", "", raw[2]], rank, ...drafts.map(([name, , cell]) => [name, "", cell]), ["p", "w2", (node) => (step.tellsP ? shown(node.p) : "")]];
  return [
    ["p", "", (node) => (step.tellsP ? shown(node.p) : "")],
    ["q", "", (node) => shown(node.q)],
    raw,
    rank,
    ...(step.sampled ? [] : drafts),
    ["coin", "w1", (node) => (tried(node) && node.judged && node.coin ? shown(node.coin) : "")],
    ["a", "w1", (node) => (tried(node) && step.tellsP ? `${coinSign(step, node)} ${shown(node.a)}` : "")],
    ["coin on a line", "w1", (node) => tried(node) && step.tellsP && <CoinLine a={node.a} coin={coinOnLine(step, node)} outcome={node.outcome} />],
    ["residual", "w4", (node) => (node.outcome === REJECTED ? shown(node.residual) : "")],
  ];
}

export function Tree({ step, picked, pick, label = "Tree" }) {
  const columns = columnsOf(step), { vocabulary } = step.run;
  const token = (number) => (number === step.size ? step.final.token : step.nodes[number].token);
  const line = ([number, lead]) => {
    const node = step.nodes[number], final = number === step.size, kind = final ? step.kind : OUTCOMES[node.outcome];
    const mark = final ? "»" : MARKS[node.outcome], notes = [final ? step.kind : "", (final ? step.nearFinal : node.near) ? "≈" : "", (final ? step.forcedFinal : node.forced) ? "forced" : ""];
    return (
      <tr class={`${kind} ${number === picked ? "picked" : ""}`} onClick={() => pick(number)}>
        <th scope="row">
          <span class="lead" aria-hidden="true">{lead}</span>
          <button type="button" aria-pressed={number === picked} aria-label={`${final ? "final token" : `node ${number}`} ${vocabulary.show(token(number))} ${kind}`}>
            <span class={`mark ${kind}`}>{mark}</span> {vocabulary.show(token(number))}
          </button>
          <span class="note">{notes.filter(Boolean).join(" ")}</span>
        </th>
        {columns.map(([name, width, cell]) => <td class={`figure ${width}`}>{final ? (name === (step.greedy ? "raw p" : "p") ? shown(step.greedy ? Place.at(step, number).rawP : Place.at(step, number).numbers.p) : "") : cell(node)}</td>)}
      </tr>
    );
  };
  return (
    <div class="scroll tree" tabIndex={0} role="group" aria-label={label}>
      <table>
        <thead><tr><th scope="col">{`root @${step.context + step.prefill}`}</th>{columns.map(([name, width]) => <th scope="col" class={`figure ${width}`}>{name}</th>)}</tr></thead>
        <tbody>{step.rows.map(line)}</tbody>
      </table>
      {step.droppedCount > 0 && <p class="note">{`re-ranking dropped ${step.droppedCount} more`}</p>}
    </div>
  );
}

/** A box for each level of the tree, those of the accepted depth filled. */
export const Depth = ({ accepted, depth }) => (
  <span class="depth" role="img" aria-label={`accepted ${accepted} of ${depth}`}>{Array.from({ length: depth }, (_, level) => <i class={level < accepted ? "accepted" : ""} />)}</span>
);

