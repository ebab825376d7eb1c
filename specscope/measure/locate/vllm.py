"""`locate` of a vLLM's capture: vLLM runs its requests again, and each forward is held against references. Of a
large model the layers' borders first, in a second run the layer that differs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specscope.analyze.audit.model.run import head_of
from specscope.analyze.audit.options import ModelSource, Progress
from specscope.analyze.locate.located import Location, Stage, ranked
from specscope.analyze.locate.model.reference import HeadPasses, ModelPasses, ModelReference, ReferencePass
from specscope.errors import UserError
from specscope.measure.locate.pairs import HEAD, MODEL
from specscope.measure.locate.tapped import (
    DRAFTER,
    TARGET,
    ComparisonSheet,
    Fed,
    FedText,
    Tapped,
    choices,
    computed,
    drafts,
    fed_rows,
    inputs,
    logits,
    parameters,
    read_taps,
    target_logit_rows,
)
from specscope.plans.kinds import runs_head
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.inside.settings import ALL_LAYERS, CAPTURE, MOST_MIB, TAPS, TAPS_INSIDE, TAPS_MIB
from specscope.trace.record.params import NO_SEED, SamplingParams, unknown_limits
from specscope.trace.record.records import RunInfo
from specscope.trace.record.tree import ROOT
from specscope.trace.wire.reading import read_capture

REQUESTS = 8  # that run again, at most
KEPT = 30  # tensors of a hidden state's size that a layer's operations take, about
HEAD_SLACK = 4.0  # each pass of a head is fed what the one before it rounded


class WalkedModels:
    """The references of a run."""

    def __init__(self, run: RunInfo, target: ModelSource, draft: ModelSource | None) -> None:
        self.target, is_head = ModelReference(target), runs_head(run.drafter)
        head = head_of(draft, self.target.causal.model) if draft is not None and is_head else None
        self.head = head if head is not None and head.by_pairs else None  # passes of others are not known here
        self.draft = ModelReference(draft) if draft is not None and not is_head else None
        self.samples_drafts = run.speculation.get("draft_sample_method") == "probabilistic"  # of sampled requests


class ComparedForwards:
    """What was compared of a run."""

    def __init__(self, tapped: Tapped, history: History, models: WalkedModels, report: Progress) -> None:
        self.tapped, self.models = tapped, models
        self.target, self.drafter = (ComparisonSheet(stage, tapped) for stage in (Stage.TARGET, Stage.DRAFTER))
        numbers, requests = [record.step for record in history.steps], list(history.requests.values())
        for done, request in enumerate(requests):
            report("comparing", done, len(requests))
            text = FedText.of(request, [numbers[place] for place in request.engine_steps])
            if text is not None and request.info is not None:
                self._request(text, request.info.params)

    @property
    def left_out(self) -> tuple[str, ...]:
        full = ["The taps were full: later computations of vLLM were not compared."] if self.tapped.is_full else []
        unread = sorted({each.unread for each in self.tapped.forwards if each.unread})
        return (*full, *(f"The cache was not read: {why}." for why in unread))

    @cached_property
    def wanted(self) -> set[str]:
        names = {name for made in self.tapped.forwards for name in made.tensors}
        return names | {name.rpartition(".")[0] for name in names if " read." in name}

    def _request(self, text: FedText, params: SamplingParams) -> None:
        models = self.models
        fed = fed_rows(self.tapped, text, shift=0 if models.head is None else 1)
        allowed = max(models.target.allowed(text.tokens).values())
        passes = ModelPasses(models.target, text.tokens, self.wanted)
        for own in (each for each in fed if each.forward.who == TARGET):
            pairs, (at, kept) = [*inputs(self.tapped, own)], target_logit_rows(own)
            if own.known:
                start = int(own.positions[0])
                right = _named(passes.feed(start, start + own.known, wanted=kept.tolist()))
                due = right.taps["lm_head"]
                pairs += computed(own, right, torch.arange(own.known), self.target.sizes)
                pairs += [*logits(own, at, due, kept), *choices(own, at, kept, params, due)]
            self.target.add(own, [*pairs, *parameters(own)], allowed)
        if models.head is not None or models.draft is not None:
            self._drafted(text, fed, allowed, is_greedy=params.temperature == 0 or not models.samples_drafts)

    def _drafted(self, text: FedText, fed: list[Fed], allowed: float, *, is_greedy: bool) -> None:
        """The drafter's passes: the first of each step is over committed rows, each later one over one token more."""
        head, draft, ids, features, end = self.models.head, self.models.draft, None, None, len(text.tokens)
        passes: ModelPasses | HeadPasses
        if head is not None:
            if (features := features_of(fed, head.layers)) is None:
                return
            passes, allowed, ids = HeadPasses(head, text.tokens, features), allowed * HEAD_SLACK, head.tokens
            end = min(len(features), end - 1)
        else:
            assert draft is not None
            passes, allowed = ModelPasses(draft, text.tokens, self.wanted), max(draft.allowed(text.tokens).values())
        step, known, root = -1, False, 0  # whether all that the step's first pass was fed is known; its last position
        for own in (each for each in fed if each.forward.who == DRAFTER):
            made, node, right = own.forward, own.forward.number - 1, None
            if not made.number:
                start, root, step = int(own.positions[0]), int(own.positions[own.last]), made.step
                known, stop = root < end, min(root + 1, end)
                _with_features(own)
                if start < stop:
                    due = passes.feed(start, stop, wanted=[stop - start - 1])
                    right = _named(due, None if features is None else features[start:stop])
            elif made.step == step and known:
                above = [node - 1 if node else ROOT]
                right = _named(passes.feed(root + 1, root + 1, [node], own.tokens.tolist(), above, [0]))
            else:
                continue
            pairs = [*inputs(self.tapped, own)]
            if right is not None:
                pairs += computed(own, right, torch.arange(len(right.rows)), self.drafter.sizes)
                if own.ended and known:
                    at, rows = torch.tensor([own.batch]), torch.tensor([own.last])
                    pairs += logits(own, at, right.taps["lm_head"][-1:], rows, ids)
            if is_greedy:
                pairs += drafts(own, self.tapped.drafted.get(made.step), ids)
            self.drafter.add(own, pairs, allowed)


