"""`python -m benchmarks inside`: what recording costs transformers' generate(), with and without in turn."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.generation import utils

import specscope
from benchmarks.cpu import LOOKUP, Peer
from benchmarks.paired import PairedSides, Side, measure_paired, show, thread_seconds, write_json
from specscope.engine.config import EngineConfig
from specscope.measure.prompts import COPYING, PLAIN
from specscope.measure.step_costs import machine_info
from specscope.terminal import text_console
from specscope.transformers.hooks import DECODING, GENERATOR, SAMPLING

TOKENS = 32  # a side of a round: many short rounds see more than a few long ones
GOAL = 0.97
PLACES = ((utils.GenerationMixin, DECODING), (utils.GenerationMixin, GENERATOR), (utils, SAMPLING))
EXIT_LAYERS = 8  # of early exit
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 0}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt lookup, greedy": (COPYING[0], {"do_sample": False, "prompt_lookup_num_tokens": LOOKUP}),
    "prompt lookup, sampled": (COPYING[0], SAMPLED | {"prompt_lookup_num_tokens": LOOKUP}),
    "early exit, sampled": (PLAIN[0], SAMPLED | {"assistant_early_exit": EXIT_LAYERS}),
}


def run_inside(config: EngineConfig, rounds: int, json_file: str | None) -> None:
    """Measure and print: each way to draft that the target has by itself, at batch 1."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    console, peer, rows = text_console(), Peer(config), []
    plain = _functions()
    with tempfile.TemporaryDirectory() as folder, specscope.record(Path(folder) / "run.jsonl") as recording:
        wrapped = _functions()
        for name, (prompt, arguments) in WAYS.items():
            work = _Work(peer, prompt, arguments)
            sides: dict[str, Side] = {
                "recorded": partial(work, "recorded", wrapped, recording.flush),
                "off": partial(work, "off", plain, lambda: None),
            }
            rates = measure_paired(sides, rounds, console, name)
            rows.append(PairedSides(name, "recorded", "off", GOAL, rates, work.per_token(rounds + 1)))
        _put(wrapped)
    machine = machine_info(str(peer.model.dtype).removeprefix("torch."), torch.get_num_threads())
    show(rows, console, machine)
    write_json(json_file, "inside", rows, machine)


def _functions() -> list[Any]:
    """What recording wraps, as it is now."""
    return [getattr(owner, name) for owner, name in PLACES]


def _put(functions: list[Any]) -> None:
    for (owner, name), function in zip(PLACES, functions, strict=True):
        setattr(owner, name, function)


class _Work:
    """One prompt, generated in one way; and the processor time that each side took, by who took it."""

    def __init__(self, peer: Peer, prompt: str, arguments: dict[str, Any]) -> None:
        self.model, self.arguments = peer.model, arguments
        self.inputs = peer.tokenizer(prompt, return_tensors="pt").to(peer.model.device)
        self.taken: dict[str, Counter[str]] = {}

    def __call__(self, side: str, functions: list[Any], flush: Callable[[], None]) -> int:
        """The tokens that were made, to their last record."""
        _put(functions)
        before = thread_seconds()
        torch.manual_seed(0)  # both sides take the same steps
        out = self.model.generate(
            **self.inputs, **self.arguments, max_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0
        )
        flush()
        self.taken.setdefault(side, Counter()).update(thread_seconds() - before)
        return int(out.shape[1] - self.inputs["input_ids"].shape[1])

    def per_token(self, rounds: int) -> dict[str, dict[str, float]]:
        """Milliseconds of processor time a token, by side."""
        return {
            side: {who: 1000 * seconds / (TOKENS * rounds) for who, seconds in of.items()}
            for side, of in self.taken.items()
        }
