"""A difference that a walk found, in the target or in the drafter, as a fault with its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specscope.analyze.audit.contexts import Contexts
from specscope.analyze.findings import Reference as Where
from specscope.analyze.locate.located import FedRow, Held, Located, Operation, Walk
from specscope.analyze.locate.model.likeness import looks, looks_of_scores
from specscope.analyze.locate.model.reference import Inside, ModelReference
from specscope.analyze.locate.model.taps import relative
from specscope.measure.locate.both import Both, PassCompared
from specscope.measure.locate.drive import KVOverwritten
from specscope.measure.locate.inside import BothSides, first_wrong
from specscope.measure.locate.layer_taps import FUSED, code_of
from specscope.measure.locate.target import AMPLIFIED, TARGET, FirstDifference, TargetWatch, hold
from specscope.model.fast.decoder import FusedLayer
from specscope.model.kv_cache import KVCache
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural
from specscope.trace.record.records import RequestStep
from specscope.trace.record.vocabulary import Vocabulary

SHOWN = 12  # tokens of a smallest input that are told
REFERENCE = "plain transformers, float32"
LOG = 1e-3  # of a log of attention's weights: rounding explains that much
READ = ("self_attn.keys read", "self_attn.values read")


def answer(watch: TargetWatch, reference: ModelReference, history: History) -> tuple[Located, Walk]:
    """The first operation that differs, and the walk to it. The watch must have found a difference."""
    difference = watch.difference
    assert difference is not None
    contexts = watch.watched[difference.at.part.request]
    held, step, inside = list(difference.before), None, None
    if difference.call is not None:
        inside = reference.inside(contexts, difference.call.layer, watch.borders[contexts.request])
        known = max((item.error for item in held[-1:]), default=0.0)
        inner, step = first_wrong(difference, inside, contexts, max(difference.held.allowed, AMPLIFIED * known))
        held += inner
    if step is None:
        held.append(difference.held)
    overwritten = [each for each in watch.drive.overwritten if each.request == contexts.request]
    located = _located(difference, held, step, inside, contexts, history, overwritten)
    how = "" if difference.inner is None else f", {difference.inner.how}"
    walk = Walk(TARGET, difference.at.where, difference.at.rows, tuple(held), f"specscope{how}", REFERENCE)
    return located, walk


def _located(
    difference: FirstDifference,
    held: Sequence[Held],
    step: BothSides | None,
    inside: Inside | None,
    contexts: Contexts,
    history: History,
    overwritten: Sequence[KVOverwritten],
) -> Located:
    wrong, agree = held[-1], [item for item in held[:-1] if item.rows]
    rows = difference.at.rows if step is None else step.rows
    smallest = smallest_input(rows, wrong, contexts, history.vocabulary.show)
    text = sentence(wrong, agree)
    likeness = _looks(difference, step, inside, wrong.allowed) if step is not None else _border_looks(difference)
    operation, certain = wrong.operation, True
    if step is not None and step.name in READ:
        parts = history.requests[contexts.request].steps
        bad = [row for row, off in zip(step.rows, (step.off > wrong.allowed).any(1).tolist(), strict=True) if off]
        story, code = _written(bad, difference.at.part, parts)
        places = {row.position for row in bad}
        if (when := next((each.when for each in overwritten if places & {*each.positions}), "")) and "since" in story:
            story += f", {when}"
        text, operation = f"{text}; {story}", _with_code(operation, code)
    elif step is None and difference.inner is not None and difference.call is not None:
        certain = difference.inner.same
        if certain:
            made_by = FusedLayer.run if difference.inner.how == FUSED else difference.call.module
            operation = _with_code(operation, code_of(made_by))
        else:
            side = _side(difference, inside)
            text += f"; run again {difference.inner.how} it agrees: the compiled kernel differs ({side})"
            operation = _with_code(operation, "kernels/cpu/layer.py")
    return Located(
        operation,
        text,
        likeness,
        smallest,
        difference.at.where,
        explained=wrong.differing,
        differing=wrong.differing,
        unit="row",
        certain=certain,
    )


def sentence(wrong: Held, agree: Sequence[Held]) -> str:
    """How an operation differs and what agrees before it, with figures."""
    name = wrong.operation.words
    by = "" if not wrong.allowed else f", by up to {wrong.error:.2g} (rounding explains {wrong.allowed:.1g})"
    text = f"{name}: {wrong.differing:,} of {plural(wrong.rows, 'row')} differ{by}"
    if not agree:
        return text
    largest = max(item.error for item in agree[-4:])
    return f"{text}; the {plural(len(agree), 'operation')} before it agree, the last of them to {largest:.1g}"


def _looks(difference: FirstDifference, step: BothSides, inside: Inside | None, allowed: float) -> str:
    """What an inner operation's difference looks like."""
    if step.keys:
        ours, right = (x.unflatten(1, (step.heads, -1))[..., :-1].clamp(min=0).log() for x in (step.ours, step.right))
        elsewhere = step.ours.unflatten(1, (step.heads, -1))[..., -1]
        beyond = int((elsewhere > allowed).any(1).sum())
        keys = [FedRow(place, -1) for place in step.keys[:-1]]
        phrase = looks_of_scores(ours, right, rows=step.rows, keys=keys, allowed=max(allowed, 1e-3))
        seen = f"{plural(beyond, 'row')} attend to slots that are not on their own path" if beyond else ""
        return "; ".join(part for part in (phrase, seen) if part)
    groups = {} if inside is None else _experts(inside, difference)
    vectors = {}
    if step.name.endswith("_proj") and difference.call is not None and difference.call.module is not None:
        bias = getattr(difference.call.module.get_submodule(step.name), "bias", None)
        if isinstance(bias, Tensor) and bias.shape == step.right.shape[1:]:
            vectors["the bias"] = bias.detach().float().cpu()
    others = None
    if inside is not None and step.name.removesuffix(" read").rstrip("s") in ("self_attn.key", "self_attn.value"):
        others = inside.taps[step.name.removesuffix(" read").rstrip("s")]
    elif inside is not None and step.name in inside.taps:
        others = inside.taps[step.name]
    return looks(
        step.ours,
        step.right,
        rows=step.rows,
        heads=step.heads,
        others=others,
        groups=groups if len(step.rows) == len(difference.at.rows) else {},
        vectors=vectors,
        allowed=allowed,
    )


