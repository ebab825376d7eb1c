// The text of a request, each token coloured and marked by where it came from; a click goes to its step.
import { useEffect, useRef, useState } from "preact/hooks";
import { useLoaded } from "./hooks.js";
import { count } from "./numbers.js";

const WINDOW = 400; // steps before and behind the current one whose text is shown
const PROMPT = 4000; // characters of a long prompt
const KINDS = ["bonus", "recovered", "target"];

/** [[step, [[text, origin, whether it is special]...]]...] of some steps. */
export function texts(run, output, from, to) {
  const { overview, vocabulary } = run, tokens = [...output.token.subarray(overview.begins[from], overview.begins[to])];
  const pieces = vocabulary.pieces(tokens), found = [];
  for (let step = from, at = 0; step < to; step++) {
    const parts = [];
    for (let i = 0; i < overview.emitted[step]; i++, at++) {
      const origin = i < overview.accepted[step] ? "accepted" : (KINDS[overview.kind[step]] ?? "target"), special = vocabulary.isSpecial(tokens[at]);
      parts.push([special ? vocabulary.show(tokens[at]) : pieces[at], origin, special]);
    }
    if (parts.length) found.push([step, parts]);
  }
  return found;
}

export function Output({ run, request, place, pick }) {
  const { first, steps, stop, end } = run.requests[request], [whole, setWhole] = useState(false), box = useRef(null);
  const loaded = useLoaded(async () => ({ run, output: await run.output(), prompts: await run.prompts() }), [run]);
  useEffect(() => {
    const now = box.current?.querySelector(".current"), view = box.current?.clientHeight;
    if (now && (now.offsetTop < box.current.scrollTop || now.offsetTop + 30 > box.current.scrollTop + view)) box.current.scrollTop = now.offsetTop - view / 2;
  }, [place, loaded, whole]);
  if (loaded?.run !== run) return <p class="faint">…</p>;
  const from = whole ? first : Math.max(first, place - WINDOW), to = whole ? first + steps : Math.min(first + steps, place + WINDOW + 1);
  const prompt = loaded.prompts[request], before = from - first, behind = first + steps - to;
  const clicked = (event) => event.target.dataset.step !== undefined && pick(Number(event.target.dataset.step));
  return (
    <div class="output" ref={box} onClick={clicked} tabIndex={0} role="group" aria-label="Prompt and output">
      {before > 0 ? <button type="button" onClick={() => setWhole(true)}>{`${count(before)} earlier steps`}</button> : <span class="prompt">{prompt.length > PROMPT ? `…${prompt.slice(-PROMPT)}` : prompt}</span>}
      {texts(run, loaded.output, from, to).map(([step, parts]) =>
        parts.map(([text, origin, special]) => <span class={`token ${origin} ${special ? "special" : ""} ${step === place ? "current" : ""}`} data-step={step} title={`${origin}, step ${run.overview.index[step]}`}>{text}</span>),
      )}
      {behind > 0 ? <button type="button" onClick={() => setWhole(true)}>{`${count(behind)} later steps`}</button> : <p class="faint">{`— ${stop ? `stopped at ${JSON.stringify(stop)}` : `ended: ${end}`}`}</p>}
      {!run.tells_text && <p class="faint">— texts are not in this file</p>}
    </div>
  );
}

export const Legend = ({ colours }) => (
  <ul class="legend" aria-label="Where tokens came from">
    {colours.map(([name, about]) => <li title={about}><span class={`token ${name}`}>{name}</span></li>)}
  </ul>
);
