"""A start, stage by stage; the worker: paused, stepped, refused, cancelled, ended, and gone when its parent is."""

import json
import subprocess
import sys
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from specscope import SamplingParams
from specscope.debug.answers import Answer, StopReason
from specscope.debug.session import Session
from specscope.debug.show import stop_text
from specscope.debug.viewer import Viewer
from specscope.engine.config import EngineConfig
from specscope.engine.prompts import PromptSpec
from specscope.live.client import Worker
from specscope.live.local import commands_over
from specscope.live.server import _Server
from specscope.live.start import SPINS, WAITING_NAMES, Stages, spare_processors
from tests.engines import tiny_engine
from tests.waiting import HANG_SECONDS, until

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


def wait(condition, session=None):
    until(condition, session and session.poll)


def told(news):
    """The text of an answer, or why there is none."""
    return news.text if isinstance(news, Answer) else news.why


@pytest.fixture(scope="module")
def worker(tiny):
    config = EngineConfig(target=str(tiny), dtype="float32", kv_memory=0.01, drafter="ngram", ngram_min=1, threads=1)
    prompt = SamplingParams(max_tokens=30, temperature=0.8, ignore_eos=True)
    made = Worker(config, [PromptSpec("abcabcabcab", prompt, raw=True)], PARAMS, {"raw": True}, paused=True)
    made.published = []
    made.bus.subscribe(made.published.append, lossless=True)
    yield made
    made.close()
    assert made.status == "ended"


@pytest.fixture(scope="module")
def session(worker):
    return Viewer(control=worker)


@pytest.fixture(scope="module")
def ask(session):
    """The answer to a line for the debugger."""

    def asked(line):
        session.debug(line)
        wait(lambda: session.news, session)
        return told(session.news.popleft())

    return asked


def test_it_loads_paused_and_steps_one_at_a_time(worker, session, ask):
    assert worker.progress
    wait(lambda: session.paused, session)
    assert session.history.steps == []
    assert "nothing has run yet" in ask("fork seed=inf")
    for count in (1, 2, 3):
        session.forward()
        wait(lambda count=count: len(session.history.steps) == count, session)
    assert "unknown command" in ask("nonsense")  # whatever ran by itself would come before this answer
    assert len(session.history.steps) == 3
    assert session.position == 2
    session.goto(0)
    session.forward()
    assert (session.position, session.follow) == (1, False)
    assert session.history.run.target


def test_the_debugger_over_a_pipe(worker, session, ask):
    """Breakpoints stop the engine in its process; going back takes steps from the parent's history; they come again."""
    session.goto_end()
    assert ask("break draft") == "breakpoint 1: break draft"
    wait(lambda: [point.text for point in session.points] == ["break draft"], session)
    assert "write ==" in ask("break reject if depth = 1")  # a bad line does not end the run
    session.debug("continue")
    wait(lambda: session.news, session)
    stop = session.news.popleft()
    assert (stop.reason, stop.hits[0].text) == (StopReason.BREAKPOINT, "break draft")
    assert stop_text(stop, session.history).startswith(f"breakpoint 1 (break draft) at step {stop.step}, r0\nstep ")
    wait(lambda: session.paused, session)
    wait(lambda: session.points[0].hits == 1, session)
    ask("delete")
    wait(lambda: session.points == (), session)
    ask("next 4")
    wait(lambda: len(session.history.steps) == stop.step + 5, session)
    before = [[step.tokens() for step in record.requests] for record in session.history.steps]
    where = ask("where")
    ask("reverse-next 3")
    wait(lambda: len(session.history.steps) == len(before) - 3, session)
    ask("next 3")
    wait(lambda: len(session.history.steps) == len(before), session)
    assert [[step.tokens() for step in record.requests] for record in session.history.steps] == before
    assert ask("where") == where
    assert "the same tokens" in ask("fork tokens=6")
    wait(lambda: worker.forked is not None, session)
    assert worker.forked.outputs[0] == worker.forked.outputs[1] != []
    session.goto(2)  # looking back moves nothing: what is asked is of the step in view
    assert ask("where").startswith("step 2 ")
    assert ask("info step").startswith("step 2")
    assert ask("fork tokens=6").startswith("fork of r0@2: ")
    assert (session.position, len(session.history.steps)) == (2, len(before))
    assert ask("next").startswith(f"step 2 was in view; the run continues from step {len(before) - 1}, where")
    wait(lambda: session.position == len(before), session)
    ask("finish")
    wait(lambda: session.history.requests["r0"].end is not None, session)
    worker.bus.flush()
    assert [record.step for record in worker.published] == list(range(len(session.history.steps)))


def test_it_runs_to_the_end_and_waits_for_more(worker, session):
    session.toggle_pause()
    wait(lambda: worker.status == "idle", session)
    assert len(session.history.requests["r0"].output()) == 30
    worker.ask("submit", "more")
    wait(lambda: "r1" in session.history.requests and session.history.requests["r1"].end, session)


def test_a_node_is_looked_at_wherever_the_engine_is(worker, session):
    """Issue 12, item 10: on an idle engine, on a running one, at an earlier step; and it goes on as it was."""
    steps = session.history.steps
    at = next(i for i, record in enumerate(steps) if record.requests and len(record.requests[0].tree))
    part = steps[at].requests[0]
    session.goto(at)
    wait(lambda: worker.status == "idle", session)  # the request before has only just ended
    assert session.view_node(part.request, 0)
    wait(lambda: worker.node_view is not None, session)
    assert (worker.node_view.step, worker.node_view.node) == (steps[at].step, 0)
    assert worker.node_view.token == part.tree.token[0]
    worker.ask("submit", PromptSpec("on and on", SamplingParams(max_tokens=300, ignore_eos=True)))
    wait(lambda: worker.status == "running", session)
    assert session.view_node(part.request, None)
    wait(lambda: worker.node_view.node is None, session)
    assert worker.node_view.token == part.verdict.token
    assert worker.status in ("running", "idle")
    wait(lambda: worker.status == "idle", session)


