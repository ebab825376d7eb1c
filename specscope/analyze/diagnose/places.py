"""Where the faults that have a name lie, and what is located put together with them.

A fault that is located has a place; one whose row of causes.py fits has a name. What is both is shown once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Suspect
from specscope.analyze.diagnose.together import (
    ACCEPTANCE,
    COINS,
    COUNTED,
    DRAFTER,
    LOSSLESS,
    OF_FINALS,
    OF_Q,
    RULED,
    TARGET,
)
from specscope.analyze.locate.located import Located, Stage

T, D, S, V, W = Stage.TARGET, Stage.DRAFTER, Stage.SAMPLING, Stage.VERDICT, Stage.DRAWS
# The checks of audit and verify that fail where a stage is wrong
CHECKS: Mapping[Stage, tuple[str, ...]] = {
    T: TARGET,
    D: (*DRAFTER, "head's embedding"),
    S: (*RULED, *OF_Q, "draft p"),
    V: (*LOSSLESS, *ACCEPTANCE, *OF_FINALS, *COUNTED, "accept probability", "trial order", "residual mass"),
    W: (*OF_Q, *COINS, "drafter tokens", "drafter tree"),
}


@dataclass(frozen=True)
class PlacedFault:
    """A fault as it is shown: with its place, where it was located, and its name, where it is known; one of them."""

    place: Located | None
    cause: Suspect | None


def fits(cause: Cause, place: Located) -> bool:
    """Whether a cause shows first at such a place."""
    pattern = cause.places.get(place.operation.stage)
    if pattern is None:
        return False
    return not pattern or not place.certain or re.search(pattern, place.operation.name) is not None


def placed(located: Sequence[Located], faults: Sequence[Suspect]) -> tuple[PlacedFault, ...]:
    """What is located, each with the likeliest name that fits; then the faults that only have a name.

    Of the causes that lie in a stage where something was located, the others follow from it: they are left out.
    """
    rest = list(faults)
    shown = []
    for place in located:
        name = next((fault for fault in rest if fits(fault.cause, place)), None)
        rest = [fault for fault in rest if fault is not name]
        shown.append(PlacedFault(place, name))
    stages = {place.operation.stage for place in located}
    elsewhere = [fault for fault in rest if not stages & fault.cause.places.keys()]
    return (*shown, *(PlacedFault(None, fault) for fault in elsewhere))


def explains(located: Sequence[Located], check: str) -> bool:
    """Whether a failed check follows from what is located."""
    return any(check in CHECKS[place.operation.stage] for place in located)
