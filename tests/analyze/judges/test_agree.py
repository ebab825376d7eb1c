"""No two judges contradict each other, over any capture: healthy, damaged, planted. Written as rules."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specscope.analyze.audit.audit import Audit
from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.result import Sameness
from specscope.analyze.compare.side import from_history
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import CheckResult, Exit
from tests.analyze.judges.edits import changed, sample, with_verdict

NAMES = ("sampled", "eagle", "ngram")
FIELDS = ("p", "p_trial", "q_trial", "accept_prob", "coin", "residual_mass", "outcome")
VALUES = (0.0, 1.0, 0.3, 1.5, -0.25, float("nan"), float("inf"))


def contradictions(history, audited: Audit | None = None):
    """What two judges say that cannot both be so, in lines."""
    found = examine(history, "run.jsonl", audited=audited)
    trial = found.stages["verify"]
    failed = {check.name for check in trial.failed}
    differing = set()
    if audited is not None:
        differing = {one.name for one in audited.findings if one.result is CheckResult.FAILED}
    lines = [f"{line}" for line in found.left_out if "could not be asked" in line]
    # What verify convicts, diagnose reports: by a fault from which it follows, or as unexplained
    for name in failed | differing:
        named = any(name in fault.cause.follows for fault in found.faults)
        told = any(f"{name}:" in line or name in line for line in found.unexplained)
        if not named and not told:
            lines.append(f"{name} failed, and diagnose says nothing of it")
    # What diagnose names, some check of verify or audit failed, or something was run again
    for fault in found.faults:
        if not fault.rerun and not (fault.cause.follows & (failed | differing)):
            lines.append(f"{fault.cause.label} is named, and no check failed that follows from it")
    if (failed or differing) and found.exit is not Exit.INCONSISTENT:
        lines.append(f"{sorted(failed | differing)} failed, and diagnose exits with {found.exit}")
    if found.exit is Exit.INCONSISTENT and not (failed or differing) and not any(f.rerun for f in found.faults):
        lines.append("diagnose convicts, and no judge does")
    if (trial.exit is Exit.INCONSISTENT) != bool(failed):
        lines.append(f"verify exits with {trial.exit}, and {len(failed)} checks failed")
    for remark in found.remarks:
        if remark.cause in [fault.cause for fault in found.faults]:
            lines.append(f"{remark.cause.label} is a fault and a remark")
    return lines


def spoiled(field, value, place):
    """A value of the evidence replaced: of the right type, and whatever it is."""

    def change(part):
        if not len(part.tree):
            return None
        array = getattr(part.verdict, field).copy()
        array[place % len(array)] = place % 3 if field == "outcome" else value
        return with_verdict(part, **{field: array})

    return change


OTHERWISE = [  # steps that say other things of themselves: positions, blocks, paths, final tokens, params
    lambda part: dataclasses.replace(part, context_len=part.context_len + 1),
    lambda part: dataclasses.replace(part, emitted=max(part.emitted - 1, 0)),
    lambda part: dataclasses.replace(part, moved=part.moved[:0]),
    lambda part: dataclasses.replace(part, blocks=part.blocks[::-1]),
    lambda part: dataclasses.replace(part, preceded=None),
    lambda part: with_verdict(part, token=7),
    lambda part: with_verdict(part, final_p=0.5),
    lambda part: with_verdict(part, path=part.verdict.path[:0]),
    lambda part: dataclasses.replace(part, tree=dataclasses.replace(part.tree, token=part.tree.token + 1)),
    lambda part: dataclasses.replace(part, tree=dataclasses.replace(part.tree, q=part.tree.q / 2)),
    lambda part: dataclasses.replace(part, parents=None),
]
DAMAGE = st.builds(spoiled, st.sampled_from(FIELDS), st.sampled_from(VALUES), st.integers(0, 5))


def damaged(edits, most):
    """Sample captures with an edit in some steps, at most so many."""
    steps = st.sets(st.integers(0, 60), min_size=1, max_size=most)
    return st.builds(changed, st.sampled_from(NAMES).map(sample), edits, steps)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(damaged(DAMAGE, 4))
def test_damaged_captures(history):
    assert contradictions(history) == []


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(damaged(st.sampled_from(OTHERWISE), 60))
def test_misplaced_steps(history):
    assert contradictions(history) == []


@pytest.mark.parametrize("name", [*NAMES, "evidence", "planted"])
def test_the_samples(name):
    assert contradictions(sample(name)) == []


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
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
