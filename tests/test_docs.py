"""What README, BENCHMARKS and docs/ say can be done can be done."""

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import bench
from specscope.cli.main import cli
from tests import fields, keys

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
    from tests.support.commands import run_here

    (block,) = re.findall(r"```text\n\$ specscope (diagnose .*?)```", TEXT["README.md"], re.S)
    command, _, shown = block.partition("\n")
    code, out, _ = run_here(command.split())
    assert code == 1
    assert out.split() == shown.split()  # which is as wide as a terminal
