"""Compiled grammars: made by a process of its own within a limit of time and memory, and kept.

xgrammar has no limit of time, and `.{0,100000}` takes it minutes. The process starts with the first grammar, in about
two seconds, and serves every engine of this program.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

from specscope.errors import UserError
from specscope.speculate.allowed import GrammarState
from specscope.speculate.bounded import BoundedProcess, EndedError
from specscope.speculate.structured.checks import check_form
from specscope.speculate.structured.worker import SECONDS, token_info
from specscope.trace.checked import short
from specscope.trace.record.params import StructuredOutputs
from specscope.trace.record.vocabulary import Vocabulary

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


@lru_cache(4)
def _info(tokens: GrammarTokens) -> Any:  # noqa: ANN401
    return token_info(library(), list(tokens.pieces), list(tokens.eos))


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
        """The vocabulary, read when it is first asked for."""
        return GrammarTokens.of(*self._about)

    def check(self, form: StructuredOutputs) -> None:
        """Check what can be checked without compiling. Raises UserError."""
        library()
        if not self.tokens.eos:
            raise UserError("structured_outputs needs a model with an end-of-sequence token; this one has none")
        check_form(form)

    def find(self, form: StructuredOutputs) -> Any | None:  # noqa: ANN401
        """The compiled grammar, where it is cached."""
        with _CACHE_LOCK:
            grammar = _CACHE.get((self.tokens.digest, form))
            if grammar is not None:
                _CACHE.move_to_end((self.tokens.digest, form))
            return grammar

    def compile(self, form: StructuredOutputs) -> Any:  # noqa: ANN401
        """The compiled grammar. Takes seconds at worst. Raises UserError for an invalid form."""
        self.check(form)
        grammar = self.find(form)
        if grammar is None:
            text = _compile(self.tokens, form)
            grammar = library().CompiledGrammar.deserialize_json(text, _info(self.tokens))
            self._keep(form, grammar)
        return grammar

    def _keep(self, form: StructuredOutputs, grammar: Any) -> None:  # noqa: ANN401
        with _CACHE_LOCK:
            _CACHE[self.tokens.digest, form] = grammar
            while len(_CACHE) > KEPT or sum(one.memory_size_bytes for one in [*_CACHE.values()][:-1]) > KEPT_BYTES:
                _CACHE.popitem(last=False)

    def submit(self, form: StructuredOutputs) -> Future[Any]:
        """Compile on a thread of its own."""
        return self._pool.submit(self.compile, form)

    def state(self, grammar: Any, stops: Iterable[int]) -> GrammarState:  # noqa: ANN401
        """Where a new request stands. `stops`: its stop tokens; those that are text are text to the grammar."""
        silent = {*self.tokens.eos, *stops} & self.tokens.never
        return GrammarState(library(), grammar, sorted(silent), len(self.tokens.pieces), self.tokens.never)


def check_forms(forms: Iterable[StructuredOutputs | None]) -> None:
    """Refuse what no model could hold to, before one is loaded: a vocabulary of single bytes can write any text.

    Raises UserError.
    """
    letters = GrammarTokens("bytes", (*(bytes([byte]) for byte in range(256)), b""), (256,), frozenset({256}))
    for form in dict.fromkeys(form for form in forms if form is not None):
        library()
        check_form(form)
        _compile(letters, form)


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
    line = text.strip().splitlines()[0] if text.strip() else "no reason given"
    if line.startswith("["):
        line = line.partition("] ")[2]
        line = line.partition(": ")[2] or line
    return short(line)[1:-1] if len(line) > 150 else line.strip().rstrip(".")
