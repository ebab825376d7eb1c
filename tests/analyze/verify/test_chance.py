"""Sums over chance: samplers with one mistake are convicted, healthy ones as seldom as is said."""

import dataclasses
import math

import numpy as np
import pytest

from specscope import SamplingParams
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.run import examine
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.evidence.visits import visits
from specscope.analyze.findings import CheckResult
from specscope.analyze.locate.formulas import located_draws
from specscope.analyze.significance import holm
from specscope.analyze.verify.chance import BY_OUTCOME, Likeliest, Sum, drafted, surprisal, uniform
from specscope.analyze.verify.trial import judge
from specscope.trace.history.history import History
from specscope.trace.record.coins import Stream, coins_at
from specscope.trace.record.records import FinalKind, Outcome
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.trace.wire.sampling import Sampler, sampling_text
from tests.analyze import edits, histories
from tests.analyze.edits import changed, check, checks, edited, failed, of, put, rebuilt, replaced, sample, under
from tests.analyze.synthetic import Synthetic
from tests.analyze.verify.conftest import HOT, run
from tests.engines import PROMPTS
from tests.faults.planted import FAULTS
from tests.support import records

LEVEL = 0.01 / 14  # of each of so many checks, where the whole trial's is 1 %
WITHOUT, DETERMINISTIC, WITH = Drawn.WITHOUT_REPLACEMENT, Drawn.DETERMINISTIC, Drawn.WITH_REPLACEMENT
FORK = "[(0,),(1,),(0,0)]"
SHAPES = [("2x2", WITHOUT), ("3", WITHOUT), (FORK, DETERMINISTIC), ("3x1", WITH)]
OF_DRAWS = ("draft coins", "draft coins in their intervals", "coins over steps", "coins unequal", "coins of requests")
SEEN = [  # the mistake, the tree, and checks that must see it
    ("accepts more", "2x2", DETERMINISTIC, {"acceptance"}),
    ("ratio by p", "2", WITHOUT, {"acceptance by place"}),
    ("ratio by p", "2x2", WITHOUT, {"emitted surprisal"}),
    ("not renormalised", "2x2", WITHOUT, {"p at later trials"}),
    ("not renormalised", "2x2", DETERMINISTIC, {"share of the final token"}),
    ("final from p", "2", WITHOUT, {"final tokens"}),
    ("final from p", "2x2", DETERMINISTIC, {"target's choice emitted"}),
    ("sorted", "2x2", WITHOUT, {"drafted surprisal", "later siblings", "emitted surprisal"}),
    ("pruned", "2", WITHOUT, {"drafted surprisal"}),
    ("coins shared", "2x2", WITHOUT, {"coins unequal"}),
    ("coins shared", "2x2", DETERMINISTIC, {"acceptance by place"}),
    ("coin twice", "2", WITHOUT, {"coins and draws"}),
    ("coins low", "2x2", WITHOUT, {"coins uniform", "acceptance"}),
    ("coins in series", "2x2", WITHOUT, {"coins in series"}),
    ("draft coins again", "2x2", WITHOUT, {"coins over steps", "coins in series"}),
    ("draft coins judge", "2x2", WITHOUT, {"coins unequal", "coins and draws"}),
    ("draws beside", "2x2", WITHOUT, {"draft coins in their intervals"}),
    ("draft coins low", "2x2", WITHOUT, {"coins uniform"}),
]


@pytest.mark.every(4)
@pytest.mark.parametrize(("fault", "tree", "drawn", "names"), SEEN)
def test_a_mistake_is_seen(fault, tree, drawn, names):
    of_drafts = fault.startswith("dra")
    steps = 100 if of_drafts else 400
    assert names <= set(failed(Synthetic(1, tree, drawn, fault, tells_draws=of_drafts).run(3, steps)))


