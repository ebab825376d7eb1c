"""One verification of SGLang's, as its tensors tell it: gathered on their device, and copied without waiting.

B requests have n slots each. Slot 0 is the root, the last committed token; the others are drafts, and links say which
is whose first child and next sibling. Row `b * n + s` of the logits is what follows slot s. Tensors are SGLang's own:
they are looked at, never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specscope.trace.inside.gather import Rows, gather
from specscope.trace.inside.gathered import Gathered, Sent
from specscope.trace.inside.trees import JudgedRequest, judged, sent_numbers, slots_above
from specscope.trace.record.rules import BLOCK, MATCH, STANDARD, THRESHOLDS


@dataclass(frozen=True)
class VerifierResult:
    """What the verifier wrote."""

    accepted: Tensor  # [B] drafts
    index: Tensor  # [B, depth] the slots of root and accepted drafts, as rows; -1 behind them
    predict: Tensor  # [B * n] at each of these rows the token that follows


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
    sent: Sent[str] | None = None  # numbers on their way to the host

    def sampled(self, called: Mapping[str, Any], *, chain: bool) -> None:
        """A sampling kernel has run; `chain`: whether it is the one that uses q. What it used is gathered at once: it
        may not outlive the call.
        """
        lossless = min(called.get("threshold_single", 1.0), called.get("threshold_acc", 1.0)) >= 1
        self.rule = MATCH if lossless else THRESHOLDS
        if chain:
            self.rule = BLOCK if called.get("block_verification") else STANDARD
        self.final_coins = called["uniform_samples_for_final_sampling"]
        outcome = VerifierResult(called["accept_token_num"], called["accept_index"], called["predicts"])
        self.gathered = gather(_rows(self, outcome, called), full=self.full)

    def chosen(self, outcome: VerifierResult) -> None:
        """All were verified greedily."""
        self.greedy = torch.ones_like(self.greedy)
        self.gathered = gather(_rows(self, outcome, None), full=self.full)

    def ended(self, outcome: VerifierResult) -> None:
        """All that SGLang did with it is done. Its numbers are sent to the host."""
        index = outcome.index.to(torch.int64)
        numbers = {
            "accepted": outcome.accepted,
            "context": self.context,
            "candidates": self.candidates,
            "first_child": self.first_child,
            "next_sibling": self.next_sibling,
            "index": index,
            "given": outcome.predict[index.clamp(0, len(outcome.predict) - 1)],
            "final_coin": self.final_coins,
            "scores": self.scores,
        }
        self.sent = Sent({name: tensor for name, tensor in numbers.items() if tensor is not None})
        self.raw = self.logits = self.final_coins = self.scores = None

    @property
    def _copies(self) -> list[Sent[Any]]:
        return [*([] if self.sent is None else [self.sent]), *([] if self.gathered is None else [self.gathered.sent])]

    @property
    def bytes(self) -> int:
        """How much is copied to the host."""
        return sum(copy.bytes for copy in self._copies)

    def judged(self) -> list[JudgedRequest]:
        """[B] the evidence of each request, of numbers that have come: SGLang has waited for its own, which were sent
        later. Raises VerificationError where they contradict each other.
        """
        for copy in self._copies:
            copy.wait()
        assert self.sent is not None
        return judged(sent_numbers(self.sent.read()), self.gathered, self.rule)


def _rows(seen: Verification, outcome: VerifierResult, called: Mapping[str, Any] | None) -> Rows:
    """A row for each draft: what follows its parent. Siblings have the same numbers of target and drafter.

    `called`: the sampling kernel's arguments: p [B, n, V] after every rule, and the coins [B, n] of the chain's drafts,
    or under match of each slot's children. Its q: by ratio what drafts were drawn from [B, n - 1, V]; under match the p
    of the children that were rejected [B, n, V], which the kernel has written.
    """
    batch, n = seen.candidates.shape
    device = seen.candidates.device
    slots = torch.arange(n, device=device).expand(batch, n)
    if seen.first_child is None or seen.next_sibling is None:
        parent = (slots - 1).clamp_min(0)
    else:
        parent = slots_above(seen.first_child, seen.next_sibling)
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
        vocabulary=logits.shape[-1],
    )
    if called is None:
        return rows
    p, q, coins = (called[name] for name in ("target_probs", "draft_probs", "uniform_samples"))
    p, q = p.flatten(0, 1), q.flatten(0, 1)
    rows.probs = lambda low, high: p[judges[low:high]]
    rows.whole = lambda low, high: p[last[low:high]]
    if seen.rule in (STANDARD, BLOCK):
        rows.q = lambda low, high: q[low:high]
        rows.coins = coins[:, : n - 1].flatten()
        ended = requests * (n - 1) + accepted.clamp_max(n - 2)  # behind all drafts none is used
        rows.whole_q = lambda low, high: q[ended[low:high]]
        rows.by_step, rows.longest = seen.rule == BLOCK, n - 1
    else:
        rows.coins = coins.gather(1, parent[:, 1:]).flatten()
        rows.whole_q = lambda low, high: q[last[low:high]]
    return rows
