// What stands over a view: help, a search in the output, and going to a place.
import { useEffect, useRef, useState } from "preact/hooks";
import { HEAD } from "./data.js";
import { count } from "./numbers.js";
import { addressOf, go, linkOf } from "./route.js";

const WORDS = HEAD.words;

export function Dialog({ title, close, children }) {
  const box = useRef(null);
  useEffect(() => {
    box.current.showModal();
    box.current.querySelector("input")?.focus();
  }, []);
  return (
    <dialog ref={box} onClose={close} aria-label={title} onClick={(event) => event.target === box.current && close()}>
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
      <Rows title="Keys" rows={[...WORDS.keys.map(([, label, help]) => [label, help]), ...WORDS.more_keys]} />
      <div>
        <Rows title="Verdicts" rows={WORDS.marks} />
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

/** Places in the output of any request that have this text, those of the current request first. */
async function found(run, request, text) {
  const { overview, vocabulary, requests } = run, output = await run.output(), hits = [], wanted = text.toLowerCase();
  const order = [request, ...requests.keys()].filter((each, i) => i === 0 || each !== request);
  for (const each of order) {
    const { first, steps } = requests[each], from = overview.begins[first];
    const pieces = vocabulary.pieces([...output.token.subarray(from, overview.begins[first + steps])]);
    const ends = [];
    let whole = "";
    for (const piece of pieces) ends.push((whole += piece).length);
    const lower = whole.toLowerCase();
    for (let at = lower.indexOf(wanted); at >= 0 && hits.length < MOST; at = lower.indexOf(wanted, at + 1)) {
      const token = from + ends.findIndex((end) => end > at);
      let step = first;
      while (overview.begins[step + 1] <= token) step++;
      hits.push([each, step, whole.slice(Math.max(0, at - 30), at), whole.slice(at, at + text.length), whole.slice(at + text.length, at + text.length + 40)]);
    }
    if (hits.length >= MOST) break;
  }
  return hits;
}

export function Search({ run, request, close }) {
  const [hits, setHits] = useState(null), asked = useRef(0);
  const search = async (text) => {
    const number = ++asked.current, next = text ? await found(run, request, text) : null;
    if (number === asked.current) setHits(next);
  };
  const open = (step) => {
    close();
    go(addressOf(run.number, run.requestAt(step), run.overview.index[step]));
  };
  const submit = (event) => {
    event.preventDefault();
    if (hits?.length) open(hits[0][1]);
  };
  return (
    <Dialog title="Search the output" close={close}>
      <form onSubmit={submit}><label>text: <input type="search" autocomplete="off" onInput={(event) => search(event.currentTarget.value)} /></label></form>
      <p class="faint" aria-live="polite">{hits === null ? "" : `${count(hits.length)}${hits.length === MOST ? " or more" : ""} found`}</p>
      <ul class="hits">{hits?.map(([each, step, before, hit, behind]) => <li><button type="button" onClick={() => open(step)}><span class="faint">{`${run.requests[each].id}@${run.overview.index[step]} `}</span>{before}<mark>{hit}</mark>{behind}</button></li>)}</ul>
    </Dialog>
  );
}
