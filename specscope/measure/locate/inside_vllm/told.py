"""The first operation that differs, as a walk and a located fault."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specscope.analyze.locate.located import Held, Located, Stage, Walk
from specscope.analyze.locate.model.likeness import looks
from specscope.analyze.locate.operations import operation
from specscope.measure.locate.inside_vllm.sheet import (
    BEYOND,
    EXACT,
    LATER,
    STAGES,
    ComparedPart,
    ComparisonSheet,
    HeldRows,
    computed,
    heads_of,
)
from specscope.measure.locate.inside_vllm.tapped import DRAFTER, TARGET, Tapped
from specscope.trace.history.wording import plural

NAMED = {TARGET: Stage.TARGET, DRAFTER: Stage.DRAFTER}
LOOKED_AT: dict[str, tuple[Stage | None, ...]] = {
    TARGET: (None, Stage.SAMPLING, Stage.VERDICT),
    DRAFTER: (None, Stage.DRAWS),
}
REPLACED = "(replaced: "
PARTS = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
SCALES = torch.linspace(-3, 3, 241)  # logarithms of factors on the scores that are tried


def code_of(tapped: Tapped, who: str, name: str) -> str:
    """vLLM's class and method of an operation; where one of its functions was replaced, that one."""
    code = tapped.code.get(who, {})
    listed = next((code[key] for key in _keys(name) if code.get(key)), [])
    return next((text for text in listed if REPLACED in text), listed[0] if listed else "")


def _keys(name: str) -> list[str]:
    """Under which names an operation's functions may be told."""
    plain = name.removesuffix(":in").removesuffix(" read")
    head, dot, last = plain.rpartition(".")
    kept = [name, LATER.get(name, name), plain]
    if last in ("query", "key"):
        kept.append(f"{head}{dot}rotary_emb")
    if last in ("value", "keys", "values"):
        kept += [f"{head}{dot}attention"] if last != "value" else [f"{head}{dot}qkv_proj"]
    if plain == "embedding":
        kept.append("embed_tokens")
    kept.append(f"{head}{dot}{PARTS.get(last, 'gate_up_proj' if last == 'up_proj' else last)}")
    return kept


def walk_of(tapped: Tapped, sheet: ComparisonSheet, who: str, engine: str, reference: str) -> Walk | None:
    """The place of the first difference, or the last one where nothing differs."""
    if not sheet.places:
        return None
    stages = LOOKED_AT[who]
    found = min((first for stage in stages if (first := sheet.first(stage)) is not None), key=computed, default=None)
    place = found[0] if found is not None else max(sheet.places, key=lambda place: place.fed.forward.index)
    end = len(place.cells)
    if found is not None:
        end = min(place.cells.index(found[1]) + 1 + BEYOND, end)
    held = tuple(_held(tapped, who, cell) for cell in place.cells[:end])
    rows = max((cell.rows for cell in place.cells if " read" not in cell.name), key=len, default=())
    return Walk(NAMED[who], place.fed.where, rows, held, engine, reference)


def _held(tapped: Tapped, who: str, cell: HeldRows) -> Held:
    return cell.held(STAGES.get(cell.name, NAMED[who]), code_of(tapped, who, cell.name))


def located(tapped: Tapped, sheet: ComparisonSheet, who: str, above: ComparisonSheet | None = None) -> list[Located]:
    """The model's own first difference, and that of the choice behind it. `above`: the target's, of a drafter."""
    found = {stage: first for stage in LOOKED_AT[who] if (first := sheet.first(stage)) is not None}
    if Stage.SAMPLING in found:
        found.pop(Stage.VERDICT, None)  # what is chosen by wrong parameters
    own = found.items()
    return [_located(tapped, sheet, who, stage, *first) for stage, first in own if not _handed_down(first, above)]


def _handed_down(found: tuple[ComparedPart, HeldRows], above: ComparisonSheet | None) -> bool:
    """Whether a drafter's first pass was only given what the target was given wrong in the same step."""
    first = None if above is None else above.first(None)
    if first is None:
        return False
    (place, cell), (target, wrong) = found, first
    same_step = place.fed.forward.step == target.fed.forward.step and place.fed.forward.number == 0
    return same_step and cell.name == wrong.name and cell.name in EXACT


def _located(
    tapped: Tapped, sheet: ComparisonSheet, who: str, stage: Stage | None, place: ComparedPart, cell: HeldRows
) -> Located:
    counts = sheet.counts(stage)
    what = operation(stage or NAMED[who], cell.name, code_of(tapped, who, cell.name))
    before = place.cells[: place.cells.index(cell)]
    wrong = cell.wrong
    rows = [row for row, bad in zip(cell.rows, wrong.tolist(), strict=True) if bad]
    first = rows[0]
    made = place.fed.forward
    which = f"the {who}'s forward" if who == TARGET else f"the drafter's pass {made.number + 1}"
    return Located(
        what,
        sentence=f"{_agree(before)}; {_differ(cell)}",
        looks=_looks(tapped, who, place, cell),
        smallest=f"{which} of step {place.fed.where}: position {first.position}, token {first.token}",
        where=place.fed.where,
        explained=counts[cell.name],
        differing=counts.total(),
        unit="request step",
        certain=LATER.get(cell.name, cell.name) in EXACT
        or any(other.name.startswith(_part(cell.name)) for other in before)
        or not before,
    )


