"""What a file is, by its start: the paths of the keys of its first JSON value, or how its lines are written.

And where its JSON documents end: one a line, or written over several lines, one after the other or in an array.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain

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
    WATCH = "it holds counts, no tokens: specscope report {file} (or watch, compare) reads it"
    TREES = "specscope tree --from draws its tree, and --tree takes it as text"
    COSTS = "specscope tune takes it as --costs"
    CALLS = "specscope verify {file} judges its calls of a sampler"
    NO_TRACE = "the store may not have the trace yet, or no longer"
    SERVER = "specscope watch http://HOST:PORT/metrics reads the server's"
    NONE = "this version of specscope does not read it"


@dataclass(frozen=True)
class FileKind:
    words: str  # after "FILE is"
    reader: ReadAs

    def refusal(self, name: str, wanted: str, place: str = "") -> UserError:
        """The error of a verb that needs another kind. `place`: what was given, where that is a place in the file."""
        use = self.reader.value.format(file=shell_word(place or name) if os.path.exists(name) else "FILE")
        other = "" if self.reader in (ReadAs.NONE, ReadAs.SERVER) else f", not {wanted}"
        return UserError(f"{printable(name)} is {self.words}{other}: {use}")


traced, watched, unread = (partial(FileKind, reader=each) for each in (ReadAs.CAPTURES, ReadAs.WATCH, ReadAs.NONE))
CAPTURE = traced("a capture")
PROMPT_FILE = FileKind("a file of prompts", ReadAs.PROMPTS)
PROMPT_TABLE = FileKind("a table of prompts", ReadAs.PROMPTS)
REQUEST_DUMP = FileKind("a dump of SGLang's requests", ReadAs.PROMPTS)
SHAREGPT = FileKind("ShareGPT's data set", ReadAs.PROMPTS)
WRAPPED_LOG = watched("a log in JSON Lines")
LOGS = VLLM_LOG, SGLANG_LOG, LLAMACPP_LOG = [watched(f"a log of {name}") for name in ("vLLM", "SGLang", "llama.cpp")]
ANSWER = watched("a server's response")
TEXTS = unread("a training data set")
STREAM = watched("a server's response, as a stream")
LLAMACPP_STREAM = watched("a response of llama.cpp, as a stream")
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
    (unread("an error from Prometheus's API"), "status errorType error"),
    (watched("a result of trtllm-bench"), "decoding_stats performance"),
    (
        watched("a result of a serving bench (bench serve)"),
        "backend total_output_tokens | request_throughput total_output_tokens | spec_decode_num_drafts date"
        " | accept_length request_throughput",
    ),
    (unread("an answer of Loki, whose log `jq -r '.data.result[].values[][1]'` takes out"), "data.result.stream"),
    (watched("metrics from Prometheus's API"), "data.resultType"),
    (
        watched("results of Spec-Bench or EAGLE"),
        "choices.accept_lengths | choices.idxs | choices.new_tokens choices.wall_time",
    ),
    (watched("a result of specdec_bench"), "Acceptance_Length_Histogram | Average_AL | Request_AL"),
    (
        watched("results of AIPerf"),
        "spec_decode_acceptance | metadata.request_start_ns metrics | total_spec_decode_steps",
    ),
    (
        FileKind("a benchmark of GuideLLM, which holds no acceptance", ReadAs.SERVER),
        "metadata.guidellm_version | benchmarks.type_ | benchmarks.config benchmarks.metrics",
    ),
    (watched("an export of SGLang's requests"), "spec_verify_ct"),
    (watched("a result with counts of drafts"), "num_drafts | accept_lengths | accepted_lengths"),
    (watched("a response of llama.cpp"), "timings.predicted_n | generation_settings timings | draft_n predicted_n"),
    (unread("a list of llama.cpp's slots, which counts no drafts"), "is_processing n_ctx"),
    (REQUEST_DUMP, "obj.sampling_params | obj.text | requests.obj.text"),
    (SHAREGPT, "conversations | conversation"),
    (FileKind("SPEED-Bench's data set", ReadAs.PROMPTS), "turns multiturn | messages question_id"),
    (FileKind("Spec-Bench's or MT-bench's data set", ReadAs.PROMPTS), "turns | prompt prompt_id"),
    (watched("a response of SGLang"), "meta_info | sglext choices | internal_states.avg_spec_accept_length"),
    (watched("figures of a request of vLLM"), "spec_decode_metrics | num_draft_tokens"),
    (ANSWER, "choices object | choices usage | metrics.speculative_decoding | data.metrics"),
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
    (LLAMACPP_LOG, r"(?:^|\s)\d+\.\d\d\.\d{3}\.\d{3} [A-Z] |\bslot print_timing: |\bdraft acceptance(?: rate)? = "),
    (SGLANG_LOG, r"\bDecode batch.*#running-req: "),
    (VLLM_LOG, r"\b(?:DEBUG|INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[[\w/]+\.py:"),
    (VLLM_LOG, r"\bSpec(?:Decoding|ulative) metrics: "),
    (LLAMACPP_PAGE, r"^(?:# (?:HELP|TYPE) )?llamacpp[:_]\w+[ {]"),
    (PAGE, r"\A(?:HTTP/[\d.]+ \d.*\n(?:[\w-]+:.*\n)*)?[>\s]*# (?:HELP|TYPE) \S"),  # curl -i has headers before it
    (PAGE, r"\A[>\s]*(?:[a-zA-Z_:]\w*:|(?:ray_)?(?:vllm|sglang)_)\w+(?:\{.*\})? [-+.\w]+(?: \d+)?\s*$"),
    (
        watched("a printed result with acceptance"),
        r"^\s*(?:num_drafts|mean acceptance length[\w ()]*|accept(?:ance)? length|acceptance at token \d+|n_accept +)"
        r"[:=] *\d",
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
    b"\xff\xfe": "text in UTF-16, as PowerShell's > writes it (UTF-8 is read)",
    b"\xfd7zXZ": "compressed with xz (gzip and zstd are read)",
    b"BZh": "compressed with bzip2 (gzip and zstd are read)",
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
# After `[` comes a JSON value or an end. No prompt (`[INST] ...`) and no log line (`[53409] ...`, `[1,0]<err>`) is so.
_JSON = re.compile(
    r'(?m)\ufeff?\s*(?:\{|\[\s*(?:["\[{\]]|\Z|(?:-?\d[\d.eE+-]*|true|false|null)\s*(?:,(?![\d, ]*\]\S)|\Z|\]\s*?$)))'
)
_KEY_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}\[\]:]')


def looks_like_json(text: str) -> bool:
    return _JSON.match(text) is not None


def is_array(text: str) -> bool:
    return looks_like_json(text) and "[" in text.lstrip("\ufeff \t\r\n")[:1]


def kind_of(start: bytes) -> FileKind | None:
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


LARGEST = 128 * 2**20  # bytes of a line or a document, such as a download of many traces: decoded up to twelve times it
# A string has an end, and is on one line. An object with no brackets in it is one token: most are, so this is quick.
_STRING = rb'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+'
_UNNESTED = rb'[^"{}\[\]]*+'
TOKENS = re.compile(_STRING + rb'("?)|\{' + _UNNESTED + rb"(?:" + _STRING + rb'"' + _UNNESTED + rb")*+\}|[{}\[\]]")


def documents(lines: Iterable[tuple[int, bytes]], name: str) -> Iterator[tuple[int, bytes]]:
    """(the number of its first line, the document) of each, from numbered lines.

    Gives lines where the first is not JSON, or is a whole document. The last may be cut off: then it has no line
    break. Raises UserError.
    """
    numbered = iter(lines)
    number, first = next(((number, line) for number, line in numbered if line.strip()), (0, b""))
    start = first.decode("utf-8", "replace")
    if not looks_like_json(start) or _is_whole(first):
        yield from [(number, first)] if first else ()
        yield from numbered
    else:
        yield from _split(chain([(number, first)], numbered), name, -1 if is_array(start) else 0)


def _is_whole(line: bytes) -> bool:
    with suppress(ValueError):
        return line.lstrip().startswith(b"{") and bool(decoded(line, msgspec.Raw))
    found = [document for _, document in _split([(1, line)], "", 0)]  # damaged, but whole
    return len(found) == 1 and found[0].startswith(b"{") and found[0].endswith(b"\n")


def _split(lines: Iterable[tuple[int, bytes]], name: str, least: int) -> Iterator[tuple[int, bytes]]:
    """Documents over several lines, or several in one. `least`: -1 where an array is around them all, else 0."""
    depth, begun = least, bytearray()  # brackets that are open; the lines of a document that has begun
    first = begin = 0
    for number, line in lines:
        for match in TOKENS.finditer(line):
            token = match[0]
            if token in b"{[":
                if depth == 0:
                    first, begin = number, match.start()
                depth += 1
            elif token in b"}]":
                if depth == 1:
                    yield first, b"".join((begun, line[begin : match.end()], b"\n"))
                    begun.clear()
                depth = max(depth - 1, least)
            elif depth == 0 and token.startswith(b"{"):
                yield number, token + b"\n"
        if depth > 0:
            begun += line[begin:]
            if len(begun) > LARGEST:
                raise UserError(f"{name} has a JSON document of over {LARGEST >> 20} MiB: write one per line (jq -c .)")
        begin = 0
    if begun:
        yield first, bytes(begun.rstrip())
