"""Bad input of every kind gets one clear line and exit code 2, at once, and costs nobody a file."""

import contextlib
import hashlib
import io
import json
import os
import resource
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specscope import __main__ as program
from specscope.cli import main as cli
from specscope.cli.debug import over_capture
from specscope.cli.options import checked_endpoint
from specscope.debug.events import EventKind, types_of
from specscope.engine.prompt_rows import parse_row
from specscope.errors import UserError
from specscope.remote.attached import checked_address
from specscope.trace.history.expressions import Expression
from specscope.trace.plan import parse_plan
from specscope.trace.record.params import PARAM_NAMES, SamplingParams
from specscope.tui.keys import ACTIONS
from specscope.tui.settings import read_settings
from tests import bad_inputs
from tests.bad_inputs import CASES, PLANTED
from tests.waiting import HANG_SECONDS

MEGABYTES = 1000
EVERY = 3  # the ordinary run takes each third case of a kind, and `slow` all
GENERATED = 200  # of three kinds each


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


def run_here(words):
    """(exit code, stdout, stderr) of the command in this process."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["specscope", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            program.main()
    finally:
        sys.argv = before
    return ended.value.code, out.getvalue(), err.getvalue()


def run_apart(words):
    """The same in a process of its own, as people run it."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "specscope", *words], capture_output=True, env=env, timeout=HANG_SECONDS, check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def check(case, folder, run=run_here, codes=(2,)):
    """Refused in one line, within memory, and no file is changed, lost or left. What hangs is ended by its limit."""
    lay_out(case, folder)
    before = contents(folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.chdir(folder):
        code, out, err = run(case.words)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    assert code in codes, (case, code, out, err)
    assert "Traceback" not in err
    if code == 0:
        assert err == ""
    else:
        assert err.startswith("specscope: error: "), err
        assert err.count("\n") == 1, err
        assert len(err) < 700
        assert case.says in err
        assert codes != (2,) or "no model at ./nothing" not in err, f"this was accepted: {case}"
    assert grown < MEGABYTES
    assert contents(folder) == before


def sampled():
    """Each third case of every kind, and the first of each."""
    seen = {}
    for case in CASES:
        at = seen[case.kind] = seen.get(case.kind, -1) + 1
        if at % EVERY == 0:
            yield case


@pytest.mark.parametrize("case", sampled(), ids=str)
def test_bad_input_is_one_line(case, tmp_path):
    check(case, tmp_path)


@pytest.mark.every(4)
@pytest.mark.parametrize("case", {case.kind: case for case in CASES}.values(), ids=str)
def test_so_it_is_for_people(case, tmp_path):
    if any("\0" in word for word in case.words):
        pytest.skip("no argument holds a NUL byte")
    check(case, tmp_path, run_apart)


@pytest.mark.parametrize("text", bad_inputs.settings(), ids=lambda text: ascii(text[:30]))
def test_settings_are_refused(text, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        read_settings(ACTIONS, path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_all_bad_input_is_one_line(tmp_path):
    cases = [(case, (2,)) for case in CASES] + [(case, (0, 2)) for case in bad_inputs.generated(GENERATED)]
    assert len(cases) + len(bad_inputs.settings()) > 1500
    failed = []
    for number, (case, codes) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            check(case, folder, codes=codes)
        except AssertionError as error:
            failed.append(f"{case}: {error}")
    assert not failed, "\n".join(failed)


# The parsers: whatever the text, an answer or a UserError of one line.


def refused_in_one_line(parse, *values):
    try:
        return parse(*values)
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 3000
    return None


odd_text = st.text(st.characters(), max_size=60)
tree_text = st.one_of(odd_text, st.text("0123456789x,()[] -:=dynamictopsled", max_size=40))
words = st.sampled_from(
    ["p", "q", "depth", "text", "kind", "'a'", "1", "0.5", "<", "==", "and", "not", "+", "*", "(", ")", "if", "else"]
)
condition_text = st.one_of(odd_text, st.lists(words, max_size=12).map(" ".join))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | odd_text,
    lambda x: st.lists(x) | st.dictionaries(odd_text, x),
    max_leaves=8,
)


@given(tree_text)
@example("[(0,), (0, 0)]" * 99)
def test_any_tree_string(text):
    refused_in_one_line(parse_plan, text)


@given(condition_text, st.sampled_from(EventKind))
@example("0\n0", EventKind.STEP)
def test_any_condition(text, kind):
    names = types_of(kind)
    expression = refused_in_one_line(Expression, text, names)
    if expression is not None:
        some = {name: kind() for name, kind in names.items()}
        assert expression(some) in (True, False)
        assert expression(dict.fromkeys(names)) in (True, False)


@given(st.dictionaries(st.sampled_from([*sorted(PARAM_NAMES), "prompt", "messages", "label"]), json_values, max_size=4))
def test_any_json_line(values):
    row = refused_in_one_line(parse_row, json.dumps(values).encode())
    if row is not None:
        params = SamplingParams.from_dict({**SamplingParams().to_dict(), **row.given})
        json.dumps(params.to_dict()).encode()
        assert SamplingParams.from_dict(params.to_dict()) == params


@given(odd_text)
def test_any_line_of_a_prompt_file(text):
    refused_in_one_line(parse_row, text.encode(errors="surrogatepass"))


@given(odd_text | st.text("htps:/[]0123456789.x@", max_size=30))
def test_any_address_and_endpoint(text):
    refused_in_one_line(checked_address, text, "--listen")
    refused_in_one_line(checked_endpoint, text, "--otlp-endpoint")


@pytest.fixture(scope="module")
def recording():
    return over_capture(PLANTED)


names = st.sampled_from(
    ["break", "tbreak", "watch", "until", "goto", "next", "step", "print", "commands", "ignore", "node", "info"]
)
names |= st.sampled_from(
    ["continue", "reverse-next", "reverse-step", "reverse-continue", "finish", "request", "tree", "where", "check"]
)
rest = st.lists(
    st.sampled_from(
        ["reject", "step", "if", "p", ">", "0.5", "1", "2", "3", "r0", "99", "x", ";", "goto 0", "continue", "@", ","]
    )
    | odd_text,
    max_size=6,
).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(names, rest).map(" ".join), max_size=12))
@example(["break reject 0\n0"])
def test_any_session_over_a_recording(lines):
    commands = over_capture(PLANTED)
    for line in lines:
        refused_in_one_line(commands.run, line)


