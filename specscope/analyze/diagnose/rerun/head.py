"""An EAGLE head once more under a named mistake: other features, other positions, another vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from specscope.analyze.audit.contexts import AuditedStep, Contexts, contexts_of
from specscope.analyze.audit.model.head import KV, Head
from specscope.analyze.audit.model.judge import Ask
from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.rerun.match import Match, among, beginnings, compare, recorded
from specscope.analyze.diagnose.rerun.models import Models
from specscope.analyze.diagnose.rerun.target import RIGHT, decoded
from specscope.plans.plan import DynamicPlan
from specscope.trace.record.tree import ROOT


@dataclass(frozen=True)
class Along:
    """What enters the target's layers: along a request's text, and at the nodes of its first steps."""

    text: Tensor  # [T, layers, width]
    nodes: Mapping[int, Tensor]  # by the step's index: [n + 1, layers, width] at the root and each node
    choice: tuple[int, ...] = ()  # [T] the target's likeliest token after each token of the text
    # What enters the layers at the row before the request's own in the batch of a step, [layers, width]; None: unknown.
    # By the step's index; for the batch's first row that is its last one.
    before: Callable[[int], Tensor | None] = lambda index: None

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return len(self.text)


Feed = Callable[[Along, tuple[int, ...], Sequence[Step]], Tensor]  # to what the head is fed, [T, F]


def of_layers(along: Tensor, layers: tuple[int, ...]) -> Tensor:
    """The features of some layers side by side."""
    return along[:, list(layers)].flatten(1)


@dataclass(frozen=True)
class HeadMistake:
    """How a head is fed, by mistake or as it should be."""

    name: str
    cause: Cause | None
    feed: Feed = lambda along, layers, steps: of_layers(along.text, layers)
    further: int = 0  # drafted nodes are that many positions too far
    scale: float = 1.0  # all positions times this
    base: float = 1.0  # the rotary base times this
    tokens: Callable[[Tensor], Tensor] = field(default=lambda d2t: d2t)
    fed: Callable[[Sequence[int], Along, Sequence[Step]], Sequence[int]] = field(
        default=lambda text, along, steps: text
    )
    decoding: int = 0  # everything after the prompt is that many positions too far
    known: int | None = None  # the head chooses among this many first tokens only
    by_slot: bool = False  # a branch of the tree reads its own slots, also where it began at another branch's node


def _shifted(by: int) -> Feed:
    """Each position gets the feature of the one `by` further on."""

    def feed(along: Along, layers: tuple[int, ...], steps: Sequence[Step]) -> Tensor:
        places = (torch.arange(along.length) + by).clamp(0, along.length - 1)
        return of_layers(along.text[places], layers)

    return feed


def _only(positions: Callable[[Sequence[Step], int], set[int]]) -> Feed:
    """Zeros at some positions."""

    def feed(along: Along, layers: tuple[int, ...], steps: Sequence[Step]) -> Tensor:
        features = of_layers(along.text, layers).clone()
        features[sorted(position for position in positions(steps, along.length) if position < along.length)] = 0
        return features

    return feed


def _accepted(steps: Sequence[Step], length: int) -> set[int]:
    return {step.after + i for step in steps for i in range(len(step.verdict.path))}


def _prompt(steps: Sequence[Step], length: int) -> set[int]:
    return set(range(steps[0].after - 1))


def _prompts_last(along: Along, layers: tuple[int, ...], steps: Sequence[Step]) -> Tensor:
    """Every token of the prompt gets the features of its last one."""
    features, end = of_layers(along.text, layers).clone(), steps[0].visit.request.info
    count = 0 if end is None else len(end.prompt_tokens)
    features[:count] = features[max(count - 1, 0)].clone()
    return features


def _held(steps: Sequence[Step], length: int) -> list[int]:
    """For each position the one whose features are fed, where accepted tokens get those of their step's root."""
    roots = list(range(length))
    for step in steps:
        for i in range(len(step.verdict.path)):
            if step.after + i < length:
                roots[step.after + i] = step.after - 1
    return roots


def _roots_again(along: Along, layers: tuple[int, ...], steps: Sequence[Step]) -> Tensor:
    return of_layers(along.text[_held(steps, along.length)], layers)


def _first_nodes(along: Along, layers: tuple[int, ...], steps: Sequence[Step]) -> Tensor:
    """Accepted tokens get the features of the tree's first nodes."""
    features = of_layers(along.text, layers).clone()
    for step in steps:
        nodes = along.nodes.get(step.part.index)
        for i in range(len(step.verdict.path)):
            if nodes is not None and step.after + i < len(features):
                features[step.after + i] = nodes[i + 1, list(layers)].flatten()
    return features


