"""Files as people have them, through every verb that could be given one: read, or refused by what the file is."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from specscope.trace.wire.reading import read_capture
from tests.support.commands import run_here, said

DATA = Path(__file__).parents[1] / "data"
PEOPLE = DATA / "people"
FIGURES, PROMPTS, WATCH = (
    {"report", "compare", "export", "open"},
    {"capture", "debug"},
    {"watch", "report", "compare"},
)
STEPS = {"verify", "diagnose", "why", "tune", "over"}
ONE_TRACE = (FIGURES | STEPS) - {"tune"}  # without its engine steps; it was drafted by a text and a model

# What each verb is called with. Prompts are read before a model is looked for, and before a server is asked.
VERBS = {
    "report": ("report", "FILE", "--json"),
    "compare": ("compare", "FILE", "COPY", "--json"),
    "export": ("export", "FILE", "-o", "tables"),
    "open": ("open", "FILE"),
    "verify": ("verify", "FILE"),
    "diagnose": ("diagnose", "FILE", "--no-audit"),
    "why": ("why", "FILE"),
    "tune": ("tune", "FILE", "--no-costs"),
    "over": ("debug", "FILE", "--commands", "script"),
    "watch": ("watch", "FILE", "--headless"),
    "capture": ("capture", "FILE", "-o", "out.jsonl", "--target", "./nothing"),
    "debug": ("debug", "--file", "FILE", "--target", "./nothing", "--commands", "script"),
}
# How it shows that a file was read, where the verb ends in an error all the same
READ = {"open": "the screen needs a terminal", "capture": "no model at ./nothing", "debug": "no model at ./nothing"}

FILES = {
    "ansi_pasted.log": ("a log of vLLM", WATCH),
    "warn_first.log": ("a log of vLLM", WATCH),
    "docker_json.log": ("a log in JSON", WATCH),
    "tail5.log": ("a log of vLLM", WATCH),
    "nan.log": ("a log of vLLM", WATCH),
    "v1_depth_0904.log": ("a log of vLLM", WATCH),
    "prom_v1_grep.txt": ("a metrics page", WATCH),
    "prom_sglang.txt": ("a metrics page", WATCH),
    "prom_llamacpp.txt": ("a metrics page of llama.cpp", WATCH),
    "sglang.log": ("a log of SGLang", WATCH),
    "llamacpp.log": ("a log of llama.cpp", WATCH),
    "sgl_0510.json": ("a response of SGLang", WATCH),
    "llamacpp_resp.json": ("a response of llama.cpp", WATCH),
    "llamacpp/chat.json": ("a response of llama.cpp", WATCH),
    "llamacpp/completion.json": ("a response of llama.cpp", WATCH),
    "llamacpp/slots.json": ("a list of llama.cpp's slots", set()),
    "llamacpp/log.jsonl": ("a log of llama.cpp", WATCH),
    "llamacpp/steps.log": ("a log of llama.cpp", WATCH),
    "llamacpp/stream.txt": ("a response of llama.cpp, as a stream", WATCH),
    "llamacpp/loop.log": ("a log of llama.cpp", WATCH),
    "llamacpp/synthetic.log": ("a log of llama.cpp", WATCH),
    "llamacpp/trace_two_slots.log": ("a log of llama.cpp", WATCH),
    "llamacpp/metrics_after.txt": ("a metrics page of llama.cpp", WATCH),
    "llamacpp/metrics_loop.txt": ("a metrics page of llama.cpp", WATCH),
    "llamacpp/metrics_before.txt": ("a metrics page of llama.cpp", WATCH),
    "vllm_bench.json": ("a result of a serving bench", WATCH),
    "sharegpt.json": ("ShareGPT's data set", PROMPTS),
    "specbench.jsonl": ("Spec-Bench's or MT-bench's data set", PROMPTS),
    "speedbench.jsonl": ("SPEED-Bench's data set", set()),  # one of its rows is a placeholder
    "mtbench_hf.jsonl": ("Spec-Bench's or MT-bench's data set", PROMPTS),
    "cap.jsonl.gz": ("a capture", FIGURES | STEPS),
    "jaeger.json.gz": ("a trace saved from Jaeger's page", FIGURES | STEPS),
    "jaeger_page.json.gz": ("a trace saved from Jaeger's page", ONE_TRACE),
    "jaeger_v3.json.gz": ("a trace from Jaeger's API", ONE_TRACE),
    "collector.binpb.gz": ("a trace in OTLP protobuf", FIGURES | STEPS),
    "collector.binpb.zstd": ("a trace in OTLP protobuf", FIGURES | STEPS),
    "collector.json.zstd": ("a trace in OTLP protobuf", FIGURES | STEPS),
}
SPECULATION = b"SpecDecoding metrics: Mean acceptance length: 1.67, Accepted: 2 tokens, Drafted: 9 tokens\n"
MADE = {
    "page.json": (b'{"data": [{"traceID": "0", "spans": []}]}', "a trace saved from Jaeger's page", set()),
    "tempo.json": (b'{"trace": {"resourceSpans": []}}', "a trace from Tempo", {"open"}),
    "no_page.json": (b'{"data": [], "errors": null}', "a response of Jaeger without a trace", set()),
    "not_found.json": (
        b'{\n "data": null,\n "errors": [{"code": 404, "msg": "trace not found"}]\n}',
        "a response of Jaeger without a trace",
        set(),
    ),
    "no_data.json": (b'{"data":[]}\n', "a response of Jaeger without a trace", set()),
    "no_v3.json": (b'{"error":{"grpcCode":5,"httpCode":404,"message":"x"}}', "an error from Jaeger", set()),
    "search.json": (b'{"traces": [{"traceID": "0"}], "metrics": {}}', "a list of traces that Tempo found", set()),
    "zipkin.json": (b'[{"traceId": "0", "id": "1", "name": "x"}]', "a trace in Zipkin's format", set()),
    "metrics.jsonl": (b'{"resourceMetrics": []}\n', "metrics or logs in OTLP JSON", set()),
    "v3.json": (b'{"result": {"resourceSpans": []}}', "a trace from Jaeger's API", {"open"}),
    "sglang_bench.jsonl": (
        b'{"accept_length": 3, "request_rate": Infinity, "request_throughput": 1}\n',
        "a result of a serving bench",
        WATCH,
    ),
    "bom.txt": (b"\xef\xbb\xbfvllm:spec_decode_num_drafts_total 3\n", "a metrics page", WATCH),
    "debug.log": (b"INFO 11-25 09:00:10 [v1/metrics/loggers.py:257] " + SPECULATION, "a log of vLLM", WATCH),
    "plain.log": (b"2026-11-25 09:00:10 " + SPECULATION, "a log of vLLM", WATCH),
    "u16.log": ("a log".encode("utf-16"), "text in UTF-16, as PowerShell's > writes it", set()),
    "x.log.xz": (b"\xfd7zXZ\x00", "compressed with xz", set()),
    "config.json": (b'{\n "architectures": ["X"],\n "hidden_size": 4\n}', "a model's config.json", set()),
    "spec.json": (b'{"method": "mtp", "num_speculative_tokens": 2}', "a speculative configuration", set()),
    "report.json": (b'{\n  "schema": "specscope.report/1"\n}', "what a specscope verb printed with --json", set()),
    "table.parquet": (b"PAR1\0\0", "a Parquet table", set()),
    "texts.jsonl": (b'{"text": "To be or not to be"}\n', "a training data set", set()),
    "page.html": (b"<!DOCTYPE html>\n<html>", "an HTML page", set()),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script").write_text("quit\n")
    return tmp_path


def check(name, what, reading):
    """Of the verbs that read such a file two do, and of the others two refuse it in one line that says what it is."""
    shutil.copy(name, f"copy-{name}")
    takes_prompts = {"over"} if reading == PROMPTS else set()  # then debug FILE decodes them, as debug --file does
    read, refuse = (sorted(verbs) for verbs in (reading, {*VERBS} - reading - takes_prompts))
    turn = sum(name.encode())  # of the verbs: each has its share of the files
    chosen = {verbs[(turn + at) % len(verbs)] for verbs in (read, refuse) if verbs for at in (0, 1)}
    for verb, words in ((verb, VERBS[verb]) for verb in sorted(chosen)):
        code, out, err = run_here([{"FILE": name, "COPY": f"copy-{name}"}.get(word, word) for word in words])
        about = f"{verb} {name}: {code} {err}"
        assert code in (0, 1, 2), about
        assert "Traceback" not in out + err, about
        (line,) = [line for line in err.splitlines() if "error:" in line] or [""]
        if verb in reading:
            assert READ[verb] in line if verb in READ else code in (0, 1), about
        else:
            assert code == 2, about
            assert f"{name} is {what}" in line or _refused_for_its_content(verb, name, line), about
            assert len(line) < 400, about


def _refused_for_its_content(verb, name, line):
    """Where the verb reads files of this kind, but not this one."""
    if verb == "tune" and name in ("jaeger_page.json.gz", "jaeger_v3.json.gz"):  # whichever drafter had a draft drafted
        return "trees are from a text and a model" in line
    without_spans = name in ("v3.json", "tempo.json", "page.json") and verb in FIGURES | STEPS
    if without_spans:
        return f"{name} is not a capture: " in line
    return name == "speedbench.jsonl" and verb in (*PROMPTS, "over") and "line 2: this row of SPEED-Bench is" in line


@pytest.mark.parametrize("file", FILES)
def test_through_every_verb(folder, file):
    what, reading = FILES[file]
    name = Path(file).name
    shutil.copy(PEOPLE / file, name)
    check(name, what, reading)


@pytest.mark.parametrize("name", MADE)
def test_what_is_of_no_use_here_is_named(folder, name):
    content, what, reading = MADE[name]
    Path(name).write_bytes(content)
    check(name, what, reading)


def test_each_file_is_in_the_table():
    held = {str(path.relative_to(PEOPLE)) for path in PEOPLE.rglob("*") if path.is_file()}
    assert held == {*FILES, "README.md"}


def test_pasted_and_wrapped_logs_are_the_same_log(folder):
    rows = []
    for name in ("ansi_pasted.log", "docker_json.log", "warn_first.log"):
        out = run_here(["watch", str(PEOPLE / name), "--headless"])[1]
        rows += [line for line in out.splitlines() if line.startswith(" 03:22:10")]
    assert len(rows) == 3
    assert len(set(rows)) == 1
    code, out, err = run_here(["watch", str(PEOPLE / "nan.log"), "--headless"])  # idle
    assert (code, "warning" in err) == (0, False)
    assert any(line.split() == ["drafted", "tokens", "0"] for line in out.splitlines())
    out = run_here(["watch", str(PEOPLE / "v1_depth_0904.log"), "--headless"])[1]
    assert "0.750 0.500  depth 2\n" in out
    assert "0.795 0.614 0.409  depth 7\n" in out


PACKED = (PEOPLE / "cap.jsonl.gz").read_bytes()
PLAIN = gzip.decompress(PACKED)
RESOURCES = {  # what the documents hold, without what is around them
    "bare.json": lambda parts: json.dumps(parts[0]),
    "bare.jsonl": lambda parts: "\n".join(map(json.dumps, parts)),
    "scopes_first.json": lambda parts: json.dumps([dict(reversed(part.items())) for part in parts]),
}


@pytest.mark.parametrize("name", RESOURCES)
def test_resource_spans_without_what_is_around_them(folder, name):
    parts = [part for line in PLAIN.splitlines() for part in json.loads(line)["resourceSpans"]]
    whole = [{**parts[0], "scopeSpans": [scope for part in parts for scope in part["scopeSpans"]]}]
    Path(name).write_text(RESOURCES[name](whole if name == "bare.json" else parts))
    check(name, "resourceSpans alone", FIGURES | STEPS)
    assert read_capture(name).history.acceptance.steps == 11


def test_compressed_data_that_is_cut_off_is_read_up_to_there(folder):
    Path("cut.jsonl.gz").write_bytes(PACKED[:-1000])
    assert "its compressed data is damaged, or ends early" in read_capture("cut.jsonl.gz").warnings[0]


def test_a_capture_of_a_newer_specscope_is_named_as_that(folder):
    version = b'"service.version","value":{"stringValue":"%s"}'
    newer = PLAIN.replace(version % b"0.1.0", version % b"9.1")
    Path("newer.jsonl").write_bytes(newer)
    (warning,) = read_capture("newer.jsonl").warnings
    assert "newer.jsonl: specscope 9.1 wrote it; this is" in warning
    Path("newer.jsonl").write_bytes(newer.replace(b'"specscope.run.block_size"', b'"specscope.run.page_size"'))
    err = said(["report", "newer.jsonl"], code=2)[1]
    assert "newer.jsonl, line 1: specscope 9.1 wrote it; this is" in err
    assert "(update specscope): " in err
    evidence = b'"specscope.run.evidence","value":{"stringValue":"%s"}'
    Path("other.jsonl").write_bytes(PLAIN.replace(evidence % b"full", evidence % b"states"))
    assert (
        "a kind of capture that this version does not know (evidence: states)"
        in read_capture("other.jsonl").warnings[0]
    )


def _bench(name, **changes):
    values = json.loads((PEOPLE / "vllm_bench.json").read_text()) | changes
    Path(name).write_text(json.dumps(values))
    return values


RATES = [0.7, 0.5, 0.3, 0.25, 0.2, 0.1, 0.0264]
WORSE = {"spec_decode_accepted_tokens": 10000, "spec_decode_per_position_acceptance_rates": RATES}


@pytest.mark.parametrize(
    ("condition", "code"),
    [
        ("depth 1 rate differs > 0.01", 1),
        ("accepted drops > 15%", 1),
        ("drafts differs > 0 or drafted differs > 0 or requests < 80 or tau drops > 30%", 0),
        ("whole paths drops > 1%", 2),
    ],
)
def test_bench_results_are_compared(folder, condition, code):
    _bench("main.json")
    _bench("branch.json", **WORSE)
    found = run_here(["compare", "main.json", "branch.json", "--fail-if", condition, "--json"])
    assert found[0] == code, found
    if code == 2:
        assert "do not show this figure on both sides" in found[2]
    else:
        assert any(one["hit"] for one in json.loads(found[1])["conditions"]) == bool(code)


def test_a_mixed_pair_says_what_each_side_means(folder):
    """vLLM's result has counts of the bench, SGLang's an average since the server started."""
    _bench("vllm.json")
    sglang = {"backend": "sglang", "duration": 10.0, "completed": 80, "total_output_tokens": 1000}
    Path("sglang.jsonl").write_text(json.dumps(sglang | {"request_throughput": 8.0, "accept_length": 2.47}) + "\n")
    code, out, err = run_here(
        ["compare", "vllm.json", "sglang.jsonl", "--fail-if", "requests differs > 0 or tau < 2.4"]
    )
    assert code == 0, err
    (row,) = [line.split() for line in out.splitlines() if line.startswith("mean acceptance length")]
    assert [*row[4:6], *row[-2:]] == ["3.53", "2.47", "-1.06", "–"]
    assert (
        "B  sglang.jsonl\n   the length is SGLang's average since the server started, not over one benchmark\n" in out
    )
    code, _, err = run_here(["compare", "vllm.json", "sglang.jsonl", "--fail-if", "tau drops > 2%"])
    assert (code, "a side reports no counts by position, so there is no interval" in err) == (2, True)
    code, out, _ = run_here(["report", "sglang.jsonl"])
    assert (code, "since the server started" in " ".join(out.split())) == (0, True)


def test_a_bench_result_holds_several_runs_rates_that_are_none_or_no_figures(folder):
    """vLLM appends to a file with --append-result."""
    values = _bench("a.json", spec_decode_per_position_acceptance_rates=[0.7475, 0.5606, None])
    Path("several.jsonl").write_text(f"{json.dumps(values)}\n{json.dumps(values)}\n")
    (report,) = json.loads(run_here(["report", "several.jsonl", "--json"])[1])["captures"]
    assert report["pooled"]["drafts"] == 2 * 4816
    (report,) = json.loads(run_here(["report", "a.json", "--json"])[1])["captures"]
    assert report["pooled"]["counts"] == [4816, 3600, 2700]
    Path("plain.json").write_text(json.dumps({k: v for k, v in values.items() if not k.startswith("spec_")}))
    code, _, err = run_here(["report", "plain.json"])
    assert (code, "no figures of acceptance under known names (spec_decode_" in err) == (2, True)
