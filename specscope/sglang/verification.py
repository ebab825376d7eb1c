"""One verification of SGLang's, as its tensors tell it: gathered on their device, and copied without waiting.

B requests have n slots each. Slot 0 is the root, the last committed token; the others are drafts, and links say which
is whose first child and next sibling. Row `b * n + s` of the logits is what follows slot s. Tensors are SGLang's own:
they are looked at, never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specscope.trace.record.rules import BLOCK, MATCH, STANDARD, THRESHOLDS
from specscope.vllm.call import Rows
from specscope.vllm.gather import gather, sent
from specscope.vllm.gathered import Gathered


@dataclass(frozen=True)
class VerifierResult:
    """What the verifier wrote."""

    accepted: Tensor  # [B] drafts
    index: Tensor  # [B, depth] the slots of root and accepted drafts, as rows; -1 behind them
    predict: Tensor  # [B * n] at each of these rows the token that follows


@dataclass(frozen=True)
class KernelCall:
    """What a sampling kernel was called with."""

    rule: str
    p: Tensor  # [B, n, V] the target's, after every rule
    # Under standard and block [B, n - 1, V] what drafts were drawn from. Under match [B, n, V] the p of the children
    # that were rejected: the kernel has written it
    q: Tensor
    coins: Tensor  # [B, n] of the chain's drafts; under match of each slot's children
    final_coins: Tensor  # [B]

    @staticmethod
    def of(called: Mapping[str, Any], *, chain: bool) -> KernelCall:
        """`called`: the kernel's arguments by name; `chain`: whether it is the one that uses q."""
        rule = BLOCK if called.get("block_verification") else STANDARD
        if not chain:
            lossless = min(called.get("threshold_single", 1.0), called.get("threshold_acc", 1.0)) >= 1
            rule = MATCH if lossless else THRESHOLDS
        coins = called["uniform_samples"], called["uniform_samples_for_final_sampling"]
        return KernelCall(rule, called["target_probs"], called["draft_probs"], *coins)

    @property
    def by_ratio(self) -> bool:
        """Whether drafts were drawn from q, and judged by p / q."""
        return self.rule in (STANDARD, BLOCK)


@dataclass
class Verification:
    """What a batch is verified with, and then what came of it."""

    rids: tuple[str, ...]  # [B]; empty where they are not known
    candidates: Tensor  # int64 [B, n]
    first_child: Tensor | None  # int64 [B, n] slots, -1 for none; None for chains
    next_sibling: Tensor | None
    context: Tensor  # [B] tokens whose KV was there
    raw: Tensor | None  # [B * n, V] logits before any rule; None where they are not at hand
    logits: Tensor | None  # and after the rules that are no sampling; the same tensor where there are none
    greedy: Tensor  # bool [B] requests of which nothing is sampled
    full: bool
    all_greedy: bool = False  # whether SGLang samples nothing of the whole batch
    drafted_ns: tuple[int, int] = (0, 0)  # wall clock of the draft, from and to; zeros where it is not known
    verified_ns: tuple[int, int] = (0, 0)  # and of the sampling, as the host launched it
    scores: Tensor | None = None  # float32 [B, n - 1] the drafter's probability of the path to each draft
    rule: str = STANDARD
    gathered: Gathered | None = None
    final_coins: Tensor | None = None  # [B]
    sent: tuple[Tensor, Tensor, Any] | None = None  # numbers on their way to the host, and the event of their arrival

    def sampled(self, called: Mapping[str, Any], *, chain: bool) -> None:
        """A sampling kernel has run. What it used is gathered at once: it may not outlive the call."""
        draws = KernelCall.of(called, chain=chain)
        outcome = VerifierResult(called["accept_token_num"], called["accept_index"], called["predicts"])
        self.rule, self.final_coins = draws.rule, draws.final_coins
        self.gathered = gather(_rows(self, outcome, draws), full=self.full)

    def chosen(self, outcome: VerifierResult) -> None:
        """All were verified greedily."""
        self.greedy = torch.ones_like(self.greedy)
        self.gathered = gather(_rows(self, outcome, None), full=self.full)

    def ended(self, outcome: VerifierResult) -> None:
        """All that SGLang did with it is done. Its numbers are sent to the host."""
        batch = len(self.candidates)
        links = [link for link in (self.first_child, self.next_sibling) if link is not None]
        accepted, index = outcome.accepted.to(torch.int64), outcome.index.to(torch.int64)
        given = outcome.predict[index.clamp(0, len(outcome.predict) - 1)]
        parts = (accepted[:, None], self.context.reshape(batch, 1), self.candidates, *links, index, given)
        ints = torch.cat([part.to(torch.int64) for part in parts], dim=1)
        coins = torch.zeros(batch, device=ints.device) if self.final_coins is None else self.final_coins
        floats = [coins[:, None], *([] if self.scores is None else [self.scores])]
        self.sent = sent(ints, torch.cat([part.to(torch.float64) for part in floats], dim=1))
        self.raw = self.logits = self.final_coins = self.scores = None

    @property
    def bytes(self) -> int:
        """How much is copied to the host."""
        own = 0 if self.sent is None else self.sent[0].nbytes + self.sent[1].nbytes
        return own + (0 if self.gathered is None else self.gathered.bytes)

    def arrived(self) -> None:
        """Wait until the host has the numbers. Called where SGLang has waited for its own, which were sent later."""
        if self.gathered is not None:
            self.gathered.wait()
        if self.sent is not None and self.sent[2] is not None:
            self.sent[2].synchronize()


