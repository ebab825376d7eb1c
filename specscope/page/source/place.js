// A token at a place of a tree, and why it was rejected, kept or never tried: specscope/trace/history/place.py in the
// browser. The sentences are the terminal's, by name; tests hold both against each other over every node of the samples.
import { HEAD } from "./data.js";
import { count, exponential, fixed, general, ordinal, plural, probability } from "./numbers.js";
import { ACCEPTED, NO_TOKEN, OUTCOMES, REJECTED, ROOT, UNTRIED } from "./step.js";

const WORDS = HEAD.words, OUTSIDE = 0, TEXT = 1;
const LOOK_AHEAD = ["block", "traversal"], STANDARD = "standard", MATCH = "match";
const BELOW = "↓", DREW = "=", DREW_ANOTHER = "≠", LESS = "<", NOT_LESS = "≥";
const looksAhead = (rule) => LOOK_AHEAD.includes(rule), isOwn = (rule) => rule.includes(":") && !rule.startsWith("lossy");

/** A sentence of the table, filled in. */
export const said = (name, values = {}) => WORDS.sentences[name].replace(/\{(\w+)\}/g, (_, key) => values[key]);

const among = (tokens, token) => {
  const place = tokens.findIndex((each) => each.token === token);
  return place < 0 ? [null, null] : [tokens[place].p, place + 1];
};

export class Place {
  constructor(step, parent, token, node = null, final = false) {
    Object.assign(this, { step, parent, token, node, final });
    this.notes = step.parents.get(parent) ?? null;
    this.likeliest = this.notes?.top ?? [];
    this.draftersLikeliest = this.notes?.draftTop ?? [];
    this.choice = this.notes?.choice ?? null;
  }

  static at(step, number) {
    return number < step.size ? new Place(step, step.nodes[number].parent, step.nodes[number].token, step.nodes[number]) : Place.end(step);
  }

  /** The final token, where the accepted path ended. */
  static end(step) {
    return new Place(step, step.last, NO_TOKEN, null, true).of(step.final.token, true);
  }

  of(token, final = false) {
    const node = token === NO_TOKEN ? null : (this.children.find((child) => child.token === token) ?? null);
    return new Place(this.step, this.parent, token, node, final);
  }

  get children() {
    return this.step.children(this.parent);
  }

  get p() {
    if (this.node === null) return this.choice?.token === this.token ? this.choice.p : null;
    return this.step.tellsP ? this.node.p : null;
  }

  get rawP() {
    if (this.node === null) return among(this.likeliest, this.token)[0];
    return this.notes === null ? null : this.node.rawP;
  }

  get rawRank() {
    return among(this.likeliest, this.token)[1];
  }

  get drafters() {
    const [p, rank] = among(this.draftersLikeliest, this.token);
    if (rank !== null || this.notes === null || !this.draftersLikeliest.length || this.rawRank !== 1) return [p, rank];
    // Ties share a rank: the token is none of the likeliest that are listed
    const told = this.notes.choiceRank;
    return told ? [this.notes.choiceQ, Math.max(told, this.draftersLikeliest.length + 1)] : [null, told];
  }

  get draftP() {
    return (this.node && draftP(this.step, this.node)) ?? this.drafters[0];
  }

  get draftRank() {
    return this.drafters[1];
  }

  get q() {
    return this.node === null || this.node.drawn === 0 ? null : this.node.q;
  }

  /** The target's likeliest token as sampled; where that is not recorded, the one that was taken here. */
  get wanted() {
    const { step, children } = this;
    if (step.final.token === NO_TOKEN) return null;
    if (this.choice !== null) return this.of(this.choice.token);
    if (!step.judged || !step.greedy || !children.length || step.forcedFinal || children.some((child) => child.forced)) return null;
    const accepted = children.find((child) => child.onPath);
    if (accepted) return Place.at(step, accepted.number);
    return this.parent === step.last ? Place.end(step) : null;
  }

  /** p and q by name: as drawn, and as tried where that prints as another number; of a recovered token in the residual. */
  get numbers() {
    const { step, node } = this, raw = step.greedy ? this.rawP : null;
    if (this.final && raw === null && step.kind === "recovered") return { ...(step.hasParents ? { p: step.final.targetP } : {}), p_tried: step.final.p };
    const found = raw === null ? { p: this.final ? step.final.p : node.p } : { raw_p: raw };
    if (this.final) return found;
    const [name, value] = this.q === null ? ["draft_p", this.draftP] : ["q", this.q];
    if (value !== null) found[name] = value;
    if (step.greedy || node.outcome === UNTRIED) return found;
    if (probability(node.pTrial) !== probability(node.p)) found.p_tried = node.pTrial;
    if (step.rule !== MATCH && probability(node.qTrial) !== probability(node.q)) found.q_tried = node.qTrial;
    return found;
  }
}