@pytest.mark.every(5)
@pytest.mark.parametrize("seed", range(5))
def test_noise_that_is_reused_is_seen(seed):
    """vLLM 47386: 10/60/30 comes out as 10.2/63.0/26.8, and every verdict recomputes.

    1,500 steps, 2,400 tokens of which 600 were recovered, convict it with each of these seeds; the output's
    own frequencies would take some 5,000.
    """
    flat = {"vocab": 3, "p": (0.1, 0.6, 0.3), "q": (0.5, 0.26, 0.24)}
    history = Synthetic(seed, "1", fault="noise reused", **flat).run(1, 1500)
    assert 2300 < history.acceptance.emitted < 2500
    wrong, right = checks(history), checks(Synthetic(seed, "1", **flat).run(1, 1500))
    convicted = {name for name, one in wrong.items() if one.result is CheckResult.FAILED}
    assert {"recovered draws"} <= convicted <= {"recovered draws", "emitted surprisal", "target's choice emitted"}
    assert wrong["recovered draws"].bias < 0
    assert wrong["recovered draws"].example is not None
    assert CheckResult.FAILED not in {one.result for one in right.values()}
    assert right["recovered draws"].least_bias < abs(wrong["recovered draws"].bias) * 1.2


TOLD = [(tree, drawn) for tree in ("3", "2x2", "3x1", "[(0,),(1,),(0,0),(0,1)]") for drawn in (WITHOUT, WITH)]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("tree", "drawn", "tells"), [*((*shape, False) for shape in SHAPES), *((*shape, True) for shape in TOLD)]
)
def test_healthy_runs_raise_no_alarm(tree, drawn, tells):
    """Short ones, with fixed seeds: of healthy runs one in a hundred may be accused by chance. `tells`: of draws."""
    for seed in range(5 if tells else 10):
        steps = 25 if tells else 10 + 12 * seed
        trial = judge(Synthetic(seed, tree, drawn, tells_draws=tells).run(2, steps), source="x")
        assert [finding.name for finding in trial.failed] == [], f"seed {seed}"
        (intervals,) = (finding for finding in trial.checks if finding.name == "draft coins in their intervals")
        assert (intervals.result is CheckResult.PASSED) is tells


@pytest.mark.slow
def test_a_thousand_healthy_runs():
    """At the default level of 1 %, at most 1 % of them fail, and long ones no more often than short ones."""
    wrong = []
    for seed in range(1000):
        tree, drawn = SHAPES[seed % 4]
        if failed(Synthetic(10_000 + seed, tree, drawn).run(1, 40 + seed % 400)):
            wrong.append(seed)
    assert len(wrong) <= 10, wrong


def test_the_power_that_is_promised_is_there():
    """A pass says what it would have seen: samplers that accept more by as much are convicted."""
    of_few, of_many = (checks(Synthetic(3).run(1, steps)) for steps in (60, 960))
    short, long = of_few["acceptance"], of_many["acceptance"]
    assert short.result is long.result is CheckResult.PASSED
    assert of_many["acceptance by place"].tested == long.tested
    assert "with 95 % power" in long.note
    assert 3 < short.least_bias / long.least_bias < 6  # sixteen times as many: a quarter, or a little less
    runs = [Synthetic(seed, "2x2", DETERMINISTIC, "accepts more").run(1, 400) for seed in range(4)]
    least = check(Synthetic(0, "2x2", DETERMINISTIC).run(1, 400), "acceptance").least_bias
    large = [one for one in (check(history, "acceptance") for history in runs) if one.bias >= least]
    assert large
    assert all(one.result is CheckResult.FAILED for one in large)


def test_healthy_draws_pass(runs):
    found = checks(runs["sampled"])
    assert {found[name].result for name in OF_DRAWS} == {CheckResult.PASSED}
    assert found["draft coins"].tested > 100
    assert not located_draws(edits.case_of(runs["sampled"]))


@pytest.mark.parametrize("name", ["greedy", "deterministic", "sampled"])
def test_where_no_coin_drew_a_draft_or_none_is_told_nothing_is_checked(runs, name):
    without = of(lambda part: part.notes is not None, notes__coin=np.zeros(0), notes__low=np.zeros(0))
    history = changed(runs[name], without) if name == "sampled" else runs[name]
    found = checks(history)
    for one in OF_DRAWS[:3]:
        assert found[one].result is CheckResult.SKIPPED
        assert (found[one].note == "the coins that drew drafts are not recorded") is (name == "sampled")
    assert CheckResult.FAILED not in {one.result for one in found.values()}


