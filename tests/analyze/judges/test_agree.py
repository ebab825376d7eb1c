"""No two judges contradict each other, over any capture: healthy, damaged, planted. Written as rules."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.result import Sameness
from specscope.analyze.compare.side import from_history
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import Exit
from tests.analyze.edits import changed, of, put, sample

NAMES = ("sampled", "eagle", "ngram")
FIELDS = ("p", "p_trial", "q_trial", "accept_prob", "coin", "residual_mass", "outcome")
VALUES = (0.0, 1.0, 0.3, 1.5, -0.25, float("nan"), float("inf"))


def contradictions(history):
    """What two judges say that cannot both be so, in lines."""
    found = examine(history, "run.jsonl")
    trial = found.stages["verify"]
    failed = {check.name for check in trial.failed}
    lines = [f"{line}" for line in found.left_out if "could not be asked" in line]
    # What verify convicts, diagnose reports: by a fault from which it follows, or as unexplained
    for name in failed:
        named = any(name in fault.cause.follows for fault in found.faults)
        told = any(f"{name}:" in line or name in line for line in found.unexplained)
        if not named and not told:
            lines.append(f"{name} failed, and diagnose says nothing of it")
    # What diagnose names, some check of verify or audit failed, or something was run again
    for fault in found.faults:
        if not fault.rerun and not (fault.cause.follows & failed):
            lines.append(f"{fault.cause.label} is named, and no check failed that follows from it")
    if failed and found.exit is not Exit.INCONSISTENT:
        lines.append(f"{sorted(failed)} failed, and diagnose exits with {found.exit}")
    if found.exit is Exit.INCONSISTENT and not failed and not any(f.rerun for f in found.faults):
        lines.append("diagnose convicts, and no judge does")
    if (trial.exit is Exit.INCONSISTENT) != bool(failed):
        lines.append(f"verify exits with {trial.exit}, and {len(failed)} checks failed")
    for remark in found.remarks:
        if remark.cause in [fault.cause for fault in found.faults]:
            lines.append(f"{remark.cause.label} is a fault and a remark")
    return lines


def spoiled(field, value, place):
    """A value of the evidence replaced: of the right type, and whatever it is."""

    def values(part):
        array = getattr(part.verdict, field)
        return put(array, place % len(array), place % 3 if field == "outcome" else value)

    return of(lambda part: len(part.tree), **{f"verdict__{field}": values})


OTHERWISE = [  # steps that say other things of themselves: positions, blocks, paths, final tokens, params
    of(context_len=lambda part: part.context_len + 1),
    of(emitted=lambda part: max(part.emitted - 1, 0)),
    of(moved=lambda part: part.moved[:0]),
    of(blocks=lambda part: part.blocks[::-1]),
    of(preceded=None),
    of(verdict__token=7),
    of(verdict__final_p=0.5),
    of(verdict__path=lambda part: part.verdict.path[:0]),
    of(tree__token=lambda part: part.tree.token + 1),
    of(tree__q=lambda part: part.tree.q / 2),
    of(parents=None),
]
DAMAGE = st.builds(spoiled, st.sampled_from(FIELDS), st.sampled_from(VALUES), st.integers(0, 5))


def damaged(edits, most):
    """Sample captures with an edit in some steps, at most so many."""
    steps = st.sets(st.integers(0, 60), min_size=1, max_size=most)
    return st.builds(changed, st.sampled_from(NAMES).map(sample), edits, steps)


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(damaged(DAMAGE, 4) | damaged(st.sampled_from(OTHERWISE), 60))
def test_damaged_captures_and_misplaced_steps(history):
    assert contradictions(history) == []


@pytest.mark.parametrize("name", [*NAMES, "evidence", "planted"])
def test_the_samples(name):
    assert contradictions(sample(name)) == []


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(damaged(DAMAGE, 4))
def test_no_difference_means_that_nothing_is_marked(history):
    """compare: "the same" is said where no row of any table is starred or marked."""
    whole = sample("sampled")
    beside = history if history.run.run_id == whole.run.run_id else whole
    found = compare(from_history(whole, "a"), from_history(beside, "b"))
    marked = [field.name for field in found.fields if field.suspect]
    starred = [figure.name for figure in found.figures if figure.significant]
    starred += [figure.name for each in found.groups.values() for figure in each if figure.significant]
    if found.answer is Sameness.SAME:
        assert not marked
        assert not starred
    if marked or starred:
        assert found.answer is Sameness.DIFFERENT
