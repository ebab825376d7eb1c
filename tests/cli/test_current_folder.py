"""No process that specscope starts runs a file of the current folder because it has a module's name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from specscope.trace.wire.reading import read_capture

ROOT = Path(__file__).parents[2]
NAMES = ("click", "multiprocessing", "torch", "textual", "grpc", "specscope", "uvicorn", "runpy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Whoever imports one of its modules leaves a file there."""
    made = tmp_path_factory.mktemp("downloaded")
    for name in NAMES:
        (made / f"{name}.py").write_text(f"open({str(made / 'ran')!r}, 'a').write({name!r} + '\\n')\n")
    return made


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The command as pip installs it, in a folder of its own."""
    script = tmp_path_factory.mktemp("bin") / "specscope"
    script.write_text("from specscope.__main__ import entry\nif __name__ == '__main__':\n    entry()\n")
    return ["env", f"PYTHONPATH={ROOT}", f"TMPDIR={script.parent}", sys.executable, str(script)]


@pytest.mark.parametrize(
    ("words", "shows"),
    [
        (["watch", "--listen", "127.0.0.1:0"], b"127.0.0.1:"),
        (["run", "abc", "--target", "TINY"], b" s  loading "),  # a model: torch is there
        pytest.param(
            ["serve", "--screen", "--port", "0", "--kv-memory", "0.01", "--target", "TINY"],
            b"specscope: serving ",
            marks=pytest.mark.slow,
        ),
        (["vllm", "--screen", "--python", "PYTHON", "--", "serve"], b"its output"),
    ],
    ids=["listen", "run", "serve", "vllm"],
)
def test_it_is_not_run(terminal, words, shows, folder, installed, tiny, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 0\n")  # it has vLLM, as far as is asked
    python.chmod(0o755)
    places = {"TINY": str(tiny), "PYTHON": str(python)}
    ran = folder / "ran"
    shown = terminal("env", "-C", folder, *installed, *(places.get(word, word) for word in words))

    def settled():
        told = [shown.screen, *(log.read_bytes() for log in Path(installed[-1]).parent.glob("*.log"))]
        return any(shows in part for part in told) or ran.exists() or shown.process.poll() is not None

    shown.wait_for(settled)
    assert not ran.exists(), ran.read_text()
    assert shown.process.poll() is None, shown.screen[-2000:]
    shown.close()
    assert not ran.exists()


@pytest.fixture(scope="module")
def several(folder, installed):
    """Runs several command lines one after the other in one process, as the installed command runs one."""
    script = Path(installed[-1]).with_name("several")
    script.write_text(
        "import sys\nfrom specscope.__main__ import main\nfor line in sys.argv[1:]:\n"
        "    sys.argv = ['specscope', *line.split()]\n    try:\n        main()\n"
        "    except SystemExit as end:\n        print('ended with', end.code, flush=True)\n"
    )

    def run(*lines):
        command = [*installed[:-1], str(script), *lines]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
        assert not (folder / "ran").exists(), (folder / "ran").read_text()
        assert "internal error" not in done.stderr
        *said, _ = re.split(r"ended with (\d+)\n", done.stdout)
        return list(map(int, said[1::2])), said[::2], done.stderr

    return run


PAGE = (ROOT / "docs" / "python.md").read_text()
(DRAFTER,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "class LastWords" in block)
(RULE,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "def typical" in block)
MODULES = {
    "mine": DRAFTER,
    "theirs": DRAFTER.replace('name = "last words"', ""),  # it has no name of its own
    "lenient": RULE,
    "other": RULE.replace("trial.p >", "trial.p + 1 >"),
    "broken": "def typical(trial):\n    return 2 * trial.p + 1\n",
}
SAMPLED = "--draft-model self:1 --tree 2x2 --temperature 1 --seed 1 --max-tokens 30 --rule lenient:typical"


@pytest.fixture(scope="module")
def captures(folder, several, tiny):
    """Captures of the drafter and the rule of docs/python.md, and what verify says with rules that are others now."""
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "p.txt").write_text("abc abc abc abc\n" * 2)
    model = f"--ignore-eos --target {tiny} --kv-memory 0.01"
    drafted = [f"{name}.jsonl --tree 4 --max-tokens 9 --drafter {name}:LastWords" for name in ("mine", "theirs")]
    verify = [f"verify rule.jsonl --rule {name}:typical" for name in ("lenient", "other", "broken")]
    lines = [f"capture p.txt -o {each} {model}" for each in (*drafted, f"rule.jsonl {SAMPLED}")]
    codes, said, err = several(*lines, *verify)
    assert codes[:3] == [0, 0, 0], err
    assert set(codes[3:4]) <= {0, 1}
    assert codes[4:] == [1, 2], said
    for name in MODULES:
        (folder / f"{name}.py").write_text((folder / "torch.py").read_text())
    return said[3:], err


def test_the_module_of_a_drafter_of_ones_own_is_run(captures, folder):
    run, theirs = (read_capture(folder / f"{name}.jsonl").history for name in ("mine", "theirs"))
    assert (run.run.drafter, run.run.tree, theirs.run.drafter) == ("last words", "4", "theirs:LastWords")
    assert any(len(part.tree) == 4 for step in run.steps for part in step.requests)


@pytest.mark.slow
def test_a_drafter_that_only_a_capture_names_is_never_imported(captures, several, tiny):
    verbs = ("diagnose", "tune --check")
    assert len(several(*(f"{verb} theirs.jsonl --target {tiny}" for verb in verbs))[0]) == len(verbs)


def test_a_rule_of_ones_own_is_asked_again(captures):
    (asked, otherwise, _), err = captures
    assert re.search(r"✓ accept probability +\d\d+ nodes\n", asked), asked
    assert "--rule other:typical gives 1" in otherwise
    assert re.search(r"^specscope: error: --rule broken:typical returned .*broken.py, line 1\)$", err, re.M), err


@pytest.mark.slow
def test_a_rule_that_only_a_capture_names_is_never_imported(captures, folder, several, tiny):
    (folder / "again.jsonl").write_bytes((folder / "rule.jsonl").read_bytes())
    judges = ["verify", "diagnose", "diagnose --only audit", "diagnose --only locate", "report", "why", "export -o t"]
    verbs = [*judges, "tune", "tune --check", "compare again.jsonl"]
    codes, told, _ = several(*(f"{verb} rule.jsonl" for verb in verbs))
    assert len(codes) == len(verbs)
    for verb, says in (
        ("verify", "was not judged: verify --rule lenient:typical does"),
        ("report", "somebody's own (lenient:typical)"),
        ("diagnose", "was not judged: verify --rule lenient:typical does"),
    ):
        assert says in " ".join(told[verbs.index(verb)].split())
