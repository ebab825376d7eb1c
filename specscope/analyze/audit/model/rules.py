"""The sampling rules, independent of the engine: each over rows of logits, and a request's whole chain of them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from specscope.analyze.audit.options import ModelSource
from specscope.errors import not_loaded
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.vocabulary import read_vocabulary

WHITESPACE = 8  # at most between JSON's tokens, as in the engine


class RequestForms:
    def __init__(self, source: ModelSource, size: int, eos: Sequence[int]) -> None:
        """`size`: the width of the logits."""
        self.source, self.size, self.eos = source, size, [token for token in eos if token < size]
        self._compiled: dict[Any, Any] = {}

    @cached_property
    def _compiler(self) -> tuple[Any, Any, list[bytes]]:
        """(xgrammar, its compiler, each token's bytes). Raises UserError."""
        import xgrammar

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
        if form in self._compiled:
            return self._compiled[form]
        if form.kind == "regex":
            made = compiler.compile_regex(form.text)
        elif form.kind in ("grammar", "choice"):
            rule = "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in form.choice or ())
            made = compiler.compile_grammar(form.text if form.kind == "grammar" else rule)
        else:
            schema = form.text or '{"type": "object"}'
            made = compiler.compile_json_schema(schema, any_whitespace=True, max_whitespace_cnt=WHITESPACE)
        return self._compiled.setdefault(form, made)

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


REPETITION, PRESENCE, FREQUENCY = "repetition penalty", "presence penalty", "frequency penalty"
PENALTIES = (REPETITION, PRESENCE, FREQUENCY)
WIDE = 1024  # top-p first looks among this many largest logits


def biased(row: Tensor, bias: Mapping[int, float]) -> Tensor:
    """A row [V] with its logit bias."""
    known = {token: value for token, value in bias.items() if token < len(row)}
    if not known:
        return row
    return row.index_add(0, torch.tensor(list(known)), torch.tensor(list(known.values()), dtype=row.dtype))


def penalised(rule: str, row: Tensor, value: float, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """A row [V] under one penalty: of what was there once, or of the output by how often each token came."""
    if value == (1.0 if rule == REPETITION else 0.0):
        return row
    times = Counter(output)
    tokens = torch.tensor(sorted({*prompt, *output} if rule == REPETITION else times), dtype=torch.long)
    here = row[tokens]
    if rule == REPETITION:
        return row.index_copy(0, tokens, torch.where(here > 0, here / value, here * value))
    count = torch.tensor([times[token] if rule == FREQUENCY else 1.0 for token in tokens.tolist()])
    return row.index_copy(0, tokens, here - value * count)


def least_p(rows: Tensor, share: Tensor, largest: Tensor | None = None) -> Tensor:
    """Without what has less than a share [R, 1] of the largest p, or of another; its own largest always stays."""
    own = rows.amax(-1, keepdim=True)
    cut = (rows < (own if largest is None else largest) + share.log()) & (rows < own)
    return rows.masked_fill(cut, -torch.inf)


def first_k(rows: Tensor, top_k: Tensor) -> Tensor:
    """Without what is below the k-th largest of its row; top_k [R, 1], 0 keeps all."""
    most = int(top_k.max())
    if most <= 0:
        return rows
    kth = rows.topk(min(most, rows.shape[1])).values
    place = (top_k.long() - 1).clamp(0, kth.shape[1] - 1)
    cut = (top_k > 0) & (top_k < rows.shape[1]) & (rows < kth.gather(1, place))
    return rows.masked_fill(cut, -torch.inf)


def first_p(rows: Tensor, top_p: Tensor, *, exclusive: bool = False) -> Tensor:
    """Only the fewest likeliest tokens whose mass reaches top_p [R, 1], and those that tie with the last.

    `exclusive`: without the one that reaches it.
    """
    if not bool((top_p < 1).any()):
        return rows
    probs = rows.softmax(-1)
    largest = probs.topk(min(WIDE, rows.shape[1])).values
    if bool((largest.sum(-1, keepdim=True) < top_p).any()):
        largest = probs.sort(-1, descending=True).values
    mass = largest.double().cumsum(-1)
    last = torch.searchsorted(mass, top_p.double()).clamp_(max=mass.shape[1] - 1)
    last = (last - 1).clamp(min=0) if exclusive else last
    return rows.masked_fill((top_p < 1) & (probs < largest.gather(-1, last)), -torch.inf)


@dataclass(frozen=True)
class Rules:
    params: SamplingParams
    prompt: Sequence[int]
    forms: RequestForms | None = None  # where outputs are limited

    @property
    def counts_output(self) -> bool:
        return self.params.penalised or self.params.limited

    def shaped(self, logits: Tensor, outputs: Sequence[Sequence[int]]) -> Tensor:
        """Logits [R, V] after logit bias and penalties; `outputs`: what each row's penalties count as output."""
        rows = logits.float()
        if not self.params.logit_bias and not self.counts_output:
            return rows
        of_rows = outputs if self.counts_output else [()] * len(rows)
        return torch.stack([self._shaped(row, output) for row, output in zip(rows, of_rows, strict=True)])

    def _shaped(self, row: Tensor, output: Sequence[int]) -> Tensor:
        row = biased(row, self.params.logit_bias)
        for rule in PENALTIES:
            row = penalised(rule, row, getattr(self.params, rule.replace(" ", "_")), self.prompt, output)
        refused = self.forms.refused(self.params, output) if self.forms is not None and self.params.limited else None
        return row if refused is None else row.masked_fill(refused, -torch.inf)

    @property
    def truncates(self) -> bool:
        """Whether some tokens are left out; which ones may then depend on rounding."""
        params = self.params
        return not params.greedy and (params.min_p > 0 or params.top_k > 0 or params.top_p < 1)

    def scores(self, shaped: Tensor) -> Tensor:
        """Shaped logits [R, V] over the temperature, the largest 0; minus infinity where a rule leaves a token out."""
        rows = shaped - shaped.amax(-1, keepdim=True)
        if self.params.greedy:
            return torch.where(rows == 0, 0.0, -torch.inf)
        return _truncated(rows / self.params.temperature, self.params)

    def bounds(self, shaped: Tensor, slack: float) -> tuple[Tensor, Tensor]:
        """The least and the largest p [V] of each token of one row [V] when logits may be off by `slack`: at the border
        of top-k, top-p and min-p, rounding decides which tokens are in, and that moves all others."""
        params, off = self.params, slack / self.params.temperature
        row = (shaped - shaped.max()) / params.temperature
        share = min(off / 4, 0.5)  # what p can be off by

        def moved(side: int) -> SamplingParams:
            """Cuts that take in more (1), or less (-1)."""
            top_p = max(1e-9, min(1.0, params.top_p + side * share)) if params.top_p < 1 else 1.0
            return replace(params, top_p=top_p, min_p=min(params.min_p * math.exp(-side * off), 0.999999))

        def left(rules: SamplingParams) -> Tensor:
            return _truncated(row[None], rules)[0] > -torch.inf

        # Each token of the widest set may be in while any of those that are not surely in are out: they swap places
        widest = row >= row[left(moved(1))].min() - off
        surely = row >= torch.where(left(moved(-1)), -torch.inf, row).max() + off
        mass = row.exp()
        low = torch.where(surely, mass / mass[widest].sum(), 0.0)
        return low, torch.where(widest, mass / (mass[surely].sum() + torch.where(surely, 0.0, mass)), 0.0)


def _truncated(rows: Tensor, params: SamplingParams) -> Tensor:
    def of_rows(value: float) -> Tensor:
        return torch.full((len(rows), 1), float(value))

    if params.min_p > 0:
        rows = least_p(rows, of_rows(params.min_p))
    return first_p(first_k(rows, of_rows(params.top_k)), of_rows(params.top_p))
