"""What can be known before torch is imported is refused before: that import takes seconds, and a model more."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANG_SECONDS

TRACES = Path(__file__).parents[2] / "traces"
EAGLE = str(TRACES / "eagle.jsonl")
CAPTURE = ["capture", "p.txt", "-o", "o.jsonl"]
CASES = {
    "debug socket in no folder": (["serve", "--debug-socket", "/nope/x"], "--debug-socket /nope/x: no such file or"),
    "debug socket that is a file": (["serve", "--debug-socket", "p.txt"], "--debug-socket p.txt: it exists and is no"),
    "debug socket with a long name": (["serve", "--debug-socket", "x" * 120], "af_unix path too long"),
    "debug socket of vLLM": (["vllm", "--debug", "/nope/x", "--", "serve"], "--debug /nope/x: no such file or"),
    "debug without prompts": (["debug"], "nothing to debug: give a prompt"),
    "a script that is not there": (["debug", "hi", "--commands", "nope"], "cannot read the commands in nope: No such"),
    "hub name": ([*CAPTURE, "--target", "no/body"], "cannot load no/body: it is not a folder, is not in the cache"),
    "draft model": ([*CAPTURE, "--drafter", "draft_model", "--draft-model", "no/body"], "cannot load no/body"),
    "all layers": ([*CAPTURE, "--target", "TINY", "--draft-model", "self:3"], "takes 1 to 2 layers of"),
    "more than all": (["run", "hi", "--target", "TINY", "--draft-model", "self:99"], "takes 1 to 2 layers of"),
    "context": ([*CAPTURE, "--target", "TINY", "--max-context", "9999"], "max_context must be between 2 and 512"),
    "metrics port": ([*CAPTURE, "--metrics-port", "PORT"], "choose another port if this one is in use"),
    "audit": (["diagnose", "--only", "audit", EAGLE, "--target", "no/body"], "cannot load no/body"),
    "audit's head": (["diagnose", "--only", "audit", EAGLE, "--draft-model", "./none"], "no head at ./none"),
    "diagnose": (["diagnose", EAGLE, "--target", "./none"], "no model at ./none"),
    "locate": (["diagnose", "--only", "locate", EAGLE, "--target", "./none"], "no model at ./none"),
    "tune": (["tune", EAGLE, "--target", "./none"], "no model at ./none"),
    "no such model": ([*CAPTURE, "--target", "./nothing"], "no model at ./nothing"),
    "no such head": ([*CAPTURE, "--drafter", "eagle", "--draft-model", "./no"], "no head"),
    "bad device": ([*CAPTURE, "--device", "toaster"], "'toaster' is not supported"),
    "device of another kind": ([*CAPTURE, "--device", "mps"], "'mps' is not supported"),
    "a tree": (["run", "a prompt", "--tree", "banana"], "cannot read the tree 'banana'"),
    "a tree of n-grams": (["run", "--drafter", "ngram", "--tree", "banana"], "cannot read the tree 'banana'"),
    "a tree alone": (["tree", "banana"], "cannot read the tree 'banana'"),
    "tune's prompts": (["tune", EAGLE, "--check", "--prompts", "none"], "cannot read the prompts none"),
}
RUN = """
import json, sys
class NoTorch:
    def find_spec(self, name, *_):
        if name in ("torch", "textual"):
            raise RuntimeError(f"{name} is imported")
sys.meta_path.insert(0, NoTorch())
from tests.support.commands import run_here
print(json.dumps([run_here(words) for words in json.load(sys.stdin)]))
"""


@pytest.fixture(scope="module")
def ended(tiny, tmp_path_factory):
    """(exit code, standard output, standard error) of each, in one process in which torch cannot be imported."""
    folder = tmp_path_factory.mktemp("early")
    (folder / "p.txt").write_text("a prompt\n")
    (folder / "bad.jsonl").write_text('{"text": "a text"}\n{"texts": 1}\n')
    (folder / "empty").write_text("\n")
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(TRACES.parent)}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        swap = {"TINY": str(tiny), "PORT": str(taken.getsockname()[1])}
        given = json.dumps([[swap.get(word, word) for word in words] for words, _ in CASES.values()])
        done = subprocess.run(
            [sys.executable, "-c", RUN], input=given, capture_output=True, text=True, env=env, cwd=folder,
            timeout=HANG_SECONDS, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(folder)) == ["bad.jsonl", "empty", "p.txt"]
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_before_torch_is_imported(ended, name):
    code, _, err = ended[name]
    assert (code, err.count("\n")) == (2, 1), err
    assert CASES[name][1] in err


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("a tree")])
def test_a_tree_that_cannot_be_read_names_every_form(ended, name):
    for form in ("5 (a chain)", "3x5", "[(0,), (1,), (0, 0)]", "top:3x5", "dynamic:24,depth=6,top=4"):
        assert form in ended[name][2]


@pytest.mark.parametrize("more", [["--no-text"], ["--no-tokens"]])
def test_an_error_about_a_prompt_quotes_nothing_where_texts_are_left_out(tmp_path, more):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x", "temperature": "hot secret"}\n')
    command = [sys.executable, "-m", "specscope", "capture", "p.jsonl", "-o", "o.jsonl", *more]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (ran.returncode, "secret" in ran.stderr) == (2, False)
    assert "p.jsonl, line 1: temperature must be a number, not a value that is not shown" in ran.stderr
