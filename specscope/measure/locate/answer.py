"""A difference that a walk found, in the target or in the drafter, as a fault with its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from specscope.analyze.locate.located import FedRow, Held, Located, Stage
from specscope.analyze.locate.model.likeness import looks, looks_of_scores
from specscope.measure.locate.drive import KVOverwritten
from specscope.measure.locate.pairs import ComparedPass, HeldPair
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.history.wording import plural
from specscope.trace.record.records import RequestStep

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
    wrong, pair = compared.held[-1], compared.wrong
    assert pair is not None
    said, operation, where = sentence(compared.held), wrong.operation, compared.where
    bad = compared.bad
    if compared.stage is Stage.TARGET and operation.name.endswith(" read"):
        story = _written(bad, history.requests[where.request], where.index)
        places = {row.position for row in bad}
        mine = (each for each in overwritten if each.before.request == where.request and places & {*each.positions})
        if "since" in story and (found := next(mine, None)) is not None:
            story += f", {found.when}"
        said += f"; {story}"
    return Located(
        operation,
        said,
        likeness(pair, wrong.allowed),
        smallest_input(bad, where.request, text, history.vocabulary.show),
        replace(where, node=bad[0].node if compared.stage is Stage.DRAFTER else None),
        explained=wrong.differing,
        differing=wrong.differing,
        certain=pair.certain,
    )


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
    places, parts = [row.position for row in bad], list(request.steps)
    where = f"positions {min(places)} to {max(places)}" if len(places) > 1 else f"position {places[0]}"
    if min(places) >= next(part.context_len for part in parts if part.index == now):
        return f"{where} were written in this step"
    for part in reversed(parts):
        if part.index < now and part.verdict is not None and len(part.moved):
            kept = range(part.position + 1, part.position + 1 + len(part.moved))
            if all(place in kept for place in places):
                step = f"{part.request}@{part.index}"
                return f"{where} are the path that {step} accepted, and its KV had to be moved there"
    writers = sorted({part.index for part in parts for place in places if _fed(part, place) and part.index < now})
    steps = ", ".join(f"@{index}" for index in writers[:3])
    return f"{where} were written in {steps}, where they agreed, and have changed since"


def _fed(part: RequestStep, place: int) -> bool:
    return part.context_len <= place <= part.position + (0 if part.verdict is None else len(part.verdict.path))


def likeness(pair: HeldPair, allowed: float) -> str:
    """What the difference looks like."""
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
