"""What is different in a fork. No torch: the console makes these, the engine applies them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specscope.trace.wording import plural


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
    tail: tuple[int, Sequence[int]] | None = None  # how many of the last tokens go, and the tokens in their place

    def describe(self) -> str:
        """One line."""
        said = [f"{name}={value}" for name, value in {**self.params, **self.engine}.items()]
        said += [f"node {node} {'accepted' if yes else 'rejected'}" for (_, node), yes in self.outcomes.items()]
        said += [f"coin of node {node} {coin}" for (_, node), coin in self.coins.items()]
        said += [f"token {token}" for token in self.tokens.values()]
        if self.tail is not None:
            said.append(f"last {plural(self.tail[0], 'token')} replaced by {len(self.tail[1])}")
        return ", ".join(said) or "nothing changed"
