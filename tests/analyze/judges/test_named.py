"""What verify convicts, diagnose explains: a check that failed, once or often, has its cause named from what failed."""

import dataclasses
import io
import math
import re

import numpy as np
import pytest
from rich.console import Console

from specscope import Draft, Drafter, Engine, SamplingParams
from specscope.analyze.diagnose import healthy
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Failure, Suspect, settled
from specscope.analyze.diagnose.run import examine
from specscope.analyze.diagnose.text import render_diagnosis
from specscope.analyze.findings import CheckResult, Exit, Finding
from specscope.analyze.locate.located import Proof
from specscope.analyze.verify.trial import judge
from specscope.trace.history.history import History
from specscope.trace.record.records import Outcome, Preceded
from tests.analyze.judges.edits import case_of, changed, decode_steps, sample, under, with_verdict
from tests.analyze.verify.edits import at, node, of, put, renormalised, replaced


def judged(history):
    """(the names of verify's failed checks, the diagnosis)."""
    found = examine(history, "run.jsonl")
    return [check.name for check in found.stages["verify"].failed], found


def untried(part):
    return np.flatnonzero(part.verdict.outcome == Outcome.UNTRIED)


def open_coin(part, i):
    """A node that chance decided: rejected at even positions, accepted at odd ones."""
    outcome = Outcome.ACCEPTED if part.position % 2 else Outcome.REJECTED
    return part.verdict.outcome[i] == outcome and 0.05 < part.verdict.accept_prob[i] < 0.95


def other_side(part, i):
    """A coin on the wrong side of a: below it where it was rejected, above it where it was accepted."""
    a = float(part.verdict.accept_prob[i])
    return (1 + a) / 2 if part.verdict.outcome[i] == Outcome.ACCEPTED else a / 2


accepted_by_p = of(  # the ratio test without q, and the verdicts as they were
    lambda part: not np.allclose(part.verdict.accept_prob, part.verdict.p_trial, atol=1e-3),
    verdict__accept_prob=lambda part: part.verdict.p_trial.astype(np.float64),
)
untried_pair = of(  # the coins of two nodes that were not tried made equal
    lambda part: len(untried(part)) > 1,
    verdict__coin=lambda part: put(part.verdict.coin, untried(part)[1], part.verdict.coin[untried(part)[0]]),
)
q_as_drawn = at(None, renormalised, verdict__q_trial=lambda part, i: part.tree.q[i])
EDITS = [
    ("accepted KV moved", of(lambda p: len(p.moved), moved=np.zeros(0, np.int32)), "sampled", Cause.TARGET_KV),
    ("accept probability", accepted_by_p, "sampled", Cause.RATIO_TEST),
    ("probabilities", at(None, verdict__p=np.nan), "sampled", Cause.NOT_A_NUMBER),
    ("probabilities", at(None, verdict__p=-0.25), "eagle", Cause.NOT_A_NUMBER),
    ("q at trials", q_as_drawn, "sampled", Cause.RESIDUAL_NOT_RENORMALISED),
    ("outcomes", at(None, open_coin, verdict__coin=other_side), "sampled", Cause.RATIO_TEST),
    ("coins unequal", untried_pair, "sampled", Cause.COINS),
]


@pytest.mark.parametrize("often", [False, True], ids=["once", "always"])
@pytest.mark.parametrize(("check", "edit", "name", "cause"), EDITS, ids=[edit[0] for edit in EDITS])
def test_a_failed_check_has_its_cause_named(check, edit, name, cause, often):
    """Items 1, 2 and 13, each in one step and in all that allow it."""
    history = sample(name)
    able = [n for n, part in enumerate(decode_steps(history)) if edit(part) is not None]
    failed, found = judged(changed(history, edit, able if often else able[:1]))
    assert check in failed
    assert found.faults[0].cause is cause
    assert found.exit is Exit.INCONSISTENT


