"""`specscope debug` as it is run: by a script, over a recording, interrupted, and with lines that cannot be obeyed."""

import os
import signal
import subprocess
import sys

import psutil

from tests.support.commands import specscope
from tests.support.samples import PLANTED
from tests.waiting import HANG_SECONDS, until


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
    assert ran.returncode == 2
    assert ran.stdout.splitlines()[-2:] == ["(specscope) print step", "0"]
    first, second, last = ran.stderr.splitlines()
    assert "line 2: there is no field pp here" in first
    assert "line 3: unknown command 'nonsense'" in second
    assert last.endswith("script: 2 commands failed, the first in line 2")


def test_ctrl_c_stops_a_live_run_between_two_steps(tiny):
    command = ["debug", "abcabcabc", "--target", str(tiny), "--raw", "--drafter", "none", "--max-tokens", "480"]
    process = subprocess.Popen(
        [sys.executable, "-m", "specscope", *command, "--ignore-eos", "--kv-memory", "0.05"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    process.stdin.write("next\ncontinue\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert "step 0" in line
    computed = psutil.Process(process.pid).cpu_times
    before = computed().user
    until(lambda: computed().user > before + 0.1)  # it has gone on
    process.send_signal(signal.SIGINT)
    process.stdin.write("info requests\nreverse-next\nnext\n")
    out, error = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, error
    assert "interrupted" in out or "nothing is left" in out
    assert "r0" in out
    assert "Traceback" not in error
