"""The evidence of one round of assisted decoding, from the tensors that it judged by. Nothing is drawn again.

A round drafts a chain of k tokens, the target gives k + 1 rows over V tokens, and one of three rules judges: the ratio
test where the drafter sampled and gave q, equality with a draw of the target's where it gave none (match), and equality
with the target's choice where nothing is sampled. Tensors are transformers' own: they are looked at, never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specscope.trace.inside.chain import Judged, assembled
from specscope.trace.inside.host import HostChain
from specscope.trace.record.notes import RawRow
from specscope.trace.record.rules import MATCH, STANDARD
from specscope.trace.record.tree import Floats, Ints

SOFTMAX = (Tensor.softmax, torch.softmax, torch.nn.functional.softmax)


class NotedDraws(TorchFunctionMode):
    """Notes what the functions under it draw: their results, as they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.coins: list[Tensor] = []
        self.drawn: list[Tensor] = []
        self.probs: list[Tensor] = []  # results of softmax

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The function's own result."""
        result = func(*args, **(kwargs or {}))
        if func is torch.rand_like:
            self.coins.append(result)
        elif func is torch.multinomial:
            self.drawn.append(result)
        elif func in SOFTMAX:
            self.probs.append(result)
        return result


class RoundError(RuntimeError):
    """A round was not as it is known: it is left out."""


@dataclass
class Round:
    """One round, as the hooks met it. k drafted tokens, V tokens in the vocabulary."""

    context: int  # tokens in the target's cache when it began
    length: int  # tokens of the text then
    draft_ns: tuple[int, int] = (0, 0)  # wall clock, from and to
    forward_ns: int = 0  # when the target's pass ended
    chain: list[int] = field(default_factory=list)  # [k]
    given: Tensor | None = None  # [1, k, V] the drafter's logits, where it gave any: its softmax is the rule's q
    raw: Tensor | None = None  # float32 [k + 1, V] the target's logits before any rule
    plain: bool = False  # whether there is no rule: then `given` is raw too
    draws: NotedDraws | None = None  # of the judging
    judged: tuple[list[int], int] | None = None  # the ratio test's own: accepted tokens and the final one, and how many

    @property
    def k(self) -> int:
        """Tokens that were drafted."""
        return len(self.chain)

    def rule(self, *, do_sample: bool) -> str:
        """The rule's name."""
        return MATCH if do_sample and self.given is None and self.k else STANDARD


def evidence(round_: Round, scores: Tensor, committed: list[int], *, do_sample: bool, full: bool) -> Judged:
    """`scores` float32 [1, k + 1, V]: the target's logits after every rule; `committed`: the tokens that were kept.

    Raises RoundError where the tokens that were kept are not those that the draws give.
    """
    chain = _by_ratio(round_, *round_.judged) if round_.judged else _by_match(round_, scores, do_sample)
    given = [*round_.chain[: chain.accepted], chain.final]
    if not committed or given[: len(committed)] != committed:
        raise RoundError(f"tokens {committed} were kept, but the draws give {given}")
    raw, own = None if round_.raw is None else _rows(round_.raw), None if round_.given is None else round_.given[0]
    tried = None if own is None or not (round_.plain and full) else own[: chain.accepted + 1]
    drafter = [] if tried is None else [(RawRow.of(row), None) for row in _rows(tried)]
    q = chain.q if chain.q is not None or own is None else _rows(own.float().softmax(-1))
    prob = None if q is None else q[range(round_.k), round_.chain]
    return assembled(
        chain.numbers(
            None if raw is None else lambda index: RawRow.of(raw[index]),
            drafter,
            full=full,
            prob=prob,
            confidence=prob,
        )
    )


def _by_ratio(round_: Round, given: list[int], accepted: int) -> HostChain:
    """The ratio test, which gave these tokens and accepted so many drafts, from its own p [k + 1, V] and q [k, V]."""
    draws, k, tokens = round_.draws, round_.k, np.array(round_.chain, np.int32)
    if draws is None or len(draws.coins) != 1 or len(draws.probs) < 2:
        raise RoundError("the ratio test drew unexpected numbers")
    q, p = (_rows(probs[0]) for probs in draws.probs[:2])
    coins = draws.coins[0].double().reshape(-1).cpu().numpy()
    chain = HostChain(tokens, accepted, given[-1], p[range(k), tokens], coins, target=p.__getitem__)
    chain.whole, chain.q, chain.taken = p[accepted], q, None if accepted == k else q[accepted]
    return chain


def _by_match(round_: Round, scores: Tensor, do_sample: bool) -> HostChain:
    """Drafts that are compared with what the target draws itself, or with its likeliest tokens."""
    draws, k, tokens = round_.draws, round_.k, np.array(round_.chain, np.int32)
    if do_sample:
        drawn = [] if draws is None else [made for made in draws.drawn if made.shape == (k + 1, 1)]
        if not drawn:
            raise RoundError("the target's draws were not seen")
        choices: Ints = drawn[0][:, 0].cpu().numpy()
    else:
        choices = scores[0].argmax(-1).cpu().numpy()
    hits = choices[:k] == tokens
    accepted = k if hits.all() else int(hits.argmin())
    chain = HostChain(tokens, accepted, int(choices[accepted]), hits.astype(np.float32), np.zeros(k))
    if not do_sample:
        chain.choices = choices
        return chain
    p = _rows(scores[0].softmax(-1))
    chain.p, chain.target, chain.whole = p[range(k), tokens], p.__getitem__, p[accepted]
    return chain


def _rows(rows: Tensor) -> Floats:
    """On the host."""
    return rows.float().cpu().numpy()
