"""`locate` of a vLLM's capture: vLLM runs its requests again, with taps, and each forward is held against references.

What a forward was fed is held against what the scheduler and the committed text say; each operation of the target
against plain transformers, and of the drafter against the audit's head or transformers over the target's own features.
Where a model is large its layers' borders come first, and in a second run the operations of the layer that differs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specscope.analyze.audit.options import ModelSource
from specscope.analyze.locate.located import Located, Location, Walk, ranked
from specscope.errors import UserError
from specscope.measure.locate.inside_vllm.again import Again, chosen, job_of, remarks
from specscope.measure.locate.inside_vllm.sheet import rank
from specscope.measure.locate.inside_vllm.tapped import DRAFTER, TARGET, Tapped, read_taps
from specscope.measure.locate.inside_vllm.told import located, ruled_out, walk_of
from specscope.measure.locate.inside_vllm.walk import Sheets, WalkedModels, compare_all
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.inside.settings import ALL_LAYERS, MOST_MIB
from specscope.trace.record.records import RunInfo
from specscope.trace.wire.reading import read_capture

REQUESTS = 8  # that run again, at most
KEPT = 30  # tensors of a hidden state's size that a layer's operations take, about
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class VllmCase:
    """A capture of a vLLM, and the models that ran."""

    history: History
    target: ModelSource
    draft: ModelSource | None
    source: str = ""
    names: tuple[str, ...] = ()  # the requests that matter most, where that is known
    requests: int = REQUESTS
    mib: int = MOST_MIB


@dataclass
class _Run:
    """One run of vLLM, compared."""

    tapped: Tapped
    sheets: Sheets


def locate_vllm(case: VllmCase, again: Again, progress: Progress = lambda *_: None) -> Location:
    """The first operation that differs in vLLM, of the target and of its drafter. Raises UserError."""
    began, run = time.monotonic(), case.history.run
    if run is None or run.backend != "vllm":
        raise UserError("this is no capture of a vLLM")
    requests = chosen(case.history, case.names, case.requests)
    if not requests:
        raise UserError("no request of this capture can run again: what shaped them is not in it")
    models = WalkedModels.load(run, case.target, case.draft)
    inside = ALL_LAYERS if _fits(models, requests, case.mib) else DRAFTER
    made = _run(case, run, requests, models, again, inside, progress)
    if inside != ALL_LAYERS and (layer := _border(made.sheets)) is not None:
        made = _run(case, run, requests, models, again, f"{TARGET}.{layer},{DRAFTER}", progress)
    return _location(case, run, made, began)


def _run(
    case: VllmCase,
    run: RunInfo,
    requests: list[RequestHistory],
    models: WalkedModels,
    again: Again,
    inside: str,
    progress: Progress,
) -> _Run:
    with tempfile.TemporaryDirectory() as folder:
        progress("vLLM runs again", 0, 1)
        job = job_of(run, requests, case.target, case.draft)
        capture = again.run(job, Path(folder), inside=inside, mib=case.mib)
        history, tapped = read_capture(capture).history, read_taps(Path(folder) / "taps")
        if not history.requests or not tapped.forwards:
            raise UserError(f"vLLM ran again and its steps were not recorded: {remarks(Path(folder))}")
    return _Run(tapped, compare_all(tapped, history, models, progress))


def _fits(models: WalkedModels, requests: list[RequestHistory], mib: int) -> bool:
    """Whether the operations of all layers can be kept."""
    config = models.target.causal.config
    tokens = sum(len(request.info.prompt_tokens) for request in requests if request.info is not None)
    tokens += 3 * sum(part.emitted for request in requests for part in request.steps)
    return bool(tokens * config.num_hidden_layers * config.hidden_size * 4 * KEPT < mib * 2**20 / 2)


def _border(sheets: Sheets) -> int | None:
    """The target's first layer whose output differs, where what it was fed does not."""
    first = sheets.target.first(None)
    place = None if first is None else rank(first[1].name)
    return place[1] if place is not None and place[0] == 1 else None


def _location(case: VllmCase, run: RunInfo, made: _Run, began: float) -> Location:
    engine = f"vLLM {run.versions.get('vllm', '')}, {'V2' if made.tapped.is_v2 else 'V1'} runner, float32"
    references = {TARGET: "plain transformers", DRAFTER: "the head's checkpoint, read a second time"}
    if run.drafter == "draft_model":
        references[DRAFTER] = references[TARGET]
    walks, faults, fine = list[Walk](), list[Located](), list[str]()
    for who in (TARGET, DRAFTER):
        sheet = made.sheets.of(who)
        walk = walk_of(made.tapped, sheet, who, engine, references[who])
        if walk is None:
            continue
        walks.append(walk)
        found = located(made.tapped, sheet, who, made.sheets.target if who == DRAFTER else None)
        faults += found
        fine += [] if found or sheet.first(None) else [ruled_out(sheet, who)]
    return Location(
        case.source,
        ranked(faults),
        tuple(walks),
        ruled_out=tuple(fine),
        left_out=tuple(made.sheets.left_out),
        seconds=time.monotonic() - began,
    )
