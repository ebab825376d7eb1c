"""A target's next-token modules once more under a named mistake: other norms, another order, other states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from specscope.analyze.audit.contexts import Ask
from specscope.analyze.audit.model.head import KV
from specscope.analyze.audit.model.mtp import Modules
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.rerun.head import FEEDS, TURNS, HeadMistake, MovedHead

_built = partial(HeadMistake, cause=Cause.DRAFTER_BUILT)
OF_FEEDS = {  # as of a head, in words of their own
    "the states of the previous position": FEEDS["the features of the previous position"],
    "the states of the next position": FEEDS["the features of the next position"],
    "no states at all": FEEDS["no features at all"],
}
OF_TURNS = ("drafted nodes one position too far", "drafted nodes one position too near", "no rotary positions")
MISTAKES = (
    _built("no norm of the embedding", joined=lambda norm, token, state: (token, norm("hnorm", state))),
    _built("no norm of the state", joined=lambda norm, token, state: (norm("enorm", token), state)),
    _built("neither norm before the projection", joined=lambda norm, token, state: (token, state)),
    _built("the two norms swapped", joined=lambda norm, token, state: (norm("hnorm", token), norm("enorm", state))),
    _built(
        "state and embedding swapped",
        joined=lambda norm, token, state: (norm("hnorm", state), norm("enorm", token)),
    ),
    _built("no norm after the layer", final=False),
    _built("the modules in reverse order", order=lambda module, count: count - 1 - module),
    _built("the next module at each depth", order=lambda module, count: (module + 1) % count),
    _built("the first module at every depth", order=lambda module, count: 0),
    _built("the state that was fed to the previous module", is_older=True),
    *(HeadMistake(name, Cause.DRAFTER_FED, feed=feed) for name, feed in OF_FEEDS.items()),
    *(HeadMistake(name, Cause.ROTARY_POSITIONS, turned=TURNS[name]) for name in OF_TURNS),
)


class MovedModules(MovedHead, Modules):
    """Modules under a mistake."""

    _works = torch.ones(0, dtype=torch.bool)  # [N] of the rows that run

    def _order(self, order: Callable[[int, int], int]) -> list[int]:
        return [order(module, len(self.blocks)) for module in range(len(self.blocks))]

    def can_run(self, mistake: HeadMistake, back: int | None) -> bool:
        """What one module's layer wrote, another does not read."""
        order = self._order(mistake.order)
        return back is None or order == sorted(order)

    @contextmanager
    def under(self, mistake: HeadMistake) -> Iterator[None]:
        """A mistake is at work meanwhile."""
        known, order = (self.blocks, self.modules), self._order(mistake.order)
        self.blocks, self.modules = ([each[module] for module in order] for each in known)
        try:
            with super().under(mistake):
                yield
        finally:
            self.blocks, self.modules = known

    def prepare(self, tokens: Tensor, hidden: Tensor, module: int = 0) -> tuple[Tensor, Tensor]:
        """What a module's layer takes: as it should be, and by mistake."""
        right, _ = super().prepare(tokens, hidden, module)
        both = self.mistake.joined(super()._norm, self.embedding[tokens], hidden)
        return right, self._linear("eh_proj", torch.cat(both, dim=-1))

    def run(
        self, prepared: tuple[Tensor, Tensor], positions: Tensor, seen: Tensor, before: Sequence[KV], module: int = 0
    ) -> tuple[Tensor, list[KV]]:
        """As of right modules."""
        self._works = self._at(positions)
        joined = torch.where(self._works[:, None], prepared[1], prepared[0])
        return super().run((joined, joined), positions, seen, before, module)

    def places(self, positions: Tensor, module: int) -> Tensor:
        """Of the tokens."""
        right = super().places(positions, module)
        return torch.where(self._works, self.mistake.turned(right, self.prompt, self._drafted), right)

    def given(self, own: Tensor, older: Tensor, slots: Tensor) -> Tensor:
        """The states that a module takes."""
        return torch.where(self._at(slots)[:, None], older, own) if self.mistake.is_older else own

    def _at(self, slots: Tensor) -> Tensor:
        """bool [N] where the mistake is at work."""
        every = self._drafted or self.at_work is None
        return torch.tensor([every or slot in (self.at_work or ()) for slot in slots.tolist()])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        right = super()._norm(name, x)
        return torch.where(self._works[:, None], x, right) if name == "post_norm" and not self.mistake.final else right

    def _chains(
        self, asked: Sequence[Ask], states: Sequence[Tensor], kv: list[KV]
    ) -> Iterator[tuple[list[Ask], Tensor]]:
        self._drafted = True
        yield from super()._chains(asked, states, kv)
        self._drafted = False
