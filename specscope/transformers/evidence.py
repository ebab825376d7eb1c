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

from specscope.trace.inside.chain import Judged, Numbers, assembled
from specscope.trace.inside.host import HostChain
from specscope.trace.record.notes import RawRow
from specscope.trace.record.rules import MATCH, STANDARD
from specscope.trace.record.tree import Doubles, Floats, Ints

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


@dataclass
class _Outcome:
    """Which tokens came out, and from what they were drawn: rows of the target's and the drafter's probabilities."""

    accepted: int
    final: int
    p: Tensor | None  # [k + 1, V]; None where nothing is sampled
    q: Tensor | None  # [k, V]; None where drafts are deterministic
    coins: Doubles  # [k]
    choices: Ints | None = None  # [k + 1] the target's likeliest tokens, where nothing is sampled


def evidence(round_: Round, scores: Tensor, committed: list[int], *, do_sample: bool, full: bool) -> Judged:
    """`scores` float32 [1, k + 1, V]: the target's logits after every rule; `committed`: the tokens that were kept.

    Raises RoundError where the tokens that were kept are not those that the draws give.
    """
    outcome = _outcome(round_, scores, do_sample)
    tokens = [*round_.chain[: outcome.accepted], outcome.final]
    if not committed or tokens[: len(committed)] != committed:
        raise RoundError(f"tokens {committed} were kept, but the draws give {tokens}")
    return assembled(_numbers(round_, outcome, full))


def _outcome(round_: Round, scores: Tensor, do_sample: bool) -> _Outcome:
    k, draws = round_.k, round_.draws
    if round_.judged is not None:
        if draws is None or len(draws.coins) != 1 or len(draws.probs) < 2:
            raise RoundError("the ratio test drew unexpected numbers")
        tokens, accepted = round_.judged
        coins = draws.coins[0].double().reshape(-1).cpu().numpy()
        return _Outcome(accepted, tokens[-1], draws.probs[1][0], draws.probs[0][0], coins)
    if not do_sample:
        choices: Ints = scores[0].argmax(-1).cpu().numpy()
        accepted = _matches(round_.chain, choices)
        return _Outcome(accepted, int(choices[accepted]), None, None, np.zeros(k), choices)
    drawn = None if draws is None else next((made for made in draws.drawn if made.shape == (k + 1, 1)), None)
    if drawn is None:
        raise RoundError("the target's draws were not seen")
    selected = drawn[:, 0].cpu().numpy()
    accepted = _matches(round_.chain, selected)
    return _Outcome(accepted, int(selected[accepted]), scores[0].softmax(-1), None, np.zeros(k))


def _matches(chain: list[int], choices: Ints) -> int:
    """How many tokens of the chain are the choices, from the first on."""
    pairs = enumerate(zip(chain, choices.tolist(), strict=False))
    return next((place for place, (token, choice) in pairs if token != choice), len(chain))


def _numbers(round_: Round, outcome: _Outcome, full: bool) -> Numbers:
    k, n, tokens = round_.k, outcome.accepted, np.array(round_.chain, np.int32)
    p, q, raw, given = (_rows(rows) for rows in (outcome.p, outcome.q, round_.raw, round_.given))
    chain = HostChain(tokens, n, outcome.final, np.zeros(k, np.float32), outcome.coins, choices=outcome.choices)
    if outcome.choices is not None:
        chain.p = (outcome.choices[:k] == tokens).astype(np.float32)
    elif p is not None:
        chain.p, chain.target, chain.whole = p[np.arange(k), tokens], p.__getitem__, p[n]
        chain.q, chain.taken = q, None if q is None or n == k else q[n]
    drafter = given[0] if given is not None and round_.plain else ()
    prob = None if round_.given is None else _given_probability(round_, outcome)
    return chain.numbers(
        None if raw is None else lambda index: RawRow.of(raw[index]),
        lambda index: (RawRow.of(drafter[index]), None) if len(drafter) else None,
        full=full,
        prob=prob,
        confidence=prob,
    )


def _rows(rows: Tensor | None) -> Floats | None:
    return None if rows is None else rows.float().cpu().numpy()


def _given_probability(round_: Round, outcome: _Outcome) -> Floats:
    """[k] the drafter's probability of each of its tokens."""
    assert round_.given is not None
    rows = round_.given[0].float().softmax(-1) if outcome.q is None else outcome.q
    values: Floats = rows[range(round_.k), round_.chain].float().cpu().numpy()
    return values
