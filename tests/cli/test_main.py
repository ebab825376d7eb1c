"""The command as people run it, `debug` and `compare` too: what works, and what bad input gets (one line, code 2)."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from specscope.cli.run import summary
from specscope.engine.phases import Phases
from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.history.totals import Undrafted
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import FinishReason
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.outputs import Bus
from specscope.trace.wire.reading import read_capture
from tests.analyze.compare.runs import Made, make
from tests.analyze.histories import step, write
from tests.processes import room_for
from tests.searching import of_file, tells
from tests.support import records as made
from tests.support.commands import run_here, said, specscope
from tests.support.samples import EAGLE, NGRAM, PLANTED, SAMPLED
from tests.tiny import write_tiny_model
from tests.trace.strategies import RUN


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text(
        '{"prompt": "abcabcabc", "kind": "copy"}\n{"prompt": "hello hello", "kind": "chat", "max_tokens": 9}\n'
    )
    return path


@pytest.fixture(scope="module")
def model(tiny):
    return ["--target", tiny, "--dtype", "float32", "--kv-memory", "0.01", "--threads", "1", "--raw"]


@pytest.fixture(scope="module")
def captured(tmp_path_factory, prompts, model):
    path = tmp_path_factory.mktemp("captured") / "run.jsonl"
    words = ["capture", prompts, "-o", path, "--max-tokens", 20, "--ignore-eos", *model]
    done = specscope(*words)
    assert done.returncode == 0, done.stderr
    return path, done.stderr


def test_capture_and_report(captured):
    path, err = captured
    assert re.search(r"captured \d+ decode steps, 29 tokens \(\d\.\d\d per step\), mean acceptance length", err)
    assert re.search(r" over \d+ drafts; \d+ of \d+ steps drafted nothing: no match in the text", err)
    text = specscope("report", path)
    assert text.returncode == 0
    assert "mean acceptance length" in text.stdout
    report = json.loads(specscope("report", path, "--json").stdout)
    by_id = {r["id"]: r for r in report["captures"][0]["requests"]}
    assert [len(by_id[name]["token_ids"]) for name in ("r0", "r1")] == [20, 9]
    assert (by_id["r0"]["labels"], by_id["r0"]["prompt"]) == ({"kind": "copy"}, "abcabcabc")
    assert len(by_id["r0"]["origins"]) == 20
    page = path.with_suffix(".html")
    assert specscope("export", path, "-o", page).returncode == 0
    assert "<html" in page.read_text()


def test_what_a_capture_is_told_to_leave_out_it_does_not_hold(model, tmp_path):
    prompts, tokens = tmp_path / "prompts.jsonl", []
    line = {"prompt": "quokkas", "stop": ["wombat"], "kind": "numbat", "structured_outputs": {"regex": "[a-z]{5,9}"}}
    prompts.write_text(json.dumps(line))
    for level in (Privacy.NO_TEXT, Privacy.NO_TOKENS):
        path = tmp_path / f"{level.name}.jsonl"
        done = specscope("capture", prompts, "-o", path, "--stop", "possum", "--stop-token-id", 251, level.flag, *model)
        assert done.returncode == 0
        assert ("a tokenizer turns into text: --no-tokens" in done.stderr) is (level is Privacy.NO_TEXT)
        content = path.read_text()
        for word in ("quokka", "wombat", "numbat", "[a-z]", "possum", "specscope.output.text"):
            assert word not in content
        history = read_capture(path).history
        assert history.run.privacy is level
        (request,) = history.requests.values()
        assert {"stop", "structured_outputs"} <= set(request.info.params.left_out)
        tokens = tokens or request.info.prompt_tokens.tolist()
        assert tells(of_file(path), tokens) is (251 in request.info.params.stop_token_ids) is history.run.tells_tokens
        verdict = specscope("verify", path)
        assert verdict.returncode == 0, verdict.stdout


def test_prompts_are_quoted_in_files_or_on_standard_input(prompts, model, tmp_path):
    path = tmp_path / "x.jsonl"
    for words, stdin, asked in (
        (["-"], "one\ntwo\n", ["one", "two"]),
        (["abc abc", prompts], "", ["abc abc", "abcabcabc", "hello hello"]),
    ):
        done = specscope("capture", *words, "-o", path, "--max-tokens", 3, *model, stdin=stdin)
        assert done.returncode == 0, done.stderr
        assert [request.info.prompt for request in read_capture(path).history.requests.values()] == asked


def test_debug_reads_the_prompts_of_a_file_and_says_so(prompts, model):
    done = specscope("debug", prompts, *model, stdin="next\ninfo requests\n")
    assert done.returncode == 0, done.stderr
    assert f"specscope: {prompts} is a file: decoding the 2 prompts in it" in done.stderr
    assert {"r0", "r1"} <= set(done.stdout.split())


def test_doctor_finds_this_machine():
    done = specscope("doctor")
    assert "torch" in done.stdout
    assert "default model" in done.stdout
    assert "fast path          onednn for float32" in done.stdout
    assert done.returncode in (0, 1)
    off = specscope("doctor", SPECSCOPE_DISABLE="onednn,fuse")
    assert "fast path          onednn for float32: disabled by SPECSCOPE_DISABLE" in off.stdout
    assert "fast path          fuse: disabled by SPECSCOPE_DISABLE" in off.stdout


def test_a_torch_that_cannot_be_loaded_is_said(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom specscope.__main__ import entry\nentry()"
    examined, refused = (
        subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
        for words in (["doctor"], ["capture", "a b", "-o", tmp_path / "run.jsonl"])
    )
    assert "torch              installed, but cannot be loaded: libcudart.so.12" in examined.stdout
    assert "default head" in examined.stdout
    assert (examined.returncode, refused.returncode) == (1, 2)
    assert refused.stderr.startswith("specscope: error: torch cannot be loaded: libcudart.so.12")


def test_a_model_or_device_that_does_not_fit_is_one_line_and_exit_code_2(prompts, model, tmp_path):
    other = write_tiny_model(tmp_path / "other", vocab=310)
    for words, says in (
        (["--draft-model", other], "vocabulary (310)"),
        (["--device", "meta"], "'meta' is not supported"),
        (["--device", "cuda:99"], "CUDA device"),
    ):
        done = specscope("capture", prompts, "-o", tmp_path / "out.jsonl", *words, *model)
        said = [line for line in done.stderr.splitlines() if " s: " not in line[:9]]  # but for progress, every 10 s
        one_line = len(said) == 1 and said[0].startswith("specscope: error: ")
        assert (done.returncode, done.stdout, one_line, says in done.stderr) == (2, "", True, True), done.stderr


def test_tree_of_another_program(tmp_path):
    done = specscope("tree", "--from", "[[0], [1], [0, 0]]", "--no-mask")
    assert done.stdout.splitlines()[:2] == ["tree [(0,), (1,), (0, 0)]", "here        --tree '[(0,), (1,), (0, 0)]'"]
    assert "   2        ■ · ■" in specscope("tree", "[(0,), (1,), (0, 0)]").stdout
    told = json.loads(specscope("tree", "--json", "--from", '{"method": "mtp", "num_speculative_tokens": 2}').stdout)
    assert (told["tree"], told["parents"], told["depths"]) == ("2", [-1, 0], [1, 2])
    assert told["from"] == "vLLM's mtp, a chain of num_speculative_tokens"
    (tmp_path / "samd.json").write_text('{"tree_adj": {"0": [1, 2, 3], "1": [4, 5], "2": [6], "3": [], "4": [7]}}')
    choices = "[[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]"
    eagle = "speculative_config:\n  decoding_type: Eagle\n  max_draft_len: 3\n"
    (tmp_path / "trtllm.yaml").write_text(f"{eagle}  eagle_choices: {choices}\n")
    block = choices.replace("[[", "\n  - [").replace("], [", "]\n  - [").replace("]]", "]")
    (tmp_path / "block.yaml").write_text(f"{eagle}  eagle_choices: {block}\n")
    (tmp_path / "one.yaml").write_text(f"{eagle}  eagle3_one_model: true\n  eagle_choices: {choices}\n")
    (tmp_path / "serve.yaml").write_text("speculative-config:\n  method: mtp\n  num_speculative_tokens: 2\n")
    (tmp_path / "config.py").write_text(f"EagleDecodingConfig(eagle_choices={choices})\n")
    paths = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"
    for name, tree, program in (
        ("samd.json", "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]", "SAMD's tree_adj"),
        *((name, paths, "TensorRT-LLM's eagle_choices") for name in ("trtllm.yaml", "block.yaml", "config.py")),
        ("one.yaml", "3", "TensorRT-LLM's max_draft_len, a chain: it has eagle3_one_model"),
        ("serve.yaml", "2", "vLLM's mtp, a chain of num_speculative_tokens"),
    ):
        code, out, _ = run_here(["tree", "--json", "--from", str(tmp_path / name)])
        told = json.loads(out)
        assert (code, told["tree"], told["from"]) == (0, tree, program)
    (tmp_path / "readme.txt").write_text("# Trees\nthree of them\n")
    for bad, why in {
        '{"tree_adj": {"0": [0]}}': "has a cycle",
        '{"tree_adj": 5}': "write each node's children",
        '{"tree_adj": {"0": []}}': "has no nodes",
        '{"tree_adj": {"0": [1], "5": [6]}}': "node 5 of the tree_adj has no parent",
        '{"medusa_choices": [[0]], "eagle_choices": [[0]]}': "two trees, eagle_choices and medusa_choices",
        "eagle_choices: [[0, 0]]": "has no parent",
        "3,4,1": "draft tokens must be 2 or more, not 1",
        str(tmp_path / "nothing.yaml"): "No such file",
        str(tmp_path): "Is a directory",
        str(tmp_path / "readme.txt"): "readme.txt holds no tree in a notation that specscope reads",
    }.items():
        code, _, err = run_here(["tree", "--from", bad])
        assert (code, err.count("\n"), why in err) == (2, 1, True), err
    for words in (["tree"], ["tree", "5", "--from", "5"]):
        assert specscope(*words).stderr.endswith("give a TREE, or another program's tree with --from TEXT\n")


DYNAMIC = "decoding_type: Eagle3\nmax_draft_len: 3\nuse_dynamic_tree: true\nmax_total_draft_tokens: 20\n"
PLAIN = '{"method": "ngram", "num_speculative_tokens": 6}'
QUOTED = PLAIN.replace('"', '\\"')
SGLANG = (("num-steps", 3), ("eagle-topk", 2), ("num-draft-tokens", 9))
OF_VLLM = "6", "vLLM's ngram, a chain of num_speculative_tokens"
SETTINGS = {
    "dynamic.yaml": (
        f"{DYNAMIC}dynamic_tree_max_topK: 8\n",
        "dynamic:20,depth=3,top=8",
        "TensorRT-LLM's use_dynamic_tree",
    ),
    "command.txt": (f'vllm serve m \\\n  --speculative_config \\\n  "{QUOTED}" 2>&1 | tee log\n', *OF_VLLM),
    "args.json": (f'{{"args": ["--model", "m", "--speculative-config", "{QUOTED}"]}}', *OF_VLLM),
    "args.yaml": (f"- args:\n  - --speculative-config\n  - '{PLAIN}'\n", *OF_VLLM),
    "key.yaml": (f"model: m\nspeculative-config: '{PLAIN}'\n", *OF_VLLM),
    "llm.py": (f"LLM('m', speculative_config={PLAIN.replace(chr(34), chr(39)).replace('}', ',}')})\n", *OF_VLLM),
    "choices.py": ("mc_sim = [[0], [1], [0, 0]]\n", "[(0,), (1,), (0, 0)]", ""),
    "sglang.yaml": (
        "- args:\n" + "".join(f'        - --speculative-{name}\n        - "{size}"\n' for name, size in SGLANG),
        "dynamic:8,depth=3,top=2",
        "SGLang's 3 steps, top 2, 9 draft tokens, one of them the root",
    ),
}


def test_settings_as_they_stand_in_commands_and_files(tmp_path):
    for name, (content, *told) in SETTINGS.items():
        (tmp_path / name).write_text(content)
        found = json.loads(said(["tree", "--json", "--from", str(tmp_path / name)])[0])
        assert [found["tree"], found["from"]] == told, name
    code, _, err = run_here(["tree", "--from", DYNAMIC])
    assert (code, "TensorRT-LLM's dynamic tree needs dynamic_tree_max_topK" in err) == (2, True)


@pytest.mark.parametrize(
    ("on_full", "code", "says"),
    [("stop", 2, "cannot continue writing {path}: File too large"), ("drop", 1, "not captured: {path} could not be")],
)
def test_a_full_disk_ends_the_run_or_is_counted_and_the_file_is_readable(prompts, model, tmp_path, on_full, code, says):
    """A real file-size limit, which fails a write in the middle as a full disk does."""
    path = tmp_path / "run.jsonl"
    words = ["capture", prompts, "-o", path, "--max-tokens", "300", "--ignore-eos", "--on-full", on_full, *model]
    with room_for(200 * 1024):
        done = specscope(*words)
    assert done.returncode == code
    assert says.format(path=path) in done.stderr
    assert "Traceback" not in done.stderr
    reader = read_capture(path)
    assert len(reader.history.steps) > 0
    assert not any("cut off" in warning for warning in reader.warnings)


class Idle:
    """A worker that does nothing."""

    def __init__(self, *asked, on_ready, **how):
        self.news, self.error, self.bus, self.on_ready = [], "", Bus(), on_ready

    def poll(self, history):
        return False

    def close(self):
        pass


@pytest.mark.parametrize(("reason", "code"), [(FinishReason.ERROR, 1), (FinishReason.LENGTH, 0)])
def test_a_run_says_what_it_came_to_and_ends_with_1_where_a_request_failed(monkeypatch, tmp_path, reason, code):
    about = made.info("r0")
    ended = made.record(0, admitted=(about,), finished=(made.end(about, reason=reason, error="no room" * code),))

    def show(viewer, *more, title):
        viewer.control.on_ready(SimpleNamespace(run=RUN, vocabulary=Vocabulary()))
        viewer.history.append(ended)

    monkeypatch.setattr("specscope.cli.run.need_terminal", lambda instead: None)
    monkeypatch.setattr("specscope.live.client.Worker", Idle)
    monkeypatch.setattr("specscope.tui.app.run_app", show)
    for more, kept in (
        ([], "decoded 0 decode steps, 0 tokens, no drafts; not saved (-o run.jsonl saves a run)\n"),
        (["-o", tmp_path / "run.jsonl"], f"captured 0 decode steps, 0 tokens, no drafts → {tmp_path / 'run.jsonl'}\n"),
    ):
        done = specscope("run", "a prompt", *more)
        assert (done.returncode, "1 of 1 request failed: no room" in done.stderr) == (code, bool(code)), done.stderr
        assert kept in done.stderr


def test_a_stranger_reads_what_the_length_is_of_why_steps_drafted_nothing_and_that_text_loops():
    total = measure([step(tree="2", path=(0, 1)), step(tree="2"), *[step()] * 6])
    reasons = Counter({Undrafted.NO_MATCH: 5, Undrafted.PROMPT: 1})
    assert summary(total, reasons, 0.05) == (
        "8 decode steps, 10 tokens (1.25 per step), mean acceptance length 2.00 over 2 drafts; 6 of 8 steps "
        "drafted nothing: no match in the text 83%, first token after the prompt 17%"
    )
    assert summary(measure([step(tree="2", path=(0, 1))]), Counter(), 0.5) == (
        "1 decode step, 3 tokens (3.00 per step), mean acceptance length 3.00 over 1 draft; 50% of the output in loops "
        "(specscope report)"
    )
    assert summary(Acceptance(), Counter(), 0.0) == "0 decode steps, 0 tokens, no drafts"


def debug(x, script):
    return specscope("debug", x, "--commands", "-", stdin=script)


def test_a_script_over_a_recording_and_from_a_step_of_it():
    ran = debug(PLANTED, "# the first rejection\nbreak reject\ncontinue\n\nprint p_tried @ 0\nquit\nnever reached\n")
    assert ran.returncode == 0
    assert "breakpoint 1 (break reject) at step 3" in ran.stdout
    assert ran.stdout.splitlines()[-2] == "0"
    assert "never" not in ran.stdout
    ran = debug(f"{PLANTED}#r0@2", "print index\n")
    assert ran.returncode == 0, ran.stderr
    assert "r0@2" in ran.stdout.splitlines()[0]
    assert ran.stdout.splitlines()[-1] == "2"


def test_a_script_runs_on_after_a_refused_line_and_ends_with_2(tmp_path):
    script = tmp_path / "script"
    script.write_text("next\nbreak reject if pp > 1\nnonsense\nprint step\n")
    ran = specscope("debug", PLANTED, "--commands", script)
    assert (ran.returncode, ran.stdout.splitlines()[-2:]) == (2, ["(specscope) print step", "0"])
    first, second, last = ran.stderr.splitlines()
    assert "line 2: there is no field pp here" in first
    assert "line 3: unknown command 'nonsense'" in second
    assert last.endswith("script: 2 commands failed, the first in line 2")


def test_ctrl_c_stops_a_live_run_between_two_steps(tiny, monkeypatch):
    forward, calls = Phases.forward, []

    def interrupted(self, now):
        forward(self, now)
        calls.append(now)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Phases, "forward", interrupted)
    model = ["--target", tiny, "--raw", "--drafter", "none", "--kv-memory", "0.05"]
    script = "continue\ninfo requests\nreverse-next\nnext\n"
    ran = specscope("debug", "abcabcabc", *model, "--max-tokens", 480, "--ignore-eos", stdin=script)
    assert ran.returncode == 0, ran.stderr
    assert "interrupted" in ran.stdout
    assert "step 4" in ran.stdout  # whose forward it came in
    assert "r0" in ran.stdout
    assert "Traceback" not in ran.stderr
    assert len(calls) < 10


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Captures of one configuration, of which the second has a worse drafter."""
    folder = tmp_path_factory.mktemp("runs")
    for name, how in (("a1", {"seed": 1}), ("worse", {"seed": 4, "blur": 0.7})):
        write(make(Made(**how)), folder / f"{name}.jsonl")
    return folder


