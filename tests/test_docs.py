"""What README, BENCHMARKS and docs/ say can be done can be done; who asks for what is gone is told so in one line."""

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import bench
from specscope.cli.main import cli
from specscope.gone import GONE, instead, refuse_gone
from tests import fields, keys
from tests.support.commands import said, specscope

ROOT = Path(__file__).parent.parent
ALONE = "README.md", "BENCHMARKS.md", "CONTRIBUTING.md", "tests/guarantees.md"
PAGES = [*(ROOT / name for name in ALONE), *(ROOT / "docs").glob("*.md")]
TEXT = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
LIMITS = dict.fromkeys(sorted({*TEXT} - {"docs/fields.md", ALONE[-1]}), 8000) | {"CONTRIBUTING.md": 4000}  # bytes
EVERYTHING = "\n".join(TEXT.values())
# Flags of pip, pytest, vLLM and its bench, SGLang, docker, guidellm, trainers, llama.cpp, Prometheus and curl
OF_OTHERS = """help help-all version no-deps lf
speculative-config otlp-traces-endpoint max-num-batched-tokens save-result tail model-path speculative-algorithm
speculative-draft-model-path speculative-eagle-topk base-url tokenizer dataset-name random-input-len random-output-len
num-prompts max-concurrency result-filename backend endpoint request-rate model data profile constraint ignore-eos
verifier-name-or-path data-path save-path draft-vocab-size standalone target-model-path draft-model-config
train-data-path output-dir chat-template nproc metrics log-jsonl spec-synth-len enable-feature data-urlencode config
"""


@pytest.mark.parametrize("name", LIMITS)
def test_pages_stay_short(name):
    assert len(TEXT[name].encode()) <= LIMITS[name]


@pytest.mark.parametrize("made", [fields, keys])
def test_what_is_made_of_the_code_is_up_to_date(made):
    assert made.PAGE.read_text() == made.page(), f"run python -m {made.__name__}, or make pages"


@pytest.mark.parametrize("small", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_python_examples_run(small, tiny, capsys, monkeypatch):
    """With a tiny target, and as they are, with the default one."""
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```python\n(.*?)```", TEXT["docs/python.md"] + TEXT["docs/testing.md"], re.S)
    examples = [block for block in blocks if "class LastWords" not in block and "def typical" not in block]
    for example, printed in zip(
        examples,
        (
            "acceptance length",
            "untried  accepted  rejected",
            "Accepted 0 of 3 levels.",
            "differs from the target's by 0.13",
            "draft 0 at place 0 was",
        ),
        strict=True,
    ):
        assert len(example.strip().splitlines()) <= 12
        example = example.replace("Engine(drafter", f"Engine(target={str(tiny)!r}, drafter") if small else example
        exec(compile(example, "docs/python.md", "exec"), {})
        assert printed in capsys.readouterr().out


def test_every_flag_that_the_pages_name_exists():
    params = [param for command in (*_commands(cli), *_commands(bench)) for param in command.params]
    known = {opt for param in params for opt in (*param.opts, *param.secondary_opts)}
    known |= {f"--{name}" for name in OF_OTHERS.split()}
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", EVERYTHING):
        assert flag in known, flag


@pytest.mark.parametrize("name", TEXT)
def test_links_lead_somewhere(name):
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXT[name]):
        if "://" not in link:
            path, _, heading = link.partition("#")
            page = (ROOT / name).parent / path if path else ROOT / name
            assert page.exists(), link
            if heading and page.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
                assert heading in {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}, link


def test_every_command_and_every_test_that_the_pages_show_is_one():
    tests = [word for command in re.findall(r"`pytest ([^`]*)`", EVERYTHING) for word in command.split() if "/" in word]
    assert len(tests) > 10
    assert [path for path in tests if not (ROOT / path.partition("::")[0]).exists()] == []
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", EVERYTHING, re.S))
    shown = [line.split("#")[0].split() for line in re.findall(r"^specscope (.*)$", blocks, re.M)]
    assert len(shown) > 10
    assert {verb for verb, *_ in shown} <= set(cli.commands)
    for name in re.findall(r"`python -m benchmarks ([a-z]+)", EVERYTHING):
        assert name in bench.commands, name


