"""Bad input is one line and exit code 2, before torch is imported: that import takes seconds, and a model more."""

import json
import os
import shlex
import socket
import subprocess
import sys

import pytest

from tests.support.samples import ROOT, TRACES
from tests.waiting import HANG_SECONDS

DATA = ROOT / "tests" / "data" / "vllm"
FILES = {name: str(TRACES / f"{name.lower()}.jsonl") for name in ("EAGLE", "SAMPLED", "NGRAM", "PLANTED")} | {
    "COUNTS": str(DATA / "watched.jsonl"),
    "LOG": str(DATA / "log.txt"),
    "ANSWER": str(DATA / "chat_n2.json"),
}
JAEGER = [f"{verb} http://me:secret@localhost:16686/search" for verb in ("open", "watch --headless", "report")]
CASES = {  # a command, and what it says
    "serve --debug-socket /nope/x": "--debug-socket /nope/x: no such file or",
    "serve --debug-socket p.txt": "--debug-socket p.txt: it exists and is no",
    f"serve --debug-socket {'x' * 120}": "af_unix path too long",
    "vllm --debug /nope/x -- serve": "--debug /nope/x: no such file or",
    "vllm --otlp-endpoint http://x --sample 2 -- serve m": "--sample must be between 0 and 1",
    "vllm --capture a.jsonl --sample 0.1 -- serve m": "--sample applies to spans that are sent: give --otlp-endpoint",
    "transformers": "Missing argument",
    "transformers --screen --otlp-endpoint http://x a.py": "--screen receives the spans",
    "transformers --python /nonexistent/python a.py": "no such program",
    "transformers --otlp-endpoint ftp://x a.py": "--otlp-endpoint",
    "transformers --capture /nonexistent/a.jsonl a.py": "/nonexistent",
    "capture p.txt -o o.jsonl --target no/body": "cannot load no/body: it is not a folder, is not in the cache",
    "capture p.txt -o o.jsonl --drafter draft_model --draft-model no/body": "cannot load no/body",
    "capture p.txt -o o.jsonl --target TINY --draft-model self:3": "takes 1 to 2 layers of",
    "run hi --target TINY --draft-model self:99": "takes 1 to 2 layers of",
    "capture p.txt -o o.jsonl --target TINY --max-context 9999": "max_context must be between 2 and 512",
    "capture p.txt -o o.jsonl --metrics-port PORT": "choose another port if this one is in use",
    "capture p.txt -o o.jsonl --target ./nothing": "no model at ./nothing",
    "capture p.txt -o o.jsonl --drafter eagle --draft-model ./no": "no head",
    **{
        f"capture p.txt -o o.jsonl --draft-model head{drafter}": "head holds a drafter of the kind DFlash2"
        for drafter in ("", " --drafter eagle", " --drafter draft_model")
    },
    "capture p.txt -o o.jsonl --device toaster": "'toaster' is not supported",
    "capture p.txt -o o.jsonl --device mps": "'mps' is not supported",
    "capture p.jsonl -o o.jsonl --no-text": "p.jsonl, line 1: temperature must be a number, not a value that is not sh",
    "capture p.jsonl -o o.jsonl --no-tokens": "p.jsonl, line 1: temperature must be a number, not a value that is not",
    "capture p.txt -o ./no/where.jsonl --target TINY": "cannot write ./no/where.jsonl",
    "capture p.txt -o o.jsonl --drafter none --tree 3": "the drafter is none",
    "capture p.txt -o o.jsonl --target TINY --rule best": "standard",
    "capture p.txt -o o.jsonl --target TINY --draft-model self:1 --tree 2x2 --rule block": "takes a chain",
    "capture p.txt -o o.jsonl --target TINY --drafter eagle": "needs --draft-model: the folder",
    "capture p.txt -o o.jsonl --drafter ngram --tree '[(0,), (1,), (0, 0)]'": "WIDTHxDEPTH",
    "capture p.txt -o o.jsonl --drafter draft_model": "needs --draft-model",
    "run ''": "a prompt is empty",
    "run --fly": "No such option --fly",
    "run --temprature 0": "No such option --temprature: did you mean --temperature? (see",
    "fly": "No such command 'fly'",
    "verfy x": "No such command 'verfy': did you mean verify? (see specscope --help)",
    "diff a b": "No such command 'diff': did you mean compare?",
    "p.txt": "no verb was given: specscope open ",
    "run 'a prompt' --tree banana": "cannot read the tree 'banana'",
    "run --drafter ngram --tree banana": "cannot read the tree 'banana'",
    "tree banana": "cannot read the tree 'banana'",
    "run 'a prompt'": "the screen needs a terminal; without one use specscope capture PROMPTS -o FILE",
    "open PLANTED": "the screen needs a terminal; without one use specscope report PLANTED",
    "watch --listen 127.0.0.1:0": "without one use an OpenTelemetry Collector, which writes captures",
    "debug": "nothing to debug: give a prompt",
    "debug hi --commands nope": "cannot read the commands in nope: No such",
    "debug none.sock": "there is no file none.sock; a prompt contains spaces or is one plain word",
    "debug PLANTED 'a prompt'": "is a capture, so debug takes no prompts with it",
    "debug PLANTED PLANTED": "is a capture, so debug takes no prompts with it",
    **{
        f"{words} PLANTED": "specscope open PLANTED shows it, specscope debug PLANTED debugs it"
        for words in ("run", "debug --file", "capture -o o.jsonl")
    },
    "debug http://127.0.0.1:8000/metrics": "is not a trace's address",
    "debug PLANTED#r0@999": "has no step 999",
    "debug COUNTS": "cannot be debugged: the capture holds counts only (vLLM /metrics reports no trees)",
    "diagnose --only audit EAGLE --target no/body": "cannot load no/body",
    "diagnose --only audit EAGLE --draft-model ./none": "no head at ./none",
    "diagnose --only audit EAGLE --sample 0": "--sample",
    "diagnose EAGLE --target ./none": "no model at ./none",
    "diagnose EAGLE EAGLE --no-audit": "EAGLE is given twice",
    "diagnose COUNTS": "cannot be judged: the capture holds counts only (vLLM /metrics reports no trees)",
    "diagnose --only locate EAGLE#r9@1": "there is no request 'r9'",
    "diagnose --only locate EAGLE#r1@9999": "has no step 9999",
    "diagnose --only locate EAGLE#r1@7/999": "there is no node 999 in r1@7",
    "diagnose --only locate EAGLE#r1@x": "write a step number after @",
    "diagnose --only locate EAGLE --stage softmax": "softmax",
    "diagnose --only locate EAGLE --target ./none": "no model at ./none",
    "diagnose --only locate EAGLE --branch 7": "the run has no such branch",
    "diagnose --only locate EAGLE --screen --json": "leave out --json",
    "diagnose --only locate EAGLE EAGLE#r1": "--only locate takes one capture",
    "diagnose --only locate EAGLE --no-audit": "--only locate runs only this stage: leave out --no-audit",
    "diagnose --only locate EAGLE --screen": "the screen needs a terminal",
    "diagnose EAGLE#r1@7": "EAGLE#r1@7 names a place: give the whole capture or add --only locate",
    "diagnose EAGLE --stage draws": "--stage and --screen need --only locate",
    "diagnose EAGLE --only audit --screen": "--stage and --screen need --only locate",
    "diagnose EAGLE --only audit --no-known": "--only audit runs only this stage: leave out --no-known",
    "diagnose EAGLE --only audit --drafter tests.own:Bigrams": "leave out --drafter",
    "diagnose EAGLE --trainer x --drafter tests.own:Bigrams": "leave out --drafter",
    "diagnose EAGLE --no-audit --drafter tests.own:Bigrams": "leave out --drafter",
    "tune EAGLE --target ./none": "no model at ./none",
    "tune EAGLE --check --prompts none": "cannot read the prompts none",
    "tune EAGLE --no-costs --check": "--no-costs measures nothing",
    "tune EAGLE --no-costs --prompts x": "needs --check",
    "tune EAGLE --no-costs --tree dynamic:8,depth=2,top=8": "it recorded 4 children",
    "tune EAGLE#r0 --no-costs": "names a place",
    "verify COUNTS": "cannot be judged: the capture holds counts only (vLLM /metrics reports no trees)",
    "verify EAGLE#r0@3": "opens it at r0@3",
    "report EAGLE NGRAM EAGLE": "is given twice",
    "report EAGLE#r0@3": "names a place: give the whole capture, EAGLE",
    "why EAGLE#r2@24/99": "there is no node 99 in r2@24; there are: 0 to 16",
    "why COUNTS": "counts only",
    "why p.txt r1@3": "extra argument (r1@3): a step is written FILE#r1@3 (see",
    "why p.txt r1": "extra argument (r1): a request is written FILE#r1 (see",
    "why SAMPLED@3": "is written SAMPLED#REQUEST@3",
    **dict.fromkeys(JAEGER, "is Jaeger's start page: open a trace there and give its address (.../trace/ID)"),
    "report p.jsonl": "is a file of prompts, not a capture",
    "open ./none.jsonl": "cannot read none.jsonl: No such file",
    "compare SAMPLED": "over time: specscope report SAMPLED",
    "compare SAMPLED EAGLE NGRAM": "give two captures",
    "compare SAMPLED --with": "requires an argument",
    "compare SAMPLED SAMPLED --with EAGLE": "is given twice for side A",
    "compare SAMPLED nothing.jsonl": "cannot read",
    "compare SAMPLED p.txt": "not a capture",
    "compare SAMPLED EAGLE --fail-if 'tau falls'": "--fail-if",
    "compare SAMPLED EAGLE --fail-if 'tau where kind is code drops > 1%'": "do not show this figure",
    "compare SAMPLED EAGLE --fail-if 'length drops > 1%'": "tokens per step, whole paths",
    "compare SAMPLED EAGLE --screen --json": "--screen shows a screen",
    "compare SAMPLED EAGLE --screen": "needs a terminal",
    "export EAGLE#r0@1 -o tables": "#r0@1 names a part of a capture, which needs a file",
    "export EAGLE#r9 -o part.jsonl": "there is no request 'r9'; there are: 'r0', 'r1', 'r2'",
    "export EAGLE#r0@3:99 -o part.jsonl": "'r0' has no step 99; its steps: 0 to 13",
    "export EAGLE#r0@7:3 -o part.jsonl": "r0 has no steps from 7 to 3",
    "export EAGLE#r0@3/1 -o part.jsonl": "r0@3/1 names a node: write a step, such as r0@3",
    "export EAGLE -o part.jsonl": "part.jsonl takes a part of EAGLE: name a request after #, such as EAGLE#r0",
    "export EAGLE#r0 PLANTED#r0 -o part.jsonl": "PLANTED and EAGLE are different captures: ",
    "export COUNTS#r0 -o part.jsonl": "cannot be exported in part: the capture holds counts only",
    "watch": "give X: a metrics page, a log, - or --listen HOST:PORT",
    "watch LOG --listen 127.0.0.1:0": "leave out ",
    "watch --listen 127.0.0.1:0 --headless": "leave out --headless",
    "watch nothing.log --headless": "cannot read nothing.log: No such file or directory",
    "watch ftp://x --headless": "is not a server's address: write http://HOST:PORT/metrics",
    "watch http://127.0.0.1:9/metrics --headless": "cannot be reached",
    "watch PLANTED --headless": "is a capture, not a log, a metrics page, a server's response",
    "watch LOG --headless -o LOG": "would overwrite the input",
    "watch LOG --headless --for -1": "must be between 0.05 and 10,000,000",
    "watch LOG --follow": "--follow needs --headless",
    "watch - - --headless": "can be watched only once",
    "watch LOG --headless --otlp-endpoint ftp://x": "--otlp-endpoint",
    "watch ANSWER --headless": "has no speculation figures",
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
    (folder / "p.jsonl").write_text('{"prompt": "x", "temperature": "hot secret"}\n')
    (folder / "head").mkdir()
    (folder / "head" / "config.json").write_text('{"architectures": ["DFlash2DraftModel"]}')
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        swap = FILES | {"TINY": str(tiny), "PORT": str(taken.getsockname()[1])}
        given = json.dumps([[_named(word, swap) for word in shlex.split(line)] for line in CASES])
        done = subprocess.run(
            [sys.executable, "-c", RUN], input=given, capture_output=True, text=True, env=env, cwd=folder,
            timeout=HANG_SECONDS, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(folder)) == ["head", "p.jsonl", "p.txt"]
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


def _named(text, files):
    """A text with the files that its capitals stand for."""
    for name, file in files.items():
        text = text.replace(name, file)
    return text


@pytest.mark.parametrize("line", CASES)
def test_it_is_refused_before_torch_is_imported(ended, line):
    code, out, err = ended[line]
    told = [one for one in err.splitlines() if "error: " in one]
    assert (code, len(told), "Traceback" in err, "secret" in err) == (2, 1, False, False), err
    assert (out == "") if "--json" not in line else json.loads(out)["exit"] == 2
    assert _named(CASES[line], FILES) in err


@pytest.mark.parametrize("line", [line for line in CASES if "banana" in line])
def test_a_tree_that_cannot_be_read_names_every_form(ended, line):
    for form in ("5 (a chain)", "3x5", "[(0,), (1,), (0, 0)]", "top:3x5", "dynamic:24,depth=6,top=4"):
        assert form in ended[line][2]
