"""Each exact check passes over real runs, and convicts one edit of a real record."""

import dataclasses

import numpy as np
import pytest

from specscope.analyze.findings import CheckResult
from specscope.trace.record.records import FinalKind, Outcome
from specscope.trace.record.tree import Drawn
from tests.analyze.verify.edits import check, edited, elder, failed, node, passed, put, replaced


def accept_probability(part):
    i = node(part, Outcome.REJECTED, lambda p, i: p.verdict.accept_prob[i] > 0.01)
    return None if i is None else replaced(part, verdict__accept_prob=put(part.verdict.accept_prob, i, 0.0))


def coin_above(part):
    i = node(part, Outcome.ACCEPTED, lambda p, i: p.verdict.accept_prob[i] < 0.9)
    return None if i is None else replaced(part, verdict__coin=put(part.verdict.coin, i, 0.95))


def tried_below_a_rejection(part):
    i = node(part, Outcome.UNTRIED, lambda p, i: p.tree.parent[i] >= 0)
    return None if i is None else replaced(part, verdict__outcome=put(part.verdict.outcome, i, Outcome.REJECTED))


def second_p(part):
    i = node(part, None, lambda p, i: p.verdict.outcome[i] and elder(p, i) and p.verdict.p_trial[i] > 0.001)
    if i is None:
        return None
    p = part.verdict.p_trial[i] * 1.1
    accept = min(1.0, float(p) / float(part.verdict.q_trial[i]))
    return replaced(
        part,
        verdict__p_trial=put(part.verdict.p_trial, i, p),
        verdict__accept_prob=put(part.verdict.accept_prob, i, accept),
    )


def not_renormalised(part):
    """q at the second trial as it was before the first draw."""
    i = node(
        part, None, lambda p, i: p.verdict.outcome[i] and elder(p, i) and p.verdict.q_trial[i] > p.tree.q[i] * 1.01
    )
    return None if i is None else replaced(part, verdict__q_trial=put(part.verdict.q_trial, i, part.tree.q[i]))


def ratio_on_deterministic(part):
    i = node(part, Outcome.REJECTED)
    return None if i is None else replaced(part, verdict__q_trial=put(part.verdict.q_trial, i, 0.5))


def mass(part):
    i = node(part, Outcome.REJECTED)
    if i is None:
        return None
    return replaced(part, verdict__residual_mass=put(part.verdict.residual_mass, i, 1.01))


def twins(part):
    i = node(part, None, lambda p, i: elder(p, i))
    if i is None:
        return None
    first = part.tree.token[part.tree.parent == part.tree.parent[i]][0]
    return replaced(part, tree__token=put(part.tree.token, i, first))


def shorter_path(part):
    return replaced(part, verdict__path=part.verdict.path[:-1]) if part.verdict.accepted else None


def bonus(part):
    return replaced(part, verdict__kind=FinalKind.BONUS) if part.verdict.kind is FinalKind.RECOVERED else None


def rejected_came_out(part):
    last = part.verdict.path[-1] if part.verdict.accepted else -1
    i = node(part, Outcome.REJECTED, lambda p, i: p.tree.parent[i] == last and p.verdict.residual_mass[i] > 0.01)
    return None if i is None else replaced(part, verdict__token=int(part.tree.token[i]))


def another_coin(part):
    i = node(part, Outcome.UNTRIED)
    return None if i is None else replaced(part, verdict__coin=put(part.verdict.coin, i, 0.123))


def same_coins(part):
    i = node(part, Outcome.UNTRIED)
    coin = part.verdict.coin
    return None if not i else replaced(part, verdict__coin=put(coin, i, coin[i - 1]))


def beyond_the_choice(part):
    if not len(part.parents.node) or part.parents.choice_p[0] < 0.01:
        return None
    return replaced(part, parents__choice_p=put(part.parents.choice_p, 0, 0.0))


def rank(part):
    i = node(part, Outcome.REJECTED, lambda p, i: p.verdict.p[i] > 0.02)
    return None if i is None else replaced(part, parents__rank=put(part.parents.rank, i, 100))


def raw(part):
    i = node(part, Outcome.REJECTED)
    return None if i is None else replaced(part, parents__raw_p=put(part.parents.raw_p, i, 1.0))


def choice_of_the_drafter(part):
    if not len(part.parents.node):
        return None
    return replaced(part, parents__choice_q=put(part.parents.choice_q, 0, 1.0), parents__choice_rank=np.full(
        len(part.parents.node), 2, np.int32))  # fmt: skip


def drafters_probability(part):
    """A first child's, which is the likeliest token of its parent."""
    if part.notes is None or not len(part.tree):
        return None
    return replaced(part, notes__prob=put(part.notes.prob, 0, 0.5))


