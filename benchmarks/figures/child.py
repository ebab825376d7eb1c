"""What `python -m benchmarks figures` starts to measure a checkout, which is in PYTHONPATH: `python -P child.py ...`.

With words, it runs them as a command and prints what that took. It is small: a process that starts another passes its
own peak memory on to it.

Without, it holds an engine. The first line it reads is the engine's settings; it answers what starting it took. Each
further line is work, {"batches": [[[1, 2]]], "tokens": 48}: the batches one after the other, so many tokens a prompt.
It uses only what every checkout offers to everyone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def run_command(command: list[str]) -> None:
    """Print [its exit code, what it took] as JSON; its own output is dropped."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    took = {"wall_s": time.perf_counter() - began, "processor_s": used.ru_utime + used.ru_stime}
    print(json.dumps([os.waitstatus_to_exitcode(status), took | {"peak_mb": used.ru_maxrss * 1024 / 1e6}]))


def hold_engine() -> None:
    """Start the engine, then work until there is no more."""
    settings = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what is printed is no answer
    began = time.perf_counter()
    from specscope import Engine, SamplingParams

    engine = Engine(**settings)
    took = {"wall_s": time.perf_counter() - began, "processor_s": time.process_time()}
    answers.write(json.dumps(took | memory()) + "\n")
    for line in sys.stdin:
        work = json.loads(line)
        params = SamplingParams(max_tokens=work["tokens"], ignore_eos=True)
        before = time.process_time()
        made = sum(len(one.token_ids) for batch in work["batches"] for one in engine.generate(batch, params))
        answers.write(json.dumps({"tokens": made, "processor_s": time.process_time() - before}) + "\n")


def memory() -> dict[str, float]:
    """Of this process, now and at most."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {"memory_mb": status["VmRSS"], "peak_mb": status["VmHWM"]}
    return {name: int(value.split()[0]) * 1024 / 1e6 for name, value in kib.items()}


if __name__ == "__main__":
    if sys.argv[1:]:
        run_command(sys.argv[1:])
    else:
        hold_engine()
