"""An EAGLE head once more under a named mistake: other features, other positions, another vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from specscope.analyze.audit.contexts import Ask, AuditedStep, Contexts, contexts_of
from specscope.analyze.audit.model.head import KV, Head
from specscope.analyze.audit.model.rows import Models
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.rerun import target
from specscope.analyze.diagnose.rerun.match import Match, compare
from specscope.analyze.verify.case import Case, Step
from specscope.plans.plan import DynamicPlan
from specscope.trace.record.tree import ROOT

LONGEST = 12  # steps of another request of the batch that are run for its features


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
Turned = Callable[[Tensor, int, bool], Tensor]  # of positions, where the prompt ends, and whether nodes are drafted
Fed = Callable[[list[int], Along, Sequence[Step]], Sequence[int]]  # the tokens of the text as they are fed


def of_layers(along: Tensor, layers: tuple[int, ...]) -> Tensor:
    """The features of some layers side by side."""
    return along[:, list(layers)].flatten(1)


@dataclass(frozen=True)
class HeadMistake:
    """How a head is fed, by mistake or as it should be."""

    name: str
    cause: Cause
    feed: Feed = lambda along, layers, steps: of_layers(along.text, layers)
    turned: Turned = lambda positions, prompt, drafted: positions
    base: float = 1.0  # the rotary base times this
    tokens: Callable[[Tensor], Tensor] = lambda d2t: d2t
    fed: Fed = lambda text, along, steps: text
    known: int | None = None  # the head chooses among this many first tokens only
    by_slot: bool = False  # a branch of the tree reads its own slots, also where it began at another branch's node


def _from(places: Callable[[int, Sequence[Step]], Tensor]) -> Feed:
    """Each position gets the feature of another one. `places`: of the text's length and steps, whose, [T]."""
    return lambda along, layers, steps: of_layers(along.text[places(along.length, steps)], layers)


def _shifted(by: int) -> Feed:
    """Each position gets the feature of the one `by` further on."""
    return _from(lambda length, steps: (torch.arange(length) + by).clamp(0, length - 1))


def _prompt_of(steps: Sequence[Step]) -> list[int]:
    info = steps[0].visit.request.info
    return [] if info is None else info.prompt_tokens.tolist()


def _prompts_last(length: int, steps: Sequence[Step]) -> Tensor:
    """Every token of the prompt has its last one's."""
    places, count = torch.arange(length), len(_prompt_of(steps))
    places[:count] = max(count - 1, 0)
    return places


def _of_roots(length: int, steps: Sequence[Step]) -> Tensor:
    """Accepted tokens have their step's root's."""
    places = torch.arange(length)
    for step in steps:
        places[step.after : step.after + len(step.verdict.path)] = step.after - 1
    return places


def _without(positions: Callable[[Sequence[Step], int], Iterable[int]]) -> Feed:
    """Zeros at some positions."""

    def feed(along: Along, layers: tuple[int, ...], steps: Sequence[Step]) -> Tensor:
        features = of_layers(along.text, layers).clone()
        features[[position for position in positions(steps, along.length) if position < along.length]] = 0
        return features

    return feed


def _accepted(steps: Sequence[Step], length: int) -> list[int]:
    return [step.after + i for step in steps for i in range(len(step.verdict.path))]


def _of_nodes(place: Callable[[int, int], int]) -> Feed:
    """Accepted tokens get the features of other nodes. `place`: of a token's place on the path and the tree's rows."""

    def feed(along: Along, layers: tuple[int, ...], steps: Sequence[Step]) -> Tensor:
        features = of_layers(along.text, layers).clone()
        for step in steps:
            nodes = along.nodes.get(step.part.index)
            for i in range(len(step.verdict.path)):
                if nodes is not None and step.after + i < len(features):
                    features[step.after + i] = nodes[place(i, len(nodes)), list(layers)].flatten()
        return features

    return feed


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


def _behind_chunks(token: Callable[[list[int], Along, list[int], int], int]) -> Fed:
    """Another token behind each of the prompt's prefill chunks but the last. `token`: of text, prompt and place."""

    def fed(text: list[int], along: Along, steps: Sequence[Step]) -> Sequence[int]:
        prompt, tokens = _prompt_of(steps), list(text)
        for part in steps[0].visit.request.steps:
            place = part.context_len + part.prefill_tokens
            if 0 < place < len(prompt) and part.verdict is None:
                tokens[place] = token(text, along, prompt, place)
        return tokens

    return fed


