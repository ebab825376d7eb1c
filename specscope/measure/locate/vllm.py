"""`locate` of a vLLM's capture: vLLM runs its requests again, with taps, and each forward is held against references.

What a forward was fed is held against what the scheduler and the committed text say; each operation of the target
against plain transformers, and of the drafter against the audit's head or transformers over the target's own features.
Where a model is large its layers' borders come first, and in a second run the operations of the layer that differs.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from specscope.analyze.audit.options import ModelSource
from specscope.analyze.locate.located import Location, ranked
from specscope.errors import UserError
from specscope.measure.locate.answer import HEAD, MODEL
from specscope.measure.locate.inside_vllm.again import Again, chosen, job_of, remarks
from specscope.measure.locate.inside_vllm.fed import DRAFTER, TARGET, read_taps
from specscope.measure.locate.inside_vllm.walk import ComparedForwards, WalkedModels
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.inside.settings import ALL_LAYERS, MOST_MIB
from specscope.trace.wire.reading import read_capture

REQUESTS = 8  # that run again, at most
KEPT = 30  # tensors of a hidden state's size that a layer's operations take, about
Progress = Callable[[str, int, int], None]


def locate_vllm(
    history: History,
    target: ModelSource,
    draft: ModelSource | None,
    again: Again,
    *,
    names: Sequence[str] = (),
    progress: Progress = lambda *_: None,
) -> Location:
    """The first operation that differs in vLLM, of the target and of its drafter. Raises UserError.

    `names`: the requests that matter most, where that is known.
    """
    began, run = time.monotonic(), history.run
    assert run is not None
    requests = chosen(history, names, REQUESTS)
    if not requests:
        raise UserError("no request of this capture can run again: their parameters are not in it")
    models = WalkedModels(run, target, draft)

    def compared(inside: str) -> ComparedForwards:
        with tempfile.TemporaryDirectory() as folder:
            progress("vLLM runs again", 0, 1)
            job = job_of(run, requests, target, draft)
            made = read_capture(again.run(job, Path(folder), inside=inside, mib=MOST_MIB)).history
            tapped = read_taps(Path(folder) / "taps")
            if not made.requests or not tapped.forwards:
                raise UserError(f"vLLM ran again and its steps were not recorded: {remarks(Path(folder))}")
        return ComparedForwards(tapped, made, models, progress)

    inside = ALL_LAYERS if _fits(models, requests, MOST_MIB) else DRAFTER
    sheets = compared(inside)
    first = sheets.target.first()  # where layers' borders alone were tapped: inside which layer it lies
    layer = None if first is None else re.match(r"layers\.(\d+)", first.wrong.name)
    if inside != ALL_LAYERS and layer is not None:
        sheets = compared(f"{TARGET}.{layer[1]},{DRAFTER}")
    engine = f"vLLM {run.versions.get('vllm', '')}, {'V2' if sheets.tapped.is_v2 else 'V1'} runner, float32"
    found, drafter = Location("", left_out=sheets.left_out), MODEL if run.drafter == "draft_model" else HEAD
    if draft is not None and models.head is None and models.draft is None:
        found.left_out += (f"drafter: a walk inside vLLM over {run.drafter} is not implemented",)
    for sheet, reference, above in ((sheets.target, MODEL, None), (sheets.drafter, drafter, sheets.target)):
        if (walk := sheet.walk(engine, reference)) is not None:
            found.walks += (walk,)
            faults = tuple(sheet.located(above))
            found.located += faults
            found.ruled_out += () if faults or sheet.first() else (sheet.agrees(),)
    found.located, found.seconds = ranked(found.located), time.monotonic() - began
    return found


def _fits(models: WalkedModels, requests: list[RequestHistory], mib: int) -> bool:
    """Whether the operations of all layers can be kept."""
    config = models.target.causal.config
    tokens = sum(len(request.info.prompt_tokens) for request in requests if request.info is not None)
    tokens += 3 * sum(part.emitted for request in requests for part in request.steps)
    return bool(tokens * config.num_hidden_layers * config.hidden_size * 4 * KEPT < mib * 2**20 / 2)
