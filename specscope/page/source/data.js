// The runs in this file: the head at once, columns of steps when they are asked for, chunk by chunk.
import { Vocabulary } from "./vocabulary.js";
import { Step } from "./step.js";

export const HEAD = JSON.parse(document.getElementById("head").textContent);
const ARRAYS = { u1: Uint8Array, u2: Uint16Array, i2: Int16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };
const HELD = 8; // chunks that are kept decoded

const parsed = new Promise((done) =>
  document.readyState === "loading" ? addEventListener("DOMContentLoaded", () => done()) : done(),
);

/** The bytes of a block of the file. */
async function block(name) {
  const find = () => document.getElementById(`block-${name}`);
  if (!find()) await parsed;
  const packed = Uint8Array.from(atob(find().textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Columns by name: of each the first bytes of all values come first, then the second ones. */
async function columns(name) {
  const bytes = await block(name), length = new DataView(bytes.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  const found = { names: header.names };
  let at = 4 + length;
  for (const [column, type, size, same] of header.columns) {
    const values = (found[column] = new ARRAYS[type](size));
    if (same !== null) values.fill(same);
    if (same !== null || !size) continue;
    const width = values.BYTES_PER_ELEMENT, into = new Uint8Array(values.buffer);
    for (let byte = 0; byte < width; byte++)
      for (let i = 0, to = byte; i < size; i++, to += width) into[to] = bytes[at++];
  }
  return found;
}

/** Where each of these begins, and where the last one ends. */
export function begins(counts) {
  const ends = new Int32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) ends[i + 1] = ends[i] + counts[i];
  return ends;
}

class Run {
  constructor(number, told) {
    Object.assign(this, told);
    this.number = number;
    this.letter = "AB"[number];
    this.byId = new Map(told.requests.map((request, place) => [request.id, place]));
    this.chunks = new Map();
    this.loaded = {};
  }

  /** What is decoded once: overview, output, vocabulary, prompts. */
  once(name, how) {
    return (this.loaded[name] ??= how(`${this.number}-${name}`));
  }

  async open() {
    const overview = await this.once("overview", columns);
    overview.begins ??= begins(overview.emitted);
    this.overview = overview;
    this.vocabulary = await this.once("vocabulary", async (name) => new Vocabulary(await columns(name)));
    return this;
  }

  output() {
    return this.once("output", columns);
  }

  prompts() {
    return this.once("prompts", async (name) => JSON.parse(new TextDecoder().decode(await block(name))));
  }

  chunk(number) {
    const held = this.chunks.get(number) ?? columns(`${this.number}-${number}`).then(laidOut);
    this.chunks.delete(number);
    this.chunks.set(number, held);
    if (this.chunks.size > HELD) this.chunks.delete(this.chunks.keys().next().value);
    return held;
  }

  /** The step at a place among all steps of the run. */
  async step(place) {
    const request = this.requests[this.requestAt(place)];
    return new Step(this, request, await this.chunk(Math.floor(place / this.chunk_size)), place % this.chunk_size, place);
  }

  /** The request that has the step at a place. */
  requestAt(place) {
    let low = 0, high = this.requests.length;
    while (low + 1 < high) {
      const middle = (low + high) >> 1;
      if (this.requests[middle].first <= place) low = middle;
      else high = middle;
    }
    while (low > 0 && !this.requests[low].steps) low--;
    return low;
  }

  /** Whether the step at a place ended in a rejection. */
  rejected(place) {
    return this.overview.kind[place] === 1;
  }
}

/** A chunk with where each step's nodes, tried nodes and parents begin. */
function laidOut(chunk) {
  const tried = new Int32Array(chunk.token.length + 1), stepOf = begins(chunk.nodes);
  for (let i = 0; i < chunk.token.length; i++) tried[i + 1] = tried[i] + ((chunk.node_flags[i] & 3) !== 0);
  return {
    ...chunk,
    nodeAt: stepOf,
    triedAt: tried,
    parentAt: begins(chunk.noted),
    topAt: begins(chunk.tops),
    draftTopAt: begins(chunk.draft_tops),
  };
}

export const RUNS = HEAD.runs.map((told, number) => new Run(number, told));
