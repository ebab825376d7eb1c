"""A target's next-token modules once more under a named mistake: other norms, another order, other states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specscope.analyze.audit.contexts import Ask, AuditedStep, Contexts, contexts_of
from specscope.analyze.audit.model.head import KV
from specscope.analyze.audit.model.mtp import Modules
from specscope.analyze.audit.model.rows import Models
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.rerun import target
from specscope.analyze.verify.case import Case, Step
from specscope.trace.record.tree import ROOT

Norm = Callable[[str, Tensor], Tensor]  # of a module, by its name
Joined = Callable[[Norm, Tensor, Tensor], tuple[Tensor, Tensor]]  # of embedding and state, what is projected


@dataclass(frozen=True)
class ModulesMistake:
    """How modules are put together or fed, by mistake or as it should be."""

    name: str
    cause: Cause = Cause.DRAFTER_BUILT
    joined: Joined = lambda norm, token, state: (norm("enorm", token), norm("hnorm", state))
    final: bool = True  # whether the norm behind the layer is there
    order: Callable[[int, int], int] = lambda module, count: module  # which module runs in a module's place
    turned: Callable[[Tensor, bool], Tensor] = lambda places, drafted: places  # of positions, and whether of nodes
    is_older: bool = False  # whether a module is fed what the one before it was fed
    feed: Callable[[Tensor], Tensor] = lambda states: states  # the target's states, [T, width]
    known: int | None = None  # it chooses among this many first tokens only


RIGHT = ModulesMistake("as it should be")
MISTAKES = (
    ModulesMistake("no norm of the embedding", joined=lambda norm, token, state: (token, norm("hnorm", state))),
    ModulesMistake("no norm of the state", joined=lambda norm, token, state: (norm("enorm", token), state)),
    ModulesMistake("neither norm before the projection", joined=lambda norm, token, state: (token, state)),
    ModulesMistake(
        "the two norms exchanged", joined=lambda norm, token, state: (norm("hnorm", token), norm("enorm", state))
    ),
    ModulesMistake(
        "state and embedding the other way round",
        joined=lambda norm, token, state: (norm("hnorm", state), norm("enorm", token)),
    ),
    ModulesMistake("no norm behind the layer", final=False),
    ModulesMistake("the modules in reverse order", order=lambda module, count: count - 1 - module),
    ModulesMistake("the module after each", order=lambda module, count: (module + 1) % count),
    ModulesMistake("the first module at every depth", order=lambda module, count: 0),
    ModulesMistake("the state that the module before was fed", is_older=True),
    ModulesMistake("the states of the position before", Cause.DRAFTER_FED, feed=lambda x: torch.cat([x[:1], x[:-1]])),
    ModulesMistake("the states of the position after", Cause.DRAFTER_FED, feed=lambda x: torch.cat([x[1:], x[-1:]])),
    ModulesMistake("no states at all", Cause.DRAFTER_FED, feed=lambda x: 0 * x),
    *(
        ModulesMistake(f"drafted nodes one position too {where}", Cause.ROTARY_POSITIONS, turned=turned)
        for where, turned in (
            ("far", lambda at, drafted: at + int(drafted)),
            ("near", lambda at, drafted: at - int(drafted)),
        )
    ),
    ModulesMistake("no rotary positions", Cause.ROTARY_POSITIONS, turned=lambda places, drafted: 0 * places),
)


class MistakenModules(Modules):
    """Modules under a mistake."""

    mistake = RIGHT
    at_work: frozenset[int] | None = None  # the rows of the text that it is at work on; None: all
    _drafted = False
    _works = torch.ones(0, dtype=torch.bool)  # [N] of the rows that run

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
        return torch.where(self._works, self.mistake.turned(right, self._drafted), right)

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

    def _trees(self, asked: Sequence[Ask], out: Tensor, kv: list[KV]) -> Iterator[tuple[list[Ask], Tensor]]:
        self._drafted = True
        yield from super()._trees(asked, out, kv)
        self._drafted = False

    def _chains(
        self, asked: Sequence[Ask], states: Sequence[Tensor], kv: list[KV]
    ) -> Iterator[tuple[list[Ask], Tensor]]:
        self._drafted = True
        yield from super()._chains(asked, states, kv)
        self._drafted = False


class ModulesAgain:
    """A target's modules, asked about the first steps of requests."""

    right = RIGHT

    def __init__(self, models: Models, case: Case) -> None:
        assert models.options.draft is not None
        self.case, self.target = case, models.target
        self.modules = MistakenModules(models.options.draft, self.target.model)
        self.modules.to(torch.float32)
        self._known: dict[tuple[str, int], tuple[Contexts, Tensor]] = {}  # by request and step

    def rows(
        self, steps: Sequence[Step], mistake: ModulesMistake, back: int | None, *, every: bool
    ) -> Iterator[tuple[Step, target.Rows]]:
        """What `search.Again` asks for: the mistake is at work on the rows that were fed so many steps before."""
        modules, notes, (contexts, states) = self.modules, steps[-1 - (back or 0)].part.notes, self._along(steps)
        order = [mistake.order(module, len(modules.blocks)) for module in range(len(modules.blocks))]
        if back is not None and order != sorted(order):
            return  # what one module's layer wrote, another does not read
        judged = {step.part.index: step for step in (steps if every else steps[-1:])}
        asked = [ask for audited in contexts.steps if audited.part.index in judged for ask in _asks(audited)]
        fed, known = mistake.feed(states), (modules.blocks, modules.modules)
        if back is not None:
            modules.at_work = frozenset(() if notes is None else notes.fed_position.tolist())
            wrong = torch.tensor([place in modules.at_work for place in range(len(states))])[:, None]
            fed = torch.where(wrong, fed, states)
        modules.blocks, modules.modules = ([known[0][k] for k in order], [known[1][k] for k in order])
        modules.mistake, rows = mistake, {index: target.Rows() for index in judged}
        for some, logits in modules.rows(contexts, fed, asked):
            for (audited, node), row in zip(some, logits, strict=True):
                rows[audited.part.index][node] = row
        (modules.blocks, modules.modules), modules.mistake, modules.at_work = known, RIGHT, None
        yield from ((step, rows[index]) for index, step in judged.items())

    def _along(self, steps: Sequence[Step]) -> tuple[Contexts, Tensor]:
        """A request's text, and the target's states along it."""
        key = steps[0].request, steps[-1].part.index
        if key not in self._known:
            indices, request = {step.part.index for step in steps}, steps[0].visit.request
            places = [place for place, part in enumerate(request.steps) if part.index in indices]
            contexts = contexts_of(self.case.history, request.id, places)
            assert contexts is not None
            states = self.target.alone(contexts.text, self.modules.layers)[1]
            assert states is not None
            self._known[key] = contexts, states.cpu()
        return self._known[key]


def _asks(step: AuditedStep) -> Iterator[Ask]:
    nodes = sorted(step.rows) if step.rows[ROOT] >= 1 else ()
    yield from ((step, node) for node in nodes if step.part.tree.children(node))
