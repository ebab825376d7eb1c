"""A judge never dies of a capture: wrong values of the right type are judged, or named, and the rest goes on."""

import dataclasses
import json

import pytest

from specscope.analyze.audit.audit import audit
from specscope.analyze.findings import CheckResult, Exit
from specscope.errors import UserError
from specscope.trace.wire.reading import read_capture
from tests.analyze.audit.runs import RULES, changed, run, saved
from tests.engines import PROMPTS
from tests.trace.damage import damaged, with_wrong_numbers


@pytest.mark.parametrize("name", ["eagle", "p-eagle", "draft tree"])
def test_outputs_that_are_swapped_between_requests_are_judged(bench, name):
    """The steps of two requests change places: no step of theirs follows from what was committed."""
    engine = bench.engine(name)
    history = run(engine, RULES["greedy"], tokens=10, prompts=[*PROMPTS[:2], PROMPTS[3]])
    first, second = list(history.requests)[:2]
    other = {first: second, second: first}
    swapped = changed(history, lambda part: dataclasses.replace(part, request=other.get(part.request, part.request)))
    found = bench.audit(engine, swapped)
    assert found.exit is Exit.INCONSISTENT
    assert found.finding("context").failed
    assert "contradict what was committed before" in found.to_dict()["verdict"]
    assert found.finding("target p").result is CheckResult.PASSED  # the third request is as it was
    assert not any("Error" in sentence for sentence in found.unjudged)


def test_where_no_step_can_be_judged_the_context_is_wrong(bench):
    engine = bench.engine("eagle")
    history = run(engine, {}, tokens=6, prompts=PROMPTS[:1])
    moved = changed(history, lambda part: dataclasses.replace(part, context_len=part.context_len + 50))
    found = bench.audit(engine, moved)
    assert (found.exit, found.audited) == (Exit.INCONSISTENT, 0)


def put(part, where, name, values):
    """The step with the first values of an array replaced."""
    inner = getattr(part, where)
    array = getattr(inner, name).copy()
    array.flat[: len(values)] = values
    return dataclasses.replace(part, **{where: dataclasses.replace(inner, **{name: array})})


DAMAGE = {  # by what is damaged: the drafter, the array, its first values, and the check that fails
    **{
        f"token {token} of {name}": (name, "tree", "token", [token], "context")
        for token in (-1, 300, 2**31 - 1)
        for name in ("eagle", "draft tree", "ngram")
    },
    **{f"p {p}": ("draft tree", "verdict", "p", [p], "target p") for p in (float("nan"), -0.5, 2.0, float("inf"))},
    "likeliest tokens": ("draft tree", "parents", "top", [99_999] * 4, "target top tokens"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_one_damaged_value_is_a_difference(bench, what):
    name, where, array, values, check = DAMAGE[what]
    engine = bench.engine(name)
    history = run(engine, RULES["temperature"], tokens=12, prompts=PROMPTS[:3])
    step = next(p for r in history.steps for p in r.requests if len(p.tree) and p.index > 2 and p.parents.node.size > 0)
    bad = changed(history, lambda part: put(part, where, array, values) if part is step else part)
    found = bench.audit(engine, bad)
    assert found.exit is Exit.INCONSISTENT
    wrong = found.finding(check)
    assert wrong.failed == 1 or check == "context"
    if check == "context":
        assert f"{what.split(' of ')[0]} is outside the model's vocabulary of 300" in wrong.detail or wrong.failed > 1
        assert found.finding("final p").result is CheckResult.PASSED
    assert not any("Error" in sentence for sentence in found.unjudged)


def judge_damaged(lines, options, path, seeds):
    """How many of them could be read and judged. Whatever was done, nothing but UserError is raised."""
    judged = 0
    for seed in seeds:
        path.write_bytes(damaged(lines, seed) if seed % 2 else with_wrong_numbers(lines, seed, 0.01))
        try:
            found = audit(read_capture(path).history, path.name, options)
        except UserError:
            continue
        assert not any("Error:" in sentence for sentence in found.unjudged), (seed, found.unjudged)
        json.dumps(found.to_dict())
        judged += 1
    return judged


@pytest.mark.every(2)
@pytest.mark.parametrize("rule", ["greedy", "all"])
@pytest.mark.parametrize("name", ["eagle dynamic", "draft tree", "suffix"])
def test_damage_is_never_an_exception(bench, tmp_path, name, rule):
    engine = bench.engine(name)
    history = run(engine, RULES[rule], tokens=8, prompts=PROMPTS[:3])
    path = saved(history, tmp_path / "run.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert judge_damaged(lines, bench.options(engine, sample=8), path, range(25)) > 12
