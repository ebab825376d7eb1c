"""What a file is, by its content: the one place that says so, for every verb that is given a file.

Only the start of a file is looked at: the paths of the keys of its first JSON value, or how its lines are written. And
where its JSON documents end: one a line, or written over several lines, one after the other or in an array. A document
may be longer than fits in memory where it is one long list, as in `{"data": [...]}`: then each entry is found alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import NamedTuple

import msgspec

from specscope.errors import UserError
from specscope.trace.checked import decoded
from specscope.trace.files import plain_start
from specscope.trace.record.vocabulary import printable, shell_word

LOOK = 2**16  # bytes of a file that are looked at
DEEPEST = 3  # keys of a path: data.spans.traceID


class ReadAs(Enum):
    """Which verbs read a file: what to do with it, in words."""

    CAPTURES = "specscope open {file} shows it, specscope debug {file} debugs it"
    PROMPTS = "specscope capture {file} -o run.jsonl takes its prompts"
    WATCH = "specscope watch {file}, report and compare read it"
    TREES = "specscope tree --from draws its tree, and --tree takes it as text"
    COSTS = "specscope tune takes it as --costs"
    CALLS = "specscope verify {file} judges its calls of a sampler"
    NO_TRACE = "the store may not have the trace yet, or no longer"
    SERVER = "specscope watch http://HOST:PORT/metrics reads the server's"
    NONE = "this version of specscope does not read it"


@dataclass(frozen=True)
class FileKind:
    """One kind of file."""

    words: str  # after "FILE is"
    reader: ReadAs

    def refusal(self, name: str, wanted: str, place: str = "") -> UserError:
        """The error of a verb that needs another kind. `place`: what was given, where that is a place in the file."""
        use = self.reader.value.format(file=shell_word(place or name) if os.path.exists(name) else "FILE")
        other = "" if self.reader in (ReadAs.NONE, ReadAs.SERVER) else f", not {wanted}"
        return UserError(f"{printable(name)} is {self.words}{other}: {use}")


def _kinds(reader: ReadAs) -> Callable[[str], FileKind]:
    return lambda words: FileKind(words, reader)


traced, watched, unread = map(_kinds, (ReadAs.CAPTURES, ReadAs.WATCH, ReadAs.NONE))
CAPTURE = traced("a capture")
PROMPT_FILE = FileKind("a file of prompts", ReadAs.PROMPTS)
PROMPT_TABLE = FileKind("a table of prompts", ReadAs.PROMPTS)
REQUEST_DUMP = FileKind("a dump of SGLang's requests", ReadAs.PROMPTS)
SHAREGPT = FileKind("ShareGPT's data set", ReadAs.PROMPTS)
WRAPPED_LOG = watched("a log in JSON Lines")
VLLM_LOG = watched("a log of vLLM")
ANSWER = watched("a server's response")
TEXTS = unread("a training data set")
STREAM = watched("a server's response, as a stream")
LLAMACPP_STREAM = watched("a response of llama.cpp, as a stream")
LLAMACPP_LOG = watched("a log of llama.cpp")
LLAMACPP_JSON_LOG = watched("a log of llama.cpp in JSON Lines")
LLAMACPP_PAGE = watched("a metrics page of llama.cpp")
PAGE = watched("a metrics page")
TABLE = watched("a table with a column of lengths")
WRAPPED, STREAMS, PAGES = (WRAPPED_LOG, LLAMACPP_JSON_LOG), (STREAM, LLAMACPP_STREAM), (PAGE, LLAMACPP_PAGE)

# By paths of keys: a kind is what has all of one of its sets, with strokes between. The first that fits is meant.
_BY_KEYS: tuple[tuple[FileKind, str], ...] = (
    (CAPTURE, "resourceSpans"),
    (traced("a trace from Jaeger's API"), "result.resourceSpans"),
    (traced("a trace saved from Jaeger's page"), "data.traceID | data.spans | traceID spans | spans processes"),
    (traced("a trace from Tempo"), "batches.resource | batches.scopeSpans | trace.resourceSpans | trace.batches"),
    (traced("resourceSpans alone"), "scopeSpans"),
    (FileKind("an error from Jaeger", ReadAs.NO_TRACE), "error.grpcCode"),
    (unread("a list of traces that Tempo found"), "traces.traceID"),
    (unread("a trace in Zipkin's format"), "traceId id | traceId localEndpoint"),
    (unread("metrics or logs in OTLP JSON"), "resourceMetrics | resourceLogs"),
    (
        watched("a result of a serving bench (bench serve)"),
        "request_throughput total_output_tokens | spec_decode_num_drafts date | accept_length request_throughput",
    ),
    (watched("metrics from Prometheus's API"), "data.resultType"),
    (
        watched("results of Spec-Bench or EAGLE"),
        "choices.accept_lengths | choices.idxs | choices.new_tokens choices.wall_time",
    ),
    (watched("a result of specdec_bench"), "Acceptance_Length_Histogram | Average_AL | Request_AL"),
    (watched("results of AIPerf"), "spec_decode_acceptance | metadata.request_start_ns metrics"),
    (
        FileKind("a benchmark of GuideLLM, which holds no acceptance", ReadAs.SERVER),
        "metadata.guidellm_version | benchmarks.type_ | benchmarks.config benchmarks.metrics",
    ),
    (watched("an export of SGLang's requests"), "spec_verify_ct"),
    (watched("a result with counts of drafts"), "num_drafts | accept_lengths | accepted_lengths"),
    (watched("a response of llama.cpp"), "timings.predicted_n | generation_settings timings"),
    (unread("a list of llama.cpp's slots, which counts no drafts"), "is_processing n_ctx"),
    (
        unread("iteration statistics of TensorRT-LLM"),
        "specDecodingStats.numDraftTokens | iterLatencyMS iter | iterLatencyMS numActiveRequests",
    ),
    (
        unread("a response of TensorRT-LLM"),
        "request_perf_metrics.speculative_decoding | choices.request_perf_metrics.speculative_decoding",
    ),
    (REQUEST_DUMP, "obj.sampling_params | obj.text | requests.obj.text"),
    (SHAREGPT, "conversations | conversation"),
    (FileKind("SPEED-Bench's data set", ReadAs.PROMPTS), "turns multiturn | messages question_id"),
    (FileKind("Spec-Bench's or MT-bench's data set", ReadAs.PROMPTS), "turns | prompt prompt_id"),
    (watched("a response of SGLang"), "meta_info | sglext choices"),
    (watched("figures of a request of vLLM"), "spec_decode_metrics | num_draft_tokens"),
    (ANSWER, "choices object | choices usage | metrics.speculative_decoding"),
    (LLAMACPP_JSON_LOG, "type time level msg"),
    (WRAPPED_LOG, "log stream | message level | message levelname"),
    (PROMPT_FILE, "prompt | messages"),
    (FileKind("a speculative configuration", ReadAs.TREES), "num_speculative_tokens | speculative_num_steps"),
    (unread("a model's config.json"), "architectures | model_type"),
    (FileKind("a file of step costs", ReadAs.COSTS), "step.rows"),
    (TEXTS, "text"),
)
# By how the text of the first lines is written
_BY_TEXT = (
    (
        FileKind("a response of Jaeger without a trace", ReadAs.NO_TRACE),
        r'\A\s*\{\s*"data":\s*(?:null|\[\s*\])\s*(?:\}|,\s*"(?:total|limit|offset|errors)":)',
    ),
    (watched("llm.get_metrics() of vLLM"), r'"name":\s*"vllm:'),
    (unread("what a specscope verb printed with --json"), r'\A\s*\{\s*"schema":\s*"specscope\.'),
    (LLAMACPP_LOG, r"(?:^|\s)\d+\.\d\d\.\d{3}\.\d{3} [A-Z] |\bslot print_timing: "),
    (watched("a log of SGLang"), r"\bDecode batch.*#running-req: "),
    (VLLM_LOG, r"\b(?:DEBUG|INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[\w+\.py:\d+\]|^SpecDecoding metrics: Mean"),
    (LLAMACPP_PAGE, r"^(?:# (?:HELP|TYPE) )?llamacpp[:_]\w+[ {]"),
    (PAGE, r"\A\s*# (?:HELP|TYPE) \S|\A\s*(?:[a-zA-Z_:]\w*:|(?:vllm|sglang)_)\w+(?:\{.*\})? [-+.\w]+(?: \d+)?\s*$"),
    (
        watched("a printed result with acceptance"),
        r"^\s*(?:num_drafts|mean acceptance length[\w ()]*|accept(?:ance)? length|acceptance at token \d+): *\d",
    ),
    (watched("results of SpecForge"), r'\A\s*\{(?s:.*)"metrics": *\[\s*\{[^}]{0,2000}"accept_length":'),
    (
        TABLE,
        r"\A(?:[^\n,;\t]*[,;\t])*\"?(?:mean|avg|average)?[ _]*acc(?:ept(?:ed|ance)?)?[ _]*(?:len|lengths?|tokens)"
        r"(?:[ _]?mean)?\"?[ \t\r]*(?:[,;\t][^\n]*)?\n[^\n]*\d",
    ),
    (LLAMACPP_STREAM, r'\Adata: ?\{(?s:.*)"timings": ?\{'),
    (STREAM, r"\A\s*(?:(?:event|id)?:[^\n]*\n\s*)*data: ?\{"),
    (
        PROMPT_TABLE,
        r'\A(?:"?[\w .-]{1,60}"?[,;\t])*"?(?:prompt|question|instruction|query)s?"? *'
        r'(?:[,;\t]"?[\w .-]{0,60}"?)*\r?(?:\n|\Z)',
    ),
    (unread("an HTML page"), r"\A\s*<(?:!doctype )?html"),
)
_TEXTS = [(kind, re.compile(pattern, re.MULTILINE | re.IGNORECASE)) for kind, pattern in _BY_TEXT]
ARRAYS = FileKind("a file of arrays (.npz)", ReadAs.CALLS)
TENSORS = FileKind("a file of tensors (.pt)", ReadAs.CALLS)
_MEMBER = rb"PK\x03\x04[\x00-\xff]{26}[^\x00/]{1,200}"  # of a ZIP archive, with its name
_IN_ZIP = (
    (ARRAYS, re.compile(_MEMBER + rb"\.npy")),
    (TENSORS, re.compile(_MEMBER + rb"/(?:data\.pkl|\.format_version)")),
)
_BY_BYTES: Mapping[bytes, str] = {
    b"PAR1": "a Parquet table",
    b"PK\x03\x04": "a ZIP archive",
    b"GGUF": "a model in GGUF",
    b"%PDF": "a PDF",
    b"\x7fELF": "a program",
    b"SQLite format 3": "an SQLite database",
}
# OTLP protobuf: a ResourceSpans in a TracesData. First come its scopes, as newer collectors write it, or its resource,
# in that an attribute, and in that its key or its value. No text has such bytes.
# The collector's file exporter has the length before each message, and may compress it.
OTLP_PROTOBUF = traced("a trace in OTLP protobuf")
_SIZE = rb"[\x80-\xff]{0,4}[\x00-\x7f]"
_PROTOBUF = re.compile(
    rb"(?:[\x00\x01][\x00-\xff]{3})?\n%b" % _SIZE
    + rb"(?:[\x12\x1a]%b[\n\x12\x1ah]|(?:\n%b){2}(?:\n%b[\w./-]{1,250}\x12|\x12))" % (_SIZE, _SIZE, _SIZE)
    + rb"|[\x00\x01][\x00-\xff]{3}(?:\x28\xb5\x2f\xfd|\{\s*\"resourceSpans\")"
)
# After `[` comes a JSON value or an end: no log line, such as `[53409] ...`, and no prompt, `[INST] ...`, begins so.
_JSON = re.compile(
    r'\ufeff?\s*(?:\{|\[\s*(?:["\[{\]]|\Z|(?:-?\d[\d.eE+-]*|true|false|null)\s*(?:,|\Z|\][ \t]*(?:[\r\n]|\Z))))'
)
_KEY_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}\[\]:]')


def looks_like_json(text: str) -> bool:
    """Whether text begins as a JSON object or array does."""
    return _JSON.match(text) is not None


def is_array(text: str) -> bool:
    """Whether text begins as a JSON array does."""
    return looks_like_json(text) and "[" in text.lstrip("\ufeff \t\r\n")[:1]


def kind_of(start: bytes) -> FileKind | None:
    """The kind of a file with this start; None where it is not known."""
    for kind, member in _IN_ZIP:
        if member.match(start):
            return kind
    for magic, words in _BY_BYTES.items():
        if start.startswith(magic):
            return FileKind(words, ReadAs.NONE)
    if re.match(rb"\x80[\x02-\x05][\x95}\]c(]", start):
        return REQUEST_DUMP if b"sglang" in start else unread("a Python pickle")
    if _PROTOBUF.match(start):
        return OTLP_PROTOBUF
    start = start[:LOOK]
    text = start.decode("utf-8", "replace").lstrip("\ufeff")
    if looks_like_json(text):
        paths = set(_key_paths(start))
        for kind, sets in _BY_KEYS:
            if any(paths.issuperset(keys.split()) for keys in sets.split(" | ")):
                return kind
    return next((kind for kind, pattern in _TEXTS if pattern.search(text)), None)


def start_of(path: str | os.PathLike[str]) -> bytes:
    """The first bytes of a regular file, decompressed; empty for a file that cannot be read, or not read twice."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return b""
        with open(path, "rb") as file:
            return plain_start(file, str(path), LOOK)
    except OSError:
        return b""  # reported where it is read


