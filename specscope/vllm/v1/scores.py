"""DrafterScores: the logits of V1's drafter for the drafts that the next step judges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specscope.trace.inside.hooking import ErrorGuard, HookedCall, wrap

MOST = 2**27  # bytes of logits that may be kept on a device until the next step; with more, none are
Passes = tuple[Sequence[Tensor], int]  # the logits [., V] of each of its passes, and a request's row in them
NONE: Passes = ((), 0)


class DrafterScores:
    """Keeps the logits of the drafter's own model while it drafts; n-gram and suffix have none."""

    def __init__(self, guard: ErrorGuard, *, sampled: bool, full: bool) -> None:
        """`full`: whether the scores are of use; without, only what suffix decoding matched is kept."""
        self._guard, self._sampled, self._full = guard, sampled, full
        self._passes: list[Tensor] = []
        self._scored: dict[str, Passes] = {}
        self._listens = self._drafts = False
        self._matches: dict[str, int] = {}

    def begin(self, runner: Any) -> None:
        """Called when the drafter begins to draft for the next step."""
        if not self._listens:
            self._listens = True
            drafter = getattr(runner, "drafter", None)
            model, cache = getattr(drafter, "model", None), getattr(drafter, "suffix_cache", None)
            if self._full and hasattr(model, "compute_logits"):
                wrap(model, "compute_logits", self._compute_logits)
            if hasattr(cache, "speculate"):
                wrap(cache, "speculate", self._speculate)
        self._passes, self._matches, self._drafts = [], {}, True

    def end(self, names: Sequence[str]) -> None:
        """Called when it has drafted, for these rows of the batch."""
        passes, self._passes, self._drafts = self._passes, [], False
        if len(passes) == 1 and names and len(passes[0]) > len(names):  # a block drafter: all depths in one pass
            passes = list(passes[0].reshape(len(names), -1, passes[0].shape[1]).unbind(1))
        fits = all(logits.device.type == "cpu" for logits in passes) or sum(logits.nbytes for logits in passes) <= MOST
        if fits and all(len(logits) == len(names) for logits in passes):
            self._scored = {name: (passes, row) for row, name in enumerate(names)}

    def take(self, name: str) -> Passes:
        """A request's passes, which are given once."""
        return self._scored.pop(name, NONE)

    def match_length(self, name: str) -> int:
        """Suffix decoding: how many tokens of a request's context matched; 0 where none did, or it is not known."""
        return self._matches.get(name, 0)

    def _speculate(self, call: HookedCall) -> Any:
        """Of the suffix cache."""
        draft = call()
        self._guard.safely(lambda: self._matches.update({call.args[0]: int(getattr(draft, "match_len", 0))}))
        return draft

    def _compute_logits(self, call: HookedCall) -> Any:
        """Of the drafter's model."""
        logits = call()
        self._guard.safely(self._keep, logits)
        return logits

    def _keep(self, logits: Any) -> None:
        """Sampling divides logits by the temperature in place."""
        if self._drafts and isinstance(logits, Tensor):
            self._passes.append(logits.clone() if self._sampled else logits)
