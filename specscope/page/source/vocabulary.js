// Token ids to text, as specscope/trace/record/vocabulary.py has it.

const ODD = /[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/u;
const VISIBLE = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍" };
const NAMED = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

/** A character as an escape, as Python's repr has it. */
function escaped(character) {
  const code = character.codePointAt(0), hex = code.toString(16);
  if (NAMED[character]) return NAMED[character];
  if (code < 0x100) return `\\x${hex.padStart(2, "0")}`;
  return code < 0x10000 ? `\\u${hex.padStart(4, "0")}` : `\\U${hex.padStart(8, "0")}`;
}

/** Text whose control and format characters show as escapes, so that none can turn a line. */
export function printable(text, keep = "\n\t") {
  if (!ODD.test(text)) return text;
  const shown = (c) => (!ODD.test(c) || keep.includes(c) || c === "\u200d" ? c : escaped(c));
  return Array.from(text, shown).join("");
}

/** Bytes as text, with what is no UTF-8 as \xNN. */
function decoded(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    // whole characters where there are some, escapes for the other bytes
    let text = "";
    for (let at = 0; at < bytes.length; ) {
      const length = wholeCharacter(bytes, at);
      text += length ? new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes.subarray(at, at + length)) : `\\x${bytes[at].toString(16).padStart(2, "0")}`;
      at += length || 1;
    }
    return text;
  }
}

function wholeCharacter(bytes, at) {
  const first = bytes[at], length = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  try {
    new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes.subarray(at, at + length));
    return at + length <= bytes.length ? length : 0;
  } catch {
    return 0;
  }
}

export class Vocabulary {
  constructor(columns) {
    this.columns = columns;
    this.place = new Map();
    this.ends = new Int32Array(columns.length.length + 1);
    columns.length.forEach((length, i) => (this.ends[i + 1] = this.ends[i] + Math.max(length, 0)));
    columns.token.forEach((token, i) => this.place.set(token, i));
  }

  bytes(token) {
    const i = this.place.get(token);
    return i === undefined || this.columns.length[i] < 0 ? undefined : this.columns.bytes.subarray(this.ends[i], this.ends[i + 1]);
  }

  isSpecial(token) {
    const i = this.place.get(token);
    return i !== undefined && this.columns.special[i] === 1;
  }

  /** The token for people: one line, spaces visible, odd characters escaped. */
  show(token) {
    const bytes = this.bytes(token);
    if (bytes === undefined) return token === -1 ? "#?" : `#${token}`;
    if (!bytes.length) return "∅";
    const text = decoded(bytes);
    if (!ODD.test(text)) return text.replaceAll(" ", "␣");
    return Array.from(text, (c) => VISIBLE[c] ?? (ODD.test(c) ? escaped(c) : c)).join("");
  }

  quoted(token) {
    return `‘${this.show(token)}’`;
  }

  /** The text that each of these tokens completes: one may hold half of a character. */
  pieces(tokens) {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    const pieces = tokens.map((token) => {
      const bytes = this.bytes(token);
      if (bytes === undefined) return token === -1 ? "▯" : `#${token} `;
      return this.isSpecial(token) ? "" : printable(decoder.decode(bytes, { stream: true }));
    });
    if (pieces.length) pieces[pieces.length - 1] += printable(decoder.decode());
    return pieces;
  }

  /** The drafter's number of a token: null where it has none, undefined where the vocabulary is not reduced. */
  draftId(token) {
    if (!this.columns.draft) return undefined;
    const i = this.place.get(token), id = i === undefined ? -1 : this.columns.draft[i];
    return id < 0 ? null : id;
  }

  /** How often a token was drafted, tried and accepted. */
  counts(token) {
    const i = this.place.get(token), { drafted, tried, accepted } = this.columns;
    return i === undefined ? [0, 0, 0] : [drafted[i], tried[i], accepted[i]];
  }
}
