import dataclasses
import importlib.util
import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from specscope.errors import UserError
from specscope.remote.attached import WATCHING
from specscope.remote.receiver import Receiver
from specscope.trace.inside.hooking import ErrorGuard
from specscope.trace.inside.on_import import on_import
from specscope.trace.inside.settings import PluginSettings
from specscope.trace.inside.sinks import Outlet, of_ranks
from specscope.trace.record.privacy import Privacy
from specscope.trace.wire.reading import read_capture
from specscope.vllm.run_info import run_info
from tests.processes import room_for
from tests.support.records import received
from tests.trace.sampled_runs import SAMPLED, FakeEngine, FinishReason
from tests.trace.samples import record as sample
from tests.trace.strategies import RUN
from tests.vllm import small
from tests.waiting import HANG_SECONDS

VLLM_RUN = run_info(SimpleNamespace(vllm_config=small.config(small.Speculation("eagle3"))), "full")


TOKENIZER = SimpleNamespace(get_vocab=dict, added_tokens_decoder={}, all_special_ids=[])


def outlet(run=RUN, **asked):
    """To what the environment asks for."""
    settings = PluginSettings.read({f"SPECSCOPE_{name}": value for name, value in asked.items()})
    return Outlet(settings, run, lambda: TOKENIZER, ErrorGuard(), (0, 0))


def test_losses_are_told_when_they_begin_and_when_they_have_doubled(caplog):
    class Sink:
        failed = 0

        def __call__(self, step):
            Sink.failed += 1

    opened = outlet()
    opened.also(Sink())
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            opened.publish(sample(0, ()))
            opened.flush()
    assert opened.lost == 10
    counts = [int(line.split()[1]) for line in (r.getMessage() for r in caplog.records)]
    assert counts == [1, 2, 4, 8]
    opened.close()


def test_the_plugins_sinks_are_behind_sampling(tmp_path, caplog):
    """Spans alone: the same parts as in specscope's own outputs."""
    taken, engine = [], FakeEngine()
    with Receiver(taken.append) as receiver:
        url = f"http://127.0.0.1:{receiver.grpc_port}"
        opened = outlet(CAPTURE=str(tmp_path / "a.jsonl"), SAMPLE="0", OTLP_ENDPOINT=url)
        ends = [(0, FinishReason.ERROR), (0, FinishReason.EOS)]
        opened.publish(engine.step([(SAMPLED, {}), ("", {})], [], [(2, 1)]))
        opened.publish(engine.step([], ends, [(2, 1)]))
        opened.close()
    names = [(span.name, span.attributes.get("specscope.request.id")) for _, span in received(taken)]
    assert [name for name, request in names if request == "r1"] == []
    assert [name for name, request in names if request == "r0"][-1].startswith("text_completion")
    assert set(read_capture(tmp_path / "a.jsonl").history.requests) == {"r0", "r1"}  # it is whole
    assert "specscope: kept 1 of 2 requests (1 by parent)" in caplog.messages