def test_an_interval_or_a_coin_that_is_anothers_is_seen(runs):
    """Off by one: the interval of the token before, or of the one behind. And another coin of the interval."""
    with_coins = lambda p: p.notes is not None and len(p.notes.coin) and p.tree.q[0] >= 0.01  # noqa: E731
    for move in (-1.0, 1.0):
        beside = of(with_coins, notes__low=lambda p, by=move: put(p.notes.low, 0, p.notes.low[0] + by * p.tree.q[0]))
        assert failed(edited(runs["sampled"], beside)) == ["draft coins in their intervals"]
    nudged = of(with_coins, notes__coin=lambda p: put(p.notes.coin, 0, p.notes.low[0] + 1e-3 * p.tree.q[0]))
    found = edited(runs["sampled"], nudged)
    assert (failed(found), check(found, "draft coins").failed) == (["draft coins"], 1)


AGAIN = {  # faults in the coins of drafts: what fails for certain, and whose coins they look like
    "draft coins of no step": ({"draft coins", "coins over steps"}, "the coin of another position of the request"),
    "draft coins of the verdict": ({"draft coins", "coins unequal"}, "another draw or trial of the same step"),
    "one coin for all draws": ({"draft coins", "coins unequal"}, "another draw or trial of the same step"),
    "draft coins of one seed": ({"draft coins"}, "another request with another seed or position"),
}


@pytest.mark.parametrize("name", AGAIN)
def test_coins_that_are_used_again_are_seen_and_located(bench, monkeypatch, name):
    certain, words = AGAIN[name]
    FAULTS[name].install(monkeypatch, None)
    history = run(bench.engine("draft tree"), **HOT)
    assert certain <= set(failed(history))
    (located,) = located_draws(edits.case_of(history))
    assert located.operation.name == "draft coins"
    assert words in located.sentence
    assert 0 < located.explained <= located.differing
    assert located.unit == "draw"


def drafts(rng, n, kind, *, stated=1.0, taken=1.0, likeliest=0.0):
    """Drafts of a run whose rows are nearly flat, of all kinds of entropies, or have a favourite.

    `stated`, `taken`: temperatures; `likeliest`: the share of drafts that is not drawn.
    """
    spread = {"flat": 0.3, "mixed": rng.uniform(1, 4, (n, 1)), "peaked": 4.0}[kind]
    logits = rng.normal(0, 1, (n, 60 if kind == "flat" else 300)) * spread
    q, drawn_from = (np.exp(logits / t) / np.exp(logits / t).sum(1, keepdims=True) for t in (stated, taken))
    drawn = np.minimum((drawn_from.cumsum(1) < rng.random((n, 1))).sum(1), q.shape[1] - 1)
    token = np.where(rng.random(n) < likeliest, q.argmax(1), drawn)
    here, logs = q[np.arange(n), token], np.log(np.maximum(q, 1e-300))
    entropy = -(q * logs).sum(1)
    draws = surprisal(here, entropy, (q * logs**2).sum(1) - entropy**2, np.arange(n))
    return dataclasses.replace(draws, likeliest=Likeliest.of(here, q.argmax(1) == token))


@pytest.mark.parametrize(
    ("kind", "n", "runs"), [("flat", 20, 900), ("mixed", 20, 700), ("peaked", 150, 400), ("mixed", 400, 100)]
)
def test_healthy_drafters_are_not_convicted(kind, n, runs):
    """A p-value is below x with a probability of x at most."""
    rng = np.random.default_rng(4)
    values = np.array([drafts(rng, n, kind).p_value for _ in range(runs)])
    assert all((values <= level).mean() <= level for level in (0.3, 0.1, 0.01))
    assert min(values) > LEVEL


