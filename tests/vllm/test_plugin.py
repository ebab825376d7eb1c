"""What variables ask of the plugin; what it writes, sends and tells a debugger; and that what it wraps is as known."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from specscope.gone import instead
from specscope.plans.model_digest import model_digest
from specscope.remote.debug_socket import AttachedCommands
from specscope.remote.receiver import Receiver
from specscope.trace.inside.hooking import ErrorGuard, signatures, wrap
from specscope.trace.inside.settings import PluginSettings
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import FinishReason
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.spans import SpanLevel
from specscope.vllm import known
from specscope.vllm.known import ENDS, GRACE_SECONDS
from specscope.vllm.plugin import checked, register
from specscope.vllm.run_info import run_info
from tests.searching import of_file, rows, tells
from tests.support.records import received
from tests.support.sources import skeleton
from tests.vllm import small
from tests.vllm.small import PROMPT, Engine, Request, Speculation, config, installed, params

STOP = "wombat"


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("level", Privacy, ids=lambda level: level.name.lower())
def test_what_it_is_told_to_leave_out_leaves_it_by_no_way(tmp_path, monkeypatch, protocol, level):
    monkeypatch.setattr(small, "PIECES", {token: f"quokka{token}Ġ" for token in range(small.V)})
    file, path, taken = tmp_path / "a.jsonl", tmp_path / "debug.sock", []
    flags = {Privacy.NO_TEXT: {"NO_TEXT": 1}, Privacy.NO_TOKENS: {"NO_TOKENS": 1}}
    with Receiver(taken.append) as receiver:
        port = receiver.grpc_port if protocol == "grpc" else receiver.http_port
        asked = {"CAPTURE": file, "OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTLP_PROTOCOL": protocol}
        with installed(**asked, DEBUG_SOCKET=path, **flags.get(level, {})) as said:
            engine = Engine([Request("a", params(stop=[STOP]))])
            for _ in range(3):  # what the second gave is told when the third begins
                engine.step()
            client = AttachedCommands(str(path))
            told = [client.run(line) for line in ("info requests", "tree", "why", "node 0")]
            client.close()
            engine.run()
    sent = [(span.name, span.attributes) for _, span in received(taken)]
    ways = {"file": file.read_text(), "network": repr(sent), "debug socket": "\n".join(told)}
    for word, where in (("quokka", set(ways)), (STOP, {"file", "network"})):
        assert {name for name, written in ways.items() if word in written} == (set() if level else where)
    numbers = [int(number) for number in re.findall(r"(?:quokka|#)(\d+)", ways["debug socket"])]
    found = {"file": of_file(file), "network": rows(sent), "debug socket": [numbers]}
    names_ids = level < Privacy.NO_TOKENS
    assert {name for name, numbers in found.items() if tells(numbers, PROMPT)} == (set(ways) if names_ids else set())
    assert bool(re.search(r"#[0-9]", told[1])) is (level is Privacy.NO_TEXT)
    if not names_ids:
        assert "this shows tokens, and " in told[-1]
    assert any("a tokenizer turns into text" in line for line in said) is (level is Privacy.NO_TEXT)
    assert read_capture(file).history.run.privacy is level
    assert {resource["specscope.run.text"] for resource, _ in received(taken)} == {level is Privacy.EVERYTHING}


def test_what_runs_when_the_process_ends_is_ended_with_it(tmp_path):
    """vLLM aborts it, and tells nobody."""
    file = tmp_path / "a.jsonl"
    with installed(CAPTURE=file):
        engine = Engine([Request("a")])
        for _ in range(3):
            engine.step()
    reader = read_capture(file)
    (request,) = reader.history.requests.values()
    assert request.end.reason is FinishReason.CANCELLED
    assert request.end.output.tolist() == [token for token, _ in request.output()] == engine.outputs["a"]
    assert reader.warnings == []


@pytest.mark.parametrize(("asked", "given"), [(0, GRACE_SECONDS), (9, 9), (None, None)])
def test_engines_get_time_to_write_where_vllm_gives_them_none(monkeypatch, tmp_path, asked, given):
    calls = []
    monkeypatch.setattr(small, "shutdown", lambda procs, timeout=None: calls.append((procs, timeout)))
    with installed(CAPTURE=tmp_path / "a.jsonl"):
        sys.modules[ENDS].shutdown(["engine"], timeout=asked)
        sys.modules[ENDS].shutdown(["engine"], asked)
    assert calls == [(["engine"], given)] * 2


# What variables ask


def wrapped():
    return hasattr(sys.modules[known.RUNNER].GPUModelRunner.execute_model, "__wrapped__")


def test_nothing_happens_unless_a_variable_asks_for_it(tmp_path):
    for variables in ({}, {"CAPTURE": "", "NO_TEXT": 1}):
        with installed(**variables) as said:
            assert (said, wrapped()) == ([], False)
    with installed(CAPTURE=tmp_path / "a.jsonl"):
        assert wrapped()
    read = PluginSettings.read({"SPECSCOPE_CAPTURE": "a", "SPECSCOPE_EVIDENCE": "lean", "SPECSCOPE_NO_TEXT": "1"})
    asked = PluginSettings(None, None, None, evidence="lean", privacy=Privacy.NO_TEXT)
    assert read == dataclasses.replace(asked, capture="a")


def test_an_error_while_it_is_installed_does_not_reach_vllm(tmp_path, monkeypatch):
    with installed() as said:
        monkeypatch.setattr(known, "remark", lambda version: 1 / 0)
        monkeypatch.setenv("SPECSCOPE_CAPTURE", str(tmp_path / "a.jsonl"))
        register()
        assert not wrapped()
    assert "ZeroDivisionError" in said[0]


@pytest.mark.parametrize(
    ("name", "value", "read", "means"),
    [
        ("SAMPLE", "0.01", PluginSettings.ratio, 0.01),
        ("SAMPLE", "", PluginSettings.ratio, None),
        ("TRACE_LEVEL", "", PluginSettings.level, SpanLevel.TREES),
        ("TRACE_LEVEL", "requests", PluginSettings.level, SpanLevel.REQUESTS),
        ("EVIDENCE", "lean", lambda read: read.full, False),
        ("EVIDENCE", "", lambda read: read.full, True),
        ("AGGREGATES", "0", lambda read: read.gone, ()),
    ],
)
def test_what_a_value_means(name, value, read, means):
    assert read(PluginSettings.read({f"SPECSCOPE_{name}": value})) == means


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("SAMPLE", "7", "SPECSCOPE_SAMPLE must be between 0 and 1"),
        ("TRACE_LEVEL", "all", "SPECSCOPE_TRACE_LEVEL is 'all': use off, requests, steps, trees"),
        ("EVIDENCE", "Lean", "SPECSCOPE_EVIDENCE is 'Lean': use full, lean"),  # or more were recorded than asked for
        ("AGGREGATES", "1", instead("SPECSCOPE_AGGREGATES")),
        ("EVIDENCE", "counts", instead("SPECSCOPE_EVIDENCE=counts")),
        ("KEEP", "error", instead("SPECSCOPE_KEEP")),
    ],
)
def test_what_cannot_be_done_switches_the_plugin_off_in_one_line(monkeypatch, tmp_path, name, value, why):
    monkeypatch.setenv(f"SPECSCOPE_{name}", value)
    with installed(CAPTURE=tmp_path / "a.jsonl", **{name: value}) as said:
        assert not wrapped()
    (line,) = said
    assert line.startswith(f"specscope: switched off: {why}")


# What it tells of vLLM's models


def told(target, draft="", method="eagle3"):
    speculation = Speculation(method, str(draft)) if method else None
    return run_info(SimpleNamespace(vllm_config=config(speculation, model=str(target))), "full")


@pytest.fixture
def models(tmp_path):
    for name in ("target", "head"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": 4}))
        (tmp_path / name / "model.safetensors").write_bytes(name[:1].encode() * 100)
    return tmp_path / "target", tmp_path / "head"


def test_paths_and_digests_of_local_folders(models, monkeypatch):
    target, head = models
    run = told(target, head)
    assert (run.target_path, run.draft_path) == (str(target), str(head))
    assert (run.target_digest, run.draft_digest) == (model_digest(target), model_digest(head))
    for alone in (told(target, method=None), told(target, target, "ngram")):  # whose `model` repeats the target's
        assert (alone.draft_path, alone.draft_digest) == ("", "")
    run = told("org/model", "org/head")
    assert (run.target_path, run.target_digest, run.draft_path, run.draft_digest) == ("org/model", "", "org/head", "")
    monkeypatch.setattr("specscope.plans.model_digest.MOST_AT_START", 10)
    assert told(target).target_digest == ""


def test_the_settings_that_shape_batches_are_told_as_vllm_takes_them(models):
    there = config(None, model=str(models[0]))
    there.scheduler_config = SimpleNamespace(max_num_batched_tokens=48, max_num_seqs=4, policy="fcfs")
    there.cache_config.enable_prefix_caching = True
    settings = {"runner": "V1", "max_num_batched_tokens": 48, "max_num_seqs": 4, "enable_prefix_caching": True}
    settings |= {"block_size": 4, "max_model_len": 64}
    assert run_info(SimpleNamespace(vllm_config=there), "full").settings == settings
    v2 = SimpleNamespace(vllm_config=there, prepare_inputs=None)  # only V2's runner has it
    assert run_info(v2, "full").settings["runner"] == "V2"


ROOT = Path(__file__).parents[2]
SOURCES = os.environ.get("SPECSCOPE_VLLM_SOURCE", "")


def text_of(module, newest=True, leave_out=()):
    """A module's source that holds what is wrapped, but for `leave_out`: Class.name, or a function."""
    classes: dict[str, list[str]] = {}
    functions = known.WRAPPED[module]
    for function in functions:
        owner, _, method = function.rpartition(".")
        if function not in leave_out:
            parameters = signatures(functions, function)[-1 if newest else 0]
            classes.setdefault(owner, []).append(f"def {method}({', '.join(parameters)}): pass")
    lines = classes.pop("", [])
    for owner, members in classes.items():
        lines += [f"class {owner}:", *(f"    {member}" for member in members)]
    return "\n".join(lines)


