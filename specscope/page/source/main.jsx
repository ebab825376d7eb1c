//! Holds Preact, (c) Jason Miller, MIT licence.
// The page: its bar, the view that the address names, and the keys.
import { render } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { Compared, Pairs, beside, pairAddress } from "./compare.jsx";
import { HEAD, RUNS } from "./data.js";
import { GoTo, Help, Search } from "./dialogs.jsx";
import { useLoaded } from "./hooks.js";
import { Analysis, Findings, Overview, Rejections } from "./overview.jsx";
import { ORDERS, ordered } from "./requests.jsx";
import { addressOf, go, move, placeOf, useRoute } from "./route.js";
import { Steps } from "./steps.jsx";
import { Tune } from "./tune.jsx";

const PAIR = HEAD.comparison !== null, COUNTS = RUNS.every((run) => !run.requests.length);
const NAMES = { overview: PAIR ? "Comparison" : "Overview", pairs: "Pairs", steps: "Steps", analysis: "Figures", rejections: "Rejections", tune: "Other trees", findings: "Findings" };
const SHOWN = Object.keys(NAMES).filter((name) => (name !== "pairs" || PAIR) && (name !== "steps" || !COUNTS));
const KEYS = new Map(HEAD.words.keys.map(([key]) => [{ space: " ", full_stop: ".", comma: ",", pagedown: "PageDown", pageup: "PageUp", home: "Home", end: "End", slash: "/", question_mark: "?" }[key] ?? key, key]));
for (const [key, name] of [["ArrowDown", "node_down"], ["ArrowUp", "node_up"], ["ArrowRight", "full_stop"], ["ArrowLeft", "comma"]]) KEYS.set(key, name);

const dark = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
const THEME = "specscope-theme", STORES = ["localStorage", "sessionStorage"]; // a file may be refused either
/** What a store answers: the first one that works here; null where none does. */
function stored(ask) {
  for (const name of STORES)
    try {
      return ask(window[name]);
    } catch {}
  return null;
}
const follow = () => (root.dataset.theme = stored((store) => store.getItem(THEME)) ?? (dark.matches ? "dark" : "light"));
follow();
dark.addEventListener("change", follow);
function theme() {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  stored((store) => store.setItem(THEME, root.dataset.theme));
}

function Bar({ run, route, setRun, open }) {
  return (
    <header class="bar">
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>to the content</a>
      <h1><span class="made">specscope</span> {RUNS.map((each) => (PAIR ? `${each.letter}: ` : "") + each.source.replace(/^.*[\/\\]/, "")).join("  ")}</h1>
      <nav aria-label="Views">{SHOWN.map((name) => <a href={`#/${name}`} aria-current={route.view === name ? "page" : undefined} onClick={name === "steps" ? (event) => { event.preventDefault(); go(addressOf(run.number, 0)); } : undefined}>{NAMES[name]}</a>)}</nav>
      <div class="tools">
        {PAIR && !["overview", "pairs"].includes(route.view) && RUNS.map((each) => <button type="button" aria-pressed={each === run} onClick={() => setRun(each.number)}>{each.letter}</button>)}
        <button type="button" onClick={() => open("search")} title="Search prompts and outputs (F)">Search</button>
        <button type="button" onClick={theme} aria-label="Light or dark (t)" title="Light or dark (t)">◐</button>
        <button type="button" onClick={() => open("help")} aria-label="Help (?)" title="Keys, marks and figures (?)">?</button>
      </div>
    </header>
  );
}

/** The steps that ended in a rejection, from a place on: round the run. */
function rejection(run, place, way) {
  for (let i = 1, at = place; i <= run.steps; i++) {
    at = (at + way + run.steps) % run.steps;
    if (run.rejected(at)) return at;
  }
  return place;
}

