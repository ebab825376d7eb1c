// What stands over a view: help, a search in the output, and going to a place.
import { useEffect, useRef, useState } from "preact/hooks";
import { HEAD } from "./data.js";
import { count } from "./numbers.js";
import { Depth } from "./tree.jsx";
import { addressOf, go, linkOf } from "./route.js";

const WORDS = HEAD.words;
const KEYS = { // what they do here
  full_stop: "the next step of this request", comma: "the previous step of this request", pagedown: "forward by a twentieth of this request", pageup: "back by a twentieth of this request",
  home: "the first step of this request", end: "the last step of this request", g: "go to a request, step or node: r3, r3@17, r3@17/4", n: "next step that ended in a rejection; wraps around", N: "previous step that ended in a rejection; wraps around",
  slash: "filter the requests", o: "sort the requests by the next column", O: "reverse the sorting", F: "find text in prompts and outputs, this request first", y: "copy a link to this place",
  j: "go to the request below", k: "go to the request above", r: "the list of this request's steps", d: "the tree of this step", v: "the overview", a: "figures and questions over many steps",
  t: "theme: light or dark", question_mark: "keys, marks and figures",
};
const WITHOUT_STEPS = ["g", "F", "v", "a", "t", "question_mark"];
const keysHere = () => WORDS.keys.filter(([key]) => HEAD.runs.some((run) => run.steps) || WITHOUT_STEPS.includes(key));

export function Dialog({ title, close, children }) {
  const box = useRef(null);
  useEffect(() => {
    box.current.showModal();
    box.current.querySelector("input")?.focus();
  }, []);
  return (
    <dialog ref={box} onClose={close} onKeyDown={(event) => event.key === "Escape" && (event.preventDefault(), close())} aria-label={title} onClick={(event) => event.target === box.current && close()}>
      <header><h2>{title}</h2><button type="button" aria-label="Close" onClick={close}>✕</button></header>
      {children}
    </dialog>
  );
}

const Rows = ({ title, rows }) => (
  <section><h3>{title}</h3><dl class="facts">{rows.map(([name, about]) => [<dt>{name}</dt>, <dd>{about}</dd>])}</dl></section>
);

export const Help = ({ close }) => (
  <Dialog title="Keys, marks and figures" close={close}>
    <div class="help" tabIndex={0} role="group" aria-label="Keys, marks and figures">
      <Rows title="Keys" rows={[...keysHere().map(([key, label]) => [label, KEYS[key]]), ...WORDS.more_keys]} />
      <div>
        <Rows title="Verdicts" rows={WORDS.marks.map(([mark, about]) => [mark === "▮▯" ? <Depth accepted={1} depth={2} /> : mark, about])} />
        <Rows title="Tokens" rows={WORDS.colours} />
        <Rows title="Figures of a node" rows={WORDS.figures} />
        <Rows title="Figures of a run" rows={WORDS.rates} />
      </div>
    </div>
    <p class="note">{`Made by ${HEAD.made}. Nothing in this file is fetched from anywhere.`}</p>
  </Dialog>
);

export function GoTo({ run, close }) {
  const [missing, setMissing] = useState("");
  const submit = (event) => {
    event.preventDefault();
    const text = event.currentTarget.elements.place.value.trim(), link = linkOf(text.replace(/^.*#/, ""), run.number);
    if (!link) return setMissing(`there is no request ${text}`);
    close();
    go(link);
  };
  return (
    <Dialog title="Go to" close={close}>
      <form onSubmit={submit}><label>request, step, node: <input name="place" placeholder="r3@17/4" autocomplete="off" /></label> <button type="submit">Go</button></form>
      <p role="alert" class="warn">{missing}</p>
    </Dialog>
  );
}

const MOST = 200; // hits that are listed

/** Where a text has another, up to `most` places, each with what stands before and behind it in whole words. */
function within(whole, wanted, most) {
  const lower = whole.toLowerCase(), hits = [];
  for (let at = lower.indexOf(wanted); at >= 0 && hits.length < most; at = lower.indexOf(wanted, at + 1)) {
    const from = Math.max(0, at - 30), end = at + wanted.length, to = end + 40;
    const before = whole.slice(from, at), behind = whole.slice(end, to);
    const cut = from > 0 && /\S/.test(whole[from - 1]), on = to < whole.length && /\S/.test(whole[to]);
    hits.push([at, `${from ? "…" : ""}${cut ? before.replace(/^\S*\s/, "") : before}`, whole.slice(at, end), `${on ? behind.replace(/\s\S*$/, "") : behind}${to < whole.length ? "…" : ""}`]);
  }
  return hits;
}

/** [request, step or null in its prompt, before, hit, behind]: in outputs, then in prompts, those of the current request first. */
async function found(run, request, text) {
  const { overview, vocabulary, requests } = run, output = await run.output(), prompts = await run.prompts(), hits = [], wanted = text.toLowerCase();
  const order = [request, ...requests.keys()].filter((each, i) => i === 0 || each !== request);
  for (const each of order) {
    const { first, steps } = requests[each], from = overview.begins[first];
    const pieces = vocabulary.pieces([...output.token.subarray(from, overview.begins[first + steps])]);
    const ends = [];
    let whole = "";
    for (const piece of pieces) ends.push((whole += piece).length);
    for (const [at, ...shown] of within(whole, wanted, MOST - hits.length)) {
      const token = from + ends.findIndex((end) => end > at);
      let step = first;
      while (overview.begins[step + 1] <= token) step++;
      hits.push([each, step, ...shown]);
    }
  }
  for (const each of order) for (const [, ...shown] of within(prompts[each], wanted, MOST - hits.length)) hits.push([each, null, ...shown]);
  return hits;
}

export function Search({ run, request, close }) {
  const [hits, setHits] = useState(null), asked = useRef(0);
  const search = async (text) => {
    const number = ++asked.current, next = text ? await found(run, request, text) : null;
    if (number === asked.current) setHits(next);
  };
  const open = ([each, step]) => {
    close();
    go(addressOf(run.number, each, step === null ? null : run.overview.index[step]));
  };
  const submit = (event) => {
    event.preventDefault();
    if (hits?.length) open(hits[0]);
  };
  return (
    <Dialog title="Search prompts and outputs" close={close}>
      <form onSubmit={submit}><label>text: <input type="search" autocomplete="off" onInput={(event) => search(event.currentTarget.value)} /></label></form>
      <p class="faint" aria-live="polite">{hits === null ? "" : `${count(hits.length)}${hits.length === MOST ? " or more" : ""} found`}</p>
      <ul class="hits">{hits?.map(([each, step, before, hit, behind]) => <li><button type="button" onClick={() => open([each, step])}><span class="faint">{`${run.requests[each].id}${step === null ? " prompt" : `@${run.overview.index[step]}`} `}</span>{before}<mark>{hit}</mark>{behind}</button></li>)}</ul>
    </Dialog>
  );
}
