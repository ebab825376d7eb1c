"""Nothing outlives its terminal or its parent, captures stay whole; what others wrote reaches a terminal as text."""

import contextlib
import json
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import psutil
import pytest

from specscope.terminal import text_console
from specscope.trace.wire.reading import read_capture
from tests.processes import SPECSCOPE
from tests.support.commands import run_here
from tests.support.samples import PLANTED, TRACES
from tests.waiting import HANG_SECONDS, until
from tests.watch.samples import Page, text

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FLUSH_SECONDS = 30.0  # a line a half second, and the bus's tenth: more only where lines are held back
CACHED = (".json", ".nbi", ".nbc")  # figures of the machine, compiled kernels
WORKER = "multiprocessing.spawn"


@pytest.fixture(scope="module")
def model(tiny):
    return ["--target", tiny, "--dtype", "float32", "--kv-memory", "0.05", "--threads", "1", "--raw"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "many.txt"
    path.write_text("abc abc abc\n" * 500)
    return path


def endless(verb, prompts, output, model):
    file = [prompts] if verb == "capture" else ["--file", prompts]
    return [*SPECSCOPE, verb, *file, "-o", output, "--max-tokens", 400, "--ignore-eos", *model]


def running(path):
    return lambda: path.exists() and path.stat().st_size > 30_000


def whole(path):
    """The capture at `path`, in which every request has its end."""
    reader = read_capture(path)
    assert reader.warnings == []
    assert reader.history.steps
    assert all(request.end is not None for request in reader.history.requests.values())
    return reader.history


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["run", "capture"])
def test_a_terminal_that_is_closed_ends_what_make_started_in_it(terminal, model, prompts, tmp_path, verb):
    path = tmp_path / "run.jsonl"
    (tmp_path / "Makefile").write_text("demo:\n\t" + " ".join(map(str, endless(verb, prompts, path, model))) + "\n")
    make = terminal("make", "-C", tmp_path, "demo")
    make.wait_for(running(path))
    make.hang_up()
    assert make.left() == []
    assert "cancelled" in {request.state for request in whole(path).requests.values()}


@pytest.fixture
def watching():
    """A page of metrics, and a command without an engine that looks at it for ever."""
    with Page(text("metrics_before.txt"), text("metrics_after.txt")) as page:
        yield page, [*SPECSCOPE, "watch", page.url, "--interval", "0.1", "--headless"]


def test_a_parent_that_is_killed_ends_it(terminal, watching):
    page, command = watching
    shell = terminal("sh", "-c", " ".join(command) + "; true")
    shell.wait_for(lambda: page.served > 2)
    shell.remember()
    shell.process.kill()
    assert len(shell.family) > 1
    assert shell.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["capture", "run"])
def test_a_run_whose_parent_is_killed_leaves_a_whole_capture(terminal, model, prompts, tmp_path, verb):
    path = tmp_path / "run.jsonl"
    shell = terminal("sh", "-c", " ".join(map(str, endless(verb, prompts, path, model))) + "; true")
    shell.wait_for(running(path))
    shell.remember()
    shell.process.kill()
    assert shell.left() == []
    assert "cancelled" in {request.state for request in whole(path).requests.values()}  # it did not run to its end


@pytest.mark.parametrize(
    ("verb", "number"),
    [
        pytest.param(verb, number, marks=() if (verb, number) == ("capture", signal.SIGINT) else pytest.mark.slow)
        for verb in ("capture", "run")
        for number in ENDING
    ],
)
def test_ending_signals_leave_a_whole_capture(terminal, model, prompts, tmp_path, verb, number):
    path = tmp_path / "run.jsonl"
    child = terminal(*endless(verb, prompts, path, model))
    child.wait_for(running(path))
    child.remember()
    child.process.send_signal(number)
    assert (child.left(), child.process.wait(HANG_SECONDS)) == ([], 128 + number)
    assert "cancelled" in {request.state for request in whole(path).requests.values()}
    assert b"Traceback" not in child.screen
    if verb == "capture" and number == signal.SIGINT:
        assert b"interrupted; captured" in child.screen
    if verb == "run":
        for mode in (b"1049", b"1003"):  # the terminal is restored: its screen, and where the mouse goes
            assert child.screen.rindex(b"\x1b[?%bl" % mode) > child.screen.rindex(b"\x1b[?%bh" % mode)


def test_a_screen_that_is_left_while_the_engine_runs_counts_what_the_capture_has(terminal, model, prompts, tmp_path):
    path = tmp_path / "run.jsonl"
    child = terminal(*endless("run", prompts, path, model))
    child.wait_for(running(path))
    leaves(child, "q")
    acceptance = whole(path).acceptance
    said = re.search(rb"captured ([\d,]+) decode steps, ([\d,]+) tokens", child.screen)
    assert [int(number.replace(b",", b"")) for number in said.groups()] == [acceptance.steps, acceptance.emitted]