def _part(name: str) -> str:
    """The region whose operations were compared, where an operation is known to be the first of it."""
    return name.rsplit(".", 2)[0] if name.startswith("layers.") and "." in name[7:] else ""


def _agree(before: Sequence[HeldRows]) -> str:
    if not before:
        return "nothing is computed before it"
    before = [cell for cell in before if not bool(cell.wrong.any())]
    largest = max((float(cell.errors.max()) for cell in before if cell.errors.numel()), default=0.0)
    exactly = f"to {largest:.1g}" if largest else "exactly"
    return f"{plural(len(before), 'operation')} before it agree {exactly}"


def _differ(cell: HeldRows) -> str:
    bad, count = int(cell.wrong.sum()), len(cell.errors)
    words = operation(Stage.TARGET, cell.name).words
    if LATER.get(cell.name, cell.name) in EXACT:
        return f"{words}: {bad} of {plural(count, 'row')} differ"
    largest, rounding = float(cell.errors.max()), f"rounding explains {cell.allowed:.1g}"
    return f"{words}: {bad} of {plural(count, 'row')} differ, by up to {largest:.2g} of their size ({rounding})"


def _looks(tapped: Tapped, who: str, place: ComparedPart, cell: HeldRows) -> str:
    if LATER.get(cell.name, cell.name) in EXACT:
        return _numbers(cell)
    sizes = tapped.sizes.get(who, {})
    if cell.name.endswith("self_attn.attention") and (scale := _scale(place, cell, sizes)):
        return scale
    heads, allowed = heads_of(cell.name, sizes), max(cell.allowed, 1e-6)
    if cell.values_of is not None:
        return looks(cell.ours, cell.right, rows=cell.rows, tokens=cell.values_of, allowed=allowed)
    return looks(cell.ours, cell.right, rows=cell.rows, heads=heads, others=cell.right, allowed=allowed)


def _numbers(cell: HeldRows) -> str:
    """Whole numbers: by how much they are off, or the first of them."""
    ours, right = (x[cell.wrong].flatten().long() for x in (cell.ours, cell.right))
    off = ours - right
    if cell.name == "parameters":
        return f"{float(cell.ours[cell.wrong][0]):.3g} where it should be {float(cell.right[cell.wrong][0]):.3g}"
    if cell.name not in ("tokens", "last token", "draft", "choice", "block table") and bool((off == off[0]).all()):
        return f"{abs(int(off[0]))} {'more' if off[0] > 0 else 'less'} at {plural(len(off), 'row')}"
    return f"{int(ours[0])} where it should be {int(right[0])}"


def _scale(place: ComparedPart, cell: HeldRows, sizes: dict[str, int]) -> str:
    """The factor on the scores that gives what attention gave; "" where none does."""
    tensors, batch, layer = place.fed.forward.tensors, place.fed.batch, cell.name.removesuffix("attention")
    keys, values = tensors.get(f"{layer}keys read.{batch}"), tensors.get(f"{layer}values read.{batch}")
    query = tensors.get(f"{layer}query")
    if keys is None or values is None or query is None or not sizes:
        return ""
    row = int(cell.wrong.nonzero().flatten()[-1])  # the one with the longest context
    position = cell.rows[row].position
    at = int((place.fed.positions == position).nonzero().flatten()[0])
    heads = query[place.fed.rows[at]].float().view(sizes["num_heads"], -1)
    group = len(heads) // keys.shape[1]
    k, v = (x[: position + 1].float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("hd,khd->hk", heads, k) / heads.shape[1] ** 0.5

    def error(factor: Tensor) -> float:
        mixed = torch.einsum("hk,khd->hd", (scores * factor).softmax(-1), v).flatten()
        return float((mixed - cell.ours[row]).norm() / mixed.norm())

    best = min(SCALES, key=lambda x: error(x.exp()))
    for step in (0.02, 0.002, 0.0002):
        best = min((best + step * i for i in range(-12, 13)), key=lambda x: error(x.exp()))
    factor = float(best.exp())
    if error(best.exp()) > max(cell.allowed, 1e-4) * 4 or abs(factor - 1) < 1e-3:
        return ""
    return f"as with scores times {factor:.3g} (1/sqrt({heads.shape[1]}) is {heads.shape[1] ** -0.5:.3g})"


def ruled_out(sheet: ComparisonSheet, who: str) -> str:
    """What agrees, where nothing of a model differs."""
    forwards, rows, largest = sheet.rows()
    return (
        f"The {who} agrees at {plural(rows, 'row')} of its operations in {plural(forwards, 'forward')} of vLLM, "
        f"to {largest:.1g}"
    )
