"""`specscope watch` from its command line to its captures, and what other commands make of those."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from specscope.remote.receiver import Receiver
from specscope.trace.record.privacy import Privacy
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.unspan import Decoder, run_info
from tests.processes import ENV, SPECSCOPE
from tests.support.commands import run_here, said, standard_input
from tests.support.records import received
from tests.support.samples import PLANTED, SAMPLED
from tests.waiting import HANG_SECONDS, until
from tests.watch.samples import DATA, LLAMA, Page, changed, text, two_engines

pytestmark = pytest.mark.usefixtures("patient")

LOG = str(DATA / "log.txt")
PAGES = [
    two_engines(text(f"metrics_{one}.txt"), text(f"metrics_{other}.txt"))
    for one, other in (("before", "idle"), ("after", "before"))
]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A capture of the recorded log, and what was printed."""
    path = tmp_path_factory.mktemp("watch") / "w.jsonl"
    out, err = said(["watch", LOG, "--headless", "-o", str(path)])
    return str(path), out, err


def test_a_log_as_a_table_and_as_a_capture(watched):
    path, out, err = watched
    assert "log.txt: vLLM's log" in err
    assert (
        "vLLM log reports counts per interval. Not available: trees, tokens, probabilities and coins, output tokens"
        in err
    )
    lines = out.splitlines()
    rows = [line.split() for line in lines if re.match(r" \d\d:\d\d:\d\d", line)]
    assert [row[2] for row in rows] == ["4", "4", "~106", "~45", "~22"]
    assert "0.019 0.019 0.019" in out
    assert any(line.split() == ["mean", "acceptance", "length", "τ", "1.07"] for line in lines)
    reader = read_capture(path)
    assert reader.warnings == []
    assert [step.aggregate.drafts for step in reader.history.steps] == [4, 4, 106, 45, 22]


def test_a_password_is_neither_printed_nor_recorded(tmp_path):
    path = tmp_path / "w.jsonl"
    with Page(text("metrics_before.txt"), text("metrics_after.txt")) as page:
        url = page.url.replace("//", "//me:hunter2@")
        code, out, err = run_here(["watch", url, "--headless", "--for", "1", "--interval", "0.1", "-o", str(path)])
        assert (code, "143" in out) == (0, True)
        code, *more = run_here(["watch", url])  # there is no terminal: it says what works without one
        assert code == 2
    code, *gone = run_here(["watch", url, "--headless"])
    assert code == 2
    assert not any("hunter2" in each for each in (out, err, *more, *gone, path.read_text()))


def test_a_log_that_is_redirected_is_read_as_one_from_a_pipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-").write_text("this is another file\n")
    with standard_input(Path(LOG)):
        assert "5 intervals" in said(["watch", "-", "--headless"])[0]


def test_report_replays_the_figures(watched, tmp_path):
    captured = watched[0]
    code, out, err = run_here(["report", captured])
    assert (code, err) == (0, "")
    assert "reported by  vLLM log" in out
    assert "Not available: trees" in out
    assert "3 of 5 intervals with drafts estimated from rounded rates" in " ".join(out.split())
    assert any(line.split() == ["mean", "acceptance", "length", "τ", "1.07"] for line in out.splitlines())
    assert "0.750 0.000 0.000" in out
    assert "Final tokens" not in out
    code, out, _ = run_here(["report", captured, "--json"])
    (told,) = json.loads(out)["captures"]
    assert [one["told"]["drafts"] for one in told["intervals"]] == [4, 4, 106, 45, 22]
    assert told["pooled"]["emitted"] is None
    assert told["pooled"]["kinds"] is None
    (of_the_log,) = json.loads(run_here(["report", LOG, "--json"])[1])["captures"]  # under its own name
    assert (of_the_log["source"], of_the_log["pooled"]) == (LOG, told["pooled"])
    page = tmp_path / "page.html"
    assert run_here(["export", captured, "-o", str(page)])[0] == 0
    assert "Acceptance, over all intervals" in page.read_text()


def test_requests_that_a_log_does_not_count_are_not_none_over_several_captures():
    out = said(["report", LOG, STEPS])[0]
    rows = dict(line.split()[:2] for line in out.partition("Over all")[2].splitlines() if len(line.split()) > 5)
    assert [rows[name] for name in (LOG, STEPS, "pooled")] == ["–", "3", "–"]


