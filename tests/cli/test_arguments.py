"""What X is: one rule for every verb."""

import gzip
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from specscope.cli.options import What
from tests.support.commands import run_here, specscope
from tests.support.samples import PLANTED, ROOT
from tests.watch.samples import Page, text

ID = "4f836fc2338be204b3bf1b5f58777b77"
LOG = str(ROOT / "tests/data/vllm/log.txt")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """One of each that a file can be."""
    monkeypatch.chdir(tmp_path)
    Path("run.jsonl").write_bytes(Path(PLANTED).read_bytes())
    Path("word").write_bytes(gzip.compress(Path(PLANTED).read_bytes()))
    Path("a#b").write_text("a prompt\n")
    Path("vllm.log").write_bytes(Path(LOG).read_bytes())
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("debug.sock")
    yield tmp_path
    listening.close()


ARE = {
    What.RECORDING: ["run.jsonl", "run.jsonl#r3@17", "word"],  # by its first bytes
    What.FILE: ["a#b", "vllm.log"],
    What.SOCKET: ["debug.sock"],
    What.INPUT: ["-"],
    What.TRACE: [f"http://localhost:16686/trace/{ID}", f"http://me:pw@tempo:3200/api/traces/{ID}#r3@17"],
    What.PAGE: ["http://localhost:8000/metrics", "http://localhost:16686/search"],
    What.WORDS: ["http://localhost:8000 is down, why?", "Why?", "What is run.txt?", "hello", "hello.", "n" * 300],
    What.MISSING: ["other.jsonl", "no/where", "none#r3@17"],
}


@pytest.mark.parametrize(("given", "what"), [(given, what) for what, texts in ARE.items() for given in texts])
def test_what_an_argument_is(folder, given, what):
    assert What.of(given) is what


REFUSED = {
    "debug.sock": ["open", "report", "verify", "why", "export -o t", "watch --headless", "run", "capture -o c.jsonl"],
    f"http://localhost:16686/trace/{ID}": ["watch --headless", "run", "capture -o c.jsonl"],
    "http://localhost:8000/metrics": ["open", "verify", "why", "debug", "run", "export -o t"],
    "other.jsonl": ["run", "debug", "capture -o c.jsonl", "open", "report", "watch --headless", "tune --no-costs"],
}


@pytest.mark.parametrize(("x", "words"), [(x, words) for x, verbs in REFUSED.items() for words in verbs])
def test_what_a_verb_does_not_take_is_refused_in_a_line_that_says_what_does(folder, x, words):
    verb, *more = words.split()
    code, out, err = run_here([verb, x, *more])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert x in err
    what_to_do = ("specscope ", "No such file", "there is no file", "a server is http", "contains spaces", "trace/ID")
    assert any(words in err for words in what_to_do), err


def test_a_flag_without_effect_is_refused(folder):
    """`debug` of a recording, or of what runs elsewhere, takes nothing of an engine and of requests."""
    for line, is_a in (
        ("run.jsonl --tree=3", "capture"),
        ("run.jsonl --temperature=0", "capture"),
        ("run.jsonl --raw", "capture"),
        ("debug.sock --stop=x", "running engine"),
        ("debug.sock --target=x", "running engine"),
    ):
        x, words = line.split()
        code, out, err = run_here(["debug", x, words])
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{x} is a {is_a}: leave out {words.partition('=')[0]}" in err


def test_a_log_may_be_piped_in():
    piped, named = specscope("report", "-", stdin=Path(LOG).read_text()).stdout, specscope("report", LOG).stdout
    assert "mean acceptance length" in piped
    assert len(piped.splitlines()) == len(named.splitlines())


def test_windows_is_told_in_a_line():
    code = "import sys; sys.platform = 'win32'; import specscope.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "specscope: error: specscope runs on Linux; on Windows, use WSL\n")


def test_a_gate_on_one_engine():
    """Of a server one reading, of a recording its steps; a change is compare's."""
    with Page(text("metrics_after.txt"), text("metrics_after.txt")) as page:
        url = page.url.replace("//", "//me:secret@")
        code, out, err = run_here(["report", url, "--fail-if", "tau < 1.01 or rate < 90%"])
        assert (code, "secret" in out + err) == (1, False)
        assert re.search(r"--fail-if tau < 1.01: not hit; it is 1\.\d+\n.*--fail-if rate < 90%: hit; it is ", err), err
        told = json.loads(run_here(["report", url, "--fail-if", "drafts < 1", "--json"])[1])
        assert (told["exit"], [one["hit"] for one in told["conditions"]]) == (0, [False])
    assert run_here(["report", PLANTED, "--fail-if", "tau > 9"])[0] == 0
    code, _, err = run_here(["report", PLANTED, "--fail-if", "tau drops > 2%"])
    assert (code, err.count("\n")) == (2, 1)
    assert "one run shows no change" in err
