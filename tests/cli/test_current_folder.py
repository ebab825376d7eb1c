"""No process that specscope starts runs a file of the current folder because it has a module's name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from specscope.trace.wire.reading import read_capture
from tests.processes import Terminal

ROOT = Path(__file__).parents[2]
NAMES = ("click", "multiprocessing", "torch", "textual", "grpc", "specscope", "uvicorn", "runpy")


@pytest.fixture
def folder(tmp_path):
    """Whoever imports one of its modules leaves a file there."""
    made = tmp_path / "downloaded"
    made.mkdir()
    for name in NAMES:
        (made / f"{name}.py").write_text(f"open({str(made / 'ran')!r}, 'a').write({name!r} + '\\n')\n")
    return made


@pytest.fixture
def installed(tmp_path):
    """The command as pip installs it, in a folder of its own."""
    script = tmp_path / "bin" / "specscope"
    script.parent.mkdir()
    script.write_text("from specscope.__main__ import entry\nif __name__ == '__main__':\n    entry()\n")
    return ["env", f"PYTHONPATH={ROOT}", f"TMPDIR={tmp_path}", sys.executable, str(script)]


@pytest.mark.parametrize(
    ("words", "shows"),
    [
        (["watch", "--listen", "127.0.0.1:0"], b"127.0.0.1:"),
        (["run", "abc", "--max-tokens", "3", "--ignore-eos", "--kv-memory", "0.01", "--target", "TINY"], b"ended"),
        (["serve", "--screen", "--port", "0", "--kv-memory", "0.01", "--target", "TINY"], b"specscope: serving "),
        (["vllm", "--screen", "--python", "PYTHON", "--", "serve"], b"its output"),
    ],
    ids=["listen", "run", "serve", "vllm"],
)
def test_it_is_not_run(words, shows, folder, installed, tiny, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 0\n")  # it has vLLM, as far as is asked
    python.chmod(0o755)
    places = {"TINY": str(tiny), "PYTHON": str(python)}
    ran = folder / "ran"
    terminal = Terminal(["env", "-C", folder, *installed, *(places.get(word, word) for word in words)])

    def settled():
        told = [terminal.screen, *(log.read_bytes() for log in tmp_path.glob("*.log"))]  # the server's own
        return any(shows in part for part in told) or ran.exists() or terminal.process.poll() is not None

    try:
        terminal.wait_for(settled)
        assert not ran.exists(), ran.read_text()
        assert terminal.process.poll() is None, terminal.screen[-2000:]
    finally:
        terminal.close()
    assert not ran.exists()


@pytest.fixture
def several(installed):
    """Runs several command lines one after the other in one process, as the installed command runs one."""
    script = Path(installed[-1]).with_name("several")
    script.write_text(
        "import sys\nfrom specscope.__main__ import main\nfor line in sys.argv[1:]:\n"
        "    sys.argv = ['specscope', *line.split()]\n    try:\n        main()\n"
        "    except SystemExit as end:\n        print('ended with', end.code, flush=True)\n"
    )

    def run(folder, *lines):
        command, text = [*installed[:-1], str(script), *lines], "abc abc abc abc\n"
        done = subprocess.run(command, input=text, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
        assert not (folder / "ran").exists(), (folder / "ran").read_text()
        assert "internal error" not in done.stderr
        return re.findall(r"ended with (\d+)", done.stdout), done.stderr

    return run


def test_the_module_of_a_drafter_of_ones_own_is_run_and_one_that_only_a_capture_names_is_not(folder, several, tiny):
    """As docs/python.md has it, from a folder that holds nothing else of use; the second has no name of its own."""
    page = (ROOT / "docs" / "python.md").read_text()
    (source,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "class LastWords" in block)
    (folder / "mine.py").write_text(source)
    (folder / "theirs.py").write_text(source.replace('name = "last words"', ""))
    (folder / "p.txt").write_text("abc abc abc abc\n")
    model = f"--tree 4 --max-tokens 9 --ignore-eos --target {tiny} --kv-memory 0.01"
    lines = [f"capture p.txt --drafter {name}:LastWords -o {name}.jsonl {model}" for name in ("mine", "theirs")]
    codes, err = several(folder, *lines)
    assert codes == ["0", "0"], err
    run, theirs = (read_capture(folder / f"{name}.jsonl").history for name in ("mine", "theirs"))
    assert (run.run.drafter, run.run.tree, theirs.run.drafter) == ("last words", "4", "theirs:LastWords")
    assert any(len(part.tree) == 4 for step in run.steps for part in step.requests)
    (folder / "theirs.py").write_text((folder / "torch.py").read_text())
    verbs = ("diagnose", "diagnose --only locate", "tune --check")
    assert len(several(folder, *(f"{verb} theirs.jsonl --target {tiny}" for verb in verbs))[0]) == len(verbs)


def said(folder, installed, tiny, *words, code=0):
    """What a command prints, from the folder."""
    command = [*installed, *words]
    if words[0] == "capture":
        command += f"-o run.jsonl --max-tokens 30 --ignore-eos --target {tiny} --kv-memory 0.01".split()
    done = subprocess.run(
        command, input="abc abc abc\n" * 8, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode in (code if isinstance(code, tuple) else (code,)), done.stdout + done.stderr
    assert not (folder / "ran").exists()
    assert "internal error" not in done.stderr
    return done.stdout + done.stderr


RULE = ["--rule", "lenient:typical"]
SAMPLED = ["capture", "-", "--draft-model", "self:1", "--tree", "2x2", "--temperature", "1", "--seed", "1", *RULE]


@pytest.fixture
def judged_by_theirs(folder, installed, tiny):
    """A capture of the rule of docs/python.md, and the rule's text."""
    page = (ROOT / "docs" / "python.md").read_text()
    (source,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "def typical" in block)
    (folder / "lenient.py").write_text(source)
    said(folder, installed, tiny, *SAMPLED)
    return source


def test_a_rule_of_ones_own_is_asked_again(folder, installed, tiny, judged_by_theirs):
    verify = "verify", "run.jsonl", *RULE
    asked = said(folder, installed, tiny, *verify, code=(0, 1))
    assert re.search(r"✓ accept probability +\d\d+ nodes\n", asked), asked
    (folder / "lenient.py").write_text(judged_by_theirs.replace("trial.p >", "trial.p + 1 >"))
    assert "--rule lenient:typical gives 1" in said(folder, installed, tiny, *verify, code=1)
    (folder / "lenient.py").write_text("def typical(trial):\n    return 2 * trial.p + 1\n")
    line = said(folder, installed, tiny, *verify, code=2)
    assert re.fullmatch(r"specscope: error: --rule lenient:typical returned .*lenient.py, line 1\)\n", line), line


@pytest.mark.slow
def test_a_rule_that_only_a_capture_names_is_never_imported(folder, installed, tiny, judged_by_theirs):
    (folder / "lenient.py").write_text((folder / "torch.py").read_text())
    (folder / "again.jsonl").write_bytes((folder / "run.jsonl").read_bytes())
    told = {}
    judges = ["verify", "diagnose", "diagnose --only audit", "diagnose --only locate", "report", "why", "export -o t"]
    for verb in (*judges, "tune", "tune --check", "compare again.jsonl"):
        told[verb] = said(folder, installed, tiny, *verb.split(), "run.jsonl", code=(0, 1, 2))
    assert "was not judged: verify --rule lenient:typical does" in " ".join(told["verify"].split())
    assert "somebody's own (lenient:typical)" in " ".join(told["report"].split())
    assert "was not judged: verify --rule lenient:typical does" in " ".join(told["diagnose"].split())
