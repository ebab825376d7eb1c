"""Compiled grammars: made by a process of its own within a limit of time and memory, and kept.

xgrammar has no limit of time, and `.{0,100000}` takes it minutes. One process serves every engine of this program.

What xgrammar 0.2.8 would silently leave out of a JSON schema or a regular expression, found by trying each keyword, is
refused in one line; vLLM (v1/structured_output/backend_xgrammar.py) and SGLang refuse most of the same.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

from specscope.errors import UserError
from specscope.speculate.allowed import GrammarState
from specscope.speculate.bounded import BoundedProcess, EndedError
from specscope.speculate.structured.worker import SECONDS, token_info
from specscope.trace.checked import decoded, short
from specscope.trace.record.params import StructuredOutputs
from specscope.trace.record.vocabulary import Vocabulary

# Keywords whose value is a schema, or a list of schemas; and those whose value is a mapping to schemas
_INSIDE = (
    *("additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
    *("allOf", "anyOf", "oneOf", "prefixItems"),
)
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
_IGNORED = (
    *("not", "if", "then", "else", "multipleOf", "uniqueItems", "contains", "minContains", "maxContains"),
    *("dependencies", "dependentRequired", "dependentSchemas", "$dynamicRef", "$recursiveRef"),
)
_FORMATS = {
    *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer", "relative-json-pointer"),
    *("time", "uri", "uri-reference", "uri-template", "uuid"),
}
_TYPED = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "format")
_OF_OBJECTS = ("required", "minProperties", "maxProperties", "propertyNames", "patternProperties")
_SAYS_NOTHING = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "nullable"),
}
MOST_NESTED = 10_000  # repetitions within each other: what may come next then takes seconds to work out
_ESCAPES = set("dDwWsSnrtfvxucbBpPk")  # of letters; for another one xgrammar takes the letter itself


def check_form(form: StructuredOutputs) -> None:
    """Raises UserError, in one line, for what a grammar made of it would not hold to."""
    if form.kind == "regex":
        if why := _unheld_regex(form.text):
            raise UserError(f"structured_outputs: regex: {why}")
    elif form.kind == "json":
        for schema, where in _schemas(decoded(form.text), "#"):
            if why := next(_unheld(schema), ""):
                raise UserError(f"structured_outputs: json: {why}, at {where[:80]}")


def _schemas(schema: object, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The schema and all within it. Values that are data (enum, default, ...) are not looked into."""
    if not isinstance(schema, dict):
        return
    yield schema, where
    for name in (*_INSIDE, *_NAMED):
        inside = schema.get(name)
        if isinstance(inside, list):
            inside = dict(enumerate(inside))
        elif name in _INSIDE:
            inside = {"": inside}
        for key, subschema in inside.items() if isinstance(inside, dict) else ():
            yield from _schemas(subschema, f"{where}/{name}/{key}".removesuffix("/"))


def _unheld(schema: dict[str, Any]) -> Iterator[str]:
    """Why the grammar of a schema would allow what the schema forbids, one reason after another."""
    for name in _IGNORED:
        if schema.get(name, False) is not False:
            yield f"{name} cannot be enforced: leave it out"
    if len(schema.get("allOf") or ()) > 1:
        yield "allOf of several schemas cannot be enforced: write them as one"
    for name in ("$ref", "anyOf", "oneOf", "allOf"):
        if name in schema and (beside := set(schema) - {name} - _SAYS_NOTHING):
            yield f"keys beside {name} cannot be enforced: move {short(min(beside))} into it"
    if not str(schema.get("$ref", "#")).startswith("#"):
        yield f"only references within the schema can be followed, not {short(schema['$ref'])}"
    if "enum" in schema or "const" in schema:
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties") or {}
    for name in (*_TYPED, *(() if known else _OF_OBJECTS)) if "type" not in schema else ():
        if name in schema:
            yield f"{name} cannot be enforced without a type: add one"
    if "format" in schema and schema["format"] not in _FORMATS:
        yield f"format {short(schema['format'])} is not known: leave it out"
    if sum(["format" in schema, "pattern" in schema, "minLength" in schema or "maxLength" in schema]) > 1:
        yield "format, pattern and minLength or maxLength cannot be enforced together: keep one of them"
    if "pattern" in schema and (why := _unheld_regex(str(schema["pattern"]), in_schema=True)):
        yield f"pattern: {why}"
    for name in schema.get("required") or () if isinstance(known, dict) else ():
        if name not in known:
            yield f"required names {short(name)}, which properties does not describe: add it there"
    if sum([bool(known), len(patterns), "propertyNames" in schema]) > 1:
        yield "properties, patternProperties of one pattern and propertyNames cannot be enforced together: keep one"


