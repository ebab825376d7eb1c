"""Calls of a sampler are judged without an engine: healthy ones pass, mistakes are named, few are enumerated."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from specscope.analyze.findings import CheckResult, Exit
from specscope.errors import UserError
from specscope.speculate.verify import host, match, traversal
from specscope.testing import VerifyCall, judge_calls, lossless
from specscope.testing.calls import read_calls
from specscope.testing.enumeration import by_coins, total_variation
from specscope.trace.record.own_rule import OwnRule
from specscope.trace.record.rules import BLOCK
from specscope.trace.record.tree import DraftTree, Drawn
from specscope.tree_shape import parse_tree
from tests.speculate.verify.enumeration import batch_of, dense
from tests.testing.samplers import arrays, calls

NAMED = {
    "renormalisation left out": "the residual is not renormalised: beyond its mass it gives the last token",
    "residual from raw p": "the token after a rejection is drawn from p, not from the residual",
    "bonus from q": "the bonus token is drawn from q",
    "argmax of recovered": "the token after a rejection is the argmax of the residual",
    "accept by p > q": "drafts are accepted where p > q",
    "p off by one": "p is taken from the next row",
    "min(1, q/p)": "drafts are accepted by min(1, q / p)",
    "residual off by one": "p is taken from the next row for the residual alone",
    "softmax": "the residual goes through a softmax",
}


def check(found, name):
    return next(check for check in found.checks if check.name == name)


@pytest.mark.every(3)
@pytest.mark.parametrize("mistake", NAMED)
@pytest.mark.parametrize("seed", range(3))
def test_a_mistake_is_named(mistake, seed):
    found = judge_calls(calls(300, seed, mistake))
    assert (found.exit, found.mistake) == (Exit.INCONSISTENT, NAMED[mistake])
    assert f"as if {NAMED[mistake]}; 300 calls, 900 drafted tokens" in str(found)


@pytest.mark.parametrize(
    ("mistake", "shown"),
    [("ratio x 1.3", "acceptance"), ("the last is taken", "acceptance"), ("a token never comes", "draws by token")],
)
def test_a_mistake_that_is_not_known_has_no_name(mistake, shown):
    found = judge_calls(calls(900, 1, mistake))
    assert (found.exit, found.mistake) == (Exit.INCONSISTENT, "")
    assert check(found, shown).result is CheckResult.FAILED


def drawn_by(made, coins):
    """What comes out of these calls with these coins."""
    rng = np.random.default_rng(2)
    for call, coin in zip(made, coins, strict=True):
        rows = [call.row(place) for place in range(3)]
        accepted = int(np.cumprod([x < p[token] / q[token] for x, (p, q, token) in zip(coin, rows, strict=True)]).sum())
        left = call.p[3] if accepted == 3 else np.maximum(call.p[accepted] - call.q[accepted], 0)
        last = rng.choice(16, p=left.astype(float) / left.sum(dtype=float))
        yield replace(call, coin=coin, output=np.append(call.drafted[:accepted], last))


def coins(count):
    return np.random.default_rng(5).random((count, 3)).astype(np.float32)


def test_coins_that_are_used_again_and_calls_that_are_given_again():
    fine = coins(400)
    made = [*drawn_by(calls(400, 3), fine)]
    assert judge_calls(made, "standard").exit is Exit.CONSISTENT
    again = judge_calls(made * 5, "standard")
    assert (again.exit, again.calls) == (Exit.CONSISTENT, 2000)
    assert check(again, "recovered draws") == check(judge_calls(made, "standard"), "recovered draws")
    for same in (np.tile(fine[0], (400, 1)), np.tile(fine[:, :1], 3)):
        found = judge_calls([*drawn_by(calls(400, 3), same)], "standard")
        assert check(found, "coins unequal").result is CheckResult.FAILED


def test_p_and_q_that_were_stored_in_bfloat16_are_judged_by_their_digits(tmp_path):
    short = lambda rows: (rows.view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32)  # noqa: E731
    made = [replace(call, p=short(call.p), q=short(call.q)) for call in drawn_by(calls(900, 4), coins(900))]
    np.savez(tmp_path / "calls.npz", coins=[call.coin for call in made], **arrays(made))
    assert judge_calls(read_calls(str(tmp_path / "calls.npz"))[0], "standard").exit is Exit.CONSISTENT
    assert judge_calls(made, "standard").exit is Exit.INCONSISTENT  # where nobody knows how they were stored


def test_a_mistake_that_gives_nearly_all_calls_is_named_with_how_many():
    made = calls(300, 0, "bonus from q")
    other = [replace(call, output=np.append(call.drafted, 1 + call.drafted[-1])[-3:]) for call in made[:3]]
    found = judge_calls([*other, *made[3:]])
    assert f"as if {NAMED['bonus from q']} in 297 of 300 calls, 900 drafted tokens" in str(found)


@pytest.mark.parametrize("seed", range(3))
def test_few_calls_show_what_no_sum_of_them_does(seed):
    found = judge_calls(calls(30, seed, "argmax of recovered"))
    assert (found.exit, found.mistake) == (Exit.INCONSISTENT, NAMED["argmax of recovered"])
    assert {name for name, reason in found.refuted.items() if reason.startswith("known mistakes: ")}


@pytest.mark.parametrize(("count", "seeds"), [(1, 200), (30, 60), pytest.param(30, 200, marks=pytest.mark.slow)])
def test_healthy_calls_are_never_accused(count, seeds):
    for seed in range(seeds):
        found = judge_calls(calls(count, seed, deterministic=seed % 4 == 0), "standard")
        assert found.exit is Exit.CONSISTENT, (seed, str(found))


def engines(verify, count, seed, coins):
    """Calls of a verifier of specscope."""
    rng, made, parents = np.random.default_rng(seed), [], (-1, 0, 1)
    for call in calls(count, seed):
        coin = rng.random(len(call.drafted) + 1)
        tree = DraftTree.build(call.drafted, parents, drawn=Drawn.WITH_REPLACEMENT)
        q = {above: dense(row) for above, row in zip(parents, call.q, strict=True)}
        (verdict,), _ = verify(batch_of(tree, [dense(row) for row in call.p], q, coin))
        of_coins = {"coin": coin[1:], "final_coin": float(coin[0])} if coins else {}
        output = np.append(tree.token[verdict.path], verdict.token)
        made.append(VerifyCall(call.p, call.drafted, output, call.q, **of_coins))
    return made


RULES = {"standard": host.verify, "block": lambda batch: traversal.verify(batch, BLOCK), "match": match.verify}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("rule", "coins"), [("standard", 0), ("standard", 1), ("block", 0), ("block", 1), ("match", 0)]
)
def test_verdicts_of_specscope_are_those_of_their_rule(rule, coins):
    found = judge_calls(engines(RULES[rule], 300, 5, coins))
    assert rule in found.fits
    others = {"standard", "match", "greedy"} if rule == "block" and coins else {"match", "greedy"} - {rule}
    assert not others & {*found.fits}


def test_coins_tell_one_call_from_another_rule():
    (call,) = engines(host.verify, 1, 3, True)
    a = np.minimum(1, call.p[0][call.drafted[0]] / call.q[0][call.drafted[0]])
    turned = VerifyCall(
        call.p, call.drafted, call.output, call.q, np.where(call.coin < a, 1 - 1e-3, 1e-3), call.final_coin
    )
    found = judge_calls([turned], "standard")
    ((number, words),) = found.impossible
    assert number == 0
    assert words.startswith(f"draft {call.drafted[0]} at place 0 was ")
    assert "and coin 0." in words


def test_at_temperature_0_the_rule_is_greedy():
    """p as before the choice; every token that comes out is its argmax."""
    made = []
    for call in calls(60, 2):
        choices = call.p.argmax(-1)
        kept = next((i for i, token in enumerate(call.drafted) if token != choices[i]), len(call.drafted))
        made.append(VerifyCall(call.p, call.drafted, choices[: kept + 1], call.q))
    assert judge_calls(made).fits == ("greedy",)


P = np.array([[0.5, 0.5, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
Q = np.array([[0.2, 0.3, 0.5, 0.0], [0.4, 0.3, 0.2, 0.1]])
IMPOSSIBLE = {
    "no such prefix": ([0, 0], [1, 1], "the output [1, 1] is not a prefix of the drafts [0, 0] plus one token"),
    "too long": ([0, 0], [0, 0, 1, 1], "is not a prefix of the drafts"),
    "p is 0": ([0, 0], [3], "draft 0 at place 0 was rejected with p = 0.5, q = 0.2"),
    "accepted with p = 0": ([2, 0], [2, 1], "draft 2 at place 0 was accepted with p = 0, q = 0.5"),
    "rejected although p > q": ([0, 0], [1], "draft 0 at place 0 was rejected with p = 0.5, q = 0.2"),
    "nothing is left of it": ([0, 0], [0, 1], "token 1 at place 1 came after a rejection with p = 0.2, q = 0.3"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_is_impossible_is_said(name):
    drafted, output, says = IMPOSSIBLE[name]
    fine = VerifyCall(P, np.array([0, 0]), np.array([0, 3]), Q)
    found = judge_calls([fine, VerifyCall(P, np.array(drafted), np.array(output), Q)], "standard")
    assert found.exit is Exit.INCONSISTENT
    ((number, words),) = found.impossible
    assert number == 1
    assert says in words
    assert check(found, "possible outputs").failed == 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"p": P * 2}, "p of call 1 has a row that sums to 2"),
        ({"q": Q[:, :2]}, r"call 1: q is \[2, 2\], which does not fit 2 drafts"),
        ({"output": np.array([0, 9])}, r"call 1: output is \[0, 9\], but the vocabulary has"),
        ({"drafted": np.array([9, 0])}, r"call 1: drafted is \[9, 0\], but the vocabulary has"),
        ({"output": np.zeros(0, np.int64)}, "call 1: output holds no token"),
        ({"coin": np.array([0.5, np.nan])}, "coin of call 1 has NaN"),
    ],
)
def test_calls_that_are_none_are_refused_as_a_file_of_them_is(wrong, says):
    fine = VerifyCall(P, np.array([0, 0]), np.array([0, 3]), Q)
    with pytest.raises(UserError, match=says):
        judge_calls([fine, replace(fine, **wrong)], "standard")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rule": "standard"}, "the rule is 'standard': give a function"),
        ({"tree": "dynamic:5"}, "the tree is 'dynamic:5': give a shape alone"),
        ({"vocabulary": 1}, "vocabulary must be at least 2"),
        ({"seeds": 0}, "not 4 and 0"),
    ],
)
def test_what_cannot_be_enumerated_is_refused(wrong, says):
    with pytest.raises(UserError, match=says):
        lossless(**{"rule": lambda trial: 1.0, "vocabulary": 4, **wrong})


def test_drafts_that_do_not_follow_q_are_no_fault_of_the_sampler():
    """Somebody tries a kernel with drafts of his own choice: the output need not follow p."""
    rng, made = np.random.default_rng(1), []
    for call in calls(300, 1):
        drafted = np.zeros(3, np.int64)
        accepted = 0
        while accepted < 3 and rng.random() < call.p[accepted][0] / call.q[accepted][0]:
            accepted += 1
        row = np.maximum(call.p[accepted] - call.q[accepted], 0) if accepted < 3 else call.p[3]
        last = rng.choice(16, p=row.astype(float) / row.sum(dtype=float))
        made.append(VerifyCall(call.p, drafted, np.append(drafted[:accepted], last), call.q))
    found = judge_calls(made, "standard")
    assert found.exit is Exit.CONSISTENT
    assert check(found, "emitted surprisal").note == "the drafts do not follow q, so the output need not follow p"
    assert "as if the drafts are not drawn from q" in str(judge_calls(made))  # of an engine they should


def test_where_no_known_mistake_could_give_them_a_rule_is_not_accused():
    """All of p lies on one token, which was drafted from a q that has little of it."""
    p, q = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[0.999, 0.001]])
    call = VerifyCall(p, np.array([0]), np.array([1]), q)
    for count in (1, 30):
        found = judge_calls([call] * count, "standard")
        assert found.exit is Exit.CONSISTENT, str(found)


SAMPLED = Drawn.WITHOUT_REPLACEMENT


def ratio(trial):
    return min(1.0, trial.p / trial.q)


def tossed(trial):
    """The same, as many kernels have it: it tosses the coin itself."""
    return trial.coin * trial.q <= trial.p


@pytest.mark.every(2)
@pytest.mark.parametrize("rule", [ratio, tossed])
@pytest.mark.parametrize(("tree", "vocabulary"), [("1", 5), ("3x1", 4), ("2", 4), ("[(0,), (1,), (0, 0)]", 3)])
def test_the_standard_rule_is_lossless(rule, tree, vocabulary):
    found = lossless(rule, tree, vocabulary=vocabulary, seeds=2)
    assert found.largest < (1e-12 if rule is ratio else 1e-9)
    assert found.is_lossless
    assert found.cases == 6
    assert str(found).startswith(f"{rule.__name__} is lossless over 6 p and q; ")


LOSSY = {
    "typical": lambda trial: trial.p > min(0.09, 0.3 * np.exp(-trial.entropy)),
    "relaxed": lambda trial: trial.p > 0.5 * trial.choice_p,
    "lenient": lambda trial: min(1.0, 1.2 * trial.p / trial.q),
    "greater": lambda trial: trial.p > trial.q,
    "upside down": lambda trial: min(1.0, trial.q / trial.p) if trial.p else 1.0,
    "p alone": lambda trial: trial.p,
    "elder siblings forgotten": lambda trial: min(1.0, trial.p / trial.q) if not trial.elders else 1.0,
    "below the root": lambda trial: min(1.0, trial.p / trial.q) if trial.depth == 1 else trial.p > 0.2,
    "a coin used twice": lambda trial: trial.coin * trial.q * (1 + trial.coin) <= trial.p,
}


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_rule_is_found(name):
    both = (lossless(LOSSY[name], tree, drawn=SAMPLED, seeds=3) for tree in ("2x1", "2"))
    found = next(each for each in both if each.largest > 0.01)
    assert not found.is_lossless
    assert "is not lossless over 3 p and q" in str(found)
    assert found.where in str(found)


def test_it_is_the_total_variation():
    """q is all at the token of which p has half, and everything is accepted."""
    p, q, everything = np.array([0.5, 0.3, 0.2]), np.array([1.0, 0.0, 0.0]), OwnRule("all", lambda trial: True)
    outcomes = by_coins(partial(host.verify, own=everything))
    assert total_variation(parse_tree("1"), lambda _: p, lambda _: q, SAMPLED, outcomes) == pytest.approx(0.5)


def test_coins_that_are_no_interval_and_a_probability_that_is_none_are_refused():
    with pytest.raises(UserError, match="accepts coins that are no interval from 0"):
        lossless(lambda trial: 0.3 < trial.coin < 0.6)
    with pytest.raises(UserError, match=r"returned 2\.0 for p = .* must return a probability"):
        lossless(lambda trial: 2.0)
