"""Outputs are opened when nothing can fail any more: a start that fails leaves every file as it was."""

import json
import os
import re
import shutil
import socket
import threading
from pathlib import Path

import pytest

from specscope import SamplingParams
from specscope.errors import UserError
from specscope.speculate.structured import compiler
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.outputs import Bus, OutputOptions, Outputs
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.spans import SpanLevel
from specscope.whole_file import write_whole
from tests.engines import tiny_engine
from tests.processes import free_port, room_for
from tests.support.commands import run_here, specscope
from tests.support.samples import PLANTED
from tests.trace.strategies import RUN
from tests.waiting import HANG_SECONDS

BAD, HTTP = {"regex": "("}, "http/protobuf"


@pytest.fixture
def old(tmp_path):
    """An older capture, and prompts."""
    (tmp_path / "p.txt").write_text("abcabcabc\n")
    return shutil.copy(PLANTED, tmp_path / "old.jsonl")


@pytest.fixture
def capture(tmp_path, tiny):
    """Runs `specscope capture` in this process with a tiny model."""
    model = ["--target", tiny, "--dtype", "float32", "--kv-memory", "0.01", "--threads", "1", "--raw"]
    model += ["--max-tokens", "5"]
    return lambda out, *more, prompts="p.txt": run_here(
        [str(word) for word in ("capture", tmp_path / prompts, "-o", out, *model, "--quiet", *more)]
    )


@pytest.fixture(scope="module")
def engine(tiny):
    return tiny_engine(tiny, drafter="ngram", tree="3", max_batch=2)


FAILS = {
    "no model": (["--target", "./nothing"], "no model at ./nothing"),
    "a port in use": (["--metrics-port", "TAKEN"], "cannot serve metrics on"),
    "a protocol of the environment": (["--otlp-endpoint", "http://127.0.0.1:1"], "unknown OTLP protocol"),
    "an endpoint of the environment": ([], "OTEL_EXPORTER_OTLP_ENDPOINT 'ftp://x': write http://HOST:PORT"),
    "more memory than there is": (["--kv-memory", "900000"], "--kv-memory 900000 GiB is more than the machine has"),
    "a context that the model has not": (["--max-context", "99999"], "max_context must be between"),
    "a prompt too long": (["--max-context", "5"], "p.txt, line 1: the prompt has 9"),
}


@pytest.mark.parametrize("name", FAILS)
def test_a_failed_start_leaves_files_as_they_were(name, old, capture, tmp_path, monkeypatch):
    words, why = FAILS[name]
    if "protocol" in name:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    if "endpoint" in name:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "ftp://x")
    before = old.read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [str(taken.getsockname()[1]) if word == "TAKEN" else word for word in words]
        for out in (old, tmp_path / "new.jsonl"):
            code, _, err = capture(out, *words)
            assert (code, why in err, err.count("\n")) == (2, True, 1), err
    assert old.read_bytes() == before
    assert not (tmp_path / "new.jsonl").exists()