def _experts(inside: Inside, difference: FirstDifference) -> dict[str, Tensor]:
    """Which experts each row is given to, where the layer has a router that tells."""
    for name, every in inside.taps.items():
        whole = bool((every == every.round()).all()) and 1 <= every.shape[1] <= 64
        if name.startswith("mlp.") and "[" in name and whole and float(every.max()) >= 1:
            return {"expert": every[difference.at.reference].long()}
    return {}


def _border_looks(difference: FirstDifference) -> str:
    """What the difference at a border looks like: of tokens and positions, by how much they are off."""
    if difference.name in ("tokens", "positions"):
        off = (difference.ours - difference.right)[:, 0]
        bad = off[off != 0]
        if difference.name == "positions" and len(bad) and bool((bad == bad[0]).all()):
            count = f"{len(bad):,} of {plural(len(off), 'row')}"
            first = next(row for row, by in zip(difference.at.rows, off.tolist(), strict=True) if by)
            return f"{int(bad[0]):+d} at {count}, the first at position {first.position}"
        return ""
    return looks(difference.ours, difference.right, rows=difference.at.rows, allowed=difference.held.allowed)


def smallest_input(rows: Sequence[FedRow], wrong: Held, contexts: Contexts, show: Callable[[int], str]) -> str:
    """The first row that differs, and the tokens up to it."""
    bad = torch.from_numpy(wrong.errors > wrong.allowed).any(1).tolist()
    first = min((row for row, off in zip(rows, bad, strict=False) if off), key=lambda row: row.position, default=None)
    if first is None:
        return ""
    tokens = contexts.text[max(0, first.position + 1 - SHOWN) : first.position + 1]
    words = " ".join(show(token) for token in tokens)
    node = "" if first.node is None else f", node {first.node} of its tree"
    more = "… " if first.position + 1 > SHOWN else ""
    return f"{contexts.request}, the first {plural(first.position + 1, 'token')}{node}: {more}{words}"


def _written(bad: Sequence[FedRow], now: RequestStep, parts: Sequence[RequestStep]) -> tuple[str, str]:
    """Who wrote the slots that are read wrong, and where that is done."""
    places = [row.position for row in bad]
    if not places:
        return "", ""
    where = f"positions {min(places)} to {max(places)}" if len(places) > 1 else f"position {places[0]}"
    if min(places) >= now.context_len:
        return f"{where} were written in this very step", code_of(KVCache.write_rows)
    for part in reversed(parts):
        if part.index < now.index and part.verdict is not None and len(part.moved):
            kept = range(part.position + 1, part.position + 1 + len(part.moved))
            if all(place in kept for place in places):
                step = f"{part.request}@{part.index}"
                return f"{where} are the path that {step} accepted, whose KV had to be moved there", code_of(
                    KVCache.move
                )
    writers = sorted({part.index for part in parts for place in places if _fed(part, place) and part.index < now.index})
    steps = ", ".join(f"@{index}" for index in writers[:3])
    return f"{where} were written in {steps}, where they agreed, and have changed since", code_of(KVCache.reserve)