def test_commands_that_trigger_themselves_have_an_end(tmp_path):
    script = tmp_path / "script"
    script.write_text("break reject\ncommands 1 goto 0; continue\ncontinue\nwhere\n")
    code, out, err = run_here(["debug", "--over", PLANTED, "--commands", str(script)])
    assert (code, err) == (0, "")
    assert "breakpoints have run 10,000 commands without an end" in out
    assert out.splitlines()[-2].startswith("step 3 ")


def shell(line, folder):
    """A line of shell, in which $S is the command."""
    env = {**os.environ, "S": f"{sys.executable} -m specscope", "T": PLANTED}
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=env, cwd=folder, timeout=HANG_SECONDS, check=False
    )


PRINTS = [
    "tree 3x4",
    "report $T",
    "report $T --json",
    "compare $T $T --json",
    "--help",
    "doctor",
    "debug --over $T --commands script",
]


@pytest.mark.every(2)
@pytest.mark.parametrize("words", PRINTS)
def test_output_that_cannot_be_written_is_said(words, tmp_path):
    (tmp_path / "script").write_text("next\nwhere\n")
    for where in ("> /dev/full", ">&-"):
        done = shell(f"$S {words} {where}", tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("specscope: error: cannot write to standard output: ")
        assert done.stderr.count("\n") == 1


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
    done = shell(f"$S report $T --html page.html {where}", tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "page.html").read_text().endswith("</html>")


def test_an_unexpected_error_is_one_line_and_its_traceback_is_for_who_asks(monkeypatch):
    monkeypatch.setattr(cli, "check_output", lambda *_: 1 // 0)
    words = ["report", PLANTED, "--html", "x"]
    code, _, err = run_here(words)
    assert code == 70
    assert err.startswith("specscope: internal error: ZeroDivisionError: ")
    assert err.count("\n") == 1
    monkeypatch.setenv("SPECSCOPE_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in run_here(words)[2]


def test_ctrl_c_is_130(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "check_output", interrupt)
    assert run_here(["report", PLANTED, "--html", "x"]) == (130, "", "")