def live(**asked):
    """V1's rejection sampler, imported."""
    made = ModuleType(known.REJECTION)
    exec(text_of(known.REJECTION, **asked), vars(made))
    return made


def test_what_differs_in_a_module_is_named():
    assert known.differences(live()) == known.differences(live(newest=False)) == []
    there = live()
    exec("def rejection_sample(draft_token_ids, new): pass", vars(there))
    (one,) = known.differences(there)
    assert one.startswith(f"{known.REJECTION}.rejection_sample takes (draft_token_ids, new), not (draft_token_ids, num")
    gone = known.differences(live(leave_out=["generate_uniform_probs"]))
    assert gone == [f"{known.REJECTION}.generate_uniform_probs is missing"]


def test_nothing_is_touched_where_something_differs(caplog):
    """Once said, and every hook that depends on it steps aside."""
    guards, installed = (ErrorGuard(), ErrorGuard()), []
    for _ in range(2):
        checked([installed.append], guards, live(leave_out=["rejection_sample"]))
    assert (installed, [guard.is_off for guard in guards]) == ([], [True, True])
    assert sum("rejection_sample is missing" in line for line in caplog.messages) == len(guards)
    there = live()
    checked([installed.append], (ErrorGuard(),), there)
    assert installed == [there]


def test_an_error_in_a_method_whose_owner_has_no_repr_goes_no_further():
    class Owner:
        def __repr__(self):
            raise TypeError("a configuration that holds a tensor")

        def fails(self):
            raise RuntimeError("broken")

    guard = ErrorGuard()
    assert guard.safely(Owner().fails) is None
    assert guard.errors == 1


