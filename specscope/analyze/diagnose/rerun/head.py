"""A head once more under a named mistake: other features, other positions, another vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specscope.analyze.audit.contexts import Ask, AuditedStep, Contexts, contexts_of
from specscope.analyze.audit.model.block import BlockHead
from specscope.analyze.audit.model.head import KV, Head
from specscope.analyze.audit.model.mtp import Modules
from specscope.analyze.audit.model.rows import Models
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.rerun import target
from specscope.analyze.verify.trial import Case, Step
from specscope.plans.plan import DynamicPlan
from specscope.trace.record.tree import ROOT


@dataclass(frozen=True)
class Along:
    """What enters the target's layers along a request's text and at the nodes of its first steps, the last of which is
    asked about."""

    contexts: Contexts
    steps: Sequence[Step]
    layers: tuple[int | str, ...]  # that feed the head
    features: Tensor  # [T, F] as the head should be fed
    text: Tensor  # [T, every layer, width]; no layer for a head that is fed what leaves the last
    nodes: dict[int, Tensor]  # by the step's index: [n + 1, every layer, width] at the root and each node

    def fed(self, states: Tensor, layers: Sequence[Any] = ()) -> Tensor:
        """Of [..., every layer, width] what the head is fed, [..., F]."""
        return states[..., list(layers or self.layers), :].flatten(-2)

    @property
    def places(self) -> Tensor:
        return torch.arange(len(self.text))

    @property
    def accepted(self) -> list[tuple[Step, int, int]]:
        """Of each accepted token of the text its step, its place on the path, and in the text."""
        placed = [(step, i, step.after + i) for step in self.steps for i in range(len(step.verdict.path))]
        return [one for one in placed if one[2] < len(self.text)]


Feed = Callable[[Along], Tensor]  # what the head is fed, [T, F]
Fed = Callable[[Along], list[int]]  # the tokens of the text as they are fed
Turned = Callable[[Tensor, int, bool], Tensor]  # of positions, where the prompt ends, and whether nodes are drafted
Norm = Callable[[str, Tensor], Tensor]  # of a module, by its name
Joined = Callable[[Norm, Tensor, Tensor], tuple[Tensor, Tensor]]  # of embedding and state, what is projected


@dataclass(frozen=True)
class HeadMistake:
    """How a head is fed, and a target's modules are put together, by mistake or as it should be."""

    name: str
    cause: Cause
    feed: Feed = lambda along: along.features
    turned: Turned = lambda positions, prompt, drafted: positions
    base: float = 1.0  # the rotary base times this
    tokens: Callable[[Tensor], Tensor] = lambda d2t: d2t
    fed: Fed = lambda along: along.contexts.text
    known: int | None = None  # the head chooses among this many first tokens only
    own: float = 1.0  # what the head made at a node's parent, times this
    skipped: str = ""  # the end of the names of norms that are left out
    flipped: str = ""  # a key of the config that is taken the other way round
    by_slot: bool = False  # a branch of the tree reads its own slots, also where it began at another branch's node
    # Of a target's modules
    joined: Joined = lambda norm, token, state: (norm("enorm", token), norm("hnorm", state))
    final: bool = True  # whether the norm after the layer is there
    order: Callable[[int, int], int] = lambda module, count: module  # which module runs in a module's place
    is_older: bool = False  # whether a module is fed what the one before it was fed


def _from(along: Along, places: Tensor) -> Tensor:
    """Each position gets the feature of another one. `places`: whose, [T]."""
    return along.features[places.clamp(0, len(along.text) - 1)]


def _without(along: Along, places: Any) -> Tensor:  # noqa: ANN401
    """Zeros at some positions."""
    features = along.features.clone()
    features[places] = 0
    return features


def _of_nodes(along: Along) -> Tensor:
    """Accepted tokens get the features of the first nodes of their tree."""
    features = along.features.clone()
    for step, i, place in along.accepted:
        if (nodes := along.nodes.get(step.part.index)) is not None:
            features[place] = along.fed(nodes[i + 1])
    return features


def _of_the_step_before(along: Along) -> Tensor:
    """What a step's root and accepted tokens should have: those of the first rows of the step before."""
    features = along.features.clone()
    for before, step in pairwise(along.steps):
        rows = along.nodes.get(before.part.index, ())[: len(step.verdict.path) + 1]
        for i, states in enumerate(rows[: len(features) - step.after + 1]):
            features[step.after - 1 + i] = along.fed(states)
    return features


def _by(along: Along, higher: int) -> Tensor:
    """Layers so much higher."""
    last = along.text.shape[1] - 1
    return along.fed(along.text, [min(max(int(layer) + higher, 0), last) for layer in along.layers])