def test_compare_compares_figures(watched, tmp_path):
    captured, sampled = watched[0], SAMPLED
    code, out, err = run_here(["compare", captured, sampled])
    assert (code, err) == (0, "")
    assert any(line.split()[:4] == ["mean", "acceptance", "length", "τ"] for line in out.splitlines())
    assert out.startswith("The acceptance length ")
    code, out, _ = run_here(["compare", sampled, captured, "--json"])
    told = json.loads(out)
    assert told["counts_only"] is True
    assert told["b"]["acceptance"]["drafts"] == 181
    code, out, _ = run_here(["compare", captured, sampled, "--fail-if", "tau > 1.1"])
    assert (code, "FAIL" in out) == (1, True)
    err = said(["export", captured, sampled, "-o", str(tmp_path / "page.html")], code=2)[1]
    assert "cannot be compared on a page: the capture holds counts only" in err
    head = tmp_path / "head.jsonl"
    head.write_text(Path(sampled).read_text().splitlines(keepends=True)[0])
    assert "there is nothing to compare" in run_here(["compare", str(head), sampled])[2]


def test_each_engine_has_a_capture_of_its_own(tmp_path):
    path = tmp_path / "w.jsonl"
    with (
        Page(*PAGES) as both,
        Page(text("metrics_idle.txt"), changed(text("metrics_before.txt"), drafts=7)) as third,
    ):
        command = ["watch", both.url, third.url, "--interval", "0.2", "--for", "0.5", "--headless", "-o", str(path)]
        code, _, err = run_here(command)
    assert code == 0, err
    drafts = {
        Path(name).name: read_capture(name).history.steps[0].aggregate.drafts for name in tmp_path.glob("*.jsonl")
    }
    assert sorted(drafts) == ["w-2.jsonl", "w-3.jsonl", "w.jsonl"]
    assert sorted(drafts.values()) == [7, 12, 143]
    assert err.count("captured ") == 3


