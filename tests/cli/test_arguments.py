"""What X is: one rule for every verb; and `specscope tune`: text, JSON, costs, and what it refuses."""

import dataclasses
import gzip
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from specscope.cli.options import What
from specscope.plans.costs import CostPoint, Costs, about_run, write_costs
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.reading import read_capture
from tests.faults.models import HEAD, TARGET, story
from tests.faults.settings import Setting, record
from tests.support.commands import run_here, specscope
from tests.support.samples import EAGLE, NGRAM, PLANTED, ROOT, SAMPLED
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


def test_the_commands_that_are_suggested_for_what_was_piped_in_name_a_file():
    out = specscope("why", "-", stdin=Path(EAGLE).read_text()).stdout
    assert "specscope diagnose FILE\n" in out
    assert re.search(r"specscope why 'FILE#r\d@\d+'", out)


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


@pytest.mark.parametrize(
    ("verb", "condition", "outcome"),
    [
        # One name, one figure: r_d is vLLM's, 8 of all 60 drafts, although only 49 of them reached depth 3
        (("report", EAGLE), "depth 3 rate < 13.4%", "hit"),
        (("compare", EAGLE, EAGLE), "depth 3 rate < 13.4%", "hit"),
        (("report", EAGLE), "depth 3 rate < 13.3%", "not hit"),
        (("compare", EAGLE, EAGLE), "depth 3 rate < 13.3%", "not hit"),
        # A limit is about B alone: A has no depth 4, and fewer drafts of a kind than a difference needs
        (("compare", SAMPLED, EAGLE), "depth 4 rate < 5.1%", "hit"),
        (("compare", EAGLE, SAMPLED), "tau where label kind is list < 1.3", "hit"),
        # What a report prints
        (("report", SAMPLED), "tokens per step < 1.71", "hit"),
        (("report", SAMPLED), "tau where kind is list < 1.3", "hit"),
        (("report", SAMPLED), "tau where after is full < 1", "not hit"),
        (("report", SAMPLED), "whole paths > 50%", "not hit"),
        (("report", EAGLE), "q above acceptance > 2 or squared error of q > 1", "not hit"),
    ],
)
def test_a_gate_takes_the_figures_that_are_shown(verb, condition, outcome):
    code, out, err = run_here([*verb, "--fail-if", condition])
    assert code == (outcome == "hit"), err
    told = re.findall(r"(?:(not )?(hit); (?:it is|B has) )", out + err)
    assert {"".join(words) for words in told} == {outcome}


def test_a_gate_without_a_condition_is_refused():
    code, out, err = run_here(["report", SAMPLED, "--fail-if", ""])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--fail-if '': write FIGURE" in err