@pytest.mark.parametrize("happens", ["an older capture", "deleted meanwhile", "a full disk", "nothing"])
def test_the_plugin_replaces_no_capture_and_tells_what_becomes_of_its_own(happens, tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    if happens == "an older capture":
        path.write_text('{"resourceSpans": []}\n')
    opened = outlet(CAPTURE=str(path))
    if happens == "deleted meanwhile":
        path.unlink()
    with room_for(path.stat().st_size + 10) if happens == "a full disk" else nullcontext():
        opened.publish(sample(0, ()))
        opened.close()
    new = tmp_path / "a.2.jsonl"
    places = {"an older capture": f"writing to {new} ({path} exists)"}
    assert opened.places == [places.get(happens, f"writing to {path}")]
    told = {
        "deleted meanwhile": [f"{path} was deleted or replaced during the run: the capture is lost"],
        "a full disk": [
            f"{path}: File too large: 1 step not captured so far; the run continues",
            f"1 step not captured: {path} could not be written",
        ],
    }
    assert caplog.messages == [f"specscope: {line}" for line in told.get(happens, [])]
    if happens in ("an older capture", "nothing"):
        assert len(read_capture(new if new.exists() else path).history.steps) == 1


def test_what_the_engine_has_not_ended_ends_with_it(tmp_path):
    opened, engine = outlet(CAPTURE=str(tmp_path / "a.jsonl")), FakeEngine()
    opened.publish(engine.step([("", {})], [], [(2, 1)]))
    opened.close()
    *_, last = read_capture(tmp_path / "a.jsonl").history.steps
    assert [end.reason for end in last.finished] == [FinishReason.CANCELLED]


def test_a_sink_that_cannot_be_opened_is_lacking_and_the_others_are_there(tmp_path):
    file = tmp_path / "no folder" / "a.jsonl"
    with Receiver(lambda spans: None) as receiver:
        url = f"http://127.0.0.1:{receiver.grpc_port}"
        opened = outlet(CAPTURE=str(file), OTLP_ENDPOINT=url)
        assert opened.places == [f"sending spans to {url}"]
        assert opened.lacking == [f"the capture (cannot write {file}: No such file or directory)"]
        opened.close()


@pytest.mark.parametrize(
    ("ranks", "name"), [((0, 0), "a.jsonl"), ((1, 0), "a-1.jsonl"), ((0, 2), "a-2.jsonl"), ((3, 2), "a-3-2.jsonl")]
)
def test_each_rank_has_a_file_of_its_own(ranks, name):
    assert of_ranks("/x/a.jsonl", ranks) == Path("/x", name)


def test_one_line_says_what_is_watched_where_it_goes_and_what_it_lacks(tmp_path, caplog):
    file = str(tmp_path / "a.jsonl")
    bare = dataclasses.replace(VLLM_RUN, speculation={}, evidence="lean", privacy=Privacy.NO_TOKENS)
    for run, asked, runner in ((VLLM_RUN, {"CAPTURE": file}, "V1 runner"), (bare, {}, "V2 runner")):
        opened = outlet(run, **asked)
        opened.announce("vLLM 0.32.0", runner)
        opened.close()
    assert caplog.messages == [
        f"specscope: watching vLLM 0.32.0 (process {os.getpid()}, V1 runner, eagle3, evidence full); "
        f"writing to {file}; lacking nothing",
        f"specscope: watching vLLM 0.32.0 (process {os.getpid()}, V2 runner, evidence lean); writing nowhere; lacking "
        "drafts (vLLM runs without a speculative config), likeliest tokens, ranks and entropies (lean evidence), texts "
        "and token ids (--no-tokens)",
    ]
    # By these words the screen knows that it has loaded
    assert caplog.messages[0].removeprefix("specscope: ").startswith(WATCHING)


@pytest.mark.parametrize(("error", "traced"), [(KeyError("a row"), True), (UserError("the disk is full"), False)])
def test_an_error_in_a_hook_is_logged_and_one_that_is_for_people_has_no_traceback(caplog, error, traced):
    def hook():
        raise error

    assert ErrorGuard().safely(hook) is None
    [line] = caplog.records
    assert bool(line.exc_info) is traced
    assert str(error) in line.getMessage()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that has not been imported."""
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "late_module"
    sys.modules.pop("late_module", None)


def test_the_hook_is_called_when_the_module_has_run_and_not_when_it_is_looked_up(module):
    """Tools look one up to see whether it is there, or to read its source."""
    seen, later = [], []
    on_import(module, lambda one: seen.append(one.value))
    for _ in range(2):
        spec = importlib.util.find_spec(module)
        assert spec.loader.get_source(module) == "value = 1\n"
    assert seen == []
    import late_module  # type: ignore[import-not-found]

    assert seen == [1]
    assert late_module.__spec__.loader.get_source(module) == "value = 1\n"
    on_import(module, later.append)  # of one that is there, at once
    assert later == [late_module]


def test_other_modules_are_found_as_ever(module, tmp_path):
    on_import("a_module_that_never_comes", lambda one: pytest.fail("not asked for"))
    (tmp_path / "another_late.py").write_text("value = 2\n")
    import another_late  # type: ignore[import-not-found]

    assert another_late.value == 2
    del sys.modules["another_late"]


LEAVES = """
import multiprocessing, pathlib, sys
from specscope.trace.inside.on_import import at_exit

def leave(path):
    with path.open("a") as file:
        file.write("runs\\n")
    at_exit(lambda: path.write_text(path.read_text() + "ends\\n"))

if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=leave, args=(folder / method,))
        process.start()
        process.join()
    leave(folder / "its own")
"""


def test_a_process_runs_it_once_when_it_ends_and_so_does_each_of_its_workers(tmp_path):
    script, told = tmp_path / "leaves.py", tmp_path / "told"
    script.write_text(LEAVES)
    told.mkdir()
    subprocess.run([sys.executable, script, told], check=True, timeout=HANG_SECONDS)
    found = {path.name: path.read_text() for path in told.iterdir()}
    assert found == dict.fromkeys(("fork", "spawn", "forkserver", "its own"), "runs\nends\n")