def _unheld_regex(text: str, *, in_schema: bool = False) -> str:
    """Why a grammar of a regular expression would match something else; "" where it would not."""
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", lambda m: " " * len(m[0]), text, flags=re.DOTALL)
    body = plain.strip("^$") if plain.startswith("^") or plain.endswith("$") else plain
    if "^" in body or "$" in body:
        return "^ and $ work only at the ends: the expression matches the whole text anyway"
    if (most := _repetitions(plain)) > MOST_NESTED:
        return f"nested repetitions multiply to {most:,}; the limit is {MOST_NESTED:,}: make it simpler"
    odd = next((m[1] for m in re.finditer(r"\\([A-Za-z])", text.replace("\\\\", "  ")) if m[1] not in _ESCAPES), "")
    if odd:
        return f"\\{odd} is not known"
    if in_schema and (special := re.search(r"\(\?(?!:|<[A-Za-z])|\\[bBpPk1-9]", text)):
        return f"{short(special[0])} cannot be enforced: leave it out"
    return ""


def _repetitions(plain: str) -> int:
    """How often the innermost part may stand at most where counted groups stand in counted groups; else 1.

    `plain`: the expression, its classes and escapes blanked.
    """
    inside, most = [1], 1  # of each open group, how often a part of it may stand at most
    group, end = 1, -1  # the same of the group that closed last, and where it did
    for match in re.finditer(r"\{(\d*),?(\d*)\}|[()]", plain):
        if match[0] == "(":
            inside.append(1)
        elif match[0] == ")" and len(inside) > 1:
            group, end = inside.pop(), match.end()
            inside[-1] = max(inside[-1], group)
        elif count := match[2] or match[1]:
            within = group if match.start() == end else 1
            inside[-1] = max(inside[-1], within * int(count))
            most = max(most, within * int(count)) if within > 1 else most
    return most


KEPT, KEPT_BYTES = 256, 256 * 2**20  # compiled grammars, of all engines


def library() -> Any:  # noqa: ANN401
    """The module xgrammar. Raises UserError where it is not installed."""
    try:
        import xgrammar
    except ImportError:
        raise UserError("structured output needs xgrammar: pip install 'specscope[serve]'") from None
    return xgrammar


@dataclass(frozen=True)
class GrammarTokens:
    """A model's vocabulary as grammars see it."""

    digest: str
    pieces: tuple[bytes, ...]  # each token's bytes; empty for special tokens and padding, which are no text
    eos: tuple[int, ...]
    never: frozenset[int]  # those without bytes

    @staticmethod
    def of(vocabulary: Vocabulary, size: int, eos: Iterable[int]) -> GrammarTokens:
        """`size`: the width of the logits. Special tokens have no bytes: `.*` would allow <|im_start|> as text."""
        known, special = vocabulary.pieces, vocabulary.special | set(eos)
        pieces = tuple(b"" if token in special else known.get(token, b"") for token in range(size))
        stops = tuple(token for token in eos if token < size)
        digest = blake2b(repr((pieces, stops)).encode(), digest_size=16).hexdigest()
        return GrammarTokens(digest, pieces, stops, frozenset(token for token, piece in enumerate(pieces) if not piece))

    @cached_property
    def info(self) -> Any:  # noqa: ANN401
        return token_info(library(), list(self.pieces), list(self.eos))


