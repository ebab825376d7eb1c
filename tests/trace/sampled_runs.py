"""Made-up runs for trace sampling: requests come, run, are preempted and end; the run may go back and branch."""

import copy
import dataclasses
from dataclasses import dataclass, field

from hypothesis import strategies as st

from specscope.trace.record.records import FinishReason, RequestInfo
from specscope.trace.record.tree import DraftTree
from tests.support import records as made
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
            asked = made.info(name, "", range(3), labels, arrived=NS, admitted=NS + 10**6, traceparent=caller)
            self.alive[name] = Alive(asked)
            infos.append(asked)
        parts = tuple(self._part(one, accepted[i % len(accepted)]) for i, one in enumerate(self.alive.values()))
        finished = []
        for which, reason in ends:
            if self.alive:
                one = self.alive.pop(sorted(self.alive)[which % len(self.alive)])
                finished.append(made.end(one.info, range(one.emitted), reason, finished=NS + self.next * 10**8))
        told = {"branch": self.branch, "after": self.after, "rewound": self.after is not None}
        told["preempted"] = tuple(sorted(self.alive)[:1]) if preempted else ()
        step = dataclasses.replace(record(self.next, parts, tuple(infos), tuple(finished)), **told)
        self.path.append((self.next, copy.deepcopy(self.alive), self.branch))
        self.next, self.after = self.next + 1, None
        return step

    def _part(self, one, accepted):
        drafted = CHAINS[accepted[0]]
        got = range(min(accepted[1], len(drafted)))
        path, outcome = list(got), made.outcomes(len(drafted), got, range(len(got), min(len(got) + 1, len(drafted))))
        judged = verdict(drafted, outcome, path, 7, made.kind_of(drafted.parent.tolist(), path))
        more = {"index": one.steps, "context": 3 + one.emitted, "prefill": 2 * (not one.steps)}
        one.steps, one.emitted = one.steps + 1, one.emitted + len(got) + 1
        return made.part(one.info.id, drafted, judged, **more)

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
def sampled_runs(draw, most=14):
    """Records of a run that may have branches."""
    engine, records = FakeEngine(), []
    for tick in draw(st.lists(ticks, min_size=1, max_size=most)):
        if draw(st.integers(0, 7)) == 0:
            engine.go_back(draw(st.integers(1, 5)))
        records.append(engine.step(*tick))
    return records