FED, PLACE, MAP = Cause.DRAFTER_FED, Cause.POSITIONS, Cause.DRAFT_VOCABULARY
RIGHT = HeadMistake("as it should be", FED)
MISTAKES = (
    HeadMistake("the features of the position before", FED, _shifted(-1)),
    HeadMistake("the features of the row before in the batch", FED, _rows_before),
    HeadMistake("the features of two positions before", FED, _shifted(-2)),
    HeadMistake("the features of the position after", FED, _shifted(1)),
    HeadMistake("the root's features for all tokens of a step", FED, _from(_of_roots)),
    HeadMistake("the features of the tree's first nodes for the accepted ones", FED, _of_nodes(lambda i, n: i + 1)),
    HeadMistake("the features of the tree's last nodes for the accepted ones", FED, _of_nodes(lambda i, n: n - 1 - i)),
    HeadMistake("the features of the prompt's last token for all of it", FED, _from(_prompts_last)),
    HeadMistake("no features at all", FED, _without(lambda steps, length: range(length))),
    HeadMistake("no features of accepted tokens", FED, _without(_accepted)),
    HeadMistake("no features of the prompt", FED, _without(lambda steps, length: range(steps[0].after - 1))),
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
        FED,
        fed=_behind_chunks(lambda text, along, prompt, place: prompt[-1]),
    ),
    HeadMistake(
        "the target's choice fed behind each prefill chunk",
        FED,
        fed=_behind_chunks(lambda text, along, prompt, place: along.choice[place - 1]),
    ),
    HeadMistake(
        "the first output token fed behind each prefill chunk",
        FED,
        fed=_behind_chunks(lambda text, along, prompt, place: text[len(prompt)]),
    ),
    HeadMistake(
        "everything behind the prompt one position too far",
        PLACE,
        turned=lambda positions, prompt, drafted: positions + (positions >= prompt),
    ),
    HeadMistake(
        "drafted nodes one position too far", PLACE, turned=lambda positions, prompt, drafted: positions + int(drafted)
    ),
    HeadMistake(
        "drafted nodes one position too near", PLACE, turned=lambda positions, prompt, drafted: positions - int(drafted)
    ),
    HeadMistake("no rotary positions", PLACE, turned=lambda positions, prompt, drafted: positions * 0.0),
    HeadMistake("rotary positions halved", PLACE, turned=lambda positions, prompt, drafted: positions * 0.5),
    HeadMistake("rotary positions doubled", PLACE, turned=lambda positions, prompt, drafted: positions * 2.0),
    HeadMistake("the vocabulary's map in reverse order", MAP, tokens=lambda d2t: d2t.flip(0)),
    HeadMistake("the vocabulary's map one row on", MAP, tokens=lambda d2t: d2t.roll(1)),
    HeadMistake("the vocabulary's map one row back", MAP, tokens=lambda d2t: d2t.roll(-1)),
    HeadMistake(
        "the vocabulary's offset added twice",
        MAP,
        tokens=lambda d2t: (2 * d2t - torch.arange(len(d2t))).clamp(max=int(d2t.max())),
    ),
    HeadMistake("no map of the vocabulary", MAP, tokens=lambda d2t: torch.arange(len(d2t))),
    *(
        HeadMistake(f"a rotary base {factor:g} times as large", PLACE, base=factor)
        for factor in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    ),
)


class MovedHead(Head):
    """A head under a mistake of its positions, its rotary base or its slots."""

    mistake = RIGHT
    prompt = 0  # positions of the prompt: what is fed while decoding comes after them
    slots = 1  # branches of a tree
    rows_at_work: frozenset[int] | None = None  # the rows of the text that are turned wrongly; None: all
    _drafted = False

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        places, turned = self.mistake.turned(positions, self.prompt, self._drafted), x
        if self.mistake.base == 1:
            turned = super()._turn(x, places)
        else:
            half = self.turned // 2
            frequency = self.rotary.inv_freq * self.mistake.base ** (-torch.arange(half) / half)
            angle = torch.outer(places.float(), frequency)[:, None]
            cos, sin = (torch.cat([y, y], dim=-1) for y in (angle.cos(), angle.sin()))
            turned = self._turn_by(x, cos, sin)
        if self.rows_at_work is None or self._drafted:
            return turned
        wrong = torch.tensor([place in self.rows_at_work for place in positions.tolist()])[:, None, None]
        return torch.where(wrong, turned, super()._turn(x, positions))

    def _trees(self, asked: Sequence[Ask], out: Tensor, kv: list[KV]) -> Iterator[tuple[list[Ask], Tensor]]:
        self._drafted = True
        if self.mistake.by_slot:
            for step in {id(step): step for step, _ in asked}.values():
                yield from self._by_slot(step, [node for other, node in asked if other is step], self.slots, out, kv)
        else:
            yield from super()._trees(asked, out, kv)
        self._drafted = False

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


