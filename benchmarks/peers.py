"""`python -m benchmarks peers`: this engine beside whichever others are found, on the same prompts, in one run."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks import peer_vllm
from benchmarks.cpu import EAGLE_PROMPTS, TOKENS, Peer, PhaseTimes, encode, run_prompts, watched, without_drafting
from benchmarks.paired import PairedSides, Side, measure_paired, show, write_json
from specscope.engine.config import EngineConfig
from specscope.engine.engine import Engine
from specscope.errors import UserError
from specscope.measure.prompts import unseen_prompts
from specscope.measure.step_costs import machine_info
from specscope.model.places import bundled_model
from specscope.terminal import text_console
from specscope.trace.record.params import SamplingParams


def run_peers(config: EngineConfig, vllm: str | None, rounds: int, json_file: str | None) -> None:
    """Measure and print. `vllm`: the Python of an environment that has vLLM."""
    console = text_console()
    need_python(vllm)
    console.print("loading the engines", style="dim")
    plain = Engine(without_drafting(config))
    own = Engine(config)
    peer, phases = Peer(config), PhaseTimes()
    prompts = encode(plain, unseen_prompts(EAGLE_PROMPTS))
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    drafts = f"{own.drafter.name}, recorded"
    sides: dict[str, Side] = {
        "no speculation": lambda: run_prompts(plain, prompts, params),
        drafts: lambda: watched(own, phases, prompts, params),
        "generate()": lambda: sum(peer.generate([prompt], TOKENS, eos=False) for prompt in prompts),
    }
    goals = [("no speculation", "generate()", 1.6), (drafts, "generate()", 2.0)]
    with ExitStack() as stack:
        if vllm is not None:
            for name, ngram in (("vLLM", False), ("vLLM n-gram", True)):
                console.print(f"starting {name}", style="dim")
                work = {"ngram": ngram, "tokens": TOKENS, "prompts": [list(p) for p in prompts]}
                ask = stack.enter_context(vllm_process(vllm, plain, work))
                sides[name] = lambda ask=ask: int(ask(""))  # type: ignore[misc]
            goals += [("no speculation", "vLLM", 0.8), (drafts, "vLLM", 1.4), (drafts, "vLLM n-gram", 1.4)]
        rates = measure_paired(sides, rounds, console, "unseen prompts, batch 1")
    comparisons = [PairedSides("batch 1", a, b, goal, rates) for a, b, goal in goals]
    machine = machine_info(plain.run_info.dtype, torch.get_num_threads())
    show(comparisons, console, machine)
    phases.show(console)
    write_json(json_file, "peers", comparisons, machine)


def need_python(vllm: str | None) -> None:
    """Raises UserError where `--vllm` names no Python, before seconds go into loading."""
    if vllm is not None and not os.access(vllm, os.X_OK):
        raise UserError(f"--vllm {vllm}: there is no Python to run; give the path of the environment's bin/python")


def _fastest(python: Path) -> dict[str, str]:
    """The settings that vLLM's documents ask for on a CPU: a core for each thread, and Intel's OpenMP where it is."""
    settings = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{torch.get_num_threads() - 1}"}
    openmp = python.absolute().parent.parent / "lib" / "libiomp5.so"
    return settings | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


@contextmanager
def vllm_process(python: str, engine: Engine, work: Mapping[str, Any]) -> Iterator[Callable[[str], str]]:
    """A vLLM over the engine's model, in a process of its own; what it answers to a line. It waits without spinning.

    `work`: as peer_vllm takes it, but for the model. Raises UserError where it does not start.
    """
    model = bundled_model(lambda _: None) if engine.config.target is None else engine.config.target
    work = {"model": str(model), "dtype": engine.run_info.dtype, **work}
    # -P: this folder's own kernels.py must not stand for the package that transformers looks for.
    command = [python, "-P", peer_vllm.__file__]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=tempfile.gettempdir(),
            env={**_fastest(Path(python)), **os.environ},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        answers, questions = process.stdout, process.stdin

        def said() -> UserError:
            log.seek(0)
            last = log.read().decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
            return UserError(f"vLLM stopped: {last[0]}")

        def ask(line: str = "") -> str:
            with suppress(BrokenPipeError):  # it has no answer either
                questions.write(f"{line}\n")
                questions.flush()
            answer = answers.readline()
            if not answer:
                raise said()
            return answer

        try:
            if ask(json.dumps(work)).strip() != "ready":
                raise said()
            yield ask
        finally:
            with suppress(BrokenPipeError):
                questions.close()
            process.wait()
