"""Flight: an asynchronous step on its way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flight:
    """An asynchronous step on its way, while the next one ran. Wall-clock nanoseconds."""

    launched_ns: int  # the step was given to the worker; its first phase begins when the step before has ended
    read_ns: int  # its verdicts were taken from the worker
    committed_ns: int  # its record was whole