def test_a_function_is_wrapped_once_and_keeps_its_name():
    class Owner:
        def double(self, x):
            """Twice."""
            return 2 * x

    for _ in range(2):
        wrap(Owner, "double", lambda call: call() + 1)
    assert (Owner().double(3), Owner.double.__doc__) == (7, "Twice.")


def test_what_the_plugin_says_of_another_version(tmp_path):
    """When vLLM imports its scheduler."""
    file = tmp_path.joinpath(*known.SCHEDULER.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(text_of(known.SCHEDULER, leave_out=["Scheduler.schedule"]))
    metadata = tmp_path / "vllm-0.32.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.1\n")
    variables = {"SPECSCOPE_CAPTURE": str(tmp_path / "a.jsonl"), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    code = f"from specscope.vllm.plugin import register; register(); import {known.SCHEDULER}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables)
    assert "vLLM 0.32.1 was not tried" in done.stderr
    assert f"{known.SCHEDULER}.Scheduler.schedule is missing. `specscope watch` reads" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not SOURCES, reason="SPECSCOPE_VLLM_SOURCE=FOLDER[:FOLDER] names no sources of vLLM")
@pytest.mark.parametrize("root", SOURCES.split(os.pathsep))
@pytest.mark.parametrize("module", known.WRAPPED)
def test_the_sources_of_vllm(root, module):
    """Folders named vllm, of 0.32.0 and 0.33.0; of a newer one, what differs is in the message."""
    assert known.differences(skeleton(Path(root), module)) == []