def test_one_that_is_killed_is_noticed(worker, session):
    worker._process.kill()
    wait(lambda: worker.status == "ended")
    assert "ended with code" in worker.error
    worker.ask("submit", "nobody hears")


def test_a_model_that_cannot_load_is_an_error_in_a_line():
    broken = Worker(EngineConfig(target="./nothing"), [], PARAMS)
    wait(lambda: broken.status == "ended")
    assert "no model at ./nothing" in broken.error
    broken.close()


NOISY = """
import os, sys

def make_noise():
    print("on standard output", flush=True)
    os.write(2, b"Retrying in 1s [Retry 1/5].\\nillegal instruction\\n")
    os._exit(3)

if "--multiprocessing-fork" in sys.orig_argv:
    class Finder:
        def find_spec(self, name, *_):
            if name == "torch":
                make_noise()
    sys.meta_path.insert(0, Finder())
"""


def test_what_libraries_print_is_kept_off_the_screens_terminal(tiny, tmp_path, monkeypatch, capfd):
    (tmp_path / "sitecustomize.py").write_text(NOISY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    noisy = Worker(EngineConfig(target=str(tiny)), [], PARAMS)
    wait(lambda: noisy.status == "ended")
    noisy.close()
    assert noisy.error == "the engine's process ended with code 3: illegal instruction"
    assert "".join(capfd.readouterr()) == ""


def test_the_workers_loop_runs_on_the_stepper_and_not_on_the_session(tiny, monkeypatch):
    engine = tiny_engine(tiny, drafter="none")
    engine.add("abc", SamplingParams(max_tokens=20, ignore_eos=True))
    sent = []
    commands = commands_over(engine)
    monkeypatch.setattr(Session, "cont", None)
    server = _Server(SimpleNamespace(poll=None), SimpleNamespace(send=sent.append), paused=False)
    server.debug_with(engine, commands)
    for _ in range(4):
        server.advance()
    assert len(commands.session.history.steps) == 4
    assert not sent
    commands.session.breakpoints.add("step")
    server.advance()
    assert server.paused
    assert sent[0].hits[0].step == 4


def test_an_end_that_is_asked_for_while_a_fork_runs_ends_the_fork(tiny):
    """And what was asked before it comes first."""
    engine, sent = tiny_engine(tiny, drafter="ngram"), []
    engine.add("abcabcabc", SamplingParams(max_tokens=40, ignore_eos=True))
    ours, theirs = Pipe()
    server = _Server(theirs, SimpleNamespace(send=sent.append), paused=True)
    server.debug_with(engine, commands_over(engine))
    for _ in range(3):
        server.advance()
    for command in (("debug", ("fork seed=3", None)), ("debug", ("where", None)), ("stop", None)):
        ours.send(command)
    server.run([])
    texts = [each.text for each in sent if isinstance(each, Answer)]
    assert "interrupted: the fork had made" in texts[0]
    assert texts[1].startswith("step 2")
    assert not engine.busy


CHOOSE = """
import json, os, sys
from specscope.live.start import WAITING_NAMES, share_cores
for chosen in json.load(sys.stdin):
    for name in WAITING_NAMES:
        os.environ.pop(name, None)
    os.environ |= chosen
    share_cores()
    print(json.dumps({name: os.environ[name] for name in WAITING_NAMES if name in os.environ}))
assert "torch" not in sys.modules
"""


@contextmanager
def spinning(count):
    children = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        until(lambda: all(psutil.Process(child.pid).cpu_times().user > 0 for child in children))
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_threads_sleep_soon_where_the_processors_are_taken():
    """What the user chose stays."""
    cases = [{}, *({name: "7"} for name in WAITING_NAMES)]
    with spinning(spare_processors() + 1):
        command, given = [sys.executable, "-c", CHOOSE], json.dumps(cases)
        ran = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in ran.stdout.splitlines()] == [{"GOMP_SPINCOUNT": SPINS}, *cases[1:]]


COMPUTE = """
import os, sys, torch
from tests.waiting import until
from specscope.live.start import on_passing_thread
threads = lambda: len(os.listdir("/proc/self/task"))
compute = lambda: torch.ones(1 << 20).exp().sum().item()
torch.set_num_threads(2)
before = threads()
on_passing_thread(compute)
until(lambda: threads() <= before)  # they end by themselves
compute()
print(threads() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux tells them")
def test_what_a_passing_thread_computes_leaves_no_pool_of_threads():
    ran = subprocess.run([sys.executable, "-c", COMPUTE], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (ran.stdout, ran.stderr) == ("1\n", "")  # one that computes here does


def test_a_line_for_each_stage(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stages = Stages("starting torch")
    now[0] += 7.9
    assert stages.begin("loading a model") == "   7 s  starting torch"
    now[0] += 2
    assert stages.lines() == ["   7 s  starting torch", "   2 s  loading a model"]
    assert stages.begin("capturing CUDA graphs: 1 of 20") == "   2 s  loading a model"
    assert stages.begin("capturing CUDA graphs: 2 of 20") == ""  # what counts on is one stage
    assert stages.lines()[2:] == ["   0 s  capturing CUDA graphs: 2 of 20"]
