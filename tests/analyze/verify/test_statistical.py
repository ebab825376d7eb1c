"""The sums over a run: a sampler with one mistake is convicted, healthy ones are not."""

import dataclasses

import numpy as np
import pytest

from specscope.analyze.evidence.columns import Columns
from specscope.analyze.evidence.visits import visits
from specscope.analyze.findings import CheckResult
from specscope.analyze.verify.chance import BY_OUTCOME, uniform
from specscope.analyze.verify.trial import judge
from specscope.trace.history.history import History
from specscope.trace.record.coins import Stream, coins_at
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinalKind, Outcome, RequestInfo, RequestStep, Verdict
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.trace.wire.sampling import Sampler, sampling_text
from tests.analyze import histories
from tests.analyze.judges.edits import rebuilt, sample, under, with_verdict
from tests.analyze.synthetic import Synthetic
from tests.analyze.verify.edits import check, failed
from tests.engines import PROMPTS

WITHOUT, DETERMINISTIC = Drawn.WITHOUT_REPLACEMENT, Drawn.DETERMINISTIC
SHAPES = [("2x2", WITHOUT), ("3", WITHOUT), ("[(0,),(1,),(0,0)]", DETERMINISTIC), ("3x1", Drawn.WITH_REPLACEMENT)]
SEEN = [  # the mistake, the tree, and a check that must see it
    ("accepts more", "2x2", DETERMINISTIC, "acceptance"),
    ("ratio by p", "2", WITHOUT, "acceptance by place"),
    ("ratio by p", "2x2", WITHOUT, "emitted surprisal"),
    ("not renormalised", "2x2", WITHOUT, "p at later trials"),
    ("not renormalised", "2x2", DETERMINISTIC, "share of the final token"),
    ("final from p", "2", WITHOUT, "final tokens"),
    ("final from p", "2x2", DETERMINISTIC, "target's choice emitted"),
    ("sorted", "2x2", WITHOUT, "drafted surprisal"),
    ("sorted", "2x2", WITHOUT, "later siblings"),
    ("sorted", "2x2", WITHOUT, "emitted surprisal"),
    ("pruned", "2", WITHOUT, "drafted surprisal"),
    ("coins shared", "2x2", WITHOUT, "coins unequal"),
    ("coins shared", "2x2", DETERMINISTIC, "acceptance by place"),
    ("coin twice", "2", WITHOUT, "coins and draws"),
    ("coins low", "2x2", WITHOUT, "coins uniform"),
    ("coins low", "2x2", WITHOUT, "acceptance"),
    ("coins in series", "2x2", WITHOUT, "coins in series"),
]


@pytest.fixture(scope="module")
def convicted():
    """What is found in 1,200 steps with a mistake; each is run once."""
    known = {}

    def find(fault, tree, drawn):
        key = fault, tree, drawn
        if key not in known:
            known[key] = set(failed(Synthetic(1, tree, drawn, fault).run(3, 400)))
        return known[key]

    return find


@pytest.mark.every(3)
@pytest.mark.parametrize(("fault", "tree", "drawn", "name"), SEEN)
def test_a_mistake_is_seen(convicted, fault, tree, drawn, name):
    assert name in convicted(fault, tree, drawn)


@pytest.mark.every(2)
@pytest.mark.parametrize("seed", range(5))
def test_noise_that_is_reused_is_seen(seed):
    """vLLM 47386: 10/60/30 comes out as 10.2/63.0/26.8, and every verdict recomputes.

    1,500 steps, 2,400 tokens of which 600 were recovered, convict it with each of these seeds; the output's
    own frequencies would take some 5,000.
    """
    sampler = Synthetic(seed, "1", fault="noise reused", vocab=3, p=(0.1, 0.6, 0.3), q=(0.5, 0.26, 0.24))
    history = sampler.run(1, 1500)
    assert 2300 < history.acceptance.emitted < 2500
    assert (
        {"recovered draws"}
        <= set(failed(history))
        <= {"recovered draws", "emitted surprisal", "target's choice emitted"}
    )
    found = check(history, "recovered draws")
    assert found.bias < 0
    assert found.example is not None
    healthy = Synthetic(seed, "1", vocab=3, p=(0.1, 0.6, 0.3), q=(0.5, 0.26, 0.24)).run(1, 1500)
    assert failed(healthy) == []
    assert check(healthy, "recovered draws").least_bias < abs(found.bias) * 1.2


@pytest.mark.every(2)
@pytest.mark.parametrize(("tree", "drawn"), SHAPES)
def test_healthy_runs_raise_no_alarm(tree, drawn):
    """60 in all, short ones: none fails at the level that is the default."""
    for seed in range(15):
        history = Synthetic(seed, tree, drawn).run(2, 10 + 12 * seed)
        assert failed(history) == [], f"seed {seed}"


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
    short, long = (check(Synthetic(3).run(1, steps), "acceptance") for steps in (60, 960))
    assert short.result is long.result is CheckResult.PASSED
    assert check(Synthetic(3).run(1, 960), "acceptance by place").tested == long.tested
    assert "with 95 % power" in long.note
    assert 3 < short.least_bias / long.least_bias < 6  # sixteen times as many: a quarter, or a little less
    runs = [Synthetic(seed, "2x2", DETERMINISTIC, "accepts more").run(1, 400) for seed in range(6)]
    least = check(Synthetic(0, "2x2", DETERMINISTIC).run(1, 400), "acceptance").least_bias
    large = [one for one in (check(history, "acceptance") for history in runs) if one.bias >= least]
    assert large
    assert all(one.result is CheckResult.FAILED for one in large)