rejected_choice = of(  # item 16: the last accepted draft is said to have been rejected, and so was the target's choice
    lambda part: len(part.verdict.path),
    verdict__outcome=lambda part: put(part.verdict.outcome, part.verdict.path[-1], Outcome.REJECTED),
    verdict__path=lambda part: part.verdict.path[:-1],
)


def accepted_other(part):
    """Item 16: a rejected draft is said to have been accepted, behind the path."""
    path = part.verdict.path
    i = node(part, Outcome.REJECTED, lambda part, i: part.tree.parent[i] == (path[-1] if len(path) else -1))
    if i is None:
        return None
    outcome = put(part.verdict.outcome, i, Outcome.ACCEPTED)
    return with_verdict(part, outcome=outcome, path=np.append(path, i).astype(np.int32))


@pytest.mark.parametrize("name", ["eagle", "ngram"])
@pytest.mark.parametrize("edit", [rejected_choice, accepted_other])
def test_greedy_acceptance_is_checked(edit, name):
    history = sample(name)
    able = [n for n, part in enumerate(decode_steps(history)) if edit(part) is not None]
    assert able
    assert "greedy acceptance" not in judged(history)[0]
    failed, found = judged(changed(history, edit, able))
    assert "greedy acceptance" in failed
    assert Cause.ACCEPTED_COUNT in [fault.cause for fault in found.faults] or len(able) < 8
    for line in found.unexplained:
        assert "greedy acceptance" not in line
    if len(able) < 8:
        return  # too few to tell a count from decisions that are wrong one by one
    way = "longer" if edit is accepted_other else "shorter"
    assert any(f"1 {way} in" in line for fault in found.faults for line in fault.for_)
    failed, found = judged(changed(history, edit, able[:1]))
    assert "greedy acceptance" in failed
    assert found.exit is Exit.INCONSISTENT


def test_a_rule_that_is_named_and_not_used():
    """Item 5: the header says block, every step says standard."""
    history = sample("sampled")
    history.run = dataclasses.replace(history.run, rule="block")
    failed, found = judged(history)
    assert failed == ["rule of verification"]
    assert found.faults[0].cause is Cause.OTHER_RULE
    assert "41 of 41 steps" in found.faults[0].for_[0]


def after_no_acceptance(part):
    """The ratio test without q, behind a step that accepted no draft."""
    return accepted_by_p(part) if part.preceded is Preceded.NOTHING else None


def test_when_it_happens_is_said_by_recorded_facts():
    """Item: an error that occurs only after one kind of step."""
    history = sample("sampled")
    able = [n for n, part in enumerate(decode_steps(history)) if after_no_acceptance(part) is not None]
    assert len(able) > 5
    failed, found = judged(changed(history, after_no_acceptance, able))
    assert "accept probability" in failed
    assert "where the step before is nothing" in found.when[0]
    assert found.when[0] in " ".join(shown(found).split())


def failure(name, failed, tested):
    return Failure("audit", Finding(name, CheckResult.FAILED, "", tested, failed, unit="node"))


def test_causes_in_order_of_what_they_explain_and_nothing_that_chance_gives():
    """Items 3 and 18: 738 of 738 before 1, 112 of 112 before 2 of 2, what rows prove before what a sum suggests."""
    failures = [failure("draft p", 738, 738), failure("target p", 1, 738)]
    pair = [Suspect(cause, Proof.ROWS, ("",)) for cause in (Cause.RULES_WRONG, Cause.Q_TEMPERATURE)]
    assert [fault.cause for fault in settled(pair, failures)] == [Cause.Q_TEMPERATURE, Cause.RULES_WRONG]
    failures = [failure("accept probability", 2, 2), failure("target p", 112, 112), failure("trial order", 9, 300)]
    two = Suspect(Cause.RATIO_TEST, Proof.ROWS, ("2 of 2",), explained=2, of=2)
    many = Suspect(Cause.RULES_WRONG, Proof.ROWS, ("112 of 112",), explained=112, of=112)
    spoils = Suspect(Cause.TRIAL_ORDER, Proof.ROWS, ("9 of 9",), explained=9, of=9, spoiled=9)
    faults = settled([Suspect(Cause.VERDICT_LATE, Proof.SUM, ("z",)), two, spoils, many], failures)
    assert [fault.cause for fault in faults] == [Cause.RULES_WRONG, Cause.RATIO_TEST, Cause.TRIAL_ORDER]
    by_chance = Suspect(Cause.DRAFTER_KV, Proof.CONDITION, ("perhaps",), chance=0.01)
    assert settled([by_chance], [failure("draft p", 5, 100)]) == []
    (fault,) = settled([dataclasses.replace(by_chance, chance=1e-9)], [failure("draft p", 5, 100)])
    assert fault.to_dict("x")["chance"] == 1e-9