/** The drafter's own probability of a node; null where it is no model, where a text alone has it, and where it was drawn. */
export const draftP = (step, node) => (!step.hasNotes || node.drawn !== 0 || node.source === TEXT ? null : node.prob);

/** How a tried node's coin stands to its a. */
export function coinSign(step, node) {
  if (step.rule === MATCH) return node.outcome === ACCEPTED ? DREW : DREW_ANOTHER;
  if (!node.judged) return BELOW;
  return node.coin < node.a ? LESS : NOT_LESS;
}

/** The coin where it was held against a; 0 where the rule has another use for it. */
export const coinOnLine = (step, node) => ([LESS, NOT_LESS].includes(coinSign(step, node)) ? node.coin : 0);

/** The nodes that ended the path. */
export function deciding(step) {
  const failed = step.children(step.last).filter((node) => node.outcome !== UNTRIED);
  return failed.length ? failed : step.last === ROOT ? [] : [step.nodes[step.last]];
}

/** Where to look first for why the path ended. */
export const endedBy = (step) => (step.kind === "recovered" ? (deciding(step)[0]?.number ?? step.size) : step.size);

const quoted = (step, token) => step.run.vocabulary.quoted(token);
const rankText = (rank, whose = "") => (rank === OUTSIDE ? said("no rank") : whose + ordinal(rank));
const certain = (p) => p === 0 || p === 1 || p === null;

function described(place) {
  const raw = place.rawP === null ? [] : [said("raw p", { p: probability(place.rawP) })];
  if (raw.length && place.rawRank !== null) raw.push(ordinal(place.rawRank));
  const draft = place.draftP === null ? [] : [said("draft p", { p: probability(place.draftP) })];
  if (place.draftRank !== null) draft.push(rankText(place.draftRank));
  const p = certain(place.p) ? "" : said("p", { p: probability(place.p) });
  const q = place.q === null ? "" : said("q", { p: probability(place.q) });
  const figures = [p, raw.join(", "), q, draft.join(", ")].filter(Boolean).join("; ");
  return quoted(place.step, place.token) + (figures ? ` (${figures})` : "");
}

/** `Target wanted X (p), drafted Y (p, rank)`. */
export function headline(step, number) {
  const place = Place.at(step, number), target = place.wanted, node = described(place);
  if (target) {
    const name = place.final ? "wanted" : place.token === target.token ? "wanted, and drafted" : "wanted, drafted";
    return said(name, { target: described(target), node });
  }
  if (place.final) return said(step.greedy ? "took" : "drew", { node });
  if (step.kind !== "recovered" || place.parent !== step.last) return said("drafted", { node });
  return said("took, drafted", { final: described(Place.end(step)), node });
}

/** The headline with the fewest figures. */
export function brief(step, number) {
  const place = Place.at(step, number), target = place.wanted;
  if (!target || place.final || place.token === target.token) return headline(step, number);
  const token = quoted(step, target.token), instead = quoted(step, place.token);
  return said("wanted, in brief", { token, first: briefly(target, "the drafter's"), instead, other: briefly(place, "its") });
}

function briefly(place, whose) {
  const p = certain(place.p) && place.rawP !== null ? place.rawP : place.p;
  const rank = place.draftRank === null ? "" : rankText(place.draftRank, `${whose} `);
  return [p === null ? "" : probability(p), rank].filter(Boolean).join(", ");
}

/** The sentences of a node; of the final token, where `number` is the number of nodes. */
export function why(step, number) {
  if (!step.judged) return [];
  const first = `${headline(step, number)}.`;
  if (number === step.size) return [first, finalText(step)];
  const text = decisionText(step, number), lines = [first, `${text[0].toUpperCase()}${text.slice(1)}.`];
  const node = step.nodes[number];
  if (node.outcome !== REJECTED || node.forced) return lines;
  const place = Place.at(step, number);
  return [...lines, ...[wider(place), otherTemperature(place)].filter(Boolean)];
}

