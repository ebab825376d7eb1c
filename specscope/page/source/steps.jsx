// A request step by step: its text, its steps, the tree of one of them, and one decision.
import { useMemo, useState } from "preact/hooks";
import { HEAD } from "./data.js";
import { useLoaded } from "./hooks.js";
import { List } from "./list.jsx";
import { Node } from "./node.jsx";
import { count, number, plural } from "./numbers.js";
import { Legend, Output, texts } from "./output.jsx";
import { deciding, endedBy, why, whyStep } from "./place.js";
import { Requests } from "./requests.jsx";
import { addressOf, go, move } from "./route.js";
import { REJECTED, ROOT, UNTRIED } from "./step.js";
import { Sentence } from "./table.jsx";
import { Depth, Tree } from "./tree.jsx";

const KINDS = ["bonus", "recovered", "target", "prefill"];

export function StepList({ run, request, place, pick }) {
  const { first, steps } = run.requests[request], { overview } = run;
  const loaded = useLoaded(async () => ({ run, output: await run.output() }), [run]);
  const row = (i) => {
    const at = first + i, parts = loaded?.run === run ? texts(run, loaded.output, at, at + 1) : [], kind = KINDS[overview.kind[at]];
    return [
      <span class="index">{overview.index[at]}</span>,
      kind === "prefill" ? <span class="faint">prefill</span> : overview.nodes[at] ? <Depth accepted={overview.accepted[at]} depth={overview.depth[at]} /> : <span class="faint">no draft</span>,
      <span class={`kind ${kind}`}>{{ recovered: "✗", bonus: "✓" }[kind] ?? "·"}</span>,
      <span class="text">{parts.flatMap(([, tokens]) => tokens.map(([text, origin]) => <span class={`token ${origin}`}>{text.replaceAll("\n", "⏎")}</span>))}</span>,
    ];
  };
  return <List label="steps" className="of-steps" count={steps} picked={place - first} height={26} row={row} pick={(i) => pick(first + i)} empty="no step of this request is known" />;
}

export function StepPanel({ step, node, pick, title }) {
  if (!step) return <section class="panel step"><p class="faint">…</p></section>;
  const nodes = plural(step.size, "node"), accepted = step.path.length;
  return (
    <section class="panel step" aria-label={title ?? "Step"}>
      <header>
        <h2>{title ?? `Step ${step.index}`}</h2>
        <span class="faint">{!step.judged ? "prefill" : step.size ? `${accepted} of ${nodes}, depth ${accepted} of ${step.depth}` : "nothing drafted"}{` · engine step ${count(step.engine)}`}{step.drafter && step.drafter !== "none" ? ` · ${step.drafter}` : ""}{step.rule && step.rule !== "standard" ? ` · rule ${step.rule}` : ""}</span>
      </header>
      {step.judged && <Tree step={step} picked={node} pick={pick} label={`Tree of ${step.name}`} />}
      <div class="why">{aboutStep(step).map((sentence, i) => <p class={i ? "" : "strong"}><Sentence text={sentence} /></p>)}{step.method && <p class="faint">{step.method}</p>}</div>
    </section>
  );
}

/** What is said of a step besides what its node says that ended it, which stands beside it. */
function aboutStep(step) {
  const node = step.judged && step.size ? why(step, endedBy(step)) : [];
  return [...whyStep(step).filter((sentence) => !node.includes(sentence)), ...shifted(step)];
}

/** What the target would have taken below a rejected node: drafts that stand a place too late look so. */
function shifted(step) {
  const below = (parent) => parent !== ROOT && (step.nodes[parent].outcome === REJECTED || below(step.nodes[parent].parent));
  const found = step.greedy && step.tellsP ? step.nodes.filter((node) => node.outcome === UNTRIED && node.p === 1 && below(node.parent)) : [];
  const places = found.slice(0, 3).map((node) => `${step.run.vocabulary.quoted(node.token)} at node ${node.number}`);
  return found.length ? [`The target would have taken ${places.join(", ")}, below ${deciding(step).length > 1 ? "rejected ones" : "the rejected one"}.`] : [];
}

/** The node that is shown where the address names none. */
export const nodeOf = (step, node) => (node === null || node > step.size ? endedBy(step) : node);

export function Steps({ run, request, place, route, listing, set, shown }) {
  const [copied, setCopied] = useState("");
  const step = useLoaded(() => (run.steps ? run.step(place) : undefined), [run, place]);
  const here = step?.place === place && step.run === run ? step : undefined, told = run.requests[request];
  const node = here ? nodeOf(here, route.node) : 0;
  const pick = (at) => move(addressOf(run.number, request, run.overview.index[at]));
  const pickNode = (number) => move(addressOf(run.number, request, here.index, number));
  const copy = async () => {
    const link = new URL(addressOf(run.number, request, here?.index ?? null, route.node), location.href).href;
    const wrote = await navigator.clipboard?.writeText(link).then(() => true, () => false);
    setCopied(wrote ? "copied" : link);
  };
  const facts = useMemo(() => told.facts, [told]);
  return (
    <main class="steps" id="main">
      <Requests run={run} shown={shown} picked={request} listing={listing} set={set} pick={(other) => go(addressOf(run.number, other))} />
      <section class="panel request" aria-label="Request">
        <header>
          <h2>{told.id}</h2>
          <span class="faint">{`τ ${number(told.tau)} · ${plural(told.tokens, "token")} · ${told.end}`}</span>
          <button type="button" id="copy" onClick={copy} title="Copy a link to this place (y)">Copy link</button>
          <output class="faint" aria-live="polite">{copied}</output>
        </header>
        <Legend colours={HEAD.words.colours} />
        <Output run={run} request={request} place={place} pick={pick} />
        <p class="note">{facts}</p>
        {run.steps > 0 && <StepList run={run} request={request} place={place} pick={pick} />}
      </section>
      {run.steps > 0 && <StepPanel step={here ?? step} node={node} pick={pickNode} />}
      {here?.judged && <Node step={here} number={node} />}
    </main>
  );
}
