"""One operation as an engine and as a reference have it, and a pass as a sequence of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from specscope.analyze.findings import Reference
from specscope.analyze.locate.located import FedRow, Held, Located, Stage, operation
from specscope.analyze.locate.model.likeness import looks, looks_of_scores
from specscope.analyze.locate.model.reference import FLOOR, relative
from specscope.measure.locate.drive import KVOverwritten
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.history.wording import plural

OF_QUERIES, OF_KEYS = ("q_proj", ".query", ".attention", "o_proj:in"), ("k_proj", "v_proj", ".key", ".value", " read")
LAYERS = re.compile(r"(midlayer|layers\.\d+)$")
AMPLIFIED = 10.0  # by how much an operation may magnify what its input is off; 7 was seen in logits
MOST_AMPLIFIED = 30.0  # by how much rounding may grow beyond what is usual, over all layers
LAYER = 100.0  # by how much a layer of a head may magnify it; 70 was seen in a head of random weights


@dataclass(frozen=True)
class HeldPair:
    name: str
    ours: Tensor  # [rows, width]; of attention's weights [rows, heads, keys]
    right: Tensor
    rows: tuple[FedRow, ...]
    heads: int = 1
    keys: tuple[FedRow, ...] = ()  # of attention's weights
    exact: bool = False  # whether no rounding is allowed
    allowed: float | None = None  # what rounding explains; None: as the pass has it
    certain: bool = True  # False: a region of several operations
    tokens: Tensor | None = field(default=None, repr=False)  # [rows, width] whose values these are, where they differ
    inside: Callable[[float], Iterable[HeldPair]] | None = None  # of a layer its operations, by what it is allowed

    @cached_property
    def errors(self) -> Tensor:
        """[rows, parts] how far ours is off: relative; of weights the sum over keys; of exact values 0 or 1."""
        if self.exact:
            return (self.ours != self.right).float().flatten(1)
        if self.keys:
            return (self.ours - self.right).abs().sum(-1)
        known = self.right.isneginf() == self.ours.isneginf()
        errors = relative(_finite(self.ours), _finite(self.right), self.heads)
        return errors if bool(known.all()) else errors.masked_fill(~known.all(1)[:, None], 1.0)


@dataclass(frozen=True)
class Allowances:
    """What rounding explains: of an operation by itself, and as the error before it may have grown."""

    usual: Mapping[str, float]
    layer: float = AMPLIFIED
    most: float = MOST_AMPLIFIED
    slack: float = 1.0  # by how much more than usual rounding moves this pass

    def of(self, pair: HeldPair, seen: float) -> float:
        """`seen`: the error of the operation before it."""
        if pair.exact:
            return 0.0
        if pair.allowed is not None:
            return pair.allowed
        usual = self.usual.get(pair.name, self.usual.get("norm", FLOOR)) * self.slack
        grown = (self.layer if LAYERS.match(pair.name) else AMPLIFIED) * seen
        return min(max(usual, grown), self.most * usual)


@dataclass
class ComparedPass:
    """One pass of a model for one request, up to what differs first."""

    stage: Stage
    where: Reference
    rows: tuple[FedRow, ...]
    limits: Allowances
    held: list[Held] = field(default_factory=list)
    wrong: HeldPair | None = None

    def compare(self, pairs: Iterable[HeldPair]) -> bool:
        """Hold operations against each other in their order, up to the first that differs; whether one does."""
        for pair in pairs:
            if not len(pair.rows):
                continue
            limit = self.limits.of(pair, next((held.error for held in reversed(self.held) if held.allowed), 0.0))
            errors, place = pair.errors, operation(self.stage, pair.name)
            wrong, largest = int((errors > limit).any(1).sum()), float(errors.max()) if errors.numel() else 0.0
            if wrong and pair.inside is not None and self.compare(pair.inside(limit)):
                return True
            self.held.append(Held(place, limit, largest, len(errors), wrong, np.asarray(errors.numpy(), np.float32)))
            if wrong:
                self.wrong = pair
                return True
        return False

    @property
    def bad(self) -> list[FedRow]:
        assert self.wrong is not None
        off = (self.wrong.errors > self.held[-1].allowed).any(1)
        return [self.wrong.rows[place] for place in off.nonzero()[:, 0].tolist()]


def heads_of(name: str, heads: int, kv_heads: int) -> int:
    """How many parts the rows of an operation inside a layer have."""
    return heads if name.endswith(OF_QUERIES) else kv_heads if name.endswith(OF_KEYS) else 1


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=torch.nan, neginf=0.0)


SHOWN = 12  # tokens of a smallest input that are told
HEAD = "the head's published layout in plain torch, float32"
MODEL = "plain transformers, float32"
# Numbers that name something: by how much they are off says nothing
NAMES = ("tokens", "last token", "draft", "choice", "block table", "parameters")
LOG = 1e-3  # of a log of attention's weights: rounding explains that much


def located_in(
    compared: ComparedPass, text: Sequence[int], history: History, overwritten: Sequence[KVOverwritten]
) -> Located:
    """The operation at which a pass differs first. `overwritten`: KV of the target that changed between steps."""
    wrong, pair, bad = compared.held[-1], compared.wrong, compared.bad
    assert pair is not None
    said, place, where = sentence(compared.held), wrong.operation, compared.where
    is_target = compared.stage is Stage.TARGET
    if is_target and place.name.endswith(" read"):
        story, places = _written(bad, history.requests[where.request], where.index), {row.position for row in bad}
        mine = (each for each in overwritten if each.before.request == where.request and places & {*each.positions})
        if "since" in story and (found := next(mine, None)) is not None:
            story += f", {found.when}"
        said += f"; {story}"
    smallest = smallest_input(bad, where.request, text, history.vocabulary.show)
    at, counts = replace(where, node=None if is_target else bad[0].node), (wrong.differing, wrong.differing, "row")
    return Located(place, said, likeness(pair, wrong.allowed), smallest, at, *counts, pair.certain)


def sentence(held: Sequence[Held]) -> str:
    """How the last operation differs and what agrees before it, with figures."""
    wrong, agree = held[-1], held[:-1]
    by = "" if not wrong.allowed else f", by up to {wrong.error:.2g} (rounding explains {wrong.allowed:.1g})"
    text = f"{wrong.operation.words}: {wrong.differing:,} of {plural(wrong.rows, 'row')} differ{by}"
    if not agree:
        return text
    largest = max(item.error for item in agree[-4:])
    return f"{text}; the {plural(len(agree), 'operation')} before it agree, the last of them to {largest:.1g}"


def smallest_input(bad: Sequence[FedRow], request: str, text: Sequence[int], show: Callable[[int], str]) -> str:
    """The first row that differs, and the tokens up to it."""
    first = min(bad, key=lambda row: row.position)
    tokens = text[max(0, first.position + 1 - SHOWN) : first.position + 1]
    words = " ".join(show(token) for token in tokens)
    node = "" if first.node is None else f", node {first.node} of its tree"
    more = "… " if first.position + 1 > SHOWN else ""
    return f"{request}, the first {plural(first.position + 1, 'token')}{node}: {more}{words}"


def _written(bad: Sequence[FedRow], request: RequestHistory, now: int) -> str:
    """Who wrote the slots that are read wrong in a step."""
    places, parts, low = [row.position for row in bad], list(request.steps), min(row.position for row in bad)
    where = f"positions {low} to {max(places)}" if len(places) > 1 else f"position {low}"
    if low >= next(part.context_len for part in parts if part.index == now):
        return f"{where} were written in this step"
    before = [part for part in parts if part.index < now]
    for part in reversed(before):
        if part.verdict is not None and part.position < low and max(places) <= part.position + len(part.moved):
            step = f"{part.request}@{part.index}"
            return f"{where} are the path that {step} accepted, and its KV had to be moved there"
    paths = [0 if part.verdict is None else len(part.verdict.path) for part in before]
    fed = {b.index: range(b.context_len, b.position + 1 + path) for b, path in zip(before, paths, strict=True)}
    writers = sorted(index for index, some in fed.items() if any(place in some for place in places))
    steps = ", ".join(f"@{index}" for index in writers[:3])
    return f"{where} were written in {steps}, where they agreed, and have changed since"


def likeness(pair: HeldPair, allowed: float) -> str:
    if pair.name == "chosen tokens":
        return ""
    if pair.exact:
        return _numbers(pair)
    if pair.keys:
        ours, right = pair.ours.clamp(min=0).log(), pair.right.log()
        return looks_of_scores(ours, right, rows=pair.rows, keys=pair.keys, allowed=max(allowed, LOG))
    if pair.name in ("d2t", "vocabulary"):
        return _of_map(pair, allowed)
    return looks(pair.ours, pair.right, rows=pair.rows, heads=pair.heads, tokens=pair.tokens, allowed=allowed)


def _numbers(pair: HeldPair) -> str:
    """Whole numbers: by how much they are off, or the first of them."""
    wrong = pair.errors.any(1)
    ours, right = (x[wrong].flatten() for x in (pair.ours, pair.right))
    off, first = (ours - right).tolist(), pair.rows[int(wrong.nonzero()[0])]
    if pair.name not in NAMES and len({*off}) == 1:
        return f"{off[0]:+g} at {len(off):,} of {plural(len(pair.rows), 'row')}, the first at position {first.position}"
    return f"{float(ours[0]):.6g} where it should be {float(right[0]):.6g}"


def _of_map(pair: HeldPair, allowed: float) -> str:
    """What is wrong with the map to the target's vocabulary, or with the mask of what can be drafted."""
    can, ought = (~x.isneginf().all(0) for x in (pair.ours, pair.right))
    missing, extra = (x.nonzero()[:, 0] for x in (ought & ~can, can & ~ought))
    if len(missing) and not len(extra):
        first = int(missing[0])
        if len(missing) > 1 and not bool(can[first:].any()):
            return f"only the first {first} tokens of the vocabulary can be drafted: {len(missing)} after them cannot"
        return f"{len(missing)} of {int(ought.sum())} tokens of the draft vocabulary cannot be drafted"
    places = ought.nonzero()[:, 0]
    right, ours = pair.right[:, places], pair.ours[:, can.nonzero()[:, 0]]
    if ours.shape == right.shape:
        for by in (1, -1, 2, -2):
            if float((ours - right.roll(by, 1)).abs().max()) <= max(allowed, 1e-4) * float(right.abs().max()):
                step = "before" if by > 0 else "behind"
                return f"each draft token stands for the target's token {abs(by)} row of d2t {step} its own"
    if len(missing) and len(extra):
        return f"{len(extra)} tokens outside the draft vocabulary are drafted, and {len(missing)} inside it are not"
    return looks(pair.ours.nan_to_num(neginf=0), pair.right.nan_to_num(neginf=0), rows=pair.rows, allowed=allowed)