def _key_paths(start: bytes) -> Iterator[str]:
    """The paths of the keys of the first value, arrays left out: `data.spans`. It may be cut off anywhere."""
    keys: list[str] = []  # of the objects that are open
    brackets: list[bytes] = []
    last = b""
    for match in _KEY_TOKENS.finditer(start):
        token = match[0]
        if token in b"{[":
            keys += [""] if token == b"{" else []
            brackets.append(token)
        elif token in b"}]":
            if brackets and brackets.pop() == b"{":
                keys.pop()
            if not brackets:
                return
        elif token == b":" and keys:
            keys[-1] = last.strip(b'"').decode("utf-8", "replace")
            if len(keys) <= DEEPEST:
                yield ".".join(keys)
        last = token


LARGEST = 32 * 2**20  # bytes of a line or a document: decoded it is up to twelve times larger; our lines have some MiB
# A string has an end, and is on one line. An object with no brackets in it is one token: most are, so this is quick.
_STRING = rb'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+'
_NO_BRACKETS = rb'[^"{}\[\]]*+'
TOKENS = re.compile(
    _STRING + rb'("?)|\{' + _NO_BRACKETS + rb"(?:" + _STRING + rb'"' + _NO_BRACKETS + rb")*+\}|[{}\[\]]"
)


