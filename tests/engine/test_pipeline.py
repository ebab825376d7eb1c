"""Async scheduling: the same steps, one ahead; and what goes wrong where somebody does not wait for whom he must."""

import threading
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from specscope import SamplingParams
from specscope.errors import UserError
from specscope.trace.record.records import FinishReason
from tests.engine.test_invariances import timeless
from tests.engines import PROMPTS
from tests.waiting import HANG_SECONDS, until


def fill(engine, tokens=24):
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, SamplingParams(max_tokens=tokens, seed=i, ignore_eos=True, temperature=0.9 * (i % 2)))


def run(engine):
    records = []
    while engine.busy:
        records.append(engine.step())
    return records


def test_the_next_step_runs_while_one_is_accounted_for(make):
    engine = make("eagle", async_scheduling=True)
    engine.subscribe(lambda record: None)
    fill(engine)
    job, account, ran, accounted = engine.pipeline._job, engine.pipeline._account, [], []

    def note(*args):
        made = job(*args)
        ran.append(made)
        return made

    def wait(*args):
        """A step is accounted for when the one after it has run: that waits for nothing here."""
        accounted.append(until(lambda: len(ran) > len(accounted) + 1))
        return account(*args)

    engine.pipeline._job, engine.pipeline._account = note, wait
    records = run(engine)
    engine.close()
    for one, after in pairwise(records):
        assert one.flight.launched_ns < one.flight.read_ns < one.flight.committed_ns
        assert after.flight.launched_ns < one.flight.read_ns  # before the verdicts of the one before were read
        assert after.start_ns < one.flight.committed_ns
        assert one.end_ns <= after.start_ns  # but a step begins with all that the one before has done


def test_requests_come_and_go_while_steps_run(make):
    """From other threads, at any moment: every request ends once, and no block is lost."""
    engine = make("eagle", async_scheduling=True, max_batch=3)
    names, done, steps = [], threading.Event(), threading.Semaphore(0)

    def customer(seed):
        for i in range(6):
            name = f"c{seed}-{i}"
            engine.add(PROMPTS[(seed + i) % len(PROMPTS)], SamplingParams(max_tokens=8, seed=i), name=name)
            names.append(name)
            if i % 3 == seed % 3:
                engine.cancel(name)
            assert steps.acquire(timeout=HANG_SECONDS)  # a few come and go at each

    threads = [threading.Thread(target=customer, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    watcher = threading.Thread(target=lambda: ([t.join() for t in threads], done.set()))
    watcher.start()
    ends = []
    while engine.busy or not done.is_set():
        ends += [(end.info.id, end.reason) for end in engine.step().finished]
        steps.release()
    engine.close()
    assert sorted(name for name, _ in ends) == sorted(names)
    assert engine.runner.cache.pool.used == 0 == engine.drafter.cache.pool.used
    assert {reason for _, reason in ends} <= {FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.EOS}


def test_what_was_launched_is_drained_before_a_debugger_looks(make):
    engine = make("eagle", async_scheduling=True)
    fill(engine)
    seen = [engine.step().step for _ in range(3)]
    published = []
    engine.bus.subscribe(published.append, lossless=True, moves=True)
    with pytest.raises(UserError, match="no timeline"):
        engine.rewind(0)
    engine.keep_timeline()
    engine.bus.flush()
    assert [record.step for record in published] == [seen[-1] + 1]
    assert not engine.pipeline.flying
    before = engine.steps
    rest = run(engine)
    assert rest[0].step == before
    assert all(record.flight is None for record in rest)
    with pytest.raises(UserError, match="cannot go back to"):
        engine.rewind(before - 1)
    engine.rewind(before)
    assert [timeless(one) for one in run(engine)] == [timeless(one) for one in rest]
    engine.close()


def test_a_step_that_fails_is_the_callers_to_know(make, monkeypatch):
    engine = make("ngram", async_scheduling=True)
    fill(engine)
    engine.step()
    forward = engine.runner.forward_with_features
    calls = iter((False, True))

    def fail(segments):
        if next(calls):
            raise ValueError("the device is gone")
        return forward(segments)

    monkeypatch.setattr(engine.runner, "forward_with_features", fail)
    with pytest.raises(ValueError, match="the device is gone"):
        run(engine)
    with pytest.raises(ValueError, match="the device is gone"):
        engine.step()
    engine.close()


def test_each_thread_that_runs_a_phase_uses_the_engines_device(make, monkeypatch):
    """Triton launches on the current device, which is one of each thread; a step's phases may run on several."""
    entered, current = [], threading.local()

    @contextmanager
    def device(index):
        before, current.device = getattr(current, "device", None), index
        yield
        current.device = before

    monkeypatch.setattr(torch.cuda, "device", device)
    engine = make("none", async_scheduling=True)
    forward = engine.phases.run["forward"]

    def watched(now):
        entered.append((threading.current_thread().name, current.device))
        forward(now)

    monkeypatch.setitem(engine.phases.run, "forward", watched)
    engine.phases.device = torch.device("cuda", 1)
    fill(engine, 4)
    run(engine)
    assert set(entered) == {("specscope-steps_0", torch.device("cuda", 1))}
    engine.close()
    engine.keep_timeline()
    fill(engine, 4)
    engine.step()
    assert entered[-1] == (threading.current_thread().name, torch.device("cuda", 1))