/** The step's path in a sentence, then why it ended. */
export function whyStep(step) {
  if (!step.judged) return [said("prefill", { tokens: plural(step.prefill, "token") })];
  if (!step.size) {
    const known = step.undrafted && step.undrafted !== "unknown";
    const reason = known ? `: ${WORDS.undrafted[step.undrafted]}` : "", sizing = step.sizing ? ` (${step.sizing})` : "";
    return [said("undrafted", { why: reason, sizing }), finalText(step)];
  }
  const path = step.path.map((node) => quoted(step, step.nodes[node].token)).join(" ");
  const figures = { accepted: step.path.length, levels: plural(step.depth, "level"), path };
  const summary = said(path ? "path of tokens" : "path", figures), number = endedBy(step);
  if (number === step.size) return [summary, ...why(step, number)];
  const rest = deciding(step).filter((node) => node.number !== number);
  const others = rest.map((node) => said("also rejected", { node: described(Place.at(step, node.number)), number: node.number }));
  return [summary, ...why(step, number), ...others, finalText(step)];
}

function wider(place) {
  const target = place.wanted, { step } = place, children = place.children.length;
  if (!target || target.node !== null) return "";
  const token = quoted(step, target.token), rank = target.draftRank;
  if (step.dropped.has(`${place.parent} ${target.token}`)) return said("dropped", { token });
  if (rank === OUTSIDE || step.run.vocabulary.draftId(target.token) === null) return said("outside", { token });
  if (rank === null && step.run.lacks_draft_tokens) return said("vocabulary untold", { token, why: WORDS.untold });
  if (rank === null) {
    const likeliest = place.draftersLikeliest.length;
    return likeliest ? said("unranked", { token, count: likeliest }) : "";
  }
  let name = rank === 1 ? "ranked first, drawn" : "ranked, drawn";
  if (rank > WORDS.widest) name = "ranked too low";
  else if (rank > children && !step.sampled) name = "ranked";
  return said(name, { token, rank: ordinal(rank), width: rank, children });
}

function otherTemperature(place) {
  const { step, node } = place, asked = step.request.asked; // 0 not known, 1 greedy, 2 greedy and nothing else, 3 not
  if (!asked || place.notes === null || step.rule !== STANDARD) return "";
  if (!step.greedy) return asked === 3 && place.choice?.token === place.token ? said("at temperature 0") : "";
  if (place.children[0] !== node || asked !== 2 || place.q !== null || place.rawP === null) return "";
  return said("at temperature 1", { p: probability(place.rawP) });
}

function finalText(step) {
  const final = said(step.kind, { token: quoted(step, step.final.token) });
  if (step.forcedFinal) return said("final, forced", { final });
  if (step.greedy) return said("final, greedy", { final });
  if (!step.tellsP) return said("final, unrecorded", { final });
  const source = said(step.kind === "recovered" ? "source, recovered" : "source");
  const name = step.final.coin ? "final, drawn by coin" : "final, drawn";
  return said(name, { final, source, coin: general(step.final.coin, 4), p: probability(step.final.p) });
}

function decisionText(step, number) {
  const place = Place.at(step, number), node = step.nodes[number], outcome = OUTCOMES[node.outcome];
  if (node.outcome === UNTRIED) {
    const name = !step.greedy || (node.p !== 0 && node.p !== 1) ? "not tried" : node.p ? "not tried, would" : "not tried, would not";
    return said(name, { why: notTried(place) });
  }
  if (node.forced) return said("forced", { outcome });
  if (!step.tellsP) return said("unrecorded", { outcome });
  if (!step.greedy) {
    const p = general(node.p, 4), late = p !== general(node.pTrial, 4);
    return said(late ? "decided late" : "decided", { outcome, coin: coinText(place), p });
  }
  const accepted = node.outcome === ACCEPTED;
  if (accepted !== (node.pTrial === 1) && coinSign(step, node) !== BELOW) return said("contrary", { outcome, p: fixed(node.pTrial, 0) });
  if (accepted) return said("greedy, this", { outcome });
  const wanted = place.wanted;
  return said("greedy, another", { outcome, wanted: wanted ? quoted(step, wanted.token) : said("another") });
}

function notTried(place) {
  const { step, parent } = place;
  if (parent !== ROOT && !step.nodes[parent].onPath) {
    const name = step.nodes[parent].outcome === REJECTED ? "parent rejected" : "parent not tried";
    return said(name, { parent: quoted(step, step.nodes[parent].token) });
  }
  const accepted = place.children.find((child) => child.outcome === ACCEPTED);
  return accepted ? said("sibling accepted", { sibling: quoted(step, accepted.token) }) : said("verification ended");
}