def test_ctrl_c_among_the_imports_ends_without_a_traceback():
    code = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from specscope.interrupt import program
program()
"""
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


STUCK = """
import sys, threading
from specscope.__main__ import entry
from specscope.engine.phases import Phases

def forward(self, now, real=Phases.forward, calls=[]):
    real(self, now)
    calls.append(now)
    if len(calls) > 5:
        print("stuck", flush=True)
        threading.Event().wait({seconds})

Phases.forward = forward
entry()
"""


@pytest.mark.parametrize("verb", ["capture", pytest.param("serve", marks=pytest.mark.slow)])
def test_a_step_that_outlasts_the_grace_leaves_a_whole_capture(terminal, model, prompts, tmp_path, verb):
    """As on a busy machine: the engine cannot end its requests any more."""
    path, script = tmp_path / "run.jsonl", STUCK.format(seconds=10 * HANG_SECONDS)
    command = endless("capture", prompts, path, model)[3:]
    if verb == "serve":
        command = ["serve", "--port", "0", "-o", path, *model[:-1]]
    child = terminal(sys.executable, "-c", script, *command)
    if verb == "serve":
        child.wait_for(lambda: b" on http://" in child.screen)
        url = child.screen.decode().split(" on ")[1].split()[0]
        asked = {"json": {"prompt": "abcabc", "ignore_eos": True, "max_tokens": 400}, "timeout": HANG_SECONDS}
        threading.Thread(target=post, args=(url + "/v1/completions", asked), daemon=True).start()
    child.wait_for(lambda: b"stuck" in child.screen)
    child.hang_up()
    assert child.left() == []
    assert {request.state for request in whole(path).requests.values()} == {"cancelled"}


def post(url, asked):
    with contextlib.suppress(httpx2.HTTPError):  # the server ends meanwhile
        httpx2.post(url, **asked)


@pytest.mark.slow
def test_nohup_outlives_its_terminal(terminal, model, tmp_path):
    prompts, path, log = tmp_path / "few.txt", tmp_path / "run.jsonl", tmp_path / "log"
    prompts.write_text("abc abc abc\n" * 60)
    command = " ".join(map(str, endless("capture", prompts, path, model)))
    shell = terminal("sh", "-c", f"nohup {command} > {log} 2>&1 < /dev/null")
    shell.wait_for(running(path))
    shell.hang_up()
    assert shell.left() == []
    assert {request.state for request in whole(path).requests.values()} == {"length"}


@pytest.mark.every(5)
@pytest.mark.parametrize("how", ["q", "\x03", *ENDING])
def test_whoever_leaves_while_the_model_loads_leaves_well(terminal, model, prompts, tmp_path, how):
    """Issue 43: q was an error, "the engine's process ended with code None"."""
    child = terminal(*endless("run", prompts, tmp_path / "run.jsonl", model))
    child.wait_for(lambda: b"loading" in child.screen or b"starting" in child.screen)
    leaves(child, how)
    assert child.screen.rindex(b"\x1b[?1049l") > child.screen.rindex(b"\x1b[?1049h")  # the terminal is restored
    assert not (tmp_path / "run.jsonl").exists()


def leaves(child, how):
    """By a key or a signal."""
    child.remember()
    if isinstance(how, str):
        child.type(how)
    else:
        child.process.send_signal(how)
    assert child.left() == []
    killed = -how if how == signal.SIGKILL else 0 if isinstance(how, str) else 128 + how
    assert child.process.wait(HANG_SECONDS) == killed, child.screen
    assert b"specscope: error" not in child.screen


def test_what_loads_ends_with_its_parent_and_with_its_screen(terminal, model, prompts, tmp_path):
    child = terminal(*endless("run", prompts, tmp_path / "run.jsonl", model))
    child.wait_for(lambda: child.find(WORKER))
    leaves(child, signal.SIGKILL)
    child = terminal(*SPECSCOPE, "serve", "--screen", "--port", 0, *model[:-1])
    child.wait_for(lambda: b"its output" in child.screen)
    leaves(child, "q")


FATAL = [signal.SIGKILL, signal.SIGQUIT, signal.SIGABRT]
DEEDS = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, *FATAL]


def kill_somewhere(terminal, chance, verb, command, path, deed, **variables):
    """Start a command, do something terrible to it at a random moment, and see what is left."""
    child = terminal(*command, **variables)
    if chance.random() < 0.3 or path is None:  # anywhere in its start
        computed, share = psutil.Process(child.process.pid), chance.uniform(0.05, 1)
        child.wait_for(lambda: computed.cpu_times().user > share)
    else:
        size = chance.randint(20_000, 500_000)
        child.wait_for(lambda: path.exists() and path.stat().st_size > size)
    child.remember()
    at, below = time.time(), child.descendants()
    if deed == "hang up":
        child.hang_up()
    elif deed == "below" and below:
        victim, number = chance.choice(below), chance.choice(DEEDS)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(number)
            if number in FATAL:
                until(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE)
        child.process.send_signal(signal.SIGTERM)  # the screen stays where its worker died: it is left by hand
    else:
        child.process.send_signal(signal.SIGTERM if deed == "below" else deed)
    what = f"{verb} after {deed!r}: {child.screen[-400:]!r}"
    assert child.left() == [], what
    pids = {str(member.pid) for member in child.family}
    assert [name for name in Path("/dev/shm").glob("*") if pids & set(re.findall(r"\d+", name.name))] == [], what
    if path is None or not path.exists() or not path.stat().st_size:
        return
    reader = read_capture(path)
    steps = reader.history.steps
    assert [step.step for step in steps] == list(range(len(steps))), what
    if deed in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, "hang up"):
        assert all(request.end is not None for request in reader.history.requests.values()), what
    elif steps and deed != "below" and not all(r.end for r in reader.history.requests.values()):
        assert at - steps[-1].end_ns / 1e9 < FLUSH_SECONDS, what


def kill_often(terminal, model, prompts, tmp_path, times, seed, deed=None, **variables):
    chance = random.Random(seed)
    for time_ in range(times):
        verb = chance.choice(("run", "capture", "watch") if deed is None else ("run", "capture"))
        path = None if verb == "watch" else tmp_path / f"{time_}.jsonl"
        listening = [*SPECSCOPE, "watch", "--listen", "127.0.0.1:0"]
        command = listening if path is None else endless(verb, prompts, path, model)
        deeds = [*DEEDS, signal.SIGSEGV, signal.SIGUSR1, signal.SIGALRM, "hang up", "below"]
        kill_somewhere(terminal, chance, verb, command, path, deed or chance.choice(deeds), **variables)


@pytest.mark.slow
def test_killed_at_random(terminal, model, prompts, tmp_path):
    kill_often(terminal, model, prompts, tmp_path, 6, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [*ENDING, signal.SIGKILL])
def test_killed_by_each_signal_it_leaves_no_file_but_its_capture(terminal, model, prompts, tmp_path, number):
    """25 times each: nothing runs on, nothing is left in shared memory, among temporary files or in the cache."""
    left, cache = tmp_path / "tmp", tmp_path / "cache"
    left.mkdir()
    places = {"TMPDIR": str(left), "XDG_CACHE_HOME": str(cache)}
    kill_often(terminal, model, prompts, tmp_path, 25, 3, number, **places)
    assert [name for name in left.rglob("*") if name.is_file()] == []
    assert [name for name in cache.rglob("*") if name.is_file() and name.suffix not in CACHED] == []


def test_what_is_started_in_the_background_ends_with_its_shell(watching):
    """A process without any terminal, whose parent dies after it has begun: before, nobody knows whose child it is."""
    script = """if True:
        import os, subprocess, sys
        nothing = subprocess.DEVNULL
        print(subprocess.Popen(sys.argv[1:], stdin=nothing, stdout=nothing, stderr=nothing).pid, flush=True)
        input()
        os._exit(0)"""
    page, command = watching
    shell = subprocess.Popen(
        [sys.executable, "-c", script, *command],
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    child = psutil.Process(int(shell.stdout.readline()))
    until(lambda: page.served > 2)
    shell.communicate("\n", timeout=HANG_SECONDS)
    with contextlib.suppress(psutil.NoSuchProcess):  # where nobody reaps orphans it stays as a zombie
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


SCRIPT = """
import os, signal, threading
from specscope.interrupt import ends_at_once
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started with
with ends_at_once():
    try:
        os.kill(os.getpid(), {number})
    except BaseException:
        pass
    {more}