class Document(NamedTuple):
    """A document, or an entry of a list."""

    number: int  # of its first line
    list_name: str  # the keys that lead to the list: result.resourceSpans; "" for a document
    text: bytes


def documents(lines: Iterable[tuple[int, bytes]], name: str) -> Iterator[tuple[int, bytes]]:
    """(the number of its first line, the document) of each, from numbered lines.

    Gives lines where the first is not JSON, or is a whole document. The last may be cut off: then it has no line
    break. Raises UserError.
    """

    def refuse(number: int) -> None:
        raise UserError(f"{name} has a JSON document of over {LARGEST >> 20} MiB: write one per line (jq -c .)")

    numbered = iter(lines)
    number, first = next(((number, line) for number, line in numbered if line.strip()), (0, b""))
    start = first.decode("utf-8", "replace")
    if not looks_like_json(start) or is_whole(first):
        yield from [(number, first)] if first else ()
        yield from numbered
        return
    splitter = Splitter(refuse, outer=is_array(start), line=number)
    for _, line in chain([(number, first)], numbered):
        for document in splitter.take(line):
            yield document.number, document.text + b"\n"
    yield from splitter.rest()


def is_whole(line: bytes) -> bool:
    """Whether a line holds one object and no more."""
    with suppress(ValueError):
        return line.lstrip().startswith(b"{") and bool(decoded(line, msgspec.Raw))
    splitter = Splitter(lambda _: None)  # damaged, but whole
    found = [document.text[:1] for document in splitter.take(line)]
    return found == [b"{"] and not any(splitter.rest())


