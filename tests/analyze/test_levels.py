"""When the level of counts changed and with what: logs as an engine writes them, made here with a known answer."""

import dataclasses
import json

import numpy as np
import pytest

from specscope.analyze.change_points import CHANCE
from specscope.analyze.levels import levels
from specscope.trace.history.interval import interval_record
from specscope.trace.record.aggregate import Aggregate
from tests.support.commands import run_here

DRAFTS = 170
EVERY = 10  # seconds


def log(rates, running=None, engine="", seed=0, **more):
    """Intervals of ten seconds, in which a drafted token is accepted at these rates after those before it."""
    draw = np.random.default_rng(seed)
    steps = []
    for place, rate in enumerate(rates):
        at = np.cumprod(draw.random((DRAFTS, 3)) < rate, axis=1).sum(0).tolist()
        counts = {"drafts": DRAFTS, "drafted": 3 * DRAFTS, "accepted": sum(at), "accepted_at": tuple(at)}
        counts |= {"proposed_at": (DRAFTS,) * 3, "waiting": 0, "engine": engine, **more}
        counts |= {} if running is None else {"running": int(running[place])}
        start = EVERY * place * 10**9
        steps.append(interval_record(place, start, start + EVERY * 10**9, Aggregate("vLLM log", **counts)))
    return steps


def load(count, seed=0, mean=8, most=6):
    """Running requests that come and go."""
    draw = np.random.default_rng(seed)
    values, now = [], 1
    for _ in range(count):
        now = int(draw.integers(1, most)) if draw.random() < 1 / mean else now
        values.append(now)
    return np.array(values)


@pytest.mark.parametrize(("count", "place"), [(12, 8), (40, 3), (300, 200)])
def test_a_level_that_changed_once(count, place):
    found = levels(log(np.repeat([0.8, 0.4], [place, count - place]), load(count)))
    before, after = found.changes
    assert (before.intervals, after.intervals) == (place, count - place)
    assert (before.drafts, after.drafts) == (place * DRAFTS, (count - place) * DRAFTS)
    assert before.end_ns == after.start_ns == EVERY * place * 10**9
    for level, rate in ((before, 0.8), (after, 0.4)):
        assert level.low < 1 + rate + rate**2 + rate**3 < level.high
        assert level.low < level.length < level.high
    assert before.p_value is None
    assert after.p_value < 1e-3


@pytest.mark.parametrize(("rates", "counts"), [((0.8, 0.5, 0.8), (60, 10, 50)), ((0.8, 0.5, 0.7, 0.4), (60,) * 4)])
def test_a_dip_has_two_ends_and_there_may_be_several_levels(rates, counts):
    found = levels(log(np.repeat(rates, counts), load(sum(counts))))
    assert [level.intervals for level in found.changes] == [*counts]


