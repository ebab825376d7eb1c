"""What a request's form and its minimum length allow, computed again: with a new matcher for every row.

Independent of the engine, which moves one matcher forward and back: here each output is fed token by token from its
beginning. Only xgrammar itself is common to both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specscope.analyze.audit.options import ModelSource
from specscope.errors import not_loaded
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.vocabulary import read_vocabulary

WHITESPACE = 8  # at most between JSON's tokens, as in the engine


class RequestForms:
    """The forms of the requests of one capture."""

    def __init__(self, source: ModelSource, size: int, eos: Sequence[int]) -> None:
        """`size`: the width of the logits."""
        self.source, self.size, self.eos = source, size, [token for token in eos if token < size]
        self._compiled: dict[Any, Any] = {}

    @cached_property
    def _compiler(self) -> tuple[Any, Any, list[bytes]]:
        """(xgrammar, its compiler, each token's bytes). Raises UserError."""
        import xgrammar
        from transformers import AutoTokenizer

        try:
            path, arguments = self.source.path, self.source.arguments
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **arguments)
            vocabulary = read_vocabulary(tokenizer)
        except Exception as error:
            raise not_loaded(f"the tokenizer of {self.source.name}", error) from error
        silent = vocabulary.special | set(self.eos)
        pieces = [b"" if token in silent else vocabulary.pieces.get(token, b"") for token in range(self.size)]
        info = xgrammar.TokenizerInfo(
            pieces, xgrammar.VocabType.RAW, vocab_size=self.size, stop_token_ids=self.eos, add_prefix_space=False
        )
        return xgrammar, xgrammar.GrammarCompiler(info, max_threads=1), pieces

    def _grammar(self, params: SamplingParams) -> Any:  # noqa: ANN401
        form, (_, compiler, _) = params.structured_outputs, self._compiler
        assert form is not None
        if form not in self._compiled:
            if form.kind == "regex":
                made = compiler.compile_regex(form.text)
            elif form.kind in ("grammar", "choice"):
                rule = "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in form.choice or ())
                made = compiler.compile_grammar(form.text if form.kind == "grammar" else rule)
            else:
                schema = form.text or '{"type": "object"}'
                made = compiler.compile_json_schema(schema, any_whitespace=True, max_whitespace_cnt=WHITESPACE)
            self._compiled[form] = made
        return self._compiled[form]

    def refused(self, params: SamplingParams, output: Sequence[int]) -> Tensor | None:
        """bool [V] what may not follow an output; None where everything may, or where the form allows nothing."""
        free = params.structured_outputs is None
        allowed = np.ones(self.size, np.bool_) if free else self._allowed(params, output)
        if allowed is None:
            return None
        if len(output) < params.min_tokens:
            early = allowed.copy()
            early[[token for token in (*self.eos, *params.stop_token_ids) if token < self.size]] = False
            allowed = early if early.any() else allowed
        return None if allowed.all() else torch.from_numpy(~allowed)

    def _allowed(self, params: SamplingParams, output: Sequence[int]) -> np.ndarray | None:
        xgrammar, _, pieces = self._compiler
        stops = sorted({*self.eos, *(t for t in params.stop_token_ids if t < self.size and not pieces[t])})
        matcher = xgrammar.GrammarMatcher(self._grammar(params), override_stop_tokens=stops)
        for token in output:
            silent = not pieces[token] and token not in stops
            if silent or matcher.is_terminated() or not matcher.accept_token(token):
                return None
        if matcher.is_terminated():
            return None
        row = np.zeros((1, (self.size + 31) // 32), np.int32)
        matcher.fill_next_token_bitmask(row, 0)
        bits = np.unpackbits(row.view(np.uint8), count=self.size, bitorder="little").astype(np.bool_)
        return bits if bits.any() else None