def no_entropy(part):
    if not len(part.parents.node) or not 0.01 < part.parents.choice_p[0] < 0.99:
        return None
    return replaced(part, parents__entropy=put(part.parents.entropy, 0, 0.0))


def uncertain(part):
    i = node(part, Outcome.REJECTED)
    return None if i is None else replaced(part, verdict__p=put(part.verdict.p, i, 0.3))


def not_the_choice(part):
    if part.verdict.kind is not FinalKind.RECOVERED:
        return None
    return replaced(part, verdict__token=(part.verdict.token + 1) % 256)


def sure_final(part):
    return replaced(part, parents__final_entropy=0.0) if 0.01 < part.verdict.final_p < 0.9 else None


def half_of_it(part):
    fits = part.verdict.kind is FinalKind.RECOVERED and part.verdict.final_p > 1e-3
    return replaced(part, verdict__final_p=part.verdict.final_p / 2) if fits else None


EDITS = [
    ("accept probability", "sampled", accept_probability),
    ("outcomes", "sampled", coin_above),
    ("trial order", "sampled", tried_below_a_rejection),
    ("p at later trials", "sampled", second_p),
    ("p at later trials", "deterministic", second_p),
    ("q at trials", "sampled", not_renormalised),
    ("q at trials", "deterministic", ratio_on_deterministic),
    ("residual mass", "sampled", mass),
    ("residual mass", "deterministic", mass),
    ("siblings", "sampled", twins),
    ("paths", "sampled", shorter_path),
    ("kind of final token", "sampled", bonus),
    ("final tokens", "sampled", rejected_came_out),
    ("final tokens", "deterministic", rejected_came_out),
    ("coins", "greedy", another_coin),
    ("coins unequal", "sampled", same_coins),
    ("target's choice", "sampled", beyond_the_choice),
    ("ranks", "sampled", rank),
    ("raw probabilities", "sampled", raw),
    ("drafter's likeliest", "sampled", choice_of_the_drafter),
    ("drafter's likeliest", "deterministic", drafters_probability),
    ("entropies", "sampled", no_entropy),
    ("greedy tokens", "greedy", uncertain),
    ("greedy tokens", "greedy", not_the_choice),
    ("entropy of the final draw", "sampled", sure_final),
    ("share of the final token", "deterministic", half_of_it),
]


@pytest.mark.parametrize(("name", "run", "change"), EDITS, ids=lambda value: getattr(value, "__name__", value))
def test_one_edit_is_convicted(runs, name, run, change):
    assert passed(runs[run], name)
    history = edited(runs[run], change)
    found = check(history, name)
    assert found.result is CheckResult.FAILED
    assert found.failed >= 1
    assert found.detail
    assert f"#{found.example}'" in found.example.command("run.jsonl")
    steps = zip(runs[run].requests.values(), history.requests.values(), strict=True)
    wrong = [(a.id, x.index) for a, b in steps for x, y in zip(a.steps, b.steps, strict=True) if x != y]
    assert wrong == [(found.example.request, found.example.index)]


def test_forced_nodes_are_left_out(runs):
    """A node that was forced accepted against its coin is no fault of the rule."""

    def forced(part):
        new = coin_above(part)
        i = node(part, Outcome.ACCEPTED, lambda p, i: p.verdict.accept_prob[i] < 0.9)
        return None if new is None else replaced(new, verdict__forced=np.array([i], np.int32))

    assert "outcomes" in failed(edited(runs["sampled"], coin_above))
    assert "outcomes" not in failed(edited(runs["sampled"], forced))


def test_other_rules_are_left_out(runs):
    """Of a rule that is not lossless nothing is said."""

    def under_block(part):
        new = coin_above(part)
        return None if new is None else replaced(new, verdict__rule="lossy:typical")

    assert "outcomes" in failed(edited(runs["sampled"], coin_above))
    assert "outcomes" not in failed(edited(runs["sampled"], under_block))


def test_a_step_without_drafts_is_judged(engines):
    from tests.analyze.verify.conftest import run

    history = run(engines["none"], temperature=1.0)
    assert failed(history) == []
    assert passed(history, "share of the final token")


def test_with_replacement_q_stays(runs):
    """Where tokens are put back, q at later trials is q."""
    from tests.analyze.synthetic import Synthetic

    history = Synthetic(1, "3x1", Drawn.WITH_REPLACEMENT).run(1, 200)
    assert failed(history) == []
    again = edited(history, lambda part: replaced(part, tree__drawn=np.full(3, Drawn.WITHOUT_REPLACEMENT, np.uint8))
                   if part.verdict.outcome[1] else None)  # fmt: skip
    assert "q at trials" in failed(again)


def test_coins_of_another_engine_are_not_recomputed(runs):
    history = edited(runs["sampled"], another_coin)
    history.run = dataclasses.replace(history.run, versions={"vllm": "0.33"})
    assert check(history, "coins").result is CheckResult.SKIPPED