def _last_nodes(along: Along, layers: tuple[int, ...], steps: Sequence[Step]) -> Tensor:
    """Accepted tokens get the features of the tree's last nodes, the last one first."""
    features = of_layers(along.text, layers).clone()
    for step in steps:
        nodes = along.nodes.get(step.part.index)
        for i in range(len(step.verdict.path)):
            if nodes is not None and step.after + i < len(features):
                features[step.after + i] = nodes[len(nodes) - 1 - i, list(layers)].flatten()
    return features


def _rows_before(along: Along, layers: tuple[int, ...], steps: Sequence[Step]) -> Tensor:
    """Each row of a pass gets the features of the row before it in the batch, another request's too."""
    features, judged = of_layers(along.text, layers).clone(), {step.part.index: step for step in steps}
    for part in steps[0].visit.request.steps:
        if part.index in judged:
            step, rows = judged[part.index], along.nodes[part.index][:, list(layers)].flatten(1)
            first, row_before = step.after - 1, along.before(part.index)
            path = step.verdict.path.tolist()[: max(along.length - step.after, 0)]
            features[step.after : step.after + len(path)] = rows[path]  # row i + 1 is node i's
        elif part.index < steps[-1].part.index and part.prefill_tokens:
            first, end = part.context_len, part.context_len + part.prefill_tokens
            features[first + 1 : end] = of_layers(along.text[first : end - 1], layers)
            row_before = along.before(part.index)
        else:
            continue
        if row_before is not None and first < len(features):
            features[first] = row_before[list(layers)].flatten()
    return features