def _behind_chunks(along: Along) -> list[int]:
    """The prompt's last token behind each of its prefill chunks but the last, in place of the next one."""
    tokens, prompt = list(along.contexts.text), along.contexts.prompt_len
    for part in along.steps[0].visit.request.steps:
        place = part.context_len + part.prefill_tokens
        if 0 < place < prompt and part.verdict is None:
            tokens[place] = tokens[prompt - 1]
    return tokens


FEEDS: dict[str, Feed] = {
    "the features of the previous position": lambda along: _from(along, along.places - 1),
    "the features of two positions before": lambda along: _from(along, along.places - 2),
    "the features of the next position": lambda along: _from(along, along.places + 1),
    "the features of the tree's first nodes for the accepted ones": _of_nodes,
    "the features of the step before": _of_the_step_before,
    "no features at all": lambda along: 0 * along.features,
    "no features of accepted tokens": lambda along: _without(along, [place for _, _, place in along.accepted]),
    "no features of the prompt": lambda along: _without(along, slice(along.steps[0].after - 1)),
    "each layer one lower": lambda along: _by(along, -1),
    "each layer one higher": lambda along: _by(along, 1),
    "the layers in reverse order": lambda along: along.fed(along.text, along.layers[::-1]),
    "the layers shifted by one place forward": lambda along: along.fed(
        along.text, (*along.layers[1:], along.layers[0])
    ),
    "the layers shifted by one place back": lambda along: along.fed(along.text, (along.layers[-1], *along.layers[:-1])),
    "the lowest layer three times": lambda along: along.fed(along.text, along.layers[:1] * len(along.layers)),
    "the highest layer three times": lambda along: along.fed(along.text, along.layers[-1:] * len(along.layers)),
}
TURNS: dict[str, Turned] = {
    "everything after the prompt one position too far": lambda at, prompt, drafted: at + (at >= prompt),
    "everything fed while decoding one position too far": lambda at, prompt, drafted: at + (at > prompt),
    "drafted nodes one position too far": lambda at, prompt, drafted: at + int(drafted),
    "drafted nodes one position too near": lambda at, prompt, drafted: at - int(drafted),
    "no rotary positions": lambda at, prompt, drafted: at * 0.0,
    "rotary positions halved": lambda at, prompt, drafted: at * 0.5,
    "rotary positions doubled": lambda at, prompt, drafted: at * 2.0,
}
MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "the vocabulary map in reverse order": lambda d2t: d2t.flip(0),
    "the vocabulary map one row forward": lambda d2t: d2t.roll(1),
    "the vocabulary map one row back": lambda d2t: d2t.roll(-1),
    "the vocabulary offset added twice": lambda d2t: (2 * d2t - torch.arange(len(d2t))).clamp(max=int(d2t.max())),
    "no vocabulary map": lambda d2t: torch.arange(len(d2t)),
}
NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm", "input_norm", "norm")
FLAGS = ("norm_before_residual", "norm_output")
BASES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
RIGHT = HeadMistake("as it should be", Cause.DRAFTER_FED)
MISTAKES = (
    *(HeadMistake(name, Cause.DRAFTER_FED, feed=feed) for name, feed in FEEDS.items()),
    HeadMistake("each branch reading its own slots instead of its ancestors'", Cause.DRAFTER_KV, by_slot=True),
    HeadMistake(
        "each feature's own token, not the next", Cause.DRAFTER_FED, fed=lambda along: [0, *along.contexts.text]
    ),
    HeadMistake("no state of its own below the root", Cause.DRAFTER_FED, own=0.0),
    HeadMistake(
        "the prompt's last token fed after each prefill chunk, not the next token",
        Cause.DRAFTER_FED,
        fed=_behind_chunks,
    ),
    *(HeadMistake(name, Cause.ROTARY_POSITIONS, turned=turned) for name, turned in TURNS.items()),
    *(HeadMistake(name, Cause.DRAFT_VOCABULARY, tokens=tokens) for name, tokens in MAPS.items()),
    *(HeadMistake(f"{name} left out", Cause.DRAFTER_BUILT, skipped=f".{name}") for name in NORMS),
    *(HeadMistake(f"{name} the other way round", Cause.DRAFTER_BUILT, flipped=name) for name in FLAGS),
    *(HeadMistake(f"a rotary base {base:g} times as large", Cause.ROTARY_POSITIONS, base=base) for base in BASES),
)


