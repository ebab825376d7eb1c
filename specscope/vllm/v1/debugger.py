"""Debugger: stops vLLM's worker inside its sampler, after it has judged and before the result is used."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from specscope.remote.debug_socket import DebugServer
from specscope.remote.held import Gate, HeldCommands
from specscope.trace.history.history import History, RecentSteps
from specscope.trace.history.wording import plural
from specscope.trace.inside.hooking import ErrorGuard
from specscope.trace.inside.on_import import at_exit
from specscope.trace.inside.recorder import Publish
from specscope.trace.inside.sinks import of_ranks
from specscope.trace.record.privacy import strip
from specscope.trace.record.records import RunInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary
from specscope.vllm.known import engine_number, rank_of_worker
from specscope.vllm.run_info import vllm_version
from specscope.vllm.witness import Witness

KEPT = 2000  # steps that conditions such as tau can look back on
OTHERS_WAIT = 600.0  # seconds that ranks wait in a collective: NCCL's limit; gloo's is three times as long
MP_LIMIT, RAY_LIMIT = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "RAY_CGRAPH_get_timeout"


@dataclass(frozen=True)
class Limit:
    """How long vLLM waits for a worker that does not answer."""

    seconds: float | None  # None: for ever
    name: str = ""  # of the variable that sets it
    ranks: int = 1

    @property
    def hold(self) -> float | None:
        """How long the worker may wait: half of the limit, as the clock may have run during the step before as well."""
        if self.seconds is None:
            return None
        return min(self.seconds, OTHERS_WAIT if self.ranks > 1 else self.seconds) / 2

    def describe(self) -> str:
        """A line for the stop: who waits, and for how long."""
        if self.hold is None:
            return "vLLM waits here without a limit: engine and worker are one process"
        others = f"; {plural(self.ranks - 1, 'other rank')} may wait in a collective" if self.ranks > 1 else ""
        return (
            f"vLLM waits here{others}. Its engine gives up after {self.seconds:g} s ({self.name}), so it continues by "
            f"itself after {self.hold:g} s"
        )


def limit_of(runner: Any) -> Limit:
    """The limit that vLLM's configuration sets."""
    parallel = runner.vllm_config.parallel_config
    ranks = int(parallel.world_size)
    if parallel.distributed_executor_backend == "uni":
        return Limit(None)
    if parallel.use_ray:
        return Limit(float(os.environ.get(RAY_LIMIT, "300")), RAY_LIMIT, ranks)
    from vllm import envs

    return Limit(float(getattr(envs, MP_LIMIT)), MP_LIMIT, ranks)


class Debugger:
    """`judged` and `finished` are called on the worker's thread, all else on the debugger's, with the gate's lock."""

    def __init__(self) -> None:
        self.gate, self.history = Gate("vLLM"), History(limit=KEPT)
        self.limit = Limit(None)
        self.asked = ""  # SPECSCOPE_DEBUG_SOCKET
        self.socket: Path | None = None  # at which it listens
        self._untaken = RecentSteps(KEPT)

    def listen(self, runner: Any) -> None:
        """Open the socket, before the model is loaded. Of the rank that decides what all of its engine's ranks do."""
        if rank_of_worker() != 0:
            return
        path, self.limit = of_ranks(self.asked, (engine_number(runner),)), limit_of(runner)
        model = runner.vllm_config.model_config.model
        told = f"attached to vLLM {vllm_version()}, process {os.getpid()}, {model}: it keeps running until you stop it"
        server = DebugServer(path, self.gate, lambda: told, partial(HeldCommands, self, self.limit.describe))
        self.socket = path
        at_exit(server.close)

    def told(self, publish: Publish, run: RunInfo, vocabulary: Vocabulary, guard: ErrorGuard) -> Publish:
        """A function that publishes a record, and then passes it to this debugger."""
        self.history.run, self.history.vocabulary = strip(run, run.privacy), vocabulary

        def forward(record: StepRecord) -> None:
            publish(record)
            guard.safely(self.finished, strip(record, run.privacy))

        return forward

    def judged(self, witness: Witness) -> None:
        """The sampler has judged; vLLM goes on when this returns."""
        with self.gate.lock:
            if not self.gate.controlled:
                return
            witness.settle()
            record = witness.standing()
            if record is None:
                return
            self.history.append(record)
            began = time.time_ns()
            self.gate.stand(record, self.limit.hold)
            witness.phase("debug", began, time.time_ns())

    def finished(self, record: StepRecord) -> None:
        """A step has ended and its record is complete. Stops here for what is known only now."""
        with self.gate.lock:
            self._untaken.append(record)
            if not self.gate.is_open:
                return  # nobody looks: this costs vLLM next to nothing
            self.catch_up()
            if self.gate.controlled and (record.finished or record.preempted):
                self.gate.stand(replace(record, requests=()), self.limit.hold)

    def catch_up(self) -> None:
        """Take in what was published while nobody was attached."""
        for record in self._untaken.take():
            if self.history.steps and self.history.last_step == record.step:
                self.history.replace_last(record)
            else:
                self.history.append(record)
