"""What a step reads back from its device: each read is a wait, so there are few; and async scheduling, one step ahead.

Without a GPU the tensors lie on the host, where a read costs nothing; but it is the same calls that would wait.
"""

import sys
import threading
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import specscope
from specscope import SamplingParams
from specscope.errors import UserError
from specscope.speculate import sampling
from specscope.trace.record.records import FinishReason
from tests.analyze.audit.runs import Bench
from tests.engine.test_invariances import timeless
from tests.engines import PROMPTS, run_all
from tests.waiting import HANG_SECONDS, until

HOME = str(Path(specscope.__file__).parent)
METHODS = ("cpu", "tolist", "item", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__")
# Operators that cannot run before the host knows how many numbers come out, or that hand a number to it.
OPERATORS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique")
RUNS = {  # a tree and a temperature, by the name of an engine
    "none": (None, 0.9),
    "ngram": ("2x3", 0.9),
    "draft tree": ("[(0,), (1,), (1, 0)]", 0.9),
    "dynamic model": ("dynamic:4,depth=3,top=2", 0.9),
    "eagle dynamic": ("dynamic:3,depth=2,top=2", 0.0),
    "p-eagle dynamic": ("dynamic:3,depth=2,top=2", 0.9),
}
LIKE_ANOTHER = ("none", "dynamic model")  # ngram, and eagle dynamic
PENALISED = {"logit_bias": {60: 2.0}, "repetition_penalty": 1.2, "frequency_penalty": 0.5}
HOST = "tree_batch.__init__"  # fills the buffer on the host that one copy takes to the device
VERDICTS, PASS = "tree_batch.to_host", ("base.top", "distribution.draw_siblings")


class Reads(TorchDispatchMode):
    """The functions of specscope that read, once for each time that one of them is called."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.calls = {}  # by frame: kept, so that no other takes its place in memory
        for name in METHODS:
            monkeypatch.setattr(torch.Tensor, name, self.watched(getattr(torch.Tensor, name)))
        monkeypatch.setattr(torch, "tensor", self.watched(torch.tensor))  # a copy to a device, from pageable memory
        taken = torch.Tensor.__getitem__

        def take(tensor, index):
            if isinstance(index, list):  # likewise
                self.note()
            return taken(tensor, index)

        monkeypatch.setattr(torch.Tensor, "__getitem__", take)

    def watched(self, method):
        def call(tensor, *args, **kwargs):
            self.note()
            return method(tensor, *args, **kwargs)

        return call

    def note(self):
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(HOME):
            frame = frame.f_back
        if frame is not None and "/triton/" not in frame.f_code.co_filename:
            self.calls[id(frame)] = frame, f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in OPERATORS:
            self.note()
        return func(*args, **(kwargs or {}))

    def places(self):
        return Counter(name for _, name in self.calls.values())


@pytest.fixture(scope="module")
def bench(deep, tiny, tmp_path_factory):
    """Over a target of few layers where no head needs many."""
    made = Bench(deep, tmp_path_factory.mktemp("heads"), backend="triton", device="cpu", evidence="lean")
    made.targets |= dict.fromkeys(("none", "ngram"), tiny)
    return made


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LIKE_ANOTHER else ()) for n in RUNS])
def test_a_step_reads_its_verdicts_and_each_draft_pass_its_tokens(bench, monkeypatch, name):
    monkeypatch.setattr(sampling, "argmax", lambda rows: rows.argmax(-1))  # as it is where there is a GPU
    tree, temperature = RUNS[name]
    engine = bench.fresh(name, tree=tree)
    for i, prompt in enumerate(("abcabc", "the")):
        more = PENALISED if name in ("none", "ngram") else {}  # a model's tokens are read for each request then
        engine.add(prompt, SamplingParams(max_tokens=5, temperature=temperature, seed=i + 1, ignore_eos=True, **more))
    engine.step()  # whatever a model reads once
    with Reads(monkeypatch) as reads:
        steps = 0
        while engine.requests:
            reads.calls.clear()
            record = engine.step()
            places = reads.places()
            judged = any(part.verdict is not None for part in record.requests)
            assert places.pop(VERDICTS, 0) == judged
            assert sum(places.pop(place, 0) for place in PASS) == len(record.passes)
            assert set(places) <= {HOST}
            steps += judged
    assert steps > 2


def test_what_reads_is_seen(monkeypatch):
    """The watch itself, by what only the host does."""
    row = torch.zeros(1, 600)
    with Reads(monkeypatch) as reads:
        sampling.softmax_(row, SamplingParams(top_p=0.99))
    assert reads.places() == {"sampling._least_on_host": 1}


def fill(engine, tokens=24):
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, SamplingParams(max_tokens=tokens, seed=i, ignore_eos=True, temperature=0.9 * (i % 2)))


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
    records = run_all(engine)
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
    rest = run_all(engine)
    assert rest[0].step == before
    assert all(record.flight is None for record in rest)
    with pytest.raises(UserError, match="cannot go back to before step"):
        engine.rewind(before - 1)
    engine.rewind(before)
    assert [timeless(one) for one in run_all(engine)] == [timeless(one) for one in rest]
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
        run_all(engine)
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
    run_all(engine)
    assert set(entered) == {("specscope-steps_0", torch.device("cuda", 1))}
    engine.close()
    engine.keep_timeline()
    fill(engine, 4)
    engine.step()
    assert entered[-1] == (threading.current_thread().name, torch.device("cuda", 1))