function coinText(place) {
  const { step, node } = place, sign = coinSign(step, node);
  if (sign === BELOW) return said("coin, below", { node: step.last, a: made(place) });
  if (sign === DREW || sign === DREW_ANOTHER) return said(sign === DREW ? "coin, this" : "coin, another", { coin: general(node.coin, 4), a: made(place) });
  if (!node.coin) return said("coin, none", { a: made(place) });
  const agrees = (sign === LESS) === (node.outcome === ACCEPTED);
  let digits = 4;
  while (digits < 17 && general(node.coin, digits) === general(node.a, digits)) digits++;
  return said(agrees ? "coin" : "coin, contrary", { coin: general(node.coin, digits), sign, a: made(place, digits) });
}

function made(place, digits = 4) {
  const { step, node } = place, a = general(node.a, digits);
  if (looksAhead(step.rule)) {
    const name = !node.judged || node.a === node.pathOwn ? "a, path" : "a, left of path";
    return said(name, { a, parent: general(node.pathParent, 4), p: general(node.pTrial, 4), q: general(node.qTrial, 4), own: general(node.pathOwn, digits) });
  }
  const plain = place.q === null && node.qTrial === 1 ? "a, p" : "a";
  const name = step.rule === MATCH ? "a, match" : isOwn(step.rule) ? "a, own rule" : plain;
  return said(name, { a, rule: step.rule, p: general(node.pTrial, digits), q: general(node.qTrial, digits) });
}

/** [label, text, whether it stands out] of what the record holds of a node besides its numbers. */
export function nodeRows(step, number) {
  const { vocabulary } = step.run, place = Place.at(step, number), { node, token } = place;
  const rows = [["token", `${vocabulary.show(token)}  ${token === NO_TOKEN ? "#?" : `#${token}`}`, false]];
  if (place.final) return [...rows, ["kind", step.kind, false], ...marginRows(step.final.margin, step.nearFinal)];
  const above = place.parent === ROOT ? null : step.nodes[place.parent];
  const parent = above ? said("child of node", { node: place.parent, token: vocabulary.show(above.token) }) : said("child of root");
  rows.push(["position", said("position", { depth: node.depth, parent }), false], ["drawn", WORDS.drawn[node.drawn], false]);
  if (node.nearDraw) rows.push(["", said("near tie in the draft"), true]);
  const id = vocabulary.draftId(token);
  if (id !== undefined && node.source !== TEXT) rows.push(["draft id", id === null ? said("no rank") : said("draft id", { number: id }), id === null]);
  if (step.hasNotes && node.score !== null && node.source === null) rows.push(["drafter", said("score", { score: fixed(node.score, 3) }), false]);
  const facts = aboutDraft(node);
  if (facts) rows.push(["drafter", facts, false]);
  if (node.outcome === REJECTED && !step.greedy) rows.push(["residual", said("residual", { mass: general(node.residual, 6) }), false]);
  if (WORDS.rules[step.rule]) rows.push(["rule", said("rule", { rule: step.rule, about: WORDS.rules[step.rule] }), false]);
  if (isOwn(step.rule)) rows.push(["rule", said("rule, own", { rule: step.rule }), false]);
  if (step.lossy) rows.push(["rule", said("rule, lossy", { rule: step.rule }), true]);
  return node.outcome === UNTRIED ? rows : [...rows, ...marginRows(node.margin, node.near)];
}

function aboutDraft(node) {
  const source = WORDS.sources[node.source];
  const parts = [node.confidence === null ? "" : `confidence ${fixed(node.confidence, 3)}`, source ? `from ${source === "both" ? source : `the ${source}`}` : "", node.module === null ? "" : `module ${node.module}`];
  return parts.filter(Boolean).join(", ");
}

function marginRows(margin, near) {
  if (near) return [["margin", said("near tie", { margin: exponential(margin, 1) }), true]];
  return margin < 1 ? [["margin", said("margin", { margin: general(margin, 2) }), false]] : [];
}

/** Where the target's first choice is for the drafter, and how much of its mass the drafter cannot draft. */
export function aboutLikeliest(place) {
  if (!place.likeliest.length || !place.draftersLikeliest.length) return [];
  const first = place.of(place.likeliest[0].token), lines = [];
  if (first.draftRank) lines.push(said("first choice", { token: place.step.run.vocabulary.show(first.token), rank: ordinal(first.draftRank) }));
  if (place.notes.outside) lines.push(said("outside mass", { p: probability(place.notes.outside) }));
  return lines;
}

/** How usual a token is in this run. */
export function typical(step, number) {
  const token = number < step.size ? step.nodes[number].token : NO_TOKEN;
  if (token === NO_TOKEN) return "";
  const [drafted, tried, accepted] = step.run.vocabulary.counts(token);
  return said("typical", { token: quoted(step, token), times: plural(drafted, "time"), tried: count(tried), accepted: count(accepted) });
}
