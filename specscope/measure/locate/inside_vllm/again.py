"""Starts vLLM again, offline, over the requests of its capture, with taps on."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specscope.analyze.audit.options import ModelSource
from specscope.errors import UserError
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.inside.settings import CAPTURE, TAPS, TAPS_INSIDE, TAPS_MIB
from specscope.trace.record.params import NO_SEED, unknown_limits
from specscope.trace.record.records import RunInfo

PYTHON = "SPECSCOPE_VLLM_PYTHON"
RUN = "specscope.vllm.again"  # the module that vLLM's Python runs
SPECULATION = (  # what of a recorded configuration vLLM takes back; the rest follows from it
    "method",
    "num_speculative_tokens",
    "draft_sample_method",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "rejection_sample_method",
    "parallel_drafting",
    "disable_padded_drafter_batch",
)
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
        (folder / "job.json").write_text(json.dumps(job))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPECSCOPE_")}
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1" if job["v2"] else "0"
        capture = folder / "run.jsonl"
        environment |= {CAPTURE: str(capture), TAPS: str(folder / "taps"), TAPS_INSIDE: inside, TAPS_MIB: str(mib)}
        with (folder / "log.txt").open("w", encoding="utf-8") as log:
            try:
                done = subprocess.run(
                    [*self.command, str(folder / "job.json")],
                    env=environment | dict(self.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            except OSError as error:
                raise UserError(f"cannot start {self.command[0]}: {error.strerror}") from error
        if done.returncode or not capture.exists():
            raise UserError(f"vLLM could not be run again: {_why(folder / 'log.txt')}")
        return capture


def _why(log: Path) -> str:
    """The last line of an error in a log."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it said nothing"])[-1][-300:]


def remarks(folder: Path) -> str:
    """What the plugin logged of its own failures; else that it said nothing."""
    lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    own = [line.partition("specscope: ")[2] for line in lines if "specscope: " in line]
    return next((line for line in own if "failed" in line or "switched off" in line), (own or ["it said nothing"])[-1])


def job_of(
    run: RunInfo, requests: Sequence[RequestHistory], target: ModelSource, draft: ModelSource | None
) -> dict[str, Any]:
    """What vLLM is to run: the recorded prompts and parameters, in float32, without graphs."""
    settings = run.settings
    engine = {name: settings[name] for name in ENGINE if name in settings}
    return {
        "v2": settings.get("runner") == "V2",
        "model": _place(run.target_path, target),
        "speculation": _speculation(run, draft),
        "engine": engine | {"dtype": "float32", "max_model_len": run.max_context, "seed": run.seed},
        "requests": [_request(request) for request in requests],
    }


def _place(recorded: str, given: ModelSource) -> str:
    """vLLM loads a folder of its own kind: the one that it loaded then, where that is still there."""
    return recorded if recorded and Path(recorded).exists() else given.path


def _speculation(run: RunInfo, draft: ModelSource | None) -> dict[str, Any]:
    speculation = {name: run.speculation[name] for name in SPECULATION if run.speculation.get(name)}
    if run.draft_path and draft is not None:
        speculation["model"] = _place(run.draft_path, draft)
    return speculation


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
