"""Reports of several captures, such as those of vLLM's ranks, and their figures pooled.

Each capture has a report of its own; request names are unique only within a capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specscope.analyze.figures import Figures, Means
from specscope.analyze.plain import plain
from specscope.analyze.report import LabelGroup, Report, grouped
from specscope.trace.history.stats import Acceptance

SETTINGS = ("target", "drafter", "draft_model", "tree", "rule")  # should be the same in all runs that are pooled


@dataclass(frozen=True)
class Several:
    """The reports of some captures. Filled by `several`."""

    reports: tuple[Report, ...]  # in the order in which they were given
    pooled: Figures  # over all of them
    means: Means  # over the requests of all of them
    groups: dict[str, list[LabelGroup]]  # of the same requests, by label
    notes: tuple[str, ...]  # what a reader of the pooled figures must know

    @property
    def requests(self) -> int:
        """How many there are in all captures."""
        return sum(len(report.requests) for report in self.reports)

    def to_dict(self) -> dict[str, Any]:
        """The pooled figures as plain values: named as in each report."""
        return {
            "pooled": plain(self.pooled),
            "per_request_mean": plain(self.means),
            "positions": plain(self.pooled.positions),
            "groups": plain(self.groups),
            "request_count": self.requests,
        }


def several(reports: Sequence[Report]) -> Several:
    """These reports with their pooled figures."""
    total = Acceptance()
    for report in reports:
        total.merge(report.pooled.acceptance)
    requests = [request for report in reports for request in report.requests]
    means = Means.over([request.figures for request in requests])
    return Several(tuple(reports), Figures(total), means, grouped(requests), (*_mixed(reports), *_twice(reports)))


def _mixed(reports: Sequence[Report]) -> list[str]:
    """A note on settings in which the runs differ: pooled figures then mix what should be compared."""
    runs = [report.run for report in reports if report.run is not None]
    values = {name: [*dict.fromkeys(str(run[name]) or "none" for run in runs)] for name in SETTINGS}
    mixed = "; ".join(f"{name} {', '.join(each)}" for name, each in values.items() if len(each) > 1)
    return [f"the captures differ in settings, which pooled figures mix: {mixed}"] if mixed else []


def _twice(reports: Sequence[Report]) -> list[str]:
    """Notes on runs that are in several captures, such as copies."""
    sources: dict[str, list[str]] = {}
    for report in reports:
        if report.run is not None:
            sources.setdefault(report.run["run_id"], []).append(report.source)
    return [f"{' and '.join(each)} hold the same run, which counts twice" for each in sources.values() if len(each) > 1]
