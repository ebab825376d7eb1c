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
from specscope.trace.record.notes import ParentsBuilder, RawRow, spread
from specscope.trace.record.records import ParentNotes
from specscope.trace.record.rules import LOSSY, MATCH, STANDARD
from specscope.trace.record.tree import Doubles, Floats, Ints

ENSEMBLE = f"{LOSSY}:ensemble"  # assistant_ensemble_weight
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


@dataclass(frozen=True)
class Judging:
    """How a request's rounds are judged. Of its GenerationConfig."""

    do_sample: bool
    weight: float | None  # assistant_ensemble_weight

    def rule(self, round_: Round) -> str:
        """The rule's name."""
        if self.weight is not None and round_.given is not None:
            return ENSEMBLE
        return MATCH if self.do_sample and round_.given is None and round_.k else STANDARD


@dataclass
class _Outcome:
    """Which tokens came out, and from what they were drawn: rows of the target's and the drafter's probabilities."""

    accepted: int
    final: int
    p: Tensor | None  # [k + 1, V]; None where nothing is sampled
    q: Tensor | None  # [k, V]; None where drafts are deterministic
    coins: Doubles  # [k]
    choices: Ints | None = None  # [k + 1] the target's likeliest tokens, where nothing is sampled


def evidence(round_: Round, how: Judging, scores: Tensor, committed: list[int], *, full: bool) -> Judged:
    """`scores` float32 [1, k + 1, V]: the target's logits after every rule; `committed`: the tokens that were kept.

    Raises RoundError where the tokens that were kept are not those that the draws give.
    """
    outcome = _outcome(round_, how, scores, committed)
    tokens = [*round_.chain[: outcome.accepted], outcome.final]
    if not committed or tokens[: len(committed)] != committed:
        raise RoundError(f"tokens {committed} were kept, but the draws give {tokens}")
    return assembled(_numbers(round_, how, outcome, full))


def _outcome(round_: Round, how: Judging, scores: Tensor, committed: list[int]) -> _Outcome:
    k, draws = round_.k, round_.draws
    if round_.judged is not None:
        if draws is None or len(draws.coins) != 1 or len(draws.probs) < 2:
            raise RoundError("the ratio test drew other numbers than it is known to")
        tokens, accepted = round_.judged
        coins = draws.coins[0].double().reshape(-1).cpu().numpy()
        return _Outcome(accepted, tokens[-1], draws.probs[1][0], draws.probs[0][0], coins)
    if not how.do_sample:
        likeliest = scores[0].argmax(-1)
        choices = _choices(round_, how, scores, likeliest)
        accepted = _matches(round_.chain, choices)
        return _Outcome(accepted, int(choices[accepted]), None, None, np.zeros(k), likeliest.cpu().numpy())
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


def _choices(round_: Round, how: Judging, scores: Tensor, likeliest: Tensor) -> Ints:
    """[k + 1] the tokens that a greedy chain is compared with. `likeliest` [k + 1]: the target's own."""
    chosen = likeliest.clone()
    if how.weight is not None and round_.given is not None:
        p, q = scores[0, : round_.k].softmax(-1), round_.given[0].softmax(-1)
        chosen[: round_.k] = (how.weight * p + (1.0 - how.weight) * q).argmax(-1)
    choices: Ints = chosen.cpu().numpy()
    return choices


def _numbers(round_: Round, how: Judging, outcome: _Outcome, full: bool) -> Numbers:
    k, n = round_.k, outcome.accepted
    chain, here = np.array(round_.chain, np.int32), np.arange(k)
    if outcome.p is None:
        assert outcome.choices is not None
        p = (outcome.choices[:k] == chain).astype(np.float32)
    else:
        p = outcome.p[here, chain.astype(np.int64)].float().cpu().numpy()
    q = np.ones(k, np.float32) if outcome.q is None else _at(outcome.q, chain)
    final = _Final.of(outcome, chain, k)
    prob = None if round_.given is None else _given_probability(round_, outcome)
    return Numbers(
        tokens=chain,
        accepted=n,
        final=outcome.final,
        p=p,
        q=q,
        sampled=outcome.q is not None,
        coin=outcome.coins,
        mass=final.mass,
        final_p=final.p,
        parents=_parents(round_, outcome, chain, final) if full else None,
        prob=prob,
        invalid=0,
        accept=_mixed_ratio(p, q, how.weight) if how.weight is not None and outcome.q is not None else None,
        confidence=prob,
    )


def _at(rows: Tensor, chain: Ints) -> Floats:
    """[k] each row's probability of the token there."""
    values: Floats = rows[np.arange(len(chain)), chain.astype(np.int64)].float().cpu().numpy()
    return values


def _given_probability(round_: Round, outcome: _Outcome) -> Floats:
    """[k] the drafter's probability of each of its tokens."""
    assert round_.given is not None
    rows = round_.given[0].float().softmax(-1) if outcome.q is None else outcome.q
    return _at(rows, np.array(round_.chain, np.int32))


def _mixed_ratio(p: Floats, q: Floats, weight: float) -> Doubles:
    """[k] what drafts are accepted by with an ensemble weight."""
    ratio: Doubles = np.minimum(1.0 - weight + weight * (p.astype(np.float64) / np.maximum(q, 1e-45)), 1.0)
    return ratio


@dataclass(frozen=True)
class _Final:
    """What the final token was drawn from."""

    p: float  # the final token's probability there
    mass: float  # of the residual, behind a rejected draft
    spread: tuple[float, float]  # entropy and varentropy, in nats
    target_p: float  # the final token's probability in the target's p

    @staticmethod
    def of(outcome: _Outcome, chain: Ints, k: int) -> _Final:
        n = outcome.accepted
        if outcome.p is None:
            assert outcome.choices is not None
            chosen = float(outcome.final == outcome.choices[n])
            return _Final(chosen, 0.0 if n == k else float(chain[n] != outcome.choices[n]), (0.0, 0.0), chosen)
        whole = outcome.p[n].float().cpu().numpy()
        if n == k:
            return _Final(float(whole[outcome.final]), 0.0, spread(whole), float(whole[outcome.final]))
        left = whole.copy()
        if outcome.q is None:
            left[chain[n]] = 0
        else:
            np.maximum(left - outcome.q[n].float().cpu().numpy(), 0, out=left)
        mass = float(left.sum())
        if mass > 0:
            left /= mass
        drawn = left if mass > 0 else whole
        return _Final(float(drawn[outcome.final]), mass, spread(drawn), float(whole[outcome.final]))


def _parents(round_: Round, outcome: _Outcome, chain: Ints, final: _Final) -> ParentNotes:
    """What target and drafter gave at the tried parents."""
    tried = min(outcome.accepted + 1, len(chain))
    notes = ParentsBuilder(len(chain), tried)
    for index in range(tried):
        child, token = np.array([index]), chain[index : index + 1]
        if round_.raw is not None:
            row = RawRow.of(round_.raw[index].cpu().numpy())
            notes.raw(index, row, child, token)
            if round_.plain and round_.given is not None:
                notes.drafter(index, RawRow.of(round_.given[0, index].float().cpu().numpy()), row, None)
        if outcome.p is None:
            assert outcome.choices is not None
            notes.chosen(index, int(outcome.choices[index]), child, token)
        else:
            notes.target(index, outcome.p[index].float().cpu().numpy(), child, token)
        if outcome.q is not None:
            notes.drawn(index, outcome.q[index].float().cpu().numpy(), child, token)
    return notes.done(np.arange(-1, tried - 1, dtype=np.int32), final.spread, final.target_p)