def _named(right: ReferencePass | None, features: Tensor | None = None) -> ReferencePass:
    """A reference's pass by vLLM's names of operations. `features`: what a head's first pass is fed."""
    assert right is not None
    named = {name.replace("midlayer", "layers.0"): x.flatten(1) for name, x in right.taps.items()}
    if features is not None:
        named["features"] = features
    for name, theirs in (("embedding", "embed_tokens"), ("state", "fed back"), ("lm_head", "d2t")):
        named |= {name: named[theirs]} if theirs in named else {}
    return replace(right, taps=named)


def features_of(fed: list[Fed], layers: tuple[Any, ...]) -> Tensor | None:
    """[L, F] the features that vLLM's target gave along a text: of a row's latest forward, as far as there are any."""
    names = ["norm" if layer == "final" else f"layers.{layer - 1}" if layer else "embedding" for layer in layers]
    rows, along = dict[int, Tensor](), list[Tensor]()
    for own in (each for each in fed if each.forward.who == TARGET):
        if any(name not in own.forward.tensors for name in names):
            return None
        joint = torch.cat([own.forward.tensors[name].float() for name in names], dim=-1)
        rows |= zip(own.positions[: own.known].tolist(), joint[own.rows[: own.known]], strict=True)
    while len(along) in rows:
        along.append(rows[len(along)])
    return torch.stack(along) if along else None


def _with_features(fed: Fed) -> None:
    """What the head combines, by one name whichever norm comes first."""
    tensors = fed.forward.tensors
    parts = [tensors[name] for name in sorted(tensors) if name.startswith("fc_norm.") and name.endswith(":in")]
    for rows in (tensors.get("input_norm:in"), torch.cat(parts, -1) if parts else None, tensors.get("fc:in")):
        if rows is not None:
            tensors.setdefault("features", rows)


def locate_vllm(
    history: History,
    target: ModelSource,
    draft: ModelSource | None,
    again: Again,
    *,
    names: Sequence[str] = (),
    progress: Progress = lambda *_: None,
) -> Location:
    """The first operation that differs in vLLM, of the target and of its drafter. `names`: the requests that matter
    most, where that is known. Raises UserError."""
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

    inside = ALL_LAYERS if _fits(models, requests) else DRAFTER
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


def _fits(models: WalkedModels, requests: list[RequestHistory]) -> bool:
    """Whether the operations of all layers can be kept."""
    config = models.target.causal.config
    tokens = sum(len(request.info.prompt_tokens) for request in requests if request.info is not None)
    tokens += 3 * sum(part.emitted for request in requests for part in request.steps)
    return bool(tokens * config.num_hidden_layers * config.hidden_size * 4 * KEPT < MOST_MIB * 2**20 / 2)


