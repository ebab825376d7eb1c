"""Bad input of every kind gets one clear line and exit code 2, at once, and costs nobody a file.

What is no value of a kind is tested where it is read, in test_fuzzing.py: here, that each flag has its reader.
"""

import contextlib
import hashlib
import os
import resource
import subprocess
import sys

import click
import pytest

from specscope.cli import export
from specscope.cli import main as cli
from specscope.cli.options import Number
from specscope.errors import UserError
from specscope.trace import files
from tests import bad_inputs as bad
from tests.bad_inputs import Case
from tests.support.commands import run_apart, run_here
from tests.support.samples import PLANTED
from tests.waiting import HANG_SECONDS

MEGABYTES = 1000


def lay_out(case, folder):
    """The case's files in a folder, with links, a pipe and a loop beside them."""
    for name, content in case.files.items():
        (folder / name).write_bytes(content)
    (folder / "sub").mkdir()
    (folder / "sub" / "kept").write_text("kept")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("gone")
    os.mkfifo(folder / "pipe")
    for name, link in (("good.txt", ""), ("c.jsonl", "-c")):
        if name in case.files:
            (folder / f"soft{link}").symlink_to(name)
            (folder / f"soft2{link}").symlink_to(folder / f"soft{link}")
            (folder / f"hard{link}").hardlink_to(folder / name)


def contents(folder):
    """Every file's name and content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        is_file = path.is_file() and not path.is_fifo()
        found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""
    return found


def complaint(case, folder, run=run_here):
    """What is wrong with how a case ends. Right: refused in one line, within memory, and no file is changed or left."""
    folder.mkdir(parents=True)
    lay_out(case, folder)
    before = contents(folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.chdir(folder):
        code, out, err = run(case.words)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    right = {
        "exit code": code == 2,
        "one line": err.startswith("specscope: error: ") and err.count("\n") == 1 and len(err) < 700,
        "what it says": case.says in err,
        "refused, and not later": "no model at ./nothing" not in err,
        "memory": grown < MEGABYTES,
        "files": contents(folder) == before,
    }
    wrong = [name for name, is_right in right.items() if not is_right]
    return f"{ascii(case)[:300]}: {', '.join(wrong)}: {code}, {out[-300:]!r}, {err[-700:]!r}" if wrong else None


def complaints(cases, folder, run=run_here):
    found = [complaint(case, folder / str(number), run) for number, case in enumerate(cases)]
    return [text for text in found if text]


VERBS = cli.cli.commands
READ = {**bad.read(), **{f"over no capture: {verb}": cases for verb, cases in bad.judged().items()}}
READ |= {f"output: {kind}": cases for kind, cases in bad.outputs().items()}


@pytest.fixture
def impatient(monkeypatch):
    """A pipe without a writer is waited for, and for less than people wait."""
    monkeypatch.setattr(files, "PATIENCE", 0.05)


@pytest.mark.every(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", READ)
def test_what_is_read_is_refused_by_its_reader(kind, tmp_path, impatient):
    assert complaints(READ[kind], tmp_path) == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_flag_has_a_reader_that_refuses(verb, tmp_path):
    """A number that is none, and a choice that is none; no flag is read by click's own readers of numbers."""
    cases = []
    for option in VERBS[verb].params:
        assert not isinstance(option.type, (click.types.IntParamType, click.types.FloatParamType)), option
        if isinstance(option.type, (Number, click.Choice)):
            flag = max(option.opts, key=len)
            cases += [Case((verb, f"{flag}={text}"), says=flag) for text in ("", "1_0")]
    assert complaints(cases, tmp_path) == []


@pytest.mark.parametrize("verb", bad.BOUNDS)
def test_every_flag_has_its_bounds(verb):
    options = {flag: option for option in VERBS[verb].params for flag in option.opts}
    for flag, values in bad.BOUNDS[verb].items():
        for value in values:
            with pytest.raises(UserError, match=f"^{flag} must be .*, not "):
                options[flag].type.convert(value, options[flag], None)


def test_so_it_is_for_people(tmp_path):
    """In a process of its own: a flag, bytes that are no text, a file, an output."""
    chosen = [
        next(case for case in READ["trees"] if "\udcff" in "".join(case.words)),
        *(READ[kind][3] for kind in ("costs", "output: figures")),
    ]
    assert complaints(chosen, tmp_path, run_apart) == []


def shell(line, folder):
    """A line of shell, in which $S is the command."""
    env = {**os.environ, "S": f"{sys.executable} -m specscope", "T": PLANTED}
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=env, cwd=folder, timeout=HANG_SECONDS, check=False
    )


PRINTS = ["tree 3x4", "report $T", "compare $T $T --json", "debug $T --commands script"]  # each writes otherwise


@pytest.mark.every(2)
@pytest.mark.parametrize("words", PRINTS)
def test_output_that_cannot_be_written_is_said(words, tmp_path):
    (tmp_path / "script").write_text("next\nwhere\n")
    for where in ("> /dev/full", ">&-"):
        done = shell(f"$S {words} {where}", tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("specscope: error: cannot write to standard output: ")
        assert done.stderr.count("\n") == 1


@pytest.mark.every(2)
@pytest.mark.parametrize("words", PRINTS)
def test_a_reader_that_goes_is_no_error(words, tmp_path):
    (tmp_path / "script").write_text("next\nwhere\n" * 500)
    done = shell(f"set -o pipefail; $S {words} | true", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.every(3)
@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full", "2>&- <&-"])
def test_without_a_standard_error_the_exit_code_tells(where, tmp_path):
    done = shell(f"$S tree x {where}", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    done = shell(f"$S export $T -o page.html {where}", tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "page.html").read_text().endswith("</html>\n")


def test_an_unexpected_error_is_one_line_and_its_traceback_is_for_who_asks(monkeypatch):
    monkeypatch.setattr(export, "check_output", lambda *_: 1 // 0)
    words = ["export", PLANTED, "-o", "x.html"]
    code, _, err = run_here(words)
    assert code == 70
    assert err.startswith("specscope: internal error: ZeroDivisionError: ")
    assert err.count("\n") == 1
    monkeypatch.setenv("SPECSCOPE_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in run_here(words)[2]


def test_ctrl_c_is_130(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "check_output", interrupt)
    assert run_here(["export", PLANTED, "-o", "x.html"]) == (130, "", "")
