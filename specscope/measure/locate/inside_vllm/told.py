"""The first operation that differs, as a walk and a located fault."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specscope.analyze.locate.located import Held, Located, Stage, Walk
from specscope.measure.locate.answer import likeness, sentence
from specscope.measure.locate.inside_vllm.sheet import ComparisonSheet, FirstDifference
from specscope.measure.locate.inside_vllm.tapped import DRAFTER, TARGET, Tapped
from specscope.measure.locate.pairs import wrong_rows
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import Vocabulary

LOOKED_AT: dict[str, tuple[Stage | None, ...]] = {
    TARGET: (None, Stage.SAMPLING, Stage.VERDICT),
    DRAFTER: (None, Stage.DRAWS),
}
BEYOND = 3  # operations of a walk behind the first that differs
LATER = {"later positions": "positions", "later keys seen": "keys seen"}
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
    if not sheet.parts:
        return None
    firsts = [first for stage in LOOKED_AT[who] if (first := sheet.first(stage)) is not None]
    found = min(firsts, key=lambda first: first.computed, default=None)
    part = max(sheet.parts, key=lambda part: part.fed.forward.index) if found is None else found.part
    end = len(part.held) if found is None else found.place + 1 + BEYOND
    held = tuple(_named(tapped, who, each) for each in part.held[:end])
    rows = max((pair.rows for pair in part.pairs if " read" not in pair.name), key=len, default=())
    return Walk(sheet.stage, part.fed.where, rows, held, engine, reference)


def _named(tapped: Tapped, who: str, held: Held) -> Held:
    """With vLLM's class and method."""
    return replace(held, operation=replace(held.operation, code=code_of(tapped, who, held.operation.name)))


def located(
    tapped: Tapped, sheet: ComparisonSheet, who: str, vocabulary: Vocabulary, above: ComparisonSheet | None = None
) -> list[Located]:
    """The model's own first difference, and that of the choice behind it. `above`: the target's, of a drafter."""
    found = {stage: first for stage in LOOKED_AT[who] if (first := sheet.first(stage)) is not None}
    if Stage.SAMPLING in found:
        found.pop(Stage.VERDICT, None)  # what is chosen by wrong parameters
    return [
        _located(tapped, sheet, who, stage, first, vocabulary)
        for stage, first in found.items()
        if not _handed_down(first, above)
    ]


def _handed_down(found: FirstDifference, above: ComparisonSheet | None) -> bool:
    """Whether a drafter's first pass was only given what the target was given wrong in the same step."""
    first = None if above is None else above.first(None)
    if first is None:
        return False
    made, targets = found.part.fed.forward, first.part.fed.forward
    same_step = made.step == targets.step and made.number == 0
    return same_step and found.pair.name == first.pair.name and found.pair.exact


def _located(
    tapped: Tapped,
    sheet: ComparisonSheet,
    who: str,
    stage: Stage | None,
    found: FirstDifference,
    vocabulary: Vocabulary,
) -> Located:
    counts, part, pair, held = sheet.counts(stage), found.part, found.pair, found.held
    before, first = part.held[: found.place], found.rows[0]
    made, scale = part.fed.forward, ""
    if pair.name.endswith("self_attn.attention"):
        scale = _scale(found, tapped.sizes.get(who, {}))
    which = f"the {who}'s forward" if who == TARGET else f"the drafter's pass {made.number + 1}"
    # The layer whose operations were compared, where an operation is known to be the first of it
    region = pair.name.rsplit(".", 2)[0] if pair.name.startswith("layers.") and "." in pair.name[7:] else ""
    return Located(
        _named(tapped, who, held).operation,
        sentence([*(each for each in before if not each.differs), held]),
        looks=scale or likeness(pair, held.allowed, vocabulary),
        smallest=f"{which} of step {part.fed.where}: position {first.position}, token {first.token}",
        where=part.fed.where,
        explained=counts[pair.name],
        differing=counts.total(),
        unit="request step",
        certain=pair.exact or not before or any(each.operation.name.startswith(region) for each in before),
    )


def _scale(found: FirstDifference, sizes: dict[str, int]) -> str:
    """The factor on the scores that gives what attention gave; "" where none does."""
    fed, pair = found.part.fed, found.pair
    tensors, batch, layer = fed.forward.tensors, fed.batch, pair.name.removesuffix("attention")
    keys, values = tensors.get(f"{layer}keys read.{batch}"), tensors.get(f"{layer}values read.{batch}")
    query = tensors.get(f"{layer}query")
    if keys is None or values is None or query is None or not sizes:
        return ""
    row = wrong_rows(found.held)[-1]  # the one with the longest context
    position = pair.rows[row].position
    at = int((fed.positions == position).nonzero().flatten()[0])
    heads = query[fed.rows[at]].float().view(sizes["num_heads"], -1)
    group = len(heads) // keys.shape[1]
    k, v = (x[: position + 1].float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("hd,khd->hk", heads, k) / heads.shape[1] ** 0.5

    def error(factor: Tensor) -> float:
        mixed = torch.einsum("hk,khd->hd", (scores * factor).softmax(-1), v).flatten()
        return float((mixed - pair.ours[row]).norm() / mixed.norm())

    best = min(SCALES, key=lambda x: error(x.exp()))
    for step in (0.02, 0.002, 0.0002):
        best = min((best + step * i for i in range(-12, 13)), key=lambda x: error(x.exp()))
    factor = float(best.exp())
    if error(best.exp()) > max(found.held.allowed, 1e-4) * 4 or abs(factor - 1) < 1e-3:
        return ""
    return f"as with scores times {factor:.3g} (1/sqrt({heads.shape[1]}) is {heads.shape[1] ** -0.5:.3g})"


def ruled_out(sheet: ComparisonSheet, who: str) -> str:
    """What agrees, where nothing of a model differs."""
    forwards, rows, largest = sheet.rows()
    return (
        f"The {who} agrees at {plural(rows, 'row')} of its operations in {plural(forwards, 'forward')} of vLLM, "
        f"to {largest:.1g}"
    )
