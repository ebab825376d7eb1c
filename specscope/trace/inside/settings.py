"""What is to be recorded inside another engine, from the environment: its processes inherit it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from specscope.errors import UserError
from specscope.gone import GONE, refuse_gone
from specscope.trace.inside.hooking import ErrorGuard
from specscope.trace.record.privacy import Privacy
from specscope.trace.wire.sampling import read_ratio
from specscope.trace.wire.spans import SpanLevel

CAPTURE, ENDPOINT, PROTOCOL = "SPECSCOPE_CAPTURE", "SPECSCOPE_OTLP_ENDPOINT", "SPECSCOPE_OTLP_PROTOCOL"
EVIDENCE, DEBUG = "SPECSCOPE_EVIDENCE", "SPECSCOPE_DEBUG_SOCKET"
EVIDENCES = ("full", "lean")
NO_TEXT, NO_TOKENS = "SPECSCOPE_NO_TEXT", "SPECSCOPE_NO_TOKENS"
LEVEL, SAMPLE = "SPECSCOPE_TRACE_LEVEL", "SPECSCOPE_SAMPLE"
TAPS, TAPS_INSIDE, TAPS_MIB = "SPECSCOPE_TAPS", "SPECSCOPE_TAPS_INSIDE", "SPECSCOPE_TAPS_MIB"
ALL_LAYERS = "all"  # as SPECSCOPE_TAPS_INSIDE
MOST_MIB = 1024  # of taps, by default


@dataclass(frozen=True)
class TapSettings:
    """What `specscope diagnose` wants recorded of an engine's forwards."""

    folder: str  # SPECSCOPE_TAPS
    # SPECSCOPE_TAPS_INSIDE: whose operations are recorded, not only its borders: all, or layers ("target.3,drafter")
    inside: str = ALL_LAYERS
    mib: str = str(MOST_MIB)  # SPECSCOPE_TAPS_MIB: at most so much; what comes later is left out

    @staticmethod
    def read(environment: Mapping[str, str]) -> TapSettings | None:
        """None where no folder is named."""
        inside, mib = environment.get(TAPS_INSIDE, ALL_LAYERS), environment.get(TAPS_MIB) or str(MOST_MIB)
        return TapSettings(folder, inside, mib) if (folder := environment.get(TAPS)) else None

    @property
    def most(self) -> int:
        """Bytes."""
        return int(self.mib) * 2**20

    def wants(self, who: str, name: str) -> bool:
        """Whether a module of the target or the drafter is recorded: inside of layers only those that are named."""
        number = next((part for part in name.split(".") if part.isdecimal()), None)
        is_border = name.rsplit(".", 1)[-1] == number
        named = self.inside.split(",")
        return number is None or is_border or bool({ALL_LAYERS, who, f"{who}.{number}"} & set(named))

    def check(self) -> None:
        """Raises UserError that names the variable whose value cannot be used."""
        if not re.fullmatch(r"all|((target|drafter)(\.\d+)?(,|$))*", self.inside):
            raise UserError(f"{TAPS_INSIDE} is {self.inside!r}: use {ALL_LAYERS} or layers such as target.3,drafter")
        if not self.mib.isdecimal():
            raise UserError(f"{TAPS_MIB} is {self.mib!r}: use a number of MiB")


@dataclass(frozen=True)
class PluginSettings:
    """Read from SPECSCOPE_* variables. Nothing happens unless one of the first three or SPECSCOPE_TAPS is set."""

    capture: str | None  # SPECSCOPE_CAPTURE: a file
    endpoint: str | None  # SPECSCOPE_OTLP_ENDPOINT: a URL
    debug: str | None  # SPECSCOPE_DEBUG_SOCKET: the path of a Unix socket
    protocol: str | None = None  # SPECSCOPE_OTLP_PROTOCOL: grpc or http/protobuf
    evidence: str = "full"  # SPECSCOPE_EVIDENCE: lean leaves out the notes on parents
    privacy: Privacy = Privacy.EVERYTHING  # SPECSCOPE_NO_TEXT=1 leaves out text, SPECSCOPE_NO_TOKENS=1 token ids too
    trace_level: str | None = None  # SPECSCOPE_TRACE_LEVEL: what is sent, as --trace-level
    sample: str | None = None  # SPECSCOPE_SAMPLE: the share of requests whose spans are sent
    taps: TapSettings | None = None  # SPECSCOPE_TAPS
    gone: tuple[str, ...] = ()  # variables that are set, and that there are no more

    @property
    def is_on(self) -> bool:
        return any((self.capture, self.endpoint, self.debug, self.taps))

    @property
    def full(self) -> bool:
        """Whether the notes on parents are recorded."""
        return self.evidence == "full"

    def check(self) -> None:
        """Raises UserError that names the variable whose value cannot be used, or that there is no more."""
        for name in (*self.gone, f"{EVIDENCE}={self.evidence}"):
            refuse_gone(name)
        self.ratio()
        self.level()
        if self.taps is not None:
            self.taps.check()
        if self.evidence not in EVIDENCES:
            raise UserError(f"{EVIDENCE} is {self.evidence!r}: use {', '.join(EVIDENCES)}")

    def are_usable(self, guard: ErrorGuard) -> bool:
        """Whether every value can be used; else the plugin steps aside, and says why."""
        try:
            self.check()
        except UserError as error:
            guard.step_aside(str(error))
        return not guard.is_off

    @staticmethod
    def read(environment: Mapping[str, str] = os.environ) -> PluginSettings:
        """From the environment; an empty variable is as good as none."""
        return PluginSettings(
            capture=environment.get(CAPTURE) or None,
            endpoint=environment.get(ENDPOINT) or None,
            debug=environment.get(DEBUG) or None,
            protocol=environment.get(PROTOCOL) or None,
            evidence=environment.get(EVIDENCE) or "full",
            privacy=Privacy.of(no_text=_is_set(environment, NO_TEXT), no_tokens=_is_set(environment, NO_TOKENS)),
            trace_level=environment.get(LEVEL) or None,
            sample=environment.get(SAMPLE) or None,
            taps=TapSettings.read(environment),
            gone=tuple(name for name in GONE if _is_set(environment, name)),
        )

    def level(self) -> SpanLevel:
        """What is sent. Raises UserError that names the variable."""
        levels = [level.value for level in SpanLevel]
        if self.trace_level not in (None, *levels):
            raise UserError(f"{LEVEL} is {self.trace_level!r}: use {', '.join(levels)}")
        return SpanLevel(self.trace_level or SpanLevel.TREES)

    def ratio(self) -> float | None:
        """The share of requests whose spans are sent; None: of all. Raises UserError that names the variable."""
        return read_ratio(self.sample, SAMPLE)


def _is_set(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "") not in ("", "0")