def _fed(part: RequestStep, place: int) -> bool:
    return part.context_len <= place <= part.position + (0 if part.verdict is None else len(part.verdict.path))


def _side(difference: FirstDifference, inside: Inside | None) -> str:
    """In which part of a layer its compiled kernel differs, by the keys and values that it wrote."""
    if inside is None or difference.keys is None or difference.values is None:
        return "its output"
    rows = [row.position for row in difference.at.rows if row.node is None and row.position < len(difference.keys)]
    reference = torch.tensor(rows, dtype=torch.long)
    for name, ours in (("key", difference.keys), ("value", difference.values)):
        if hold(name, relative(ours[reference], inside.taps[f"self_attn.{name}"][reference]), 1e-3).differs:
            return f"before the KV is written: the {name}s differ"
    return "behind the KV, which agrees"


def _with_code(operation: Operation, code: str) -> Operation:
    return replace(operation, code=code) if code else operation


# Of a drafter


def located_in(compared: PassCompared, where: Where, contexts: Contexts, vocabulary: Vocabulary) -> Located:
    """The operation at which a pass differs first."""
    wrong, both = compared.held[-1], compared.wrong
    assert both is not None
    agree = [held for held in compared.held[:-1] if held.rows]
    return Located(
        wrong.operation,
        sentence(wrong, agree),
        likeness(both, wrong.allowed, vocabulary),
        smallest_input(both.rows, wrong, contexts, vocabulary.show),
        replace(where, node=_node(both, wrong.errors > wrong.allowed)),
        explained=wrong.differing,
        differing=wrong.differing,
        certain=both.certain,
    )


def likeness(both: Both, allowed: float, vocabulary: Vocabulary) -> str:
    """What the difference looks like."""
    if both.looks:
        return both.looks
    if both.keys:
        ours, right = both.ours.clamp(min=0).log(), both.right.log()
        return looks_of_scores(ours, right, rows=both.rows, keys=both.keys, allowed=max(allowed, LOG))
    if both.name == "positions":
        return _shifted(both)
    if both.name in ("d2t", "vocabulary"):
        return _of_map(both, allowed, vocabulary)
    return looks(both.ours, both.right, rows=both.rows, heads=both.heads, others=both.others, allowed=allowed)


def _node(both: Both, wrong: object) -> int | None:
    """The first node that shows it."""
    for row, off in zip(both.rows, wrong.any(1).tolist(), strict=False):  # type: ignore[attr-defined]
        if off:
            return row.node
    return None


def _shifted(both: Both) -> str:
    """By how much positions are off."""
    off = (both.ours - both.right)[:, 0].tolist()
    bad = [by for by in off if by]
    if len(set(bad)) != 1:
        return ""
    first = next(row for row, by in zip(both.rows, off, strict=True) if by)
    return f"{int(bad[0]):+d} at {len(bad)} of {len(off)} rows, the first at position {first.position}"


def _of_map(both: Both, allowed: float, vocabulary: Vocabulary) -> str:
    """What is wrong with the map to the target's vocabulary, or with the mask of what can be drafted."""
    can, ought = (~x.isneginf().all(0) for x in (both.ours, both.right))
    missing, extra = (x.nonzero()[:, 0].tolist() for x in (ought & ~can, can & ~ought))
    if missing and not extra:
        first = int(can.nonzero().max()) + 1 if bool(can.any()) else 0
        if first <= missing[0] and len(missing) > 1:
            return (
                f"the first {missing[0]} tokens of the vocabulary alone: {len(missing)} behind them cannot be drafted"
            )
        shown = ", ".join(f"{token} ({vocabulary.show(token)})" for token in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        return f"of {int(ought.sum())} tokens that can be drafted {shown}{more} cannot"
    places = ought.nonzero()[:, 0]
    right, ours = both.right[:, places], both.ours[:, can.nonzero()[:, 0]]
    if ours.shape == right.shape:
        for by in (1, -1, 2, -2):
            if float((ours - right.roll(by, 1)).abs().max()) <= max(allowed, 1e-4) * float(right.abs().max()):
                step = "before" if by > 0 else "behind"
                return f"each draft token stands for the target's token {abs(by)} row of d2t {step} its own"
    if missing and extra:
        return f"{len(extra)} tokens are drafted that the head does not have, and {len(missing)} that it has are not"
    return looks(both.ours.nan_to_num(neginf=0), both.right.nan_to_num(neginf=0), rows=both.rows, allowed=allowed)
