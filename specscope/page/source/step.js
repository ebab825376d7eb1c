// One request step of a chunk, as an object: its tree, its verdict, and what is noted of its parents.

export const UNTRIED = 0, ACCEPTED = 1, REJECTED = 2;
export const OUTCOMES = ["untried", "accepted", "rejected"];
export const MARKS = ["·", "✓", "✗"];
const KINDS = ["bonus", "recovered", "target", "prefill"];
export const ROOT = -1, NO_TOKEN = -1;

const known = (value) => (Number.isNaN(value) ? null : value);

export class Step {
  constructor(run, request, chunk, row, place) {
    const flags = chunk.flags[row], bit = (number) => (flags >> number) & 1;
    const named = (name) => chunk.names[name][chunk[name][row]];
    Object.assign(this, { run, request, place, index: chunk.index[row], engine: chunk.engine[row] });
    this.name = `${request.id}@${this.index}`;
    this.kind = KINDS[chunk.kind[row]];
    this.judged = this.kind !== "prefill";
    this.context = chunk.context[row];
    this.prefill = chunk.prefill[row];
    this.emitted = chunk.emitted[row];
    this.droppedCount = chunk.dropped[row];
    [this.greedy, this.tellsP, this.forcedFinal, this.nearFinal, this.hasParents, this.hasNotes, this.lossy, this.sampled] =
      [0, 1, 2, 3, 4, 5, 6, 7].map((number) => bit(number) === 1);
    for (const name of ["drafter", "rule", "undrafted", "sizing", "method"]) this[name] = named(name);
    this.final = { token: chunk.final[row], p: chunk.final_p[row], targetP: chunk.final_target_p[row], coin: chunk.final_coin[row], margin: chunk.final_margin[row] };
    this.nodes = nodesOf(chunk, chunk.nodeAt[row], chunk.nodeAt[row + 1]);
    this.size = this.nodes.length;
    this.path = this.nodes.filter((node) => node.onPath).sort((a, b) => a.depth - b.depth).map((node) => node.number);
    this.last = this.path.at(-1) ?? ROOT;
    this.depth = Math.max(0, ...this.nodes.map((node) => node.depth));
    this.parents = parentsOf(chunk, row);
    this.dropped = droppedOf(chunk, row);
  }

  children(parent) {
    return parent === ROOT ? this.nodes.filter((node) => node.parent === ROOT) : this.nodes[parent].children.map((child) => this.nodes[child]);
  }

  /** The tokens that the verifier committed. */
  get tokens() {
    return this.judged ? [...this.path.map((node) => this.nodes[node].token), this.final.token] : [];
  }

  /** [number, branch characters] depth first, siblings in draw order; the final token, as `size`, where it was drawn. */
  get rows() {
    const rows = [];
    const below = (parent, lead) => {
      const inside = this.children(parent).map((node) => node.number);
      if (parent === this.last && this.judged) inside.push(this.size);
      for (const number of inside) {
        const isLast = number === inside.at(-1);
        rows.push([number, lead + (isLast ? "└─ " : "├─ ")]);
        if (number < this.size) below(number, lead + (isLast ? "   " : "│  "));
      }
    };
    below(ROOT, "");
    return rows;
  }
}

function nodesOf(chunk, from, to) {
  const nodes = [];
  for (let i = from; i < to; i++) {
    const bits = chunk.node_flags[i], parent = chunk.parent[i], outcome = bits & 3, at = chunk.triedAt[i];
    const node = {
      number: i - from,
      token: chunk.token[i],
      parent,
      outcome,
      depth: parent === ROOT ? 1 : nodes[parent].depth + 1,
      children: [],
      onPath: (bits & 4) !== 0,
      judged: (bits & 8) !== 0,
      forced: (bits & 16) !== 0,
      near: (bits & 32) !== 0,
      nearDraw: (bits & 64) !== 0,
      drawn: chunk.drawn[i],
      p: chunk.p[i],
      q: chunk.q[i],
      prob: known(chunk.prob[i]),
      score: known(chunk.score[i]),
      rawP: chunk.raw_p[i],
      source: chunk.source[i] === 255 ? null : chunk.source[i],
      confidence: known(chunk.confidence[i]),
      module: chunk.module[i] < 0 ? null : chunk.module[i],
    };
    if (outcome !== UNTRIED)
      for (const [name, column] of TRIED) node[name] = chunk[column]?.[at];
    if (parent !== ROOT) nodes[parent].children.push(node.number);
    nodes.push(node);
  }
  return nodes;
}

const TRIED = Object.entries({
  pTrial: "p_trial", qTrial: "q_trial", a: "accept_prob", coin: "coin", residual: "residual_mass", margin: "margin", pathParent: "path_parent", pathOwn: "path_own",
});

/** What target and drafter gave, by parent. */
function parentsOf(chunk, row) {
  const parents = new Map();
  const list = (name, at, i) => {
    const tokens = [];
    for (let j = at[i]; j < at[i + 1]; j++) if (chunk[`${name}_p`][j] !== 0 && chunk[name][j] !== NO_TOKEN) tokens.push({ token: chunk[name][j], p: chunk[`${name}_p`][j] });
    return tokens;
  };
  for (let i = chunk.parentAt[row]; i < chunk.parentAt[row + 1]; i++)
    parents.set(chunk.at[i], {
      top: list("top", chunk.topAt, i),
      draftTop: list("draft_top", chunk.draftTopAt, i),
      choice: chunk.choice[i] === NO_TOKEN ? null : { token: chunk.choice[i], p: chunk.choice_p[i] },
      entropy: chunk.entropy[i],
      qEntropy: chunk.q_entropy[i],
      choiceRank: chunk.choice_rank[i],
      choiceQ: chunk.choice_q[i],
      outside: chunk.outside[i],
    });
  return parents;
}

/** "PARENT TOKEN" of what re-ranking dropped, where the target wanted it. */
function droppedOf(chunk, row) {
  const dropped = new Set();
  chunk.dropped_step.forEach((step, i) => step === row && dropped.add(`${chunk.dropped_parent[i]} ${chunk.dropped_token[i]}`));
  return dropped;
}