def test_the_debuggers_transcript_is_what_it_says():
    from specscope.cli.run import over_capture

    (block,) = re.findall(r"```console\n(.*?)```", TEXT["README.md"], re.S)
    first, *rest = re.split(r"^\(specscope\) ", block, flags=re.M)
    commands = over_capture(first.split()[-1])
    assert len(rest) == 4
    for piece in rest:
        line, _, wanted = piece.partition("\n")
        assert commands.run(line) == wanted.rstrip()


def _commands(command):
    yield command
    for child in getattr(command, "commands", {}).values():
        yield from _commands(child)


def test_the_diagnosis_is_what_it_says():

    (block,) = re.findall(r"```text\n\$ specscope (diagnose .*?)```", TEXT["README.md"], re.S)
    command, _, shown = block.partition("\n")
    out = said(command.split(), code=1)[0]
    assert out.split() == shown.split()  # which is as wide as a terminal


# Command lines as people have them in scripts and notes; each is refused by the name that is gone.
CAPTURE = ["capture", "a prompt", "-o", "run.jsonl"]
ASKED: list[tuple[str, list[str]]] = [
    *((verb, [verb, "x"]) for verb in ("replay", "tui", "extract", "audit", "locate", "help", "train", "bench")),
    *((flag, ["watch", "log.txt", "--headless", flag, "x"]) for flag in ("--alert", "--exec")),
    *((flag, ["serve", flag]) for flag in ("--prefix-cache", "--no-prefix-cache")),
    *((name, [*CAPTURE, *name.split()]) for name in ("--adaptive", "--no-adaptive", "--costs", "--speculation auto")),
    *((name, [*CAPTURE, "--drafter", name]) for name in GONE if "+" in name),
    ("synthetic", [*CAPTURE, "--drafter", "synthetic:0.8,0.5"]),
    ("--suffix-shared", ["serve", "--drafter", "suffix", "--suffix-shared", "1000"]),
    ("--evidence counts", ["vllm", "--capture", "x.jsonl", "--evidence", "counts", "--", "serve", "m"]),
    *((flag, ["open", flag, "x"]) for flag in ("--web", "--web-port")),
    ("--keep", ["capture", "prompts.txt", "-o", "run.jsonl", "--otlp-endpoint", "http://x", "--keep", "error"]),
    ("--keep", ["vllm", "--capture", "run.jsonl", "--keep", "error", "--", "serve", "m"]),
    ("--keep-buffer", ["serve", "--keep-buffer", "32"]),
    ("--sample-capture", ["transformers", "--sample-capture", "script.py"]),
    *((flag, ["debug", flag, "x"]) for flag in ("--over", "--attach")),
    ("--enable-per-request-metrics", ["serve", "--enable-per-request-metrics"]),
    ("--stop-on-error", ["debug", "a prompt", "--commands", "f", "--stop-on-error"]),
    ("--step", ["doctor", "--step"]),
    ("--log-stats", [*CAPTURE, "--log-stats"]),
    ("--tui", ["compare", "a.jsonl", "b.jsonl", "--tui"]),
    *(("--html", [*words, "--html", "page.html"]) for words in (["report", "run.jsonl"], ["compare", "a", "b"])),
    ("--plot", ["tune", "run.jsonl", "--plot", "curve.svg"]),
    *((flag, ["diagnose", "run.jsonl", flag, "x"]) for flag in ("--again", "--against")),
]


def test_a_sentence_says_what_to_use():
    assert instead("--adaptive").startswith("--adaptive was removed: `specscope tune` finds the tree to use")
    assert instead("--tree") is None
    refuse_gone("--tree")
    assert [text for text in GONE.values() if "\n" in text or text.endswith(".")] == []


@pytest.mark.parametrize(("name", "words"), ASKED, ids=[name for name, _ in ASKED])
def test_who_asks_is_told(name, words):
    refused = specscope(*words)
    assert refused.returncode == 2
    assert f"specscope: error: {instead(name)}" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_a_variable_that_is_gone_is_named_and_the_command_runs():
    told = specscope("tree", "3", SPECSCOPE_AGGREGATES="1")
    assert (told.returncode, told.stderr) == (0, f"specscope: {instead('SPECSCOPE_AGGREGATES')}\n")