def shown(found):
    console = Console(width=110, record=True, file=io.StringIO())
    render_diagnosis(found, "run.jsonl", console)
    return console.export_text()


def test_three_lists_in_order():
    """Item 4: faults, then what is unexplained, then remarks without a number; no "no fault" below a fault."""
    history = changed(sample("eagle"), lambda part: with_verdict(part, final_p=0.5), [3])
    failed, found = judged(history)
    assert failed
    found = dataclasses.replace(
        found,
        remarks=(Suspect(Cause.WEAK_DRAFTER, Proof.SUM, ("few are accepted",)),),
        unexplained=("verify, something: odd",),
    )
    text = shown(found)
    assert text.index("1. ") < text.index("Also wrong") < text.index("Remarks") < text.index("the drafter is weak here")
    assert "2. " not in text
    assert "No fault found" not in text
    bare = shown(dataclasses.replace(found, suspects=()))
    assert bare.index("Something is wrong, and no known cause fits") < bare.index("Remarks")
    assert "1. " not in bare
    assert "no cause is named" in bare


def test_a_healthy_run_says_what_was_looked_at():
    found = examine(sample("sampled"))
    assert found.exit is Exit.CONSISTENT
    text = shown(found)
    assert "No fault found by verify over 41 decode steps" in text
    assert re.search(
        r"drafted surprisal: would have seen a bias of [\d.]+ nats a token with 95 % power, over 64 draws", text
    )
    assert found.builds in text
    assert re.match(r"recorded by specscope \S+, torch ", found.builds)
    assert not found.when
    apart = examine(sample("sampled"), left_out=["audit: the model is not at hand"])
    assert apart.exit is Exit.NOT_JUDGED
    assert "what could not be judged is named above" in shown(apart)


def evidence(**values):
    """An edit of the evidence on tried parents: what gives its fields of it."""
    fields = {f"parents__{name}": lambda part, value=value: value(part.parents) for name, value in values.items()}
    return of(lambda part: part.parents is not None, **fields)


def guessing(rank):
    """The drafter ranks the token that the target wants so, by the number of the parent; and nothing is accepted."""

    def change(part):
        if part.parents is None:
            return None
        ranks = np.array([rank(part.position + node) for node in part.parents.node.tolist()], np.int32)
        outcome = (np.minimum(part.verdict.outcome, 1) * Outcome.REJECTED).astype(np.uint8)
        nothing = {"verdict__path": part.verdict.path[:0], "verdict__outcome": outcome}
        return replaced(part, parents__choice_rank=ranks, **nothing)

    return change


@pytest.mark.parametrize(
    ("rank", "cause"),
    [(lambda n: 1 + n * 7919 % 49_152, Cause.DRAFTER_AT_CHANCE), (lambda n: 2 + n % 40 * (n % 40), Cause.WEAK_DRAFTER)],
)
def test_a_drafter_at_the_level_of_chance_is_more_than_weak(rank, cause):
    """Nothing is accepted: ranks spread evenly over the vocabulary are no weak drafter's."""
    (found,) = healthy.weak_drafter(case_of(changed(sample("eagle"), guessing(rank))), None)
    assert found.cause is cause
    assert ("as by chance" in found.for_[-1]) is (cause is Cause.DRAFTER_AT_CHANCE)
    assert not cause.is_fault