def test_opentelemetrys_variables_switch_off_what_its_endpoint_asks_for(monkeypatch):
    def sends(endpoint=None):
        opened = Outputs(OutputOptions(None, endpoint, HTTP, SpanLevel.TREES, None), Bus(), RUN, Vocabulary(), None)
        opened.close()
        return opened._spans is not None

    assert not sends()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert sends()
    for name, value in (("OTEL_SDK_DISABLED", "True"), ("OTEL_TRACES_EXPORTER", "none")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert not sends()
            assert sends("http://127.0.0.1:1")  # a flag wins
            changed.setenv(name, "otlp")
            assert sends()


def test_a_variable_with_a_bad_value_is_named(monkeypatch):
    monkeypatch.setenv("SPECSCOPE_NO_TOKENS", "banana")
    code, _, err = run_here(["export", PLANTED, "-o", "x.html"])
    assert (code, err.count("\n")) == (2, 1)
    assert "Invalid value for SPECSCOPE_NO_TOKENS: 'banana' is not" in err
    monkeypatch.delenv("SPECSCOPE_NO_TOKENS")
    assert "Invalid value for '--findings': 'x'" in run_here(["export", PLANTED, "-o", "x.html", "--findings=x"])[2]


def test_a_place_that_cannot_be_written_is_said_and_no_empty_file_is_left(old, capture, engine, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place, why in (
        ("/dev/full", "cannot continue writing /dev/full: No space left on device"),
        (tmp_path / "pipe", f"cannot write {tmp_path / 'pipe'}: nobody reads this pipe"),
    ):
        code, _, err = capture(place)
        assert (code, why in err) == (2, True), err
    with pytest.raises(UserError, match="nobody reads this pipe"):
        write_whole(tmp_path / "pipe", b"a page")
    with room_for(0), pytest.raises(UserError, match="cannot continue writing"):
        CaptureWriter(tmp_path / "new.jsonl", RUN, Vocabulary())
    assert not (tmp_path / "new.jsonl").exists()
    port = free_port()
    options = OutputOptions(str(tmp_path / "no" / "x"), None, None, SpanLevel.TREES, port)
    with pytest.raises(UserError, match="cannot write"):
        Outputs(options, engine.bus, engine.run_info, engine.vocabulary, SamplingParams())
    socket.create_server(("127.0.0.1", port)).close()  # what was opened before it is closed again


def test_standard_input_that_is_the_output_is_not_overwritten(tmp_path):
    file = tmp_path / "same.txt"
    file.write_text("a prompt\n")
    done = specscope("capture", "-", "-o", file, "--target", "./nothing", stdin=file)
    assert done.returncode == 2
    assert "would overwrite the input -" in done.stderr
    assert file.read_text() == "a prompt\n"


def test_prompts_come_through_a_pipe_and_captures_go_into_one(capture, tmp_path):
    for name in ("in", "out"):
        os.mkfifo(tmp_path / name)
    threading.Thread(target=(tmp_path / "in").write_text, args=("abcabcabc\n",), daemon=True).start()
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "out").read_bytes()), daemon=True)
    reader.start()
    assert capture(tmp_path / "out", prompts="in") == (0, "", "")
    reader.join(HANG_SECONDS)
    assert read[0].startswith(b'{"resourceSpans":')


@pytest.mark.parametrize("size", [10_000_000, 200_000])
def test_a_prompt_that_cannot_fit_never_reaches_the_tokenizer(engine, monkeypatch, size):
    class NeverAsked:
        chat_template = "x"

        def __getattr__(self, name):
            raise AssertionError("the tokenizer was asked")

    monkeypatch.setattr(engine, "tokenizer", NeverAsked())
    for prompt in (
        "x" * size,
        [{"role": "user", "content": "x" * size}],
        [{"role": "user", "content": ""}] * size,
        [1] * size,
    ):
        with pytest.raises(UserError, match=r"limit of|the limit is"):
            engine.add(prompt)
    assert not engine.busy


@pytest.mark.parametrize(
    "form", [("--regex", "("), ("--grammar", "root ::= ("), ("--json-schema", '{"type": "nothing"}'), ()]
)
def test_every_form_is_looked_at_before_a_model_is(form, tmp_path):
    """Of a flag, or of the last of many lines."""
    forms = [] if form else [*(f"a{{{number}}}" for number in range(1, 20)), "("]
    lines = [json.dumps({"prompt": "abc", "structured_outputs": {"regex": regex}}) for regex in forms]
    (tmp_path / "p.txt").write_text("\n".join(lines or ["abc"]))
    out = tmp_path / "new.jsonl"
    code, _, err = run_here(["capture", str(tmp_path / "p.txt"), "-o", str(out), "--target", "/no/such", *form])
    assert (code, out.exists()) == (2, False)
    place = "" if form else f"{tmp_path}/p.txt, line 20: "
    assert err.startswith(f"specscope: error: {place}structured_outputs: " + ("" if form else "regex cannot be used: "))


FAILED = "1 of 2 requests failed: structured_outputs: regex cannot be used: "


def test_requests_that_failed_are_counted_with_their_reason(tiny, tmp_path, monkeypatch):
    lines = [json.dumps({"prompt": "abc", "max_tokens": 3, **form}) for form in ({}, {"structured_outputs": BAD})]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    model = ["--raw", "--target", tiny, "--kv-memory", "0.01"]
    monkeypatch.setattr(compiler, "check_forms", lambda forms: None)  # so that one fails in its request
    for verb, *output in (("capture", "-o", tmp_path / "run.jsonl"), ("debug", "--commands", "-")):
        done = specscope(verb, tmp_path / "p.jsonl", *output, *model, stdin="continue\n")
        assert (done.returncode, f"specscope: warning: {FAILED}" in done.stderr) == (1, True)
    for words in (["why"], ["diagnose", "--no-audit"], ["report"], ["verify"]):
        _, out, err = run_here([*words, str(tmp_path / "run.jsonl")])
        assert FAILED in out + err
        assert FAILED in run_here([*words, str(tmp_path / "run.jsonl"), "--json"])[1]


