"""A rule of one's own: it decides, a capture tells it, and `verify` asks it again."""

import dataclasses
import itertools
import re
import types
from contextlib import closing

import numpy as np
import pytest

from specscope import Engine, EngineConfig, SamplingParams
from specscope.analyze.findings import CheckResult
from specscope.analyze.verify.trial import judge, verdict
from specscope.errors import UserError
from specscope.trace.record.own_rule import OwnRule
from specscope.trace.record.records import Outcome
from tests.analyze.audit.runs import drained
from tests.engines import tiny_engine
from tests.own import Bigrams

SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3)


def ratio(trial):
    return min(1.0, trial.p / trial.q)


def typical(trial):
    """Medusa's: what is likely enough for how certain the target is."""
    return trial.p > min(0.3, 0.5 * np.exp(-trial.entropy))


def every_field(trial):
    seen = trial.depth + len(trial.elders) + sum(elder.p for elder in trial.elders) + trial.token % 3
    return (trial.coin + seen + trial.choice_p) % 1.0


def run(tiny, rule, tree="2x2", params=SAMPLED):
    """The history of a run of three requests."""
    with closing(tiny_engine(tiny, drafter=Bigrams, tree=tree, rule=rule)) as engine:
        for prompt in ("abcabcabc", "hello hello", "ab"):
            engine.add(prompt, params)
        return drained(engine)


def steps(history):
    return [part for record in history.steps for part in record.requests if part.verdict is not None]


def accept_check(history, rule):
    trial = judge(history, source="x", own_rule=rule)
    (check,) = (check for check in trial.checks if check.name == "accept probability")
    return check, trial


def test_the_standard_rule_as_ones_own_gives_its_verdicts(tiny):
    mine, theirs = run(tiny, ratio), run(tiny, "standard")
    for one, other in zip(steps(mine), steps(theirs), strict=True):
        assert one.rule == f"{__name__}:ratio"
        assert dataclasses.replace(one.verdict, rule="standard") == other.verdict


@pytest.mark.parametrize("rule", [typical, every_field], ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_verify_asks_it_again(tiny, rule, temperature):
    """From the numbers of a capture it gives what it gave, to the last bit."""
    history = run(tiny, rule, params=dataclasses.replace(SAMPLED, temperature=temperature))
    verdicts = [step.verdict for step in steps(history)]
    tried = sum(int((verdict.outcome != Outcome.UNTRIED).sum()) for verdict in verdicts)
    asked = []

    def same(trial):
        asked.append(rule(trial))
        return asked[-1]

    check, trial = accept_check(history, OwnRule(verdicts[0].rule, same))
    assert (check.result, check.tested) == (CheckResult.PASSED, tried)
    given = [a for verdict in verdicts for a in verdict.accept_prob[verdict.outcome != Outcome.UNTRIED].tolist()]
    assert sorted(map(float, asked)) == sorted(given)
    assert not [note for note in trial.notes if "rule" in note]


def test_without_its_name_it_is_not_judged_and_another_rule_is_convicted(tiny):
    history, name = run(tiny, typical), f"{__name__}:typical"
    check, trial = accept_check(history, None)
    assert check.result is CheckResult.SKIPPED
    assert f"the rule is {name}: its acceptance was not judged: verify --rule {name} judges it" in trial.notes
    others = {check.name: check.result for check in trial.checks}
    assert {others[name] for name in ("outcomes", "trial order", "residual mass", "paths")} == {CheckResult.PASSED}
    check, trial = accept_check(history, OwnRule("mine:ratio", ratio))
    assert check.result is CheckResult.FAILED
    assert "--rule mine:ratio gives" in check.detail
    assert f"the rule is {name}: judged by mine:ratio" in trial.notes


def test_it_is_told_what_was_tried_before(tiny):
    told = []
    run(tiny, lambda trial: told.append(trial) or 0.0, "2x2")
    assert {trial.depth for trial in told} == {1}  # nothing is accepted
    for before, trial in itertools.pairwise(told):
        assert trial.elders in ((), (*before.elders, before))
    assert max(len(trial.elders) for trial in told) == 1


BAD = {
    "a word": (lambda trial: "0.5", r"returned '0.5' for p = .*must return a probability .*test_own_rule.py, line"),
    "not a number": (lambda trial: float("nan"), "returned nan"),
    "above 1": (lambda trial: 1.5, "returned 1.5"),
    "a mistake": (lambda trial: trial.r, r"failed for p = .*AttributeError.*test_own_rule.py, line"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_named_with_its_place(tiny, name):
    rule, says = BAD[name]
    with pytest.raises(UserError, match=says) as raised:
        run(tiny, rule)
    assert "\n" not in str(raised.value)


def test_a_name_alone_imports_nothing():
    config = EngineConfig(rule=ratio)
    assert config.rule == f"{__name__}:ratio"
    assert dataclasses.replace(config, max_batch=2).load_rule().function is ratio
    assert dataclasses.replace(config, rule="match").load_rule() is None
    with pytest.raises(UserError, match="the rule 'mine:f' is imported only if --rule names it"):
        dataclasses.replace(config, rule="mine:f")
    with pytest.raises(UserError, match="unknown rule 'best': use standard, block, traversal, match or module:fun"):
        EngineConfig(rule="best")


def test_what_is_no_function_is_refused():
    with pytest.raises(UserError, match=r"--rule tests\.own:Bigrams\.plan"):
        Engine(rule="tests.own:Bigrams.plan")
    ratio_of_lossy = types.FunctionType(ratio.__code__, globals(), "ratio")
    ratio_of_lossy.__module__ = "lossy"
    with pytest.raises(UserError, match="--rule 'lossy:ratio': lossy:NAME is a rule of another engine: rename your mo"):
        Engine(rule=ratio_of_lossy)
    with pytest.raises(UserError, match=r"--rule specscope:__version__ is '0.1.0': name a function"):
        Engine(rule="specscope:__version__")


def test_a_rule_that_rejects_what_the_target_likes_breaks_no_other_check(tiny):
    """What a rejection leaves may hold the rejected token: p was above q there."""
    history = run(tiny, lambda trial: 0.3 * ratio(trial), "3x2", dataclasses.replace(SAMPLED, max_tokens=100))
    same = [part for part in steps(history) if part.verdict.token in part.tree.token[part.verdict.outcome == 2]]
    assert same
    failed = {check.name for check in judge(history, source="x").checks if check.result is CheckResult.FAILED}
    assert failed <= {"emitted surprisal", "target's choice emitted"}


def test_a_sample_that_is_too_small_is_no_proof(tiny):
    """It accepts more than it may, which a few steps do not show."""

    def verdict_of(tokens):
        params = dataclasses.replace(SAMPLED, max_tokens=tokens)
        history = run(tiny, lambda trial: min(1.0, 1.1 * trial.p / trial.q), params=params)
        return verdict(judge(history, source="x"))

    few, more = verdict_of(4), verdict_of(100)
    assert few.startswith("consistent: ")
    assert "tokens are too few to say so; specscope.testing.lossless proves it exactly" in few
    assert re.search(r"lossless: \d+ draws would have seen .* nats a token with 95 % power; specscope", more)
    assert "not prove" not in verdict(judge(run(tiny, "standard"), source="x"))
