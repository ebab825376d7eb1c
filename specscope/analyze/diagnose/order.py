"""From causes for which there is evidence to faults, in the one order of causes, and to what none of them explains.

verify and audit measure; nothing is measured again here. Evidence counts where a check failed that follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CHANCE, Suspect
from specscope.analyze.diagnose.judged import Failure
from specscope.trace.history.wording import plural

WHOLE = 0.995  # of a failed check: so much explained counts as all of it


def settled(suspects: Iterable[Suspect], failures: Sequence[Failure]) -> list[Suspect]:
    """The faults, in the one order of causes: from which a check fails, or under which a rerun gave what was recorded.

    Causes that chance explains are left out, and those that explain nothing which a better one does not.
    """
    known = [suspect for suspect in merged(suspects) if suspect.chance is None or suspect.chance <= CHANCE]
    faults = [fault for fault in known if fault.rerun or _explained_share(fault, failures) > 0]
    left, leading = {failure.check.name: 1.0 for failure in failures}, list[Suspect]()
    for fault in sorted(faults, key=lambda fault: _rank(fault, failures)):
        new = [name for name, rest in left.items() if rest > 1 - WHOLE and fault.covers(name) > 0]
        if new or not leading or not failures:  # what explains nothing new follows from a better one
            leading.append(fault)
        left |= {name: max(0.0, left[name] - fault.covers(name)) for name in new}
    return leading


def _rank(suspect: Suspect, failures: Sequence[Failure]) -> tuple[int, float, int, int]:
    """The order of causes: rows before conditions before sums; then by what they explain of all that failed, less what
    they spoil, and by how many that are; then by the order of a step, in which causes.py lists them: what comes first
    explains what follows."""
    share = _explained_share(suspect, failures) * suspect.net
    return suspect.proof, -round(share, 2), -suspect.of, list(Cause).index(suspect.cause)


def _explained_share(suspect: Suspect, failures: Sequence[Failure]) -> float:
    """How much of all that failed, each check weighted by how many failed, follows from a cause: 0 to 1."""
    whole = sum(failure.weight for failure in failures)
    return sum(failure.weight * suspect.covers(failure.check.name) for failure in failures) / whole if whole else 0.0


def merged(suspects: Iterable[Suspect]) -> list[Suspect]:
    """One suspect for each cause, its surest lines first."""
    best: dict[Cause, Suspect] = {}
    for suspect in sorted(suspects, key=lambda suspect: (suspect.proof, -suspect.net)):
        first = best.setdefault(suspect.cause, suspect)
        if first is suspect:
            continue
        added = {name: min(1.0, first.explains.get(name, 0.0) + share) for name, share in suspect.explains.items()}
        rerun = first.rerun or suspect.rerun  # the mistake itself gives what was recorded: it explains the whole check
        best[suspect.cause] = replace(
            first,
            for_=tuple(dict.fromkeys((*first.for_, *suspect.for_))),
            example=first.example or suspect.example,
            explains={} if rerun else {**first.explains, **added},
            chance=None if first.chance is None or suspect.chance is None else min(first.chance, suspect.chance),
            rerun=rerun,
        )
    return list(best.values())


def unexplained(faults: Sequence[Suspect], failures: Sequence[Failure]) -> list[str]:
    """What failed and follows from no named fault; where a part of it does, how much is left."""
    lines = []
    for failure in failures:
        check, share = failure.check, sum(fault.covers(failure.check.name) for fault in faults)
        rest = check.failed - round(share * check.failed)
        if share <= 0:
            lines.append(failure.line)
        elif share < WHOLE and rest:
            counted = f"{rest:,} of {plural(check.failed, check.unit or 'place')}"
            lines.append(f"{failure.judge}, {check.name}: {counted} failures are unexplained")
    return lines