def parents_of(first_child: Tensor, next_sibling: Tensor) -> Tensor:
    """[B, n] the parent's slot of each slot; a slot that nothing leads to, the root among them, has 0.

    Each slot looks for the eldest of its siblings in log2(n) steps, and that one's parent is known.
    """
    batch, n = first_child.shape
    first_child, next_sibling = first_child.clamp_max(n - 1), next_sibling.clamp_max(n - 1)
    slots = torch.arange(n, device=first_child.device).expand(batch, n)
    nowhere = torch.full((batch, 1), n, device=first_child.device)  # where links of -1 point
    elder = torch.cat([slots, nowhere], dim=1).scatter(1, torch.where(next_sibling < 0, n, next_sibling), slots)
    elder[:, n] = n
    for _ in range(max(n - 1, 1).bit_length()):
        elder = elder.gather(1, elder)
    parent = torch.zeros_like(elder).scatter(1, torch.where(first_child < 0, n, first_child), slots)
    return parent.gather(1, elder)[:, :n]


def _rows(seen: Verification, outcome: VerifierResult, draws: KernelCall | None) -> Rows:
    """A row for each draft: what follows its parent. Siblings have the same numbers of target and drafter."""
    batch, n = seen.candidates.shape
    device = seen.candidates.device
    slots = torch.arange(n, device=device).expand(batch, n)
    if seen.first_child is None or seen.next_sibling is None:
        parent = (slots - 1).clamp_min(0)
    else:
        parent = parents_of(seen.first_child, seen.next_sibling)
    requests = torch.arange(batch, device=device)
    judges = (requests[:, None] * n + parent[:, 1:]).flatten()
    # An index beyond its tensor would end the whole process on a device: whatever is wrong here, SGLang goes on
    accepted = outcome.accepted.to(torch.int64).clamp(0, outcome.index.shape[1] - 1)
    last = outcome.index.gather(1, accepted[:, None])[:, 0].to(torch.int64).clamp(0, len(outcome.predict) - 1)
    raw, logits = seen.raw, seen.logits
    assert raw is not None
    assert logits is not None
    rows = Rows(
        tokens=seen.candidates[:, 1:].flatten().clamp_max(logits.shape[-1] - 1),
        request=requests.repeat_interleave(n - 1),
        first=requests * (n - 1),
        drafted=torch.full_like(requests, n - 1),
        accepted=accepted,
        final=outcome.predict[last].to(torch.int64).clamp(0, logits.shape[-1] - 1),
        greedy=seen.greedy,
        raw=lambda some: raw[judges[some]].float(),
        target=lambda low, high: logits[judges[low:high]].float(),
        probs=None,
        q=None,
        whole=None,
        whole_q=None,
        vocabulary=logits.shape[-1],
    )
    if draws is None:
        return rows
    p, q = draws.p.flatten(0, 1), draws.q.flatten(0, 1)
    rows.probs = lambda low, high: p[judges[low:high]]
    rows.whole = lambda low, high: p[last[low:high]]
    if draws.by_ratio:
        rows.q = lambda low, high: q[low:high]
        rows.coins = draws.coins[:, : n - 1].flatten()
        ended = requests * (n - 1) + accepted.clamp_max(n - 2)  # behind all drafts none is used
        rows.whole_q = lambda low, high: q[ended[low:high]]
        rows.by_step, rows.longest = draws.rule == BLOCK, n - 1
    else:
        rows.coins = draws.coins.gather(1, parent[:, 1:]).flatten()
        rows.whole_q = lambda low, high: q[last[low:high]]
    return rows


def unpacked(seen: Verification) -> Sequence[SentNumbers]:
    """What `ended` sent, a request each."""
    assert seen.sent is not None
    ints, floats = seen.sent[0].numpy(), seen.sent[1].numpy()
    n, chain = seen.candidates.shape[1], seen.first_child is None
    links = [] if chain else [n, n]
    depth = (ints.shape[1] - 2 - n - sum(links)) // 2
    parts = np.split(ints, np.cumsum([1, 1, n, *links, depth]), axis=1)
    first_child, next_sibling = (None, None) if chain else parts[3:5]
    return [
        SentNumbers(
            accepted=(accepted := int(parts[0][b, 0])),
            context=int(parts[1][b, 0]),
            candidates=parts[2][b],
            first_child=None if first_child is None else first_child[b],
            next_sibling=None if next_sibling is None else next_sibling[b],
            path=parts[-2][b, 1 : 1 + accepted] - b * n,
            given=parts[-1][b, : 1 + accepted].tolist(),
            final_coin=float(floats[b, 0]),
            scores=floats[b, 1:] if floats.shape[1] > 1 else None,
        )
        for b in range(len(ints))
    ]


@dataclass(frozen=True)
class SentNumbers:
    """One request's, on the host."""

    accepted: int  # drafts
    context: int  # tokens whose KV was there
    candidates: np.ndarray  # [n] root and drafts
    first_child: np.ndarray | None  # [n] slots, -1 for none; None for chains
    next_sibling: np.ndarray | None
    path: np.ndarray  # [accepted] slots
    given: list[int]  # tokens that came out: those of the path, and the final one
    final_coin: float
    scores: np.ndarray | None  # [n - 1] the drafter's probability of the path to each draft