def test_a_gate_is_about_what_the_report_shows(tmp_path):
    """Each run of a file of two; a run in two files once; test_branches has its branch."""
    two = tmp_path / "two.jsonl"
    two.write_bytes(Path(EAGLE).read_bytes() + Path(SAMPLED).read_bytes())
    assert "it is 6\n" in run_here(["report", str(two), "--fail-if", "requests < 1"])[2]
    lines = Path(EAGLE).read_bytes().splitlines(keepends=True)
    halves = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    halves[0].write_bytes(b"".join(lines[: len(lines) // 2]))
    halves[1].write_bytes(b"".join(lines[len(lines) // 2 :]))
    assert "it is 3\n" in run_here(["report", *map(str, halves), "--fail-if", "requests < 1"])[2]


def tuned(*words):
    """What is printed."""
    done = specscope("tune", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def costs(tmp_path):
    """A file of costs for the sample capture."""
    told = read_capture(EAGLE).history.run
    point = CostPoint(1, 0.02, 0.0199, 0.0201)
    step = (dataclasses.replace(point, rows=2), CostPoint(32, 0.06, 0.059, 0.061))
    passes = (CostPoint(1, 0.002, 0.002, 0.002),)
    file = tmp_path / "costs.json"
    about = {**about_run(told), "cpu": "one", "context": "50"}
    write_costs(str(file), Costs(about, (point, *step), passes, passes))
    return file


def test_acceptance_alone_needs_no_costs(tmp_path):
    out = tuned(EAGLE, "--no-costs", "--nodes", 8, "--tree", "3")
    assert "The best static tree of each size" in out
    assert "The best dynamic tree of each size" in out
    assert "tok/s" not in out
    assert re.search(r"^3 +3 .* 3 *$", out, re.M)
    told_by_its_config = record(Setting("dflash chain", requests=4, tokens=40), tmp_path / "run.jsonl")
    assert "The best static tree of each size" in tuned(told_by_its_config, "--no-costs")


def test_costs_from_a_file_give_a_tree_to_take(costs):
    said = " ".join(tuned(EAGLE, "--costs", costs).split())
    assert re.search(
        r"Recommended: --tree \S+ [0-9.]+ tokens/s predicted, \+[0-9.]+% over the default .* \(between", said
    )
    words = ["tune", EAGLE, "--costs", str(costs), "--json", "--tree", "top:2x2"]
    code = f"import sys; from specscope.cli.main import cli\ncli({words!r}, standalone_mode=False)\n"
    code += "assert 'torch' not in sys.modules"
    found = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
    assert found["choice"]["names"][-1] == "choice"
    assert found["recorded_acceptance_length"] > 1
    assert {"recorded", "default", "plain"} <= {name for row in found["trees"] for name in row["names"]}
    asked = next(row for row in found["trees"] if row["tree"] == "top:2x2")
    low, value, high = (asked["tokens_per_s"][name] for name in ("low", "value", "high"))
    assert low < value < high


DAMAGED = Path(__file__).parents[1] / "data" / "damaged"


@pytest.fixture(scope="module")
def captures(tmp_path_factory):
    """One without drafts, and one of another engine."""
    history, folder = read_capture(EAGLE).history, tmp_path_factory.mktemp("captures")
    others = dataclasses.replace(history.run, versions={**history.run.versions, "vllm": "0.11"})
    for name, run, steps in (("none", history.run, history.steps[:1]), ("vllm", others, history.steps)):
        writer = CaptureWriter(folder / f"{name}.jsonl", run, history.vocabulary)
        for step in steps:
            writer(step)
        writer.close()
    return folder


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (f"{NGRAM} --costs COSTS", "holds the costs of drafter eagle"),
        (f"{EAGLE} --costs COSTS --batch 2", "give --batch 1"),
        ("MADE/none.jsonl --no-costs", "has no drafts"),
        ("MADE/vllm.jsonl --costs none.json", "there are no costs at none.json, and"),
        (f"{DAMAGED}/tune-max-empty.jsonl --no-costs", "error: the capture shows too little to judge any tree"),
    ],
)
def test_what_tells_no_tree_or_does_not_fit_together_is_refused(words, says, form, costs, captures):
    words = words.replace("COSTS", str(costs)).replace("MADE", str(captures)).split()
    code, out, err = run_here(["tune", *words, *form])
    assert (code, err.count("\n"), bool(out)) == (2, 1, bool(form))
    assert says in err


@pytest.mark.slow
def test_an_engine_is_measured_and_its_choice_checked(tmp_path, monkeypatch):
    """The whole way on a tiny engine: capture, costs, choice, check on other prompts."""
    from specscope.measure import step_costs

    monkeypatch.setattr(step_costs, "SECONDS", 0.0)
    lines = tmp_path / "prompts.txt"
    lines.write_text("\n".join(story(60 + i, 40) for i in range(3)))
    models = ["--target", str(TARGET), "--draft-model", str(HEAD)]
    flags = ["--raw", "--dtype", "float32", "--max-tokens", "20", "--kv-memory", "0.05"]
    capture = ["capture", lines, "-o", tmp_path / "c.jsonl", "--tree", "dynamic:12,depth=3,top=4"]
    assert specscope(*capture, *models, *flags).returncode == 0
    lines.write_text("\n".join(story(90 + i, 40) for i in range(2)))
    check = ["--check", "--prompts", lines, "--costs", tmp_path / "costs.json", "--tree", "2", "--nodes", 8]
    found = json.loads(tuned(tmp_path / "c.jsonl", *models, *check, "--json"))
    named = {name: row for row in found["trees"] for name in row["names"]}
    for name in ("plain", "default", "choice"):
        assert named[name]["measured_tokens_per_s"] > 0
    chain = next(row for row in found["trees"] if row["tree"] == "2")
    assert chain["measured_acceptance_length"] == pytest.approx(chain["acceptance_length"]["value"], rel=0.5)
    assert {"none", "2", named["choice"]["tree"] or "none"} <= set(found["checked"]["errors"])
    assert json.loads((tmp_path / "costs.json").read_text())["about"]["drafter"] == "eagle"
    again = json.loads(tuned(tmp_path / "c.jsonl", "--costs", tmp_path / "costs.json", "--json"))
    assert again["costs"] == found["costs"]  # read, and no model is needed


def test_a_recorded_tree_that_cannot_be_read_leaves_the_others_to_be_judged():
    for form, says in (([], r"^4 +4 .* 4 *$"), (["--json"], '"tree": "4"')):
        assert re.search(says, tuned(DAMAGED / "tune-indexerror.jsonl", "--no-costs", *form), re.M)