def compare(*words):
    return run_here(["compare", *map(str, words)])


def test_several_captures_on_a_side():
    sides = [EAGLE, SAMPLED], [NGRAM, PLANTED]
    told = json.loads(compare(*sides[0], "--with", *sides[1], "--json")[1])
    assert (told["a"]["source"], told["b"]["source"]) == sides
    assert told == json.loads(compare(*sides[0], "--json", "--with", NGRAM, "--with", PLANTED)[1])
    assert told == json.loads(compare("--with", *sides[1], "--json", *sides[0])[1])


@pytest.mark.parametrize(
    ("condition", "code"),
    [
        (None, 1),
        ("tau drops > 2%", 1),
        ("tau drops > 60%", 0),
        ("tau where label kind is code drops > 1%", 1),
        ("tau where kind is prose rises > 0 or tau where after is full drops > 90%", 0),
    ],
)
def test_fail_if_alone_decides(runs, condition, code):
    asked = [] if condition is None else ["--fail-if", condition]
    done, out, _ = compare(runs / "a1.jsonl", runs / "worse.jsonl", *asked)
    assert done == code
    assert ("FAIL" in out) is bool(code and condition)
    assert "B gets fewer tokens per draft than A: " in out


def test_an_older_kind_of_run_is_compared_by_what_both_have():
    code, out, _ = compare(EAGLE, NGRAM)
    out = " ".join(out.split())
    assert code == 0
    assert "B does not record the drafter's probabilities" in out
    assert "Only the configured settings differ (drafter, draft model, tree)." in out
    assert "draft tree differs at 46 of 49 equal contexts, as configured: drafter, draft model, tree" in out


def test_steps_without_drafts_are_named_and_a_change_that_no_tree_can_make_is_not_called_visible():
    out = compare(NGRAM, EAGLE)[1]
    assert "(95 %: -75.4 to +31.5 %); 3 requests are too few to see any change in tau\n" in out
    steps = "τ counts only steps with drafts: 14 % of A's, 95 % of B's. Output tokens per step: 1.40 → 2.21. Only the"
    assert steps in " ".join(out.split())
    assert "τ counts" not in compare(EAGLE, SAMPLED)[1]
    figures = {each["name"]: each["visible"] for each in json.loads(compare(NGRAM, EAGLE, "--json")[1])["figures"]}
    assert figures["tau"] is figures["rate"] is figures["whole paths"] is None


def test_every_setting_that_can_explain_a_difference_is_named_and_differences_of_rates_are_points():
    out = " ".join(compare(EAGLE, SAMPLED)[1].split())
    every = "drafts, drafter, draft model, draft revision, tree, draft vocabulary, max_tokens, temperature, seed"
    assert f"Only the configured settings differ ({every})." in out
    assert "depth 2 rate 33.3% 17.1% -16.3 points -28.8 to -4.6 31.1 points" in out
    assert "All 3 pairs diverge: the sampling parameters differ." in out
