"""Made-up runs for trace sampling: requests come, run, are preempted and end; the run may go back and branch."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinalKind, FinishReason, RequestEnd, RequestInfo, RequestStep
from specscope.trace.record.tree import DraftTree
from tests.trace.samples import NS, record, verdict

SAMPLED, NOT_SAMPLED = f"00-{5:032x}-{9:016x}-01", f"00-{6:032x}-{9:016x}-00"
CHAINS = [DraftTree.build(list(range(n)), list(range(-1, n - 1))) for n in range(4)]


@dataclass
class Alive:
    """A request that runs."""

    info: RequestInfo
    steps: int = 0
    emitted: int = 0


@dataclass
class FakeEngine:
    """Gives records, and goes back as the engine does: to a step on its path, from which a branch begins."""

    alive: dict[str, Alive] = field(default_factory=dict)
    next: int = 0  # the next step's number
    names: int = 0
    branch: int = 0
    branches: int = 1
    after: int | None = None
    path: list[tuple[int, dict[str, Alive], int]] = field(default_factory=list)  # (step, what was alive, branch)

    def step(self, comes, ends, accepted, preempted=False):
        """One record. `comes`: what new requests say; `ends`: (of which of those alive, why); `accepted`: of each."""
        infos = []
        for caller, labels in comes:
            name, self.names = f"r{self.names}", self.names + 1
            infos.append(
                RequestInfo(
                    name, NS, NS + 10**6, "", np.arange(3, dtype=np.int32), SamplingParams(), labels, "", caller
                )
            )
            self.alive[name] = Alive(infos[-1])
        parts = tuple(self._part(one, accepted[i % len(accepted)]) for i, one in enumerate(self.alive.values()))
        finished = []
        for which, reason in ends:
            if self.alive:
                one = self.alive.pop(sorted(self.alive)[which % len(self.alive)])
                output = np.arange(one.emitted, dtype=np.int32)
                finished.append(RequestEnd(one.info, NS + self.next * 10**8, reason, "", output))
        made = dataclasses.replace(
            record(self.next, parts, tuple(infos), tuple(finished)),
            preempted=tuple(sorted(self.alive)[:1]) if preempted else (),
            branch=self.branch,
            after=self.after,
            rewound=self.after is not None,
        )
        self.path.append((self.next, copy.deepcopy(self.alive), self.branch))
        self.next, self.after = self.next + 1, None
        return made

    def _part(self, one, accepted):
        drafted = CHAINS[accepted[0]]
        got = min(accepted[1], len(drafted))
        kind = FinalKind.TARGET if not len(drafted) else FinalKind.BONUS if got == len(drafted) else FinalKind.RECOVERED
        outcome = [1] * got + [2] * (got < len(drafted)) + [0] * max(len(drafted) - got - 1, 0)
        judged = verdict(drafted, outcome, list(range(got)), 7, kind)
        made = RequestStep(
            one.info.id, one.steps, 3 + one.emitted, 2 * (not one.steps), "ngram", drafted, judged, got + 1
        )
        one.steps, one.emitted = one.steps + 1, one.emitted + got + 1
        return made

    def go_back(self, places):
        """To before one of its last steps; the next one begins a branch."""
        if not self.path:
            return
        at = max(len(self.path) - places, 0)
        del self.path[at:]
        before = self.path[-1] if self.path else (-1, {}, 0)
        self.after, self.alive = before[0], copy.deepcopy(before[1])
        self.branch, self.branches = self.branches, self.branches + 1


callers = st.sampled_from(["", "", "", SAMPLED, NOT_SAMPLED])
labels = st.sampled_from([{}, {"kind": "code"}])
ticks = st.tuples(
    st.lists(st.tuples(callers, labels), max_size=2),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(FinishReason)), max_size=2),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4),
    st.booleans(),
)


@st.composite
def sampled_runs(draw, most=14, goes_back=True):
    """Records of a run; with `goes_back` of one that may have branches."""
    engine, records = FakeEngine(), []
    for tick in draw(st.lists(ticks, min_size=1, max_size=most)):
        if goes_back and draw(st.integers(0, 7)) == 0:
            engine.go_back(draw(st.integers(1, 5)))
        records.append(engine.step(*tick))
    return records