def _layers(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Feed:
    def feed(along: Along, layers: tuple[int, ...], steps: Sequence[Step]) -> Tensor:
        last = along.text.shape[1] - 1
        return of_layers(along.text, tuple(min(max(layer, 0), last) for layer in change(layers)))

    return feed


def _borders(steps: Sequence[Step]) -> list[int]:
    """The prompt's positions just after each of its prefill chunks, except the last chunk."""
    info = steps[0].visit.request.info
    end = 0 if info is None else len(info.prompt_tokens)
    parts = steps[0].visit.request.steps
    return [
        after for part in parts if 0 < (after := part.context_len + part.prefill_tokens) < end and part.verdict is None
    ]


def _prompts_last_token(text: Sequence[int], along: Along, steps: Sequence[Step]) -> Sequence[int]:
    """After each chunk the prompt's last token."""
    fed, info = list(text), steps[0].visit.request.info
    for place in _borders(steps):
        fed[place] = fed[place] if info is None else int(info.prompt_tokens[-1])
    return fed


def _sampled_token(text: Sequence[int], along: Along, steps: Sequence[Step]) -> Sequence[int]:
    """After each chunk the token that the target would choose there."""
    fed = list(text)
    for place in _borders(steps):
        fed[place] = along.choice[place - 1]
    return fed


def _first_output(text: Sequence[int], along: Along, steps: Sequence[Step]) -> Sequence[int]:
    """After each chunk the first token of the output."""
    fed, info = list(text), steps[0].visit.request.info
    for place in _borders(steps):
        fed[place] = fed[place] if info is None else text[len(info.prompt_tokens)]
    return fed


FED = Cause.DRAFTER_FED
MISTAKES = (
    HeadMistake("as it should be", None),
    HeadMistake("the features of the position before", FED, _shifted(-1)),
    HeadMistake("the features of the row before in the batch", FED, _rows_before),
    HeadMistake("the features of two positions before", FED, _shifted(-2)),
    HeadMistake("the features of the position after", FED, _shifted(1)),
    HeadMistake("the root's features for all tokens of a step", FED, _roots_again),
    HeadMistake("the features of the tree's first nodes for the accepted ones", FED, _first_nodes),
    HeadMistake("the features of the tree's last nodes for the accepted ones", FED, _last_nodes),
    HeadMistake("the features of the prompt's last token for all of it", FED, _prompts_last),
    HeadMistake("no features at all", FED, _only(lambda steps, length: set(range(length)))),
    HeadMistake("no features of accepted tokens", FED, _only(_accepted)),
    HeadMistake("no features of the prompt", FED, _only(_prompt)),
    HeadMistake("each layer one lower", FED, _layers(lambda layers: tuple(layer - 1 for layer in layers))),
    HeadMistake("each layer one higher", FED, _layers(lambda layers: tuple(layer + 1 for layer in layers))),
    HeadMistake("the layers in reverse order", FED, _layers(lambda layers: layers[::-1])),
    HeadMistake("the layers one place on", FED, _layers(lambda layers: (*layers[1:], layers[0]))),
    HeadMistake("the layers one place back", FED, _layers(lambda layers: (layers[-1], *layers[:-1]))),
    HeadMistake("the lowest layer thrice", FED, _layers(lambda layers: (layers[0],) * len(layers))),
    HeadMistake("the highest layer thrice", FED, _layers(lambda layers: (layers[-1],) * len(layers))),
    HeadMistake("each branch reading its own slots, not its ancestors'", Cause.DRAFTER_KV, by_slot=True),
    HeadMistake(
        "the prompt's last token fed behind each prefill chunk, not its next one",
        Cause.DRAFTER_FED,
        fed=_prompts_last_token,
    ),
    HeadMistake("the target's choice fed behind each prefill chunk", FED, fed=_sampled_token),
    HeadMistake("the first output token fed behind each prefill chunk", FED, fed=_first_output),
    HeadMistake("everything behind the prompt one position too far", Cause.POSITIONS, decoding=1),
    HeadMistake("drafted nodes one position too far", Cause.POSITIONS, further=1),
    HeadMistake("drafted nodes one position too near", Cause.POSITIONS, further=-1),
    HeadMistake("no rotary positions", Cause.POSITIONS, scale=0.0),
    HeadMistake("rotary positions halved", Cause.POSITIONS, scale=0.5),
    HeadMistake("rotary positions doubled", Cause.POSITIONS, scale=2.0),
    HeadMistake("the vocabulary's map in reverse order", Cause.DRAFT_VOCABULARY, tokens=lambda d2t: d2t.flip(0)),
    HeadMistake("the vocabulary's map one row on", Cause.DRAFT_VOCABULARY, tokens=lambda d2t: d2t.roll(1)),
    HeadMistake("the vocabulary's map one row back", Cause.DRAFT_VOCABULARY, tokens=lambda d2t: d2t.roll(-1)),
    HeadMistake(
        "the vocabulary's offset added twice",
        Cause.DRAFT_VOCABULARY,
        tokens=lambda d2t: (2 * d2t - torch.arange(len(d2t))).clamp(max=int(d2t.max())),
    ),
    HeadMistake("no map of the vocabulary", Cause.DRAFT_VOCABULARY, tokens=lambda d2t: torch.arange(len(d2t))),
    *(
        HeadMistake(f"a rotary base {factor:g} times as large", Cause.POSITIONS, base=factor)
        for factor in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    ),
)


class MovedHead(Head):
    """A head with wrong positions: shifted, scaled, or turned with another rotary base."""

    further = 0
    scale = 1.0
    base = 1.0
    decoding = 0
    prompt = 0  # positions of the prompt: what is fed while decoding comes after them
    slots: int | None = None  # branches of a tree, each of which reads its own slots; None: each node its ancestors
    rows_at_work: frozenset[int] | None = None  # the rows of the text that are turned wrongly; None: all
    _off = 0
    _drafted = False

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.rows_at_work is None or self._drafted:
            return self._turned(x, positions)
        wrong = torch.tensor([place in self.rows_at_work for place in positions.tolist()])[:, None, None]
        return torch.where(wrong, self._turned(x, positions), super()._turn(x, positions))

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        places = (positions + self._off + self.decoding * (positions >= self.prompt)) * self.scale
        if self.base == 1:
            return super()._turn(x, places)
        half = self.turned // 2
        frequency = self.rotary.inv_freq * self.base ** (-torch.arange(half) / half)
        angle = torch.outer(places.float(), frequency)[:, None]
        cos, sin = (torch.cat([y, y], dim=-1) for y in (angle.cos(), angle.sin()))
        return self._turn_by(x, cos, sin)

    def _trees(self, asked: Sequence[Ask], out: Tensor, kv: list[KV]) -> Iterator[tuple[list[Ask], Tensor]]:
        self._off, self._drafted = self.further, True
        if self.slots is None:
            yield from super()._trees(asked, out, kv)
        else:
            for step in {id(step): step for step, _ in asked}.values():
                yield from self._by_slot(step, [node for other, node in asked if other is step], self.slots, out, kv)
        self._off, self._drafted = 0, False

    def _by_slot(
        self, step: AuditedStep, nodes: Sequence[int], slots: int, out: Tensor, kv: list[KV]
    ) -> Iterator[tuple[list[Ask], Tensor]]:
        """The logits at a step's nodes in a beam search whose best paths of each level get the slots in order."""
        tree, root, before = step.part.tree, step.rows[ROOT] - 1, len(kv[0][0])
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


class HeadRerun:
    """A head and its target, asked about the first steps of requests."""

    def __init__(self, models: Models, case: Case, longest: int) -> None:
        """`longest`: how many steps of another request of the batch are run for its features."""
        assert models.options.draft is not None
        self.slots = case.plan.top if isinstance(case.plan, DynamicPlan) else 1  # branches of a tree at each level
        self.visits = {(visit.request.id, visit.part.index): visit for visit in case.visits}
        requests = len(case.history.requests)
        self.starts = {steps[0].request: steps for steps in beginnings(case.steps, requests, longest) if steps}
        self.target = models.target
        self.head = MovedHead(models.options.draft, self.target.model)
        self.head.to(torch.float32)
        self.tokens = self.head.tokens
        self._along: dict[tuple[str, int], tuple[Contexts, Along]] = {}

    def ask(
        self,
        steps: Sequence[Step],
        mistake: HeadMistake,
        allowed: float,
        *,
        rows: frozenset[int] | None = None,
        only: int | None = None,
    ) -> Match:
        """How many of the steps' parents agree under a mistake.

        `rows`: the only positions at which it is at work, None: all; `only`: the only step that is looked at.
        """
        match = Match()
        if not all(isinstance(layer, int) for layer in self.head.layers):
            return match
        contexts, along = self._contexts(steps)
        layers: tuple[int, ...] = tuple(int(layer) for layer in self.head.layers)
        self.head.further, self.head.scale, self.head.base = mistake.further, mistake.scale, mistake.base
        self.head.tokens, self.head.slots = mistake.tokens(self.tokens), self.slots if mistake.by_slot else None
        # The pair of slot t holds the token at t + 1: the prompt's own end one slot before its last token
        self.head.decoding, self.head.prompt = mistake.decoding, contexts.prompt_len - 1
        fed = replace(contexts, text=[*mistake.fed(contexts.text, along, steps)])
        features, self.head.rows_at_work = mistake.feed(along, layers, steps), rows
        if rows is not None:
            right = of_layers(along.text, layers)
            at_work = torch.tensor([place in rows for place in range(len(right))])[:, None]
            features = torch.where(at_work, features, right)
        judged = {step.part.index: step for step in steps}
        asked: list[Ask] = [
            (audited, node)
            for audited in contexts.steps
            if audited.part.index in judged and audited.rows[ROOT] >= 1 and only in (None, audited.part.index)
            for node in sorted(audited.rows)
            if audited.part.tree.children(node)
        ]
        for some, logits in self.head.rows(fed, features, asked):
            for (audited, node), row in zip(some, logits, strict=True):
                for parent, tokens, probs in recorded(judged[audited.part.index], drafter=True):
                    if parent == node:
                        compare(match, among(row, mistake.known), tokens, probs, allowed)
        self.head.further, self.head.scale, self.head.base, self.head.tokens = 0, 1.0, 1.0, self.tokens
        self.head.decoding, self.head.rows_at_work, self.head.slots = 0, None, None
        return match

    def _contexts(self, steps: Sequence[Step]) -> tuple[Contexts, Along]:
        """What the head sees of a request, and what the target makes of its text in every layer."""
        name = steps[0].request, steps[-1].part.index
        if name not in self._along:
            request = steps[0].visit.request
            indices = {step.part.index for step in steps}
            places = [place for place, part in enumerate(request.steps) if part.index in indices]
            contexts = contexts_of(request, places, list(range(len(request.steps))))
            assert contexts is not None
            count = int(self.target.config.num_hidden_layers)
            logits, features = self.target.alone(contexts.text, list(range(count)))
            assert features is not None
            nodes = {step.part.index: states.cpu() for step, states in decoded(self.target, steps, RIGHT, states=True)}
            text, choice = features.cpu().reshape(len(features), count, -1), tuple(logits.argmax(-1).tolist())
            self._along[name] = contexts, Along(text, nodes, choice, partial(self._row_before, steps[0].request))
        return self._along[name]

    def _row_before(self, request: str, index: int) -> Tensor | None:
        """Of a request's step: what `Along.before` gives."""
        batch = self.visits[request, index].record.requests
        other = batch[[part.request for part in batch].index(request) - 1]
        if other.request not in self.starts:
            return None
        _, along = self._contexts(self.starts[other.request])
        if other.index in along.nodes:
            return along.nodes[other.index][-1]
        last = other.context_len + other.prefill_tokens - 1
        return along.text[last] if other.prefill_tokens and last < along.length else None