def test_a_prompt_that_is_too_long_is_named_before_the_model_is_loaded(capture, tiny, tmp_path):
    """Its weights cannot be read: where one prompt fits, that comes after the warning; else the prompts alone."""
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    for weights in model.glob("*.safetensors"):
        weights.write_bytes(b"")
    (tmp_path / "p.txt").write_text("abc\n" + "x " * 600 + "\n")
    (tmp_path / "long.txt").write_text("x " * 600)
    code, _, err = capture(tmp_path / "o.jsonl", "--target", model)
    told, loading = err.splitlines()
    assert re.fullmatch(rf"specscope: warning: {tmp_path}/p.txt, line 2: the prompt has \d+ tokens; .*skipped", told)
    assert (code, "cannot load" in loading) == (2, True)
    code, _, err = capture(tmp_path / "o.jsonl", "--target", model, prompts="long.txt")
    assert (code, err.count("\n"), "long.txt, line 1: the prompt has" in err) == (2, 1, True)


def test_a_token_that_the_model_does_not_have_is_refused_before_anything_is_decoded(old, capture, tmp_path):
    before = Path(old).read_bytes()
    for name, value in (("logit_bias", {"300000": 1}), ("stop_token_ids", [300000])):
        (tmp_path / "p.txt").write_text(f'{{"prompt": "abc"}}\n{json.dumps({"prompt": "abc", name: value})}')
        code, _, err = capture(old)
        assert (code, Path(old).read_bytes()) == (2, before)
        assert err.startswith(f"specscope: error: {tmp_path / 'p.txt'}, line 2: {name}")
        assert "token id 300000 is outside the vocabulary (0 to 2" in err


@pytest.mark.parametrize("happens", ["deleted", "replaced", "nothing"])
def test_a_capture_that_is_deleted_or_replaced_during_the_run_is_said(happens, tmp_path, engine):
    path = tmp_path / "new.jsonl"
    options = OutputOptions(str(path), None, None, SpanLevel.TREES, None)
    outputs = Outputs(options, engine.bus, engine.run_info, engine.vocabulary, SamplingParams())
    if happens != "nothing":
        path.unlink()
    if happens == "replaced":
        path.write_text("another")
    gone = f"{path} was deleted or replaced during the run: the capture is lost"
    assert outputs.close() == ([] if happens == "nothing" else [gone])
    assert (outputs.code, outputs.captured) == ((0, str(path)) if happens == "nothing" else (1, ""))


@pytest.mark.parametrize("steps", [1, 4])
def test_requests_that_the_engine_has_not_ended_are_ended_in_the_capture(steps, tmp_path, tiny):
    """It failed, was killed, or a step takes too long: the file is closed as it is, and what comes then is dropped."""
    path = tmp_path / "new.jsonl"
    engine = tiny_engine(tiny, drafter="ngram", tree="3", max_batch=2)
    for _ in range(3):
        engine.add("abcabcabc", SamplingParams(max_tokens=40, ignore_eos=True))
    options = OutputOptions(str(path), None, None, SpanLevel.TREES, None, True)
    outputs = Outputs(options, engine.bus, engine.run_info, engine.vocabulary, SamplingParams())
    for _ in range(steps):
        engine.step()
    assert outputs.close() == outputs.close() == []
    engine.step()
    reader = read_capture(path)
    assert reader.warnings == []
    ended = reader.history.requests
    assert {name: one.end.reason.value for name, one in ended.items()} == {"r0": "cancelled", "r1": "cancelled"}
    texts = [[token for token, _ in one.output()] for one in ended.values()]
    assert [one.end.output.tolist() for one in ended.values()] == texts
    assert [step.step for step in reader.history.steps] == list(range(steps + 1))
    assert run_here(["verify", str(path)])[0] == 0


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_an_endpoint_that_nobody_listens_on_is_told_once_and_holds_nothing_up(protocol, capture, old):
    """Issue 43: each batch was tried for seven seconds, and at the end the endpoint was said to have refused them."""
    where = f"127.0.0.1:{free_port()}"
    user = "" if protocol == "grpc" else "user:secret@"  # which gRPC does not send
    flags = ["--otlp-endpoint", f"http://{user}{where}", "--otlp-protocol", protocol]
    code, _, err = capture(old, *flags)
    assert code == 0
    assert re.fullmatch(
        rf"specscope: warning: \d+ spans not sent: nothing listens at {where} \(connection refused\)\n", err
    )
