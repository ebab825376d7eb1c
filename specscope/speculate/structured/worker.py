"""What the process that compiles grammars does (specscope.speculate.bounded), within SECONDS and MEMORY."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from specscope.speculate.bounded import answer_jobs

SECONDS = 5  # of processor time, for one grammar
MEMORY = 3 * 2**30  # bytes
LARGEST = 64 * 2**20  # of a compiled grammar, as text
MASK_SECONDS = 0.25  # of processor time, for what may come next: others wait for it, and nothing can interrupt it
WALKED = 64  # tokens of each output that is tried
MAX_WHITESPACE = 8  # spaces and line ends in a row between JSON's tokens: without a bound models loop on them


def _quoted(text: str) -> str:
    """As EBNF writes it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def compiled(xgr: Any, info: Any, kind: str, value: Any) -> Any:  # noqa: ANN401
    """A form's grammar. Raises RuntimeError for an invalid form."""
    compiler = xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    if kind == "regex":
        return compiler.compile_regex(value)
    if kind == "choice":
        return compiler.compile_grammar("root ::= " + " | ".join(map(_quoted, value)))
    if kind == "grammar":
        return compiler.compile_grammar(value)
    schema = '{"type": "object"}' if kind == "json_object" else value
    return compiler.compile_json_schema(schema, any_whitespace=True, max_whitespace_cnt=MAX_WHITESPACE)


def _answer(xgr: Any, info: Any, kind: str, value: Any) -> tuple[str, str]:  # noqa: ANN401
    """("ok", the grammar as text) or ("refused", why)."""
    try:
        grammar = compiled(xgr, info, kind, value)
        if why := _unusable(xgr, grammar, info.vocab_size):
            return "refused", why
        text = grammar.serialize_json()
    except MemoryError:
        return "refused", "it takes too much memory"
    except Exception as error:
        return "refused", str(error)
    return ("ok", text) if len(text) <= LARGEST else ("refused", "its compiled form is too large: make it smaller")


def _unusable(xgr: Any, grammar: Any, tokens: int) -> str:  # noqa: ANN401
    """Why nothing can be written by a grammar, or not in time; "" where it can. Three outputs of it are tried."""
    row = np.zeros((1, (tokens + 31) // 32), np.int32)
    for rank in (0.0, 0.5, 1.0):  # of the allowed tokens, in order of their ids, the one that is taken
        matcher = xgr.GrammarMatcher(grammar)
        for place in range(WALKED):
            start = time.process_time()
            matcher.fill_next_token_bitmask(row, 0)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:tokens])
            if not place and not len(allowed):
                return "the form allows no first token"
            accepted = len(allowed) and matcher.accept_token(int(allowed[round(rank * (len(allowed) - 1))]))
            if time.process_time() - start > MASK_SECONDS:
                return f"the mask after {place + 1} tokens takes over {MASK_SECONDS:g} s to compute: make it simpler"
            if not accepted or matcher.is_terminated():
                break
    return ""


def token_info(xgr: Any, pieces: list[bytes], stops: list[int]) -> Any:  # noqa: ANN401
    """xgrammar's view of a vocabulary: each token's bytes, none for tokens that are no text and never allowed."""
    return xgr.TokenizerInfo(
        pieces, vocab_type=xgr.VocabType.RAW, vocab_size=len(pieces), stop_token_ids=stops, add_prefix_space=False
    )


def _load() -> Any:  # noqa: ANN401
    import xgrammar as xgr

    def prepare(about: tuple[list[bytes], list[int]]) -> Any:  # noqa: ANN401
        info = token_info(xgr, *about)
        return lambda job: _answer(xgr, info, *job)

    return prepare


if __name__ == "__main__":
    answer_jobs(_load, SECONDS, MEMORY)
