"""How far an engine has loaded, and how long it still takes: stage by stage, as last time on this machine. No torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from specscope.engine.config import EngineConfig
from specscope.model.places import on_disk
from specscope.trace.checked import decoded
from specscope.user_cache import LARGEST, place, store

USUAL = {"starting": 4.0, "loading": 6.0, "measuring": 12.0, "converting": 20.0, "compiling": 10.0, "capturing": 20.0}
COMING = ("starting", "loading")  # the stages of every start
READ = 3e8  # bytes of weights that are read in a second
ONCE = "once"  # in the text of a stage that does not come back
LATE = 0.99  # shown while a stage takes longer than it should


class LoadClock:
    """Given each stage as it begins. What the stages took is kept for the next start of the same engine."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        names = ("target", "drafter", "draft_model", "dtype", "device", "backend", "graphs")
        about = {name: str(getattr(config, name)).rpartition("/")[2] for name in names}  # a model by its folder's name
        self._file = place("loading", about)
        self._last = self._read()  # seconds of each stage
        self._weights = 0.0 if self._last else weights_of(config)
        self._took: dict[str, float] = {}
        self._stage = "starting"
        self._began = self._stage_began = clock()

    def _read(self) -> Mapping[str, float]:
        with suppress(OSError, ValueError):
            if self._file.stat().st_size <= LARGEST:
                return decoded(self._file.read_bytes(), dict[str, float])
        return {}

    def enter(self, stage: str) -> None:
        """A stage begins; what follows a colon in its text is how far it is."""
        if _name(stage) != _name(self._stage):
            self._end()
        self._stage = stage

    def done(self) -> None:
        """It has loaded."""
        self._end()
        with suppress(OSError):
            store(self._file, {name: took for name, took in self._took.items() if ONCE not in name.split()})

    def _end(self) -> None:
        now = self._clock()
        name = _name(self._stage)
        self._took[name] = round(self._took.get(name, 0.0) + now - self._stage_began, 2)
        self._stage_began = now

    @property
    def progress(self) -> tuple[str, float, int | None]:
        """The stage, the share of the whole that is done, and the seconds that are left; None where it is late."""
        now, current = self._clock(), _name(self._stage)
        left = max(self._expected(current) - (now - self._stage_began), 0.0)
        passed = {*self._took, current}
        if self._last:
            left += sum(took for name, took in self._last.items() if name not in passed)
        else:
            kinds = {name.split()[0] for name in passed}
            left += sum(self._expected(kind) for kind in COMING if kind not in kinds)
        spent = now - self._began
        share = min(spent / (spent + left), LATE) if spent + left > 0 else 0.0
        return self._stage, round(share, 2), math.ceil(left) or None

    def _expected(self, name: str) -> float:
        """Seconds of a stage."""
        kind = name.split()[0]
        return self._last.get(name, USUAL.get(kind, 1.0) + (self._weights / READ if kind == "loading" else 0.0))


def weights_of(config: EngineConfig) -> float:
    """Bytes of the target's weights, where they are on this machine; the default model's are few."""
    with suppress(OSError):
        path = None if config.target is None else on_disk(config.target)
        if path is not None:
            files = [path] if path.is_file() else [*path.glob("*.safetensors")]
            return float(sum(file.stat().st_size for file in files))
    return 0.0


def _name(stage: str) -> str:
    return stage.partition(":")[0]