def test_what_a_source_names_replaces_no_capture(tmp_path):
    """The file that the user named is replaced; that of a second engine takes another name."""
    for name in ("w.jsonl", "w-2.jsonl"):
        shutil.copy(PLANTED, tmp_path / name)
    answers = [str(DATA / name) for name in ("chat_greedy.json", "completion_greedy.json")]
    out, err = said(["watch", *answers, "--headless", "-o", str(tmp_path / "w.jsonl")])
    assert "chatcmpl-8c7946b0c7c72083" in out
    assert "chat_greedy.json: vLLM response" in err
    assert [line.split()[1] for line in out.splitlines() if line.startswith("drafts")] == ["4", "30"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["w-2.2.jsonl", "w-2.jsonl", "w.jsonl"]
    assert (tmp_path / "w-2.jsonl").read_bytes() == Path(PLANTED).read_bytes()
    assert f"→ {tmp_path / 'w-2.2.jsonl'}" in err
    assert read_capture(tmp_path / "w-2.2.jsonl").history.acceptance.drafts == 30


def test_a_page_makes_no_more_files_than_it_may(tmp_path, monkeypatch):
    monkeypatch.setattr("specscope.watch.watching.ENGINES", 2)
    log = text("log.txt").splitlines()
    lines = [log[1][:110], *(re.sub(r"Engine \d+", f"Engine {number:03}", line) for number in range(5) for line in log)]
    (tmp_path / "many.log").write_text("\n".join(lines) + "\n")
    err = said(["watch", str(tmp_path / "many.log"), "--headless", "-o", str(tmp_path / "w.jsonl")])[1]
    assert sorted(one.name for one in tmp_path.glob("*.jsonl")) == ["w-2.jsonl", "w.jsonl"]
    assert err.count("more than 2 engines: further ones are left out") == 1
    assert "warning: 15 intervals of more than 2 engines left out" in err
    assert "left out 1×: line 1: a `SpecDecoding metrics:` line without its" in err  # it is damaged


def test_a_capture_that_is_deleted_meanwhile_is_told_and_the_code_says_so(tmp_path):
    path = tmp_path / "w.jsonl"
    command = [*SPECSCOPE, "watch", "-", "--headless", "-o", str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV, text=True
    ) as process:
        process.stdin.write(text("log.txt"))
        process.stdin.flush()
        until(lambda: path.exists() and path.stat().st_size > 0)
        path.unlink()
        _, err = process.communicate(timeout=HANG_SECONDS)
    assert f"specscope: warning: {path} was deleted or replaced during the run: the capture is lost" in err
    assert "→" not in err
    assert process.returncode == 1


def test_ctrl_c_leaves_a_valid_capture(tmp_path):
    path = tmp_path / "w.jsonl"
    with Page(text("metrics_before.txt"), text("metrics_after.txt")) as page:
        command = [*SPECSCOPE, "watch", page.url, "--interval", "0.1", "--headless", "-o", str(path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV, text=True)
        try:
            until(lambda: page.served >= 5)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=HANG_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "mean acceptance length" in out
    reader = read_capture(path)
    assert (reader.warnings, reader.history.acceptance.drafts) == ([], 143)


@pytest.mark.parametrize("level", Privacy, ids=lambda level: level.flag or "all")
def test_what_it_writes_and_sends_holds_no_text_of_a_response(tmp_path, level):
    path, answer, spans = tmp_path / "w.jsonl", tmp_path / "answer.json", []
    response = json.loads(text("chat_greedy.json"))
    response["choices"][0]["message"]["content"] = "quokka"
    answer.write_text(json.dumps(response | {"prompt": "quokka", "system_fingerprint": "quokka"}))
    with Receiver(spans.append, http_port=None) as receiver:
        endpoint = f"http://127.0.0.1:{receiver.grpc_port}"
        words = ["--otlp-endpoint", endpoint, "--otlp-protocol", "grpc", "-o", str(path), *filter(None, [level.flag])]
        assert run_here(["watch", str(answer), "--headless", *words])[0] == 0
    assert "quokka" not in path.read_text() + repr(received(spans))
    assert run_info(received(spans)[0][0]).backend == "vLLM response"
    decoder = Decoder()
    steps = [record for _, span in received(spans) for record in decoder.feed(span)] + decoder.flush()
    assert [step.aggregate.drafts for step in steps] == [4]
    assert read_capture(path).history.run.privacy is max(level, Privacy.NO_TEXT)


def test_on_a_screen_with_two_engines(terminal, tmp_path):
    path, other = tmp_path / "w.jsonl", tmp_path / "w-2.jsonl"
    with Page(*PAGES) as page:
        shown = terminal(*SPECSCOPE, "watch", page.url, "--interval", "0.6", "-o", path)
        for words in (b"no data yet", b"does not report trees", b"another engine"):  # the last: e has where to go
            shown.wait_for(lambda words=words: words in shown.screen)
        drawn = len(shown.screen)
        shown.type("e")
        shown.wait_for(lambda: b"engine 1 smollm2" in shown.screen[drawn:])
        shown.remember()
        shown.type("q")
        assert (shown.left(), shown.process.returncode) == ([], 0)
    assert read_capture(path).history.acceptance.drafts == 143
    assert read_capture(other).history.acceptance.drafts == 12


STEPS, SYNTHETIC = str(LLAMA / "steps.log"), str(LLAMA / "synthetic.log")


def test_logs_are_compared_and_a_made_up_run_beside_a_real_one_is_a_warning(tmp_path):
    code, out, _ = run_here(["compare", STEPS, SYNTHETIC, "--fail-if", "tau drops > 2%"])
    assert (code, "not shown: the interval includes it" in out) == (0, True)  # of three intervals
    assert re.search(r"3\.90 +2\.40 +-1\.50 ", out)
    assert run_here(["compare", STEPS, SYNTHETIC, "--fail-if", "tau < 3"])[0] == 1
    err = said(["compare", STEPS, SYNTHETIC, "--json"])[1]
    assert "warning: B has synthetic verdicts and A does not say so: their figures cannot be compared" in err
    _, _, err = run_here(["compare", SYNTHETIC, shutil.copy(SYNTHETIC, tmp_path / "again.log")])
    assert "made-up" not in err
    log = text("log.txt")
    method = "{'speculative_config': {'rejection_sample_method': 'synthetic'}}"
    config = f"INFO 11-25 10:11:12 [utils.py:1] non-default args: {method}\n"
    (tmp_path / "v.log").write_text(config + log)
    assert "B has synthetic verdicts" in run_here(["compare", LOG, str(tmp_path / "v.log")])[2]