def test_levels_that_alternate_with_load_have_a_condition_and_no_changes():
    """Also where the load is not told at the beginning; and with the times at which the condition held."""
    running = load(300)
    steps = log(np.where(running >= 3, 0.35, 0.8), running)
    steps[0] = dataclasses.replace(steps[0], aggregate=dataclasses.replace(steps[0].aggregate, running=None))
    found = levels(steps)
    assert not found.changes
    assert found.condition.text == "running requests >= 3"
    assert (found.condition.hits_in, found.condition.hits_out) == (int((running >= 3).sum()), 0)
    low, high = found.groups
    assert low.intervals + high.intervals == 300
    assert low.high < 1.6 < 2.8 < high.low
    running = np.repeat([1, 3, 1, 2, 1], [95, 45, 70, 22, 68])
    found = levels(log(np.where(running >= 2, 0.3, 0.8), running))
    assert (found.changes, found.condition.text) == ((), "running requests >= 2")
    assert [(end - start) // 10**10 for start, end in found.stretches] == [45, 22]


def mixed(draw, count, lasts):
    """Rates of a batch of two, each request of which has its own and lasts so many intervals."""
    rates = np.zeros(count)
    for _ in range(2):
        place = 0
        while place < count:
            last = place + max(1, int(draw.exponential(lasts)))
            rates[place:last] += np.clip(draw.normal(0.75, 0.12), 0, 1) / 2
            place = last
    return rates


KINDS = {
    "binomial": lambda draw, count: np.full(count, 0.75),
    "between intervals": lambda draw, count: np.clip(draw.normal(0.75, 0.05, count), 0, 1),
    "of requests": lambda draw, count: mixed(draw, count, 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_said_of_a_level_that_never_changes(kind):
    said = 0
    for seed in range(70):
        draw = np.random.default_rng(seed)
        count = int(draw.choice([8, 15, 30, 60]))
        found = levels(log(KINDS[kind](draw, count), load(count, seed, mean=int(draw.choice([1, 8]))), seed=seed))
        said += bool(found.changes) + (found.condition is not None)
    assert said <= 1  # 0.001 of each: 2 of 70 have a chance of 1 in 100


def test_few_intervals_and_averages_alone():
    assert not levels(log([0.8, 0.8, 0.2])).changes
    told = [
        interval_record(i, i * 10**10, (i + 1) * 10**10, Aggregate("SGLang log", averages={"accept_length": length}))
        for i, length in enumerate([3.1, 3.05, 3.12, 3.08, 3.1, 3.06, 3.11, 1.5, 1.45, 1.52, 1.48, 1.5, 1.47])
    ]
    assert [(level.intervals, level.drafts) for level in levels(told).changes] == [(7, None), (6, None)]


def test_two_runs_have_one_condition():
    rare, often = np.repeat([1, 3, 1], [50, 6, 44]), np.repeat([1, 3, 1], [10, 60, 30])
    a, b = (log(np.where(run >= 2, 0.35, 0.8), run, seed=seed) for seed, run in enumerate((rare, often)))
    found = levels(a, b)
    assert found.condition.text == "running requests >= 3"
    assert [(group.side, group.where, group.intervals) for group in found.groups] == [
        ("A", "running requests >= 3", 6),
        ("B", "running requests >= 3", 60),
        ("A", "elsewhere", 94),
        ("B", "elsewhere", 40),
    ]
    assert levels(log([0.8] * 50, load(50)), log([0.8] * 50, load(50, 1), seed=1)).condition is None
    assert levels(log([0.8] * 50, load(50)), log([0.5] * 50, load(50, 1), seed=1)).condition is None


def vllm_log(path, running, rates):
    """The lines that vLLM writes every ten seconds."""
    lines = []
    for place, (step, busy) in enumerate(zip(log(rates, running), running, strict=True)):
        a = step.aggregate
        at = f"INFO 11-26 09:{place // 6:02}:{place % 6}0"
        rates_at = ", ".join(f"{count / a.drafts:.3f}" for count in a.accepted_at)
        lines += [
            f"{at} [loggers.py:257] Engine 000: Avg prompt throughput: 30.0 tokens/s, Avg generation throughput: 50.0 "
            f"tokens/s, Running: {busy} reqs, Waiting: 0 reqs, GPU KV cache usage: 1.6%, Prefix cache hit rate: 20.0%",
            f"{at} [metrics.py:125] SpecDecoding metrics: Mean acceptance length: {a.length:.2f}, Accepted throughput: "
            f"{a.accepted / 10:.2f} tokens/s, Drafted throughput: {a.drafted / 10:.2f} tokens/s, Accepted: "
            f"{a.accepted} tokens, Drafted: {a.drafted} tokens, Per-position acceptance rate: {rates_at}, Avg Draft "
            f"acceptance rate: {100 * a.accepted / a.drafted:.1f}%",
        ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_report_and_compare_of_logs_say_it(tmp_path):
    rare, often = np.repeat([1, 2, 1], [70, 8, 42]), np.repeat([1, 2, 1], [30, 60, 30])
    a, b = (vllm_log(tmp_path / name, run, np.where(run >= 2, 0.35, 0.8)) for name, run in (("a", rare), ("b", often)))
    code, out, _ = run_here(["report", a])
    assert code == 0
    assert "8 of 8 intervals where running requests >= 2 are low, as are 0 of 112 others: " in out
    (capture,) = json.loads(run_here(["report", a, "--json"])[1])["captures"]
    assert capture["levels"]["condition"]["text"] == "running requests >= 2"
    assert [group["intervals"] for group in capture["levels"]["groups"]] == [8, 112]
    out = run_here(["compare", a, b])[1]
    assert "B: running requests >= 2" in out
    assert "These are 6.7% of A's intervals and 50.0% of B's intervals." in " ".join(out.split())
    found = json.loads(run_here(["compare", a, b, "--json"])[1])["levels"]
    assert [group["intervals"] for group in found["groups"]] == [8, 60, 112, 60]
    steady = vllm_log(tmp_path / "c", np.ones(60, int), np.full(60, 0.7))
    out = run_here(["report", steady])[1]
    assert "When the level changed" not in out
    assert "Low intervals" not in out
    changed = vllm_log(tmp_path / "d", np.ones(60, int), np.repeat([0.8, 0.5], 30))
    out = run_here(["report", changed])[1]
    assert "When the level changed" in out
    assert out.count("11-26 09:04:50") >= 2  # where one ends and the other begins


def test_one_odd_interval_is_no_level():
    rates = np.full(100, 0.6)
    rates[40] = 0.2
    assert not levels(log(rates)).changes
    rates[41:43] = 0.2
    assert [level.intervals for level in levels(log(rates)).changes] == [40, 3, 57]


@pytest.mark.parametrize("count", [60, 120, 240])
def test_a_level_that_falls_slowly_is_told_in_steps(count):
    found = levels(log(np.linspace(0.6, 0.3, count)))
    lengths = [level.length for level in found.changes]
    assert len(lengths) >= 2
    assert lengths == sorted(lengths, reverse=True)
    assert all(level.p_value < CHANCE for level in found.changes[1:])