class HeadAgain:
    """A head over its target, asked about the first steps of requests."""

    right = RIGHT

    def __init__(self, models: Models, case: Case) -> None:
        assert models.options.draft is not None
        self.dtype, self.target, self.history = case.dtype, models.target, case.history
        self.visits = {(visit.request.id, visit.part.index): visit for visit in case.visits}
        self.firsts: dict[str, list[Step]] = {}  # steps of each request that are run for its features
        for step in case.steps:
            mine = self.firsts.setdefault(step.request, [])
            if len(mine) < LONGEST and (mine or step.last is None):
                mine.append(step)
        self.head = MovedHead(models.options.draft, self.target.model)
        self.head.to(torch.float32)
        self.head.slots = case.plan.top if isinstance(case.plan, DynamicPlan) else 1  # branches at each level
        self.tokens = self.head.tokens
        self._along: dict[tuple[str, int], tuple[Contexts, Along]] = {}

    def ask(self, steps: Sequence[Step], mistake: HeadMistake, back: int | None) -> Match:
        """The last of some first steps, the mistake at work on the rows that were fed so many steps before it; None: on
        all rows."""
        notes = steps[-1 - (back or 0)].part.notes
        fed = frozenset[int]() if notes is None else frozenset(notes.fed_position.tolist())
        return self._asked(steps, mistake, None if back is None else fed, [steps[-1]])[0]

    def step_by_step(self, steps: Sequence[Step]) -> Iterator[Match]:
        """Each of these steps without a mistake."""
        yield from self._asked(steps, RIGHT, None, steps)

    def _asked(
        self, steps: Sequence[Step], mistake: HeadMistake, at_work: frozenset[int] | None, only: Sequence[Step]
    ) -> list[Match]:
        """How well some of the steps agree. `at_work`: the positions at which the mistake is at work, None: all."""
        head, layers = self.head, tuple(layer for layer in self.head.layers if isinstance(layer, int))
        if len(layers) < len(head.layers):
            return [Match() for _ in only]
        contexts, along = self._contexts(steps)
        # The pair of slot t holds the token at t + 1: the prompt's own end one slot before its last token
        head.mistake, head.prompt, head.rows_at_work = mistake, contexts.prompt_len - 1, at_work
        head.tokens = mistake.tokens(self.tokens)
        fed = replace(contexts, text=[*mistake.fed(contexts.text, along, steps)])
        features = mistake.feed(along, layers, steps)
        if at_work is not None:
            wrong = torch.tensor([place in at_work for place in range(along.length)])[:, None]
            features = torch.where(wrong, features, of_layers(along.text, layers))
        judged = {audited.part.index: audited for audited in contexts.steps if audited.rows[ROOT] >= 1}
        asked: list[Ask] = [
            (audited, node)
            for step in only
            if (audited := judged.get(step.part.index)) is not None
            for node in sorted(audited.rows)
            if audited.part.tree.children(node)
        ]
        rows: dict[int, dict[int, Tensor]] = {step.part.index: {} for step in only}
        for some, logits in head.rows(fed, features, asked):
            for (audited, node), row in zip(some, logits, strict=True):
                rows[audited.part.index][node] = row
        head.mistake, head.tokens, head.rows_at_work = RIGHT, self.tokens, None
        return [compare(step, rows[step.part.index], self.dtype, drafter=True, known=mistake.known) for step in only]

    def _contexts(self, steps: Sequence[Step]) -> tuple[Contexts, Along]:
        """What the head sees of a request, and what the target makes of its text in every layer."""
        name = steps[0].request, steps[-1].part.index
        if name not in self._along:
            request = steps[0].visit.request
            indices = {step.part.index for step in steps}
            places = [place for place, part in enumerate(request.steps) if part.index in indices]
            contexts = contexts_of(self.history, request.id, places)
            assert contexts is not None
            count = int(self.target.config.num_hidden_layers)
            logits, features = self.target.alone(contexts.text, list(range(count)))
            assert features is not None
            nodes = {
                step.part.index: states.cpu()
                for step, states in target.decoded(self.target, steps, target.RIGHT, states=True)
            }
            text, choice = features.cpu().reshape(len(features), count, -1), tuple(logits.argmax(-1).tolist())
            self._along[name] = contexts, Along(text, nodes, choice, partial(self._row_before, steps[0].request))
        return self._along[name]

    def _row_before(self, request: str, index: int) -> Tensor | None:
        """Of a request's step: what `Along.before` gives."""
        batch = self.visits[request, index].record.requests
        other = batch[[part.request for part in batch].index(request) - 1]
        steps = self.firsts.get(other.request)
        if not steps:
            return None
        _, along = self._contexts(steps)
        if other.index in along.nodes:
            return along.nodes[other.index][-1]
        last = other.context_len + other.prefill_tokens - 1
        return along.text[last] if other.prefill_tokens and last < along.length else None