PYTHON = "SPECSCOPE_VLLM_PYTHON"
RUN = "specscope.vllm.again"  # the module that vLLM's Python runs
SPECULATION = (  # what of a recorded configuration vLLM takes back; the rest follows from it
    *("method", "num_speculative_tokens", "draft_sample_method", "prompt_lookup_max", "prompt_lookup_min"),
    *("rejection_sample_method", "parallel_drafting", "disable_padded_drafter_batch"),
)
SILENT = "it said nothing"
ENGINE = ("max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching", "block_size", "async_scheduling")
ENOUGH = 512  # tokens of an output that are made again


@dataclass(frozen=True)
class Again:
    """How to start vLLM."""

    command: tuple[str, ...]  # a Python that has vLLM, and what it runs; the job is the next argument
    environment: Mapping[str, str]  # besides this process's own

    @staticmethod
    def found() -> Again:
        """By the environment, or in this interpreter. Raises UserError."""
        named = os.environ.get(PYTHON)
        if named is None and importlib.util.find_spec("vllm") is None:
            raise UserError(f"locating needs to run vLLM again: name its Python with {PYTHON}=/path/to/bin/python")
        return Again((named or sys.executable, "-P", "-m", RUN), {})

    def run(self, job: Mapping[str, Any], folder: Path, *, inside: str, mib: int) -> Path:
        """Run a job; the capture that was made, with the taps beside it in `taps`. Raises UserError."""
        file, capture = folder / "job.json", folder / "run.jsonl"
        file.write_text(json.dumps(job))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPECSCOPE_")}
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **environment}
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1" if job["v2"] else "0"
        environment |= {CAPTURE: str(capture), TAPS: str(folder / "taps"), TAPS_INSIDE: inside, TAPS_MIB: str(mib)}
        environment |= self.environment
        with (folder / "log.txt").open("w", encoding="utf-8") as log:
            how: Any = {"env": environment, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            try:
                done = subprocess.run([*self.command, str(file)], check=False, **how)
            except OSError as error:
                raise UserError(f"cannot start {self.command[0]}: {error.strerror}") from error
        if done.returncode or not capture.exists():
            lines = [line for line in _log(folder) if line]
            last = ([line for line in lines if "Error" in line] or lines or [SILENT])[-1]
            raise UserError(f"vLLM could not be run again: {last[-300:]}")
        return capture


def _log(folder: Path) -> list[str]:
    return [line.strip() for line in (folder / "log.txt").read_text("utf-8", errors="replace").splitlines()]


def remarks(folder: Path) -> str:
    """What the plugin logged of its own failures; else that it said nothing."""
    own = [line.partition("specscope: ")[2] for line in _log(folder) if "specscope: " in line]
    return next((line for line in own if "failed" in line or "switched off" in line), (own or [SILENT])[-1])


def job_of(
    run: RunInfo, requests: Sequence[RequestHistory], target: ModelSource, draft: ModelSource | None
) -> dict[str, Any]:
    """What vLLM is to run: the recorded prompts and parameters, in float32, without graphs."""
    engine = {name: run.settings[name] for name in ENGINE if name in run.settings}
    speculation = {name: run.speculation[name] for name in SPECULATION if run.speculation.get(name)}
    if run.draft_path and draft is not None:
        speculation["model"] = _place(run.draft_path, draft)
    return {
        "v2": run.settings.get("runner") == "V2",
        "model": _place(run.target_path, target),
        "speculation": speculation,
        "engine": engine | {"dtype": "float32", "max_model_len": run.max_context, "seed": run.seed},
        "requests": [_request(request) for request in requests],
    }


def _place(recorded: str, given: ModelSource) -> str:
    """vLLM loads a folder of its own kind: the one that it loaded then, where that is still there."""
    return recorded if recorded and Path(recorded).exists() else given.path


def _request(request: RequestHistory) -> dict[str, Any]:
    """A request, for vLLM to make as many tokens of as were made then."""
    assert request.info is not None
    params, made = request.info.params, sum(part.emitted for part in request.steps)
    return {
        "prompt": request.info.prompt_tokens.tolist(),
        "params": params.to_dict(),
        "tokens": max(min(made, ENOUGH), 1),
        "seeded": params.temperature > 0 and NO_SEED not in request.info.labels.items(),
    }


def can_run(request: RequestHistory) -> bool:
    """Whether all that shaped a request is in the capture."""
    info = request.info
    if info is None or not len(info.prompt_tokens) or not request.steps:
        return False
    return not unknown_limits(info.params, info.labels) or info.params.structured_outputs is not None


def chosen(history: History, names: Sequence[str], most: int) -> list[RequestHistory]:
    """The requests that run again: those that are named, and the first others, in the order in which they came."""
    able = [request for request in history.requests.values() if can_run(request)]
    kept = {request.id for request in sorted(able, key=lambda request: request.id not in names)[:most]}
    return [request for request in able if request.id in kept]
