"""`specscope audit --trainer FOLDER`: the head in training beside the head that served a capture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from specscope.analyze.findings import Exit
from specscope.analyze.table import Table
from specscope.analyze.text import VERDICT, header_block, table_block
from specscope.errors import UserError
from specscope.measure.judges import audit_options, target_named
from specscope.measure.trainer.folders import (
    FolderDifference,
    read_trained,
    served_dtype,
    setting_differences,
    settings,
    tensors_of,
    weight_differences,
)
from specscope.model.heads.head_loader import load_head
from specscope.model.loader import load_model
from specscope.model.places import head_place
from specscope.plans.heads import runs_head
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural
from specscope.trace.record.notes import model_part
from specscope.trace.record.vocabulary import printable


@dataclass(frozen=True)
class TrainerAudit:
    """What was found. Filled by `audit_trainer`."""

    source: str
    trainer: str
    weights: str  # of the trainer: where they come from
    served: str
    tensors: int  # of the trained head
    settings: int  # likewise
    differences: tuple[FolderDifference, ...]  # weights and vocabulary maps first, then settings
    notes: tuple[str, ...]

    @property
    def exit(self) -> Exit:
        """What the command exits with."""
        return Exit.INCONSISTENT if self.differences else Exit.CONSISTENT

    @property
    def verdict(self) -> str:
        """In a sentence, with what was compared."""
        compared = f"{plural(self.tensors, 'tensor')} and {plural(self.settings, 'setting')} compared"
        if not self.differences:
            return f"The served head is the trained one: {compared}, none differs."
        first, more = self.differences[0], len(self.differences) - 1
        return f"The served head is not the trained one: {first.sentence}" + (
            f", and {plural(more, 'other difference')} ({compared})." if more else f" ({compared})."
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for --json."""
        return {
            **{name: getattr(self, name) for name in ("source", "trainer", "weights", "served", "tensors", "settings")},
            "exit": int(self.exit),
            "warnings": list(self.notes),
            "verdict": self.verdict,
            "differences": [{"key": each.key, "sentence": each.sentence} for each in self.differences],
        }


def audit_trainer(
    history: History, source: str, folder: str, target: str | None, draft_model: str | None
) -> TrainerAudit:
    """Compare a head in training with the head that served a capture. Raises UserError."""
    run = history.run
    if run is not None and not runs_head(model_part(run.drafter)):
        raise UserError(f"the capture's drafter is {run.drafter}: --trainer compares EAGLE heads")
    head_place(folder)
    options = audit_options(history, target, draft_model, None)
    assert run is not None  # otherwise audit_options has refused it
    if options.draft is None:
        raise UserError(options.why_no_draft)
    loaded = load_model(target_named(run, target), torch.device("cpu"), torch.float32)
    dtype = served_dtype(options.draft.path)
    trained, served = read_trained(folder, loaded, dtype), load_head(options.draft.path, loaded)
    ours, theirs = trained.loaded.head.config, served.head.config
    return TrainerAudit(
        source=source,
        trainer=folder,
        weights=trained.weights,
        served=options.draft.path,
        tensors=len(tensors_of(trained.loaded)),
        settings=len(settings(ours)),
        differences=(*weight_differences(trained.loaded, served, dtype), *setting_differences(ours, theirs)),
        notes=options.notes,
    )


def render_trainer(audit: TrainerAudit, console: Console) -> None:
    """Print it. Text of models and users is never read as markup."""
    console.print(
        header_block(
            (
                ("capture", audit.source),
                ("in training", f"{audit.trainer}: {audit.weights}"),
                ("served", audit.served),
            )
        )
    )
    for note in audit.notes:
        console.print(Text(f"! {printable(note)}", style="yellow"))
    if audit.differences:
        rows = [(printable(each.key), printable(each.sentence)) for each in audit.differences]
        console.print(table_block(Table("", ("differs", "how"), rows, words=frozenset(["how"]))))
    console.print(Text(f"\n{printable(audit.verdict)}", style=VERDICT[audit.exit]))