class MovedHead(Head):
    """A head under a mistake of its positions, its rotary base or its slots."""

    mistake = RIGHT
    prompt = 0  # positions of the prompt: what is fed while decoding comes after them
    slots = 1  # branches of a tree
    at_work: frozenset[int] | None = None  # the rows of the text that it is at work on; None: all
    _drafted = False

    def can_run(self, mistake: HeadMistake, back: int | None) -> bool:
        """Whether it can be run so. What leaves the last layer is not known by layers."""
        if back is not None and (mistake.skipped or mistake.flipped):  # parts that are put together so are all along
            return False
        known = all(isinstance(layer, int) for layer in self.layers)
        return known and any(f".{name}".endswith(f"{mistake.skipped}.weight") for name in self.weights)

    @contextmanager
    def under(self, mistake: HeadMistake) -> Iterator[None]:
        known, self.mistake = self.config if mistake.flipped else {}, mistake  # a target's modules have no such config
        if mistake.flipped:
            self.config = known | {mistake.flipped: not known.get(mistake.flipped)}
        try:
            yield
        finally:
            self.mistake = RIGHT
            if mistake.flipped:
                self.config = known

    def fed_back(self, hidden: Tensor) -> Tensor:
        """What the head made, as it is fed below."""
        return super().fed_back(hidden) * self.mistake.own

    def _normed(self, name: str, x: Tensor) -> Tensor:
        skipped = self.mistake.skipped
        return x if skipped and f".{name}".endswith(skipped) else super()._normed(name, x)

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        places, half = self.mistake.turned(positions, self.prompt, self._drafted), self.size // 2
        if self.mistake.base == 1:
            turned = super()._turn(x, places)
        else:
            frequency = self.rotary.inv_freq * self.mistake.base ** (-torch.arange(half) / half)
            angle = torch.outer(places.float(), frequency).repeat(1, 2)[:, None]
            turned = self._turn_by(x, angle.cos(), angle.sin())
        if self.at_work is None or self._drafted:
            return turned
        wrong = torch.tensor([place in self.at_work for place in positions.tolist()])[:, None, None]
        return torch.where(wrong, turned, super()._turn(x, positions))

    def _trees(self, asked: Sequence[Ask], out: Tensor, kv: list[KV]) -> Iterator[tuple[list[Ask], Tensor]]:
        self._drafted = True
        if self.mistake.by_slot and self.mask_token is None:
            for step in {id(step): step for step, _ in asked}.values():
                yield from self._by_slot(step, [node for other, node in asked if other is step], out, kv)
        else:
            yield from super()._trees(asked, out, kv)
        self._drafted = False

    def _by_slot(
        self, step: AuditedStep, nodes: Sequence[int], out: Tensor, kv: list[KV]
    ) -> Iterator[tuple[list[Ask], Tensor]]:
        """The logits at a step's nodes in a beam search whose best paths of each level get the slots in order."""
        tree, root, before, slots = step.part.tree, step.rows[ROOT] - 1, len(kv[0][0]), self.slots
        hidden, scores, paths = out[[root]], torch.zeros(1), [()]
        wanted = {(): ROOT, **{tuple(tree.token[tree.path_to(node)].tolist()): node for node in nodes if node != ROOT}}
        for depth in range(1, int(tree.max_depth) + 1):
            logits = self.logits(hidden)
            rows = [(row, wanted[path]) for row, path in enumerate(paths) if wanted.get(path) in nodes]
            yield [(step, node) for _, node in rows], logits[[row for row, _ in rows]]
            values, tokens = logits.log_softmax(-1).topk(slots, dim=-1)
            scores, best = (scores[:, None] + values).flatten().topk(slots)
            paths = [(*paths[i // slots], int(tokens.flatten()[i])) for i in best.tolist()]
            seen = torch.zeros(slots, before + depth * slots, dtype=torch.bool)
            seen[:, : root + 1] = True
            seen[:, before:] = torch.eye(slots, dtype=torch.bool).repeat(1, depth)
            prepared = self.prepare(tokens.flatten()[best], self.fed_back(hidden[best // slots]))
            hidden, kv = self.run(prepared, torch.full((slots,), root + depth), seen, kv)


class MovedBlock(MovedHead, BlockHead):
    """A DFlash head under the same mistakes."""


class HeadAgain:
    """A head over its target, or a target's modules, asked about the first steps of requests."""

    right = RIGHT

    def __init__(self, models: Models, case: Case, moved: type[MovedHead]) -> None:
        assert models.options.draft is not None
        self.case, self.target = case, models.target
        self.head = moved(models.options.draft, self.target.model)
        self.head.to(torch.float32)
        self.head.slots = case.plan.top if isinstance(case.plan, DynamicPlan) else 1  # branches at each level
        self.tokens = self.head.tokens
        self._along: dict[tuple[str, int], Along] = {}

    def rows(
        self, steps: Sequence[Step], mistake: HeadMistake, back: int | None, *, every: bool
    ) -> Iterator[tuple[Step, target.Rows]]:
        """The last of some first steps, or every one, with its logits at root and nodes. The mistake is at work on the
        rows that were fed `back` steps before the last; None: on all.
        """
        head = self.head
        if not head.can_run(mistake, back):
            return
        notes, at_work, along = steps[-1 - (back or 0)].part.notes, None, self._known(steps)
        features, text = mistake.feed(along), mistake.fed(along)
        if back is not None:
            at_work = frozenset[int]() if notes is None else frozenset(notes.fed_position.tolist())
            wrong = torch.tensor([place in at_work for place in range(len(along.features))])[:, None]
            features = torch.where(wrong, features, along.features)
            pairs = enumerate(zip(along.contexts.text, text, strict=False))
            text = [other if place - 1 in at_work else token for place, (token, other) in pairs]
        # The pair of slot t holds the token at t + 1: the prompt's own end one slot before its last token
        head.prompt, head.at_work, head.tokens = along.contexts.prompt_len - 1, at_work, mistake.tokens(self.tokens)
        judged = {step.part.index: step for step in (steps if every else steps[-1:])}
        asked: list[Ask] = [
            (audited, node)
            for audited in along.contexts.steps
            if audited.rows[ROOT] >= 1 and audited.part.index in judged
            for node in sorted(audited.rows)
            if audited.part.tree.children(node)
        ]
        rows: dict[int, target.Rows] = {index: {} for index in judged}
        with head.under(mistake):
            for some, logits in head.rows(replace(along.contexts, text=text), features, asked):
                for (audited, node), row in zip(some, logits, strict=True):
                    rows[audited.part.index][node] = row
        head.tokens, head.at_work = self.tokens, None
        yield from ((step, rows[index]) for index, step in judged.items())

    def _known(self, steps: Sequence[Step]) -> Along:
        """What the head sees of a request, and what the target makes of its text in every layer."""
        key = steps[0].request, steps[-1].part.index
        if key not in self._along:
            indices, request = {step.part.index for step in steps}, steps[0].visit.request
            places = [place for place, part in enumerate(request.steps) if part.index in indices]
            contexts, cache, right = contexts_of(self.case.history, request.id, places), DynamicCache(), target.RIGHT
            assert contexts is not None
            layers, inner = self.head.layers, all(isinstance(layer, int) for layer in self.head.layers)
            every = range(int(self.target.config.num_hidden_layers) if inner else 0)
            _, states = self.target.alone(contexts.text, every if inner else layers)
            assert states is not None
            text = states.reshape(len(states), len(every) or 1, -1)
            self._along[key] = Along(
                contexts,
                steps,
                layers,
                text[:, list(layers) if inner else [0]].flatten(1),
                text,
                {step.part.index: target.decoded(self.target, step, right, cache, every) for step in steps if inner},
            )
        return self._along[key]


_built = partial(HeadMistake, cause=Cause.DRAFTER_BUILT)
OF_FEEDS = {  # as of a head, in words of their own
    "the states of the previous position": FEEDS["the features of the previous position"],
    "the states of the next position": FEEDS["the features of the next position"],
    "no states at all": FEEDS["no features at all"],
}
OF_TURNS = ("drafted nodes one position too far", "drafted nodes one position too near", "no rotary positions")
OF_MODULES = (
    _built("no norm of the embedding", joined=lambda norm, token, state: (token, norm("hnorm", state))),
    _built("no norm of the state", joined=lambda norm, token, state: (norm("enorm", token), state)),
    _built("neither norm before the projection", joined=lambda norm, token, state: (token, state)),
    _built("the two norms swapped", joined=lambda norm, token, state: (norm("hnorm", token), norm("enorm", state))),
    _built(
        "state and embedding swapped", joined=lambda norm, token, state: (norm("hnorm", state), norm("enorm", token))
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
    _works = torch.ones(0, dtype=torch.bool)  # [N] of the rows that run

    def _order(self, order: Callable[[int, int], int]) -> list[int]:
        return [order(module, len(self.blocks)) for module in range(len(self.blocks))]

    def can_run(self, mistake: HeadMistake, back: int | None) -> bool:
        """What one module's layer wrote, another does not read."""
        order = self._order(mistake.order)
        return back is None or order == sorted(order)

    @contextmanager
    def under(self, mistake: HeadMistake) -> Iterator[None]:
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
        right = super().places(positions, module)
        return torch.where(self._works, self.mistake.turned(right, self.prompt, self._drafted), right)

    def given(self, own: Tensor, older: Tensor, slots: Tensor) -> Tensor:
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
