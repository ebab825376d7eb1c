"""The first operation that differs, as a walk and a located fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from specscope.analyze.locate.located import Held, Located, Operation, Stage, Walk
from specscope.measure.locate.answer import likeness, sentence
from specscope.measure.locate.inside_vllm.sheet import ComparedPart, ComparisonSheet
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import Vocabulary

BEHIND = {Stage.TARGET: (Stage.SAMPLING, Stage.VERDICT), Stage.DRAFTER: (Stage.DRAWS,)}  # stages behind a model's own
REPLACED = "(replaced: "
PARTS = {  # by the last part of an operation's name, under which its functions are told
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "value"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("query", "key"), "rotary_emb"),
    **dict.fromkeys(("keys", "values"), "attention"),
    "embedding": "embed_tokens",
}


def _named(sheet: ComparisonSheet, held: Held) -> Operation:
    """With vLLM's class and method: the function that was replaced, else all that it may be."""
    name, code = held.operation.name, sheet.tapped.code.get(sheet.stage, {})
    plain = name.removesuffix(":in").removesuffix(" read")
    head, dot, last = plain.rpartition(".")
    keys = (name, name.removeprefix("later "), plain, f"{head}{dot}{PARTS.get(last, last)}")
    listed = next((code[key] for key in keys if code.get(key)), [])
    replaced = [text for text in listed if REPLACED in text]
    return replace(held.operation, code=" or ".join(replaced[:1] or listed))


def walk_of(sheet: ComparisonSheet, engine: str, reference: str) -> Walk | None:
    """The place of the first difference, or the last one where nothing differs."""
    firsts = [first for stage in (None, *BEHIND[sheet.stage]) if (first := sheet.first(stage)) is not None]
    last = max(sheet.parts, key=lambda part: (part.fed.forward.index, len(part.compared.held)), default=None)
    part = min(firsts, key=lambda first: first.computed, default=last)
    if part is None:
        return None
    held = tuple(replace(each, operation=_named(sheet, each)) for each in part.compared.held)
    return Walk(sheet.stage, part.fed.where, part.compared.rows, held, engine, reference)


def located(sheet: ComparisonSheet, vocabulary: Vocabulary, above: ComparisonSheet | None = None) -> Iterator[Located]:
    """The model's own first difference, and that of the choice behind it. `above`: the target's, of a drafter."""
    for stage in (sheet.stage, *BEHIND[sheet.stage]):
        chosen_wrong = stage is Stage.VERDICT and sheet.first(Stage.SAMPLING) is not None  # by wrong parameters
        if (first := sheet.first(stage)) is not None and not chosen_wrong and not _handed_down(first, above):
            yield _located(sheet, stage, first, vocabulary)


def _handed_down(found: ComparedPart, above: ComparisonSheet | None) -> bool:
    """Whether a drafter's first pass was only given what the target was given wrong in the same step."""
    first = None if above is None else above.first()
    if first is None:
        return False
    made = found.fed.forward
    same_step = made.step == first.fed.forward.step and made.number == 0
    return same_step and found.wrong.name == first.wrong.name and found.wrong.exact


def _located(sheet: ComparisonSheet, stage: Stage, found: ComparedPart, vocabulary: Vocabulary) -> Located:
    counts, pair, (*before, held) = sheet.counts(stage), found.wrong, found.compared.held
    number, first = found.fed.forward.number, found.compared.bad[0]
    which = "the target's forward" if sheet.stage is Stage.TARGET else f"the drafter's pass {number + 1}"
    # The layer whose operations were compared, where an operation is known to be the first of it
    region = pair.name.rsplit(".", 2)[0] if pair.name.startswith("layers.") and "." in pair.name[7:] else ""
    return Located(
        _named(sheet, held),
        sentence([*before, held]),
        looks=likeness(pair, held.allowed, vocabulary),
        smallest=f"{which} of step {found.fed.where}: position {first.position}, token {first.token}",
        where=found.fed.where,
        explained=counts[pair.name],
        differing=counts.total(),
        unit="request step",
        certain=pair.exact or not before or any(each.operation.name.startswith(region) for each in before),
    )


def ruled_out(sheet: ComparisonSheet) -> str:
    """What agrees, where nothing of a model differs."""
    forwards, rows, largest = sheet.rows()
    rows_of, forwards_of = plural(rows, "row"), plural(forwards, "forward")
    return f"The {sheet.stage} agrees at {rows_of} of its operations in {forwards_of} of vLLM, to {largest:.1g}"