@pytest.mark.parametrize(
    ("fault", "kind", "n"),
    [
        ({"likeliest": 1.0}, "flat", 20),
        ({"likeliest": 1.0}, "mixed", 20),
        ({"likeliest": 1.0}, "peaked", 60),
        ({"likeliest": 0.5}, "flat", 60),
        ({"taken": 0.7}, "mixed", 250),
        ({"stated": 0.7}, "mixed", 250),
        ({"taken": 0.7}, "flat", 3000),
    ],
)
def test_another_way_to_draft_is_seen(fault, kind, n):
    rng = np.random.default_rng(6)
    found = [drafts(rng, n, kind, **fault) for _ in range(20)]
    assert sum(one.p_value <= LEVEL for one in found) >= 19
    assert sum(one.takes_likeliest for one in found) == (20 if "likeliest" in fault else 0)


class TakesLikeliest(Synthetic):
    """Of each row the likeliest token, said to be drawn."""

    def _siblings(self, q, count, noise, coin):
        return np.argsort(-q)[:count].tolist()


def test_a_drafter_that_takes_the_likeliest_is_convicted_and_named():
    history = TakesLikeliest(1, "1x1").run(1, 60)
    found = check(history, "drafted surprisal")
    assert found.result is CheckResult.FAILED
    assert found.unit == "draw"
    assert f"{found.tested} of {found.tested} are the likeliest" in found.detail
    assert examine(history).suspects[0].cause is Cause.Q_NOT_DRAWN
    assert failed(Synthetic(1, "1x1").run(1, 60)) == []


def test_under_a_rule_that_looks_ahead_only_the_roots_children_count():
    """Which inner nodes are accepted depends there on what is drawn below them: their children are no fair sample."""
    c = judge(Synthetic(2, "2x2").run(1, 50), source="x").evidence
    every = drafted(c)[0].count
    ahead = np.ones(len(c), bool)
    c.__dict__.update(ahead=ahead, walks=~ahead)
    assert 0 < drafted(c)[0].count < every


