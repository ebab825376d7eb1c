"""A quick start: importing torch and transformers makes a million objects, and the collector would walk them all."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import psutil

from specscope.engine.config import EngineConfig
from specscope.engine.lean import import_transformers
from specscope.engine.prompts import PromptEncoder, PromptSpec, TooLargeError
from specscope.errors import UserError
from specscope.model.places import NAME, check_context, check_device, check_layers, check_model, config_of, head_place
from specscope.plans.kinds import runs_head
from specscope.trace.record.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from specscope.engine.engine import Engine

T = TypeVar("T")

# What OpenMP libraries read of how their threads wait: GNU's, and Intel's and LLVM's.
WAITING_NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPINS = "1000"  # of GNU's, about 5 us; its own choice is 300,000. BENCHMARKS.md has the figures.
TEMPLATE_TOKENS = 1000  # that a chat template adds, or fewer
LOOK_SECONDS = 0.1  # in which the others are watched
BUSY = 0.6  # processors that others may keep busy: a screen that draws takes a quarter


def share_cores() -> None:
    """Let torch's threads sleep soon where other processes keep the processors busy. Call it before torch is imported.

    By default they spin while they wait, which is quickest: a thread that sleeps must be woken some hundred times in a
    step. But where the processors are taken, the thread that spins takes one from the thread that it waits for. What
    the user has set of this stays.
    """
    if "torch" in sys.modules or any(name in os.environ for name in WAITING_NAMES):
        return
    parent = psutil.Process(os.getppid())  # which may be a screen that starts
    parent.cpu_percent()
    busy = psutil.cpu_percent(LOOK_SECONDS) * (os.cpu_count() or 1) - parent.cpu_percent()
    if busy / 100 > spare_processors() + BUSY:
        os.environ["GOMP_SPINCOUNT"] = SPINS


def spare_processors() -> int:
    """The processors beyond torch's threads, of which it starts one per core."""
    return (os.cpu_count() or 1) - (psutil.cpu_count(logical=False) or os.cpu_count() or 1)


def on_passing_thread(work: Callable[[], T]) -> T:
    """The result of `work`, run on a thread that ends with it. Raises what it raises.

    GNU's OpenMP keeps a pool of threads for each thread that computed, and where all pools have more threads than there
    are processors, it lets them sleep soon. So an engine that another thread will step is built on a thread that ends.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def check_places(config: EngineConfig) -> None:
    """Check models, heads and device before torch is imported. Raises UserError.

    Importing torch takes seconds.
    """
    check_device(config.device)
    check_model(config.target)
    if config.draft_model is not None and runs_head(config.drafter):
        head_place(config.draft_model)
    elif config.draft_model is not None and config.draft_layers is None:
        check_model(config.draft_model)
    known, name = config_of(config.target), NAME if config.target is None else config.target
    layers, longest = known.get("num_hidden_layers"), known.get("max_position_embeddings")
    if config.draft_layers is not None and isinstance(layers, int):
        check_layers(config.draft_layers, layers, name)
    if config.max_context is not None and isinstance(longest, int):
        check_context(config.max_context, longest, name)


def too_long(config: EngineConfig, specs: Sequence[PromptSpec], progress: Callable[[str], None]) -> dict[int, str]:
    """Which prompts are longer than the model's context, by their place among `specs`, and why. Raises UserError.

    Asked before the weights are loaded. A token has a byte at least, so that for most prompts no tokenizer is needed.
    """
    check_places(config)
    known = config_of(config.target).get("max_position_embeddings")
    longest = config.max_context or known
    sizes = [sum(len(text.encode()) for text in spec.texts) for spec in specs]
    doubtful = [n for n, size in enumerate(sizes) if isinstance(longest, int) and size + TEMPLATE_TOKENS >= longest]
    if not doubtful or not isinstance(longest, int):
        return {}
    share_cores()
    from specscope.model.loader import load_tokenizer

    progress("reading the tokenizer")
    tokenizer = load_tokenizer(config.target)
    pieces = read_vocabulary(tokenizer).pieces
    encoder = PromptEncoder(tokenizer, len(pieces), longest, max(map(len, pieces.values()), default=1))
    refused: dict[int, str] = {}
    for number in doubtful:
        spec = specs[number]
        try:
            encoder.check(encoder.encode(encoder.turn(spec.prompt, raw=spec.raw), spec.template)[1])
        except TooLargeError as error:
            refused[number] = f"{spec.place or f'prompt {number + 1}'}: {error}"
        except UserError:  # the engine says so
            continue
    return refused


class Stages:
    """The stages of a start, in order. One that counts ("4 of 20" behind a colon) is one stage."""

    def __init__(self, first: str) -> None:
        self._begun = [(first, time.monotonic())]

    def begin(self, stage: str) -> str:
        """The next stage begins, or the last one counts on. The line of the stage that has ended; "" for none."""
        last, since = self._begun[-1]
        if stage.partition(":")[0] == last.partition(":")[0]:
            self._begun[-1] = (stage, since)
            return ""
        ended = self.lines()[-1]
        self._begun.append((stage, time.monotonic()))
        return ended

    def lines(self) -> list[str]:
        """A line for each: whole seconds, and the stage; the last one's go on."""
        ends = [since for _, since in self._begun[1:]] + [time.monotonic()]
        return [f"{int(end - since):>4} s  {stage}" for (stage, since), end in zip(self._begun, ends, strict=True)]


def start_engine(config: EngineConfig, progress: Callable[[str], None]) -> Engine:
    """Import what an engine needs and build it. Raises UserError.

    The garbage collector rests meanwhile: 0.5 s of a 4 s start.
    """
    check_places(config)
    progress("starting torch")
    share_cores()
    gc.disable()
    try:
        import_transformers()
        from specscope.engine.engine import Engine

        build = partial(Engine, config, progress=progress)
        return on_passing_thread(build) if config.async_scheduling else build()  # its steps have a thread of their own
    finally:
        gc.enable()