print("went on")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("more", ["pass", "threading.Event().wait()"], ids=["soon", "late"])
def test_a_signal_that_was_dropped_ends_it_all_the_same(number, more):
    script = SCRIPT.format(number=int(number), more=more)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert "went on" not in done.stdout
    assert done.returncode in (128 + number, -number, 130)


STARTS = """
import multiprocessing, os, signal
from specscope.interrupt import ignore_terminal

def work(pipe):
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
    pipe.send("alive")

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(theirs,), daemon=True)
    try:
        with ignore_terminal():
            os.kill(os.getpid(), {number})
            child.start()
    except BaseException as error:
        print(type(error).__name__, "after the child was" if child.pid else "before")
    print(ours.recv())
"""


def test_a_signal_while_a_process_is_started_is_the_parents_and_is_not_lost(tmp_path):
    """Issue 11: Ctrl-C in that moment was dropped, and the screen ran on."""
    script = tmp_path / "starts.py"
    script.write_text(STARTS.format(number=int(signal.SIGINT)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.stdout.splitlines() == ["KeyboardInterrupt after the child was", "alive"], done.stderr


ODD = "r0'; touch X; '\x1b]0;gone\x07\r\u202e[/b] $(touch X)"
VERBS = [
    ["report"],
    ["verify"],
    ["diagnose", "--no-audit"],
    ["why"],
    ["diagnose", "--only", "audit"],
    ["tune", "--no-costs"],
    ["compare", PLANTED],
    ["debug", "--commands", "COMMANDS"],
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The faulty capture, whose first request's client chose its id; what a debugger is told over it."""
    folder = tmp_path_factory.mktemp("hostile")
    path, commands = folder / "it's $(touch X) \x1b[7m.jsonl", folder / "commands"
    text = (TRACES / "planted.jsonl").read_text().replace('"r0"', json.dumps(ODD))
    text = text.replace('emitted","value":{"intValue":"1"', 'emitted","value":{"intValue":"0"', 1)  # not consistent
    path.write_text(text.replace('"fox', json.dumps("\x1b[2J fox")[:-1]))
    commands.write_text("info requests\ngoto 3\ninfo request\ntree\nnode 0\nwhy\nwhere\n")
    return path, commands


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_an_id_and_a_name_are_plain_text_everywhere_and_a_command_that_is_suggested_is_one_command(words, hostile):
    path, commands = hostile
    _, out, err = run_here([str(commands) if word == "COMMANDS" else word for word in words] + [str(path)])
    for line in (out + err).splitlines():
        assert line.isprintable()
    assert "internal error" not in err
    assert out or "audit" in words  # which asks for a model
    found = [line[line.index("specscope ") :] for line in out.splitlines() if "specscope " in line and "touch" in line]
    assert found or words[0] not in ("verify", "diagnose", "why") or "audit" in words
    for command in found:
        name, _, *words = shlex.split(command)
        assert name == "specscope"
        (place,) = words
        assert place.partition("#")[0] == str(path.parent) + "/it's $(touch X) \\x1b[7m.jsonl"


@pytest.mark.parametrize("words", [["verify"], ["compare", PLANTED]], ids=lambda words: words[0])
def test_a_path_is_never_markup(terminal, words, tmp_path):
    """Nor a template of a bar."""
    folder = tmp_path / "a["
    folder.mkdir()
    odd, plain = folder / "b].{0}jsonl", tmp_path / "plain.jsonl"
    for path in (odd, plain):
        shutil.copy(TRACES / "ngram.jsonl", path)
    expected, ended = run_here([*words, str(plain)])[0], run_here([*words, str(odd)])
    assert ended[0] == expected, ended
    shown = terminal(*SPECSCOPE, *words, odd)
    assert shown.process.wait(HANG_SECONDS) == expected, shown.screen


def test_a_capture_to_such_a_path_ends_well(tiny, tmp_path):
    folder = tmp_path / "a["
    folder.mkdir()
    model = ["--target", str(tiny), "--dtype", "float32", "--kv-memory", "0.01", "--threads", "1"]
    code, _, err = run_here(
        ["capture", "abc abc", "-o", str(folder / "b].jsonl"), "--max-tokens", "3", "--raw", *model]
    )
    assert code == 0, err
    assert "a[/b].jsonl" in err


def test_a_console_prints_no_markup_and_no_control_characters(capsys):
    console = text_console()
    console.print("[bold]a[/b]\x1b[31m\x07", highlight=False)
    console.print("two\nlines", highlight=False)
    assert capsys.readouterr().out == "[bold]a[/b]\\x1b[31m\ntwo\nlines\n"


def test_what_listens_on_a_debugger_s_socket_moves_no_cursor(tmp_path):
    path, commands = tmp_path / "s", tmp_path / "commands"
    commands.write_text("info requests\n")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()

    def answer():
        client, _ = listening.accept()
        with client, client.makefile("rb") as lines:
            for _ in range(2):
                client.sendall(json.dumps({"text": "one\n\x1b]52;c;eA==\x07two"}).encode() + b"\n")
                lines.readline()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    code, out, err = run_here(["debug", str(path), "--commands", str(commands)])
    listening.close()
    assert code == 0, err
    assert out.count("one\n\\x1b]52;c;eA==\\x07two") == 2
    assert "\x1b" not in out + err