def test_holm():
    """Holm 1979: the smallest against alpha / m, the next against alpha / (m - 1)."""
    assert holm([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
    assert holm([], 0.05) == []
    assert holm([0.06], 0.05) == [False]


def test_the_distance_of_uniform_numbers():
    rng = np.random.default_rng(3)
    values = [Sum.uniform(rng.random(200)).p_value for _ in range(1000)]
    assert np.mean(np.array(values) <= 0.05) <= 0.05 + 3 * math.sqrt(0.05 / 1000)  # the bound is all but exact
    assert Sum.uniform(rng.random(200) ** 2).p_value < 1e-6
    assert not Sum.uniform(np.zeros(0)).judged


def asked(engine, *temperatures, at_once=False):
    """A history of requests for one prompt with one seed, at these temperatures."""
    history = History(run=engine.run_info, vocabulary=engine.vocabulary)
    for number, temperature in enumerate(temperatures, 1):
        engine.add(PROMPTS[0], SamplingParams(max_tokens=40, seed=0, temperature=temperature))
        while engine.busy and (number == len(temperatures) or not at_once):
            history.append(engine.step())
    return history


def test_coins_that_are_known_already_are_no_chance(bench):
    """Requests with one seed and one prompt make the same draws: they are counted once. A greedy one uses no coins."""
    history = asked(bench.engine("draft tree"), *[1.3] * 12, at_once=True)
    assert failed(history) == []
    first = next(iter(history.requests.values()))
    assert check(history, "acceptance").tested <= sum(len(step.tree) for step in first.steps)
    alone, after = (asked(bench.engine("draft tree"), *temperatures) for temperatures in ([1.3], [0.0, 1.3]))
    assert check(after, "acceptance").tested == check(alone, "acceptance").tested > 0


def of_requests(record, names):
    """The record with these requests alone."""
    return dataclasses.replace(
        record,
        admitted=tuple(info for info in record.admitted if info.id in names),
        requests=tuple(part for part in record.requests if part.request in names),
        finished=tuple(end for end in record.finished if end.info.id in names),
    )


@pytest.fixture(scope="module")
def whole():
    """A healthy run of many short requests."""
    return Synthetic(3, "2x2", WITHOUT).run(300, 6)


@pytest.mark.parametrize("by_outcome", [True, False])
def test_a_sample_of_a_healthy_run_is_not_convicted(whole, by_outcome):
    """Requests with poor acceptance were chosen: their acceptance is poor, which is no fault of the sampler."""
    taus = {name: request.acceptance.tau for name, request in whole.requests.items()}
    most = sorted(taus.values())[100]
    chosen = {name for name in taus if taus[name] < most}
    choose = (lambda record: of_requests(record, chosen)) if by_outcome else Sampler(whole.run.run_id, 0.3)
    out = rebuilt(whole, choose)
    assert 50 < len(out.requests) < 150
    assert bool(failed(out)) == by_outcome  # as it would be judged if it did not say what it is
    told = f"keep tau < {most}" if by_outcome else sampling_text(0.3)  # as captures of before were
    out.run = dataclasses.replace(whole.run, sampling=told)
    assert not failed(out)
    assert (BY_OUTCOME in {one.note for one in judge(out, source="x").checks}) == by_outcome


def in_common(record):
    """Two requests have a token's coin in common, one at its root and one deeper."""
    parts = list(record.requests)
    judged = [part for part in parts if part.verdict is not None and (part.verdict.coin > 0).sum() > 1]
    if len(judged) > 1:
        first, second = (part.verdict.coin for part in judged[:2])
        coin = put(second, np.flatnonzero(second > 0)[1], first[np.flatnonzero(first > 0)[0]])
        parts[parts.index(judged[1])] = replaced(judged[1], verdict__coin=coin)
    return dataclasses.replace(record, requests=tuple(parts))


@pytest.mark.parametrize(
    ("run", "result"), [({"versions": {"vllm": "0.32.0"}}, CheckResult.PASSED), ({}, CheckResult.FAILED)]
)
def test_another_engines_coins_may_follow_from_the_position_of_each_token(run, result):
    """Those of vLLM's V2 runner do."""
    history = rebuilt(under(sample("sampled"), seed=7), in_common, **run)
    assert check(history, "coins of requests").result is result


@pytest.mark.parametrize("ours", [True, False])
def test_a_server_whose_clients_use_few_seeds_is_not_accused(ours):
    """Prompts of seven lengths under each of 30 seeds: what follows from a seed and a position is no new chance."""
    run = dataclasses.replace(histories.RUN, versions=histories.RUN.versions if ours else {"vllm": "0.32.0"})
    history, half = History(run=run), np.full(2, 0.5)
    tree = DraftTree.build([1, 1], [ROOT, 0])
    of_seed = np.random.default_rng(0).random((30, 100))  # another engine's: by the position of the token
    for number in range(345):
        seed, prompt = number % 30, np.ones(10 + 3 * (number // 30 % 7), np.int32)
        info = records.info(f"r{number}", "", prompt, params=SamplingParams(temperature=1.0, seed=seed, max_tokens=5))
        for index in range(5):
            root = len(prompt) - 1 + index
            coins = coins_at(np.array([seed], np.uint64), Stream.VERIFY, np.array([root]), np.array([3]))
            final, *nodes = coins if ours else of_seed[seed, root : root + 3]
            verdict = records.verdict(
                [Outcome.REJECTED, Outcome.UNTRIED], (), 1, FinalKind.RECOVERED, p=half, p_trial=half, q_trial=half,
                accept_prob=half, coin=nodes, final_coin=float(final),
            )  # fmt: skip
            part = records.part(info.id, tree, verdict, index=index, context=root, emitted=1, preceded=None)
            history.append(histories.record(5 * number + index, [part], admitted=() if index else (info,)))
    c = Columns.of(list(visits(history)), history)
    steps = np.unique([(c.params[s].seed, c.position[s]) for s in range(len(c))], axis=0)
    assert len(c) > 9 * len(steps) / 5
    assert (0.8 if ours else 0.3) * len(steps) < c.fresh.sum() <= len(steps)
    of_nodes, finals, _ = uniform(c).values()
    distinct = 0 if ours else len(np.unique(c.coin))  # ours are computed again, each by itself
    assert 0.8 * distinct <= of_nodes.count <= distinct
    assert finals.count <= len(np.unique(c.final_coin))
    assert not {"coins uniform", "coins in series", "coins of requests"} & set(failed(history))
