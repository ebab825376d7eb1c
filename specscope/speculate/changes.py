"""What is different in a fork. No torch: the console makes these, the engine applies them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specscope.trace.record.params import SamplingParams

_LENGTH = {"max_tokens", "stop", "ignore_eos", "stop_token_ids", "logprobs"}  # they only say where an output ends
_SAMPLED = {"temperature", "top_k", "top_p", "min_p", "seed"}  # they move no greedy choice


@dataclass(frozen=True)
class Changes:
    """Positions are of a step's root in the request: its place among all tokens, prompt and output.

    Forced outcomes and tokens are marked in the evidence (Verdict.forced): such a run is not lossless.
    """

    params: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters by name, the seed among them
    engine: Mapping[str, Any] = field(default_factory=dict)  # drafter, draft_model, tree, rule
    outcomes: Mapping[tuple[int, int], bool] = field(default_factory=dict)  # (position, node): accepted or rejected
    coins: Mapping[tuple[int, int], float] = field(default_factory=dict)  # (position, node): the coin, in (0, 1)
    tokens: Mapping[int, int] = field(default_factory=dict)  # position: the final token of that step

    def describe(self) -> str:
        parts = [f"{name}={value}" for name, value in {**self.params, **self.engine}.items()]
        parts += [f"node {node} {'accepted' if yes else 'rejected'}" for (_, node), yes in self.outcomes.items()]
        parts += [f"coin of node {node} {coin}" for (_, node), coin in self.coins.items()]
        parts += [f"token {token}" for token in self.tokens.values()]
        return ", ".join(parts) or "nothing changed"

    def explaining(self, before: SamplingParams, after: SamplingParams, *, lossless: bool, ended: bool) -> str:
        """The changes that can produce a different token, in words; "" where none can.

        `before` and `after`: the request's parameters. `lossless`: both runs are, whatever their drafts and their rule;
        a greedy output is then the target's own choice. `ended`: whether one output ended where they part.
        """
        greedy = before.greedy and after.greedy
        moot = (set() if ended else _LENGTH) | (_SAMPLED if greedy else set())
        changed = {name for name in self.params if getattr(before, name) != getattr(after, name)} - moot
        left = Changes(
            params={name: value for name, value in self.params.items() if name in changed},
            engine={} if greedy and lossless else self.engine,
            outcomes=self.outcomes,
            coins={} if greedy else self.coins,
            tokens=self.tokens,
        )
        return "" if left == Changes() else left.describe()