heated = evidence(  # the target's likeliest token holds a fifth of its own mass, and p is wide
    top_p=lambda e: np.where(np.arange(e.top_p.shape[1]) == 0, 0.2, 0).astype(np.float32) + 0 * e.top_p,
    entropy=lambda e: np.full_like(e.entropy, 9.0),
)


@pytest.mark.parametrize(("temperature", "cause"), [(2.5, Cause.HIGH_TEMPERATURE), (0.5, Cause.HARD_TEXT)])
def test_a_lower_bound_shows_no_sure_target_and_a_high_temperature_explains_low_acceptance(temperature, cause):
    """At 2.5 the target's own entropy lies below p's, somewhere from 0.5 nats on; at 0.5 it lies above p's 9."""
    case = case_of(under(changed(sample("sampled"), heated), temperature=temperature))
    (found,) = (remark for remark in healthy.remarks(case) if remark.cause is not Cause.TREE_TOO_SMALL)
    assert found.cause is cause
    (line,) = found.for_
    assert "between 0.50 and 9.00 nats" in line if temperature > 1 else "is between 9.00 and" in line


@pytest.mark.parametrize("coin", [float("nan"), float("inf"), -1.0, 2.0])
def test_a_coin_that_is_no_number_is_convicted_and_left_out_of_sums(coin):
    spoil = of(verdict__coin=lambda part: put(part.verdict.coin, -1, coin))
    histories = sample("sampled"), changed(sample("sampled"), spoil, {20})
    for history in histories:  # another engine's: ours are computed again, and no chance
        history.run = dataclasses.replace(history.run, versions={"vllm": "0.32.0"})
    whole, spoilt = (judge(history, source="x") for history in histories)
    checks = {check.name: check for check in spoilt.checks}
    assert checks["probabilities"].wrong.tolist() == [20]
    for name in ("coins uniform", "coins in series", "coins and draws"):
        healthy = next(check for check in whole.checks if check.name == name)
        assert checks[name].tested < healthy.tested
        assert math.isfinite(checks[name].statistic)


class Oracle(Drafter):
    """Drafts what comes, but from `shift` tokens further on."""

    max_nodes = max_depth = 3

    def __init__(self, texts, shift):
        self.texts, self.shift = texts, shift

    def propose(self, contexts):
        begins = [(self.texts[c.request], len(c.tokens) + self.shift) for c in contexts]
        return [Draft.chain(text[begin : begin + 3]) for text, begin in begins]


@pytest.mark.parametrize(("shift", "begins"), [(1, "late"), (-1, "early"), (0, "")])
def test_drafts_that_begin_a_token_off_are_named_whatever_drafted_them(tiny, shift, begins):
    prompts = ["the cat sat on", "a dog", "x y z", "once more"]

    def recorded(**how):
        engine, history = Engine(target=str(tiny), dtype="float32", kv_memory=0.01, threads=1, **how), History()
        history.run, history.vocabulary = engine.run_info, engine.vocabulary
        engine.bus.subscribe(history.append, lossless=True)
        for prompt in prompts:
            engine.add(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
        while engine.busy:
            engine.step()
        engine.bus.flush()
        return history

    plain = recorded(drafter="none").requests.values()
    texts = {r.id: [*r.info.prompt_tokens.tolist(), *(token for token, _ in r.output()), 0, 0] for r in plain}
    found = [*healthy.shifted(case_of(recorded(drafter=lambda setup: Oracle(texts, shift))))]
    assert [each.cause for each in found] == [Cause.DRAFTS_SHIFTED] * bool(begins)
    assert all(each.for_[0].endswith(f"drafts: drafts begin one token too {begins}") for each in found)