def asked(engine, *temperatures, at_once=False):
    """A history of requests for one prompt with one seed, at these temperatures."""
    history = History(run=engine.run_info, vocabulary=engine.vocabulary)
    for number, temperature in enumerate(temperatures, 1):
        engine.add(PROMPTS[0], SamplingParams(max_tokens=40, seed=0, temperature=temperature))
        while engine.busy and (number == len(temperatures) or not at_once):
            history.append(engine.step())
    return history


def test_coins_that_are_known_already_are_no_chance(engines):
    """Requests with one seed and one prompt make the same draws: they are counted once. A greedy one uses no coins."""
    history = asked(engines["draft tree"], *[1.3] * 20, at_once=True)
    assert failed(history) == []
    first = next(iter(history.requests.values()))
    assert check(history, "acceptance").tested <= sum(len(step.tree) for step in first.steps)
    alone, after = (asked(engines["draft tree"], *temperatures) for temperatures in ([1.3], [0.0, 1.3]))
    assert check(after, "acceptance").tested == check(alone, "acceptance").tested > 0


def _of_requests(record, names):
    """The record with these requests alone."""
    return dataclasses.replace(
        record,
        admitted=tuple(info for info in record.admitted if info.id in names),
        requests=tuple(part for part in record.requests if part.request in names),
        finished=tuple(end for end in record.finished if end.info.id in names),
    )


@pytest.mark.parametrize("by_outcome", [True, False])
def test_a_sample_of_a_healthy_run_is_not_convicted(by_outcome):
    """Requests with poor acceptance were chosen: their acceptance is poor, which is no fault of the sampler."""
    whole = Synthetic(3, "2x2", WITHOUT).run(300, 6)
    taus = {name: request.acceptance.tau for name, request in whole.requests.items()}
    most = sorted(taus.values())[100]
    chosen, asked = {name for name in taus if taus[name] < most}, f"keep tau < {most}"  # as captures of before were
    choose, out = Sampler(whole.run.run_id, 0.3), History(run=whole.run)
    for record in whole.steps:
        sampled = _of_requests(record, chosen) if by_outcome else choose(record)
        if sampled is not None:
            out.append(sampled)
    assert 50 < len(out.requests) < 150
    assert bool(failed(out)) == by_outcome  # as it would be judged if it did not say what it is
    out.run = dataclasses.replace(whole.run, sampling=asked if by_outcome else sampling_text(0.3))
    assert not failed(out)
    assert (BY_OUTCOME in {one.note for one in judge(out, source="x").checks}) == by_outcome


def of_one_seed(change, **run):
    """The sample, its requests with one seed and their parts in each step as `change` gives them."""
    history = under(sample("sampled"), seed=7)
    history.run = dataclasses.replace(history.run, **run)
    return rebuilt(history, lambda one: dataclasses.replace(one, requests=tuple(change(list(one.requests)))))


def in_common(parts):
    """Two requests have a token's coin in common, one at its root and one deeper."""
    drafted = [part for part in parts if part.verdict is not None and (part.verdict.coin > 0).sum() > 1]
    if len(drafted) > 1:
        first, second = drafted[:2]
        coin = second.verdict.coin.copy()
        coin[np.flatnonzero(coin > 0)[1]] = first.verdict.coin[np.flatnonzero(first.verdict.coin > 0)[0]]
        parts[parts.index(second)] = with_verdict(second, coin=coin)
    return parts


@pytest.mark.parametrize(
    ("run", "result"), [({"versions": {"vllm": "0.32.0"}}, CheckResult.PASSED), ({}, CheckResult.FAILED)]
)
def test_another_engines_coins_may_follow_from_the_position_of_each_token(run, result):
    """Those of vLLM's V2 runner do."""
    assert check(of_one_seed(in_common, **run), "coins of requests").result is result


@pytest.mark.parametrize("ours", [True, False])
def test_a_server_whose_clients_use_few_seeds_is_not_accused(ours):
    """Prompts of seven lengths under each of 60 seeds: what follows from a seed and a position is no new chance."""
    run = dataclasses.replace(histories.RUN, versions=histories.RUN.versions if ours else {"vllm": "0.32.0"})
    history, ones = History(run=run), np.ones(2, np.float32)
    tree = DraftTree(np.ones(2, np.int32), np.array([ROOT, 0], np.int32), ones, np.zeros(2, np.uint8))
    of_seed = np.random.default_rng(0).random((60, 100))  # another engine's: by the position of the token
    for number in range(690):
        seed, prompt = number % 60, np.ones(10 + 3 * (number // 60 % 7), np.int32)
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=5)
        info = RequestInfo(f"r{number}", 0, 1, "", prompt, params, {})
        for index in range(5):
            root = len(prompt) - 1 + index
            coins = coins_at(np.array([seed], np.uint64), Stream.VERIFY, np.array([root]), np.array([3]))
            final, *nodes = coins if ours else of_seed[seed, root : root + 3]
            half, none = np.full(2, 0.5, np.float32), np.zeros(2)
            outcome, path = np.array([Outcome.REJECTED, Outcome.UNTRIED], np.uint8), np.zeros(0, np.int32)
            verdict = Verdict(outcome, half, half, half, half, np.array(nodes), none, path, 1, FinalKind.RECOVERED,
                              0.5, float(final))  # fmt: skip
            part = RequestStep(info.id, index, root, 0, "", tree, verdict, 1, preceded=None)
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
