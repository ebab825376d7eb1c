"""`specscope debug` as it is run: by a script, over a recording, interrupted, and with lines that cannot be obeyed."""

import os
import signal

from specscope.engine.phases import Phases
from tests.support.commands import specscope
from tests.support.samples import PLANTED


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