class Splitter:
    """Finds where documents end, and entries of lists, in text that comes in pieces."""

    def __init__(
        self,
        too_large: Callable[[int], None],
        *,
        outer: bool = False,
        lists: Container[str] = frozenset(),
        line: int = 1,
    ) -> None:
        """`too_large` hears of each that is left out, by its line. The text begins in this `line`.

        `outer`: an array is around the documents. `lists`: those whose entries are taken by themselves, by their keys.
        """
        self._too_large = too_large
        self._lists, self._line = lists, line
        self._least = self._depth = -1 if outer else 0  # brackets that are open, that array's left out
        self._items: int | None = 0  # the depth at which a document or an entry begins; None behind a list
        self._keys: list[str] = []  # of what is open, outside entries
        self._key = b'""'  # the last string
        self._list_name = ""
        self._in_string = b""  # the start of a string whose end is not there yet
        self._parts: list[bytes] = []  # of what has begun
        self._size = self._first = 0
        self._is_begun = False

    def take(self, piece: bytes) -> list[Document]:
        """What ends in the next piece."""
        number, self._line = self._line, self._line + piece.count(b"\n")
        piece, self._in_string = self._in_string + piece, b""
        complete: list[Document] = []
        start = counted = 0
        for match in TOKENS.finditer(piece):
            token = match[0]
            if token in b"{[":
                if self._depth == self._items:
                    start, self._is_begun = match.start(), True
                    number += piece.count(b"\n", counted, start)
                    self._first, counted = number, start
                self._open(token)
            elif token in b"}]":
                if self._close() and self._is_begun:
                    self._keep(piece[start : match.end()])
                    if self._size <= LARGEST:
                        complete.append(Document(self._first, self._list_name, b"".join(self._parts)))
                    self._forget()
            elif token.startswith(b"{"):
                if self._depth == self._items and len(token) <= LARGEST:
                    number += piece.count(b"\n", counted, match.start())
                    counted = match.start()
                    complete.append(Document(number, self._list_name, token))
            elif not match[1] and piece[match.end() :] in (b"", b"\\"):
                self._in_string, piece = piece[match.start() :], piece[: match.start()]
            else:
                self._key = token
        if self._is_begun:
            self._keep(piece[start:])
        if len(self._in_string) > LARGEST:
            self._too_large(number)
            self._in_string = b""
        return complete

    def _open(self, bracket: bytes) -> None:
        if self._list_name == "" and 0 <= self._depth < DEEPEST and self._lists:
            self._keys[self._depth :] = [self._key.strip(b'"').decode("utf-8", "replace")]
            name = ".".join(self._keys[1:])
            if bracket == b"[" and name in self._lists:
                self._items, self._list_name = self._depth + 1, name
                self._forget()
        self._depth += 1

    def _close(self) -> bool:
        """Whether a document or an entry ends."""
        self._depth = max(self._depth - 1, self._least)
        if self._list_name and self._items is not None and self._depth < self._items:
            self._items, self._list_name = None, ""
        if self._depth <= 0 and self._items is None:
            self._items = 0
            return False
        return self._depth == self._items

    def _keep(self, part: bytes) -> None:
        """Keep a part of what has begun, unless that is too large."""
        was_small = self._size <= LARGEST
        self._size += len(part)
        if self._size <= LARGEST:
            self._parts.append(part)
        elif was_small:
            self._parts = []
            self._too_large(self._first)

    def _forget(self) -> None:
        self._parts, self._size, self._is_begun = [], 0, False

    def rest(self) -> Iterator[tuple[int, bytes]]:
        """What has begun and has no end."""
        rest = b"".join([*self._parts, self._in_string]).rstrip()
        if self._depth > 0 or rest:
            yield self._first, rest or b"{"