_WORKER = BoundedProcess("specscope.speculate.structured.worker")
_CACHE: OrderedDict[tuple[str, StructuredOutputs], Any] = OrderedDict()
_CACHE_LOCK = threading.Lock()


class Grammars:
    """The grammars of one model. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, size: int, eos: Iterable[int]) -> None:
        self._about = (vocabulary, size, tuple(eos))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    @cached_property
    def tokens(self) -> GrammarTokens:
        return GrammarTokens.of(*self._about)

    def check(self, form: StructuredOutputs) -> None:
        """Check what can be checked without compiling. Raises UserError."""
        library()
        if not self.tokens.eos:
            raise UserError("structured_outputs needs a model with an end-of-sequence token; this one has none")
        check_form(form)

    def find(self, form: StructuredOutputs) -> Any | None:  # noqa: ANN401
        with _CACHE_LOCK:
            if (key := (self.tokens.digest, form)) in _CACHE:
                _CACHE.move_to_end(key)
            return _CACHE.get(key)

    def compile(self, form: StructuredOutputs) -> Any:  # noqa: ANN401
        """The compiled grammar. Takes seconds at worst. Raises UserError for an invalid form."""
        self.check(form)
        grammar = self.find(form)
        if grammar is None:
            text = _compile(self.tokens, form)
            grammar = library().CompiledGrammar.deserialize_json(text, self.tokens.info)
            with _CACHE_LOCK:
                _CACHE[self.tokens.digest, form] = grammar
                while len(_CACHE) > KEPT or sum(one.memory_size_bytes for one in [*_CACHE.values()][:-1]) > KEPT_BYTES:
                    _CACHE.popitem(last=False)
        return grammar

    def submit(self, form: StructuredOutputs) -> Future[Any]:
        return self._pool.submit(self.compile, form)

    def state(self, grammar: Any, stops: Iterable[int]) -> GrammarState:  # noqa: ANN401
        """Where a new request stands. `stops`: its stop tokens; those that are text are text to the grammar."""
        silent = {*self.tokens.eos, *stops} & self.tokens.never
        matcher = library().GrammarMatcher(grammar, override_stop_tokens=sorted(silent))
        return GrammarState(matcher, len(self.tokens.pieces), self.tokens.never - silent)


def check_forms(forms: Mapping[StructuredOutputs, str]) -> None:
    """Refuse what no model could hold to, before one is loaded: a vocabulary of single bytes can write any text.

    `forms`: with the place of each in a file, "" for none. Raises UserError.
    """
    letters = GrammarTokens("bytes", (*(bytes([byte]) for byte in range(256)), b""), (256,), frozenset({256}))
    for form, place in forms.items():
        library()
        try:
            check_form(form)
            _compile(letters, form)
        except UserError as error:
            raise UserError(f"{place}: {error}" if place else str(error)) from None


def _compile(tokens: GrammarTokens, form: StructuredOutputs) -> str:
    """The compiled grammar, as text. Raises UserError where there is none."""
    about = (list(tokens.pieces), list(tokens.eos))
    try:
        outcome, text = _WORKER.ask(tokens.digest, about, (form.kind, getattr(form, form.kind)))
    except EndedError:
        raise UserError(
            f"structured_outputs: {form.kind} takes more than {SECONDS} s or too much memory to compile: "
            "make it simpler"
        ) from None
    if outcome != "ok":
        raise UserError(f"structured_outputs: {form.kind} cannot be used: {_reason(text)}")
    return str(text)


def _reason(text: str) -> str:
    """xgrammar's message as a line for people, without its file and line."""
    line = re.sub(r"^\[[^]]*\] (\S+: )?", "", (text.strip() or "no reason given").splitlines()[0])
    return short(line)[1:-1] if len(line) > 150 else line.strip().rstrip(".")