function Page() {
  const route = useRoute(), [chosen, setRun] = useState(0), [dialog, open] = useState(null);
  const [listing, setListing] = useState({ order: "arrival", reverse: false, filter: "", kind: "" });
  const run = RUNS[route.view === "steps" ? route.run : chosen], set = (change) => setListing((old) => ({ ...old, ...change }));
  const ready = useLoaded(() => Promise.all(RUNS.map((each) => each.open())), []);
  const shown = useMemo(() => ordered(run, listing), [run, listing]);
  const request = route.view === "steps" ? route.request : (shown[0] ?? 0), place = ready && route.view === "steps" ? placeOf(run, request, route.index) : (run.requests[request]?.first ?? 0);
  useEffect(() => route.view === "steps" && setRun(route.run), [route]);

  const visit = (to) => to >= 0 && to < run.steps && move(addressOf(run.number, run.requestAt(to), run.overview.index[to]));
  const within = (to) => visit(Math.min(Math.max(to, run.requests[request].first), run.requests[request].first + run.requests[request].steps - 1));
  const choose = (way) => shown.length && move(addressOf(run.number, shown[Math.min(Math.max(shown.indexOf(request) + way, 0), shown.length - 1)]));
  const sort = (way) => (way > 0 ? set({ order: ORDERS[(ORDERS.indexOf(listing.order) + 1) % ORDERS.length] }) : set({ reverse: !listing.reverse }));
  const onNode = async (way) => {
    const step = await run.step(place), rows = step.rows.map(([number]) => number);
    const now = document.querySelector(".tree tr.picked"), at = now ? [...now.parentNode.children].indexOf(now) : 0;
    move(addressOf(run.number, request, step.index, rows[Math.min(Math.max(at + way, 0), rows.length - 1)]));
  };
  const jump = () => Math.max(1, Math.round(run.requests[request].steps / 20));
  const inSteps = {
    full_stop: () => within(place + 1), comma: () => within(place - 1), pagedown: () => within(place + jump()), pageup: () => within(place - jump()),
    home: () => within(0), end: () => within(run.steps), j: () => choose(1), k: () => choose(-1), node_down: () => onNode(1), node_up: () => onNode(-1),
    slash: () => document.getElementById("filter").focus(), o: () => sort(1), O: () => sort(-1), y: () => document.getElementById("copy").click(),
    d: () => document.querySelector(".tree .picked button")?.focus(), r: () => document.querySelector(".of-steps")?.focus(),
  };
  const inPairs = () => {
    const { pairs, first } = HEAD.comparison, at = route.pair ?? first ?? 0, pair = pairs[at], { rows } = beside(pair), now = rows.findLastIndex((row) => row <= (route.at ?? pair.at ?? pair.other ?? 0));
    const parting = (way) => { for (let i = 1, to = at; i <= pairs.length; i++) { to = (to + way + pairs.length) % pairs.length; if (pairs[to].at !== null) return move(pairAddress(to)); } };
    const row = (to) => move(pairAddress(at, rows[Math.min(Math.max(to, 0), rows.length - 1)])), pairTo = (to) => move(pairAddress(Math.min(Math.max(to, 0), pairs.length - 1)));
    return { full_stop: () => row(now + 1), comma: () => row(now - 1), home: () => row(0), end: () => row(rows.length), node_down: () => row(now + 1), node_up: () => row(now - 1), j: () => pairTo(at + 1), k: () => pairTo(at - 1), n: () => parting(1), N: () => parting(-1) };
  };
  const anywhere = {
    g: () => open("goto"), F: () => open("search"), question_mark: () => open("help"), t: theme, a: () => go("#/analysis"), v: () => go("#/overview"),
    r: () => !COUNTS && go(addressOf(run.number, request)), d: () => !COUNTS && go(addressOf(run.number, request)),
    n: () => run.steps && visit(rejection(run, route.view === "steps" ? place : -1, 1)), N: () => run.steps && visit(rejection(run, place, -1)),
  };
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || dialog || !ready) return;
      const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
      if (event.key === "Escape" && typing) {
        event.preventDefault(); // a browser would empty the field alone
        if (event.target.id === "filter") set({ filter: "" });
        return event.target.blur();
      }
      const name = KEYS.get(event.key), view = route.view === "steps" ? inSteps : route.view === "pairs" ? inPairs() : {};
      const action = view[name] ?? anywhere[name];
      if (typing || !action) return;
      event.preventDefault();
      action();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });

  const views = {
    overview: () => (PAIR ? <Compared /> : <Overview run={run} first={ready && run.steps ? rejection(run, -1, 1) : -1} />),
    pairs: () => ready && <Pairs route={route} />,
    steps: () => ready && <Steps run={run} request={request} place={place} route={route} listing={listing} set={set} shown={shown} />,
    analysis: () => <Analysis run={run} />,
    rejections: () => <Rejections run={run} />,
    tune: () => <Tune run={run} />,
    findings: () => <Findings run={run} />,
  };
  const atStep = ready && route.view === "steps" && route.index !== null, { overview } = run;
  const lacks = atStep && (overview.index[place] !== route.index || route.node > overview.nodes[place]);
  const missing = lacks ? `${run.requests[request].id}@${route.index}${route.node === null ? "" : `/${route.node}`}` : route.missing;
  return [
    <Bar run={run} route={route} setRun={setRun} open={open} />,
    missing && <p class="warnings" role="alert">{`There is no ${missing} in this file.${lacks ? ` This is ${run.requests[request].id}@${overview.index[place]}.` : ""}`}</p>,
    views[route.view]() || <main id="main"><p class="faint">…</p></main>,
    dialog === "help" && <Help close={() => open(null)} />,
    dialog === "search" && ready && <Search run={run} request={request} close={() => open(null)} />,
    dialog === "goto" && <GoTo run={run} close={() => open(null)} />,
  ];
}

const app = document.getElementById("app");
app.replaceChildren();
render(<Page />, app);
