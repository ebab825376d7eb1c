"""What fuzzing and damaged captures have in common: a command in this process, and what must never come of it."""

import json
import os
import re
import signal

from tests.support.commands import run_here

FULL = "SPECSCOPE_SWEEP"  # how many cases of each sweep; without it, so many that the slow tests stay short
SECONDS = 60  # after which a command hangs
FLAGS = re.compile(r"\(see specscope[\w -]* --help\)\n$|^specscope: error: --")  # about a flag that cannot be read
WITH_JSON = ("report", "verify", "diagnose", "compare", "why", "tune", "doctor")
# What could move a cursor, colour what follows or turn a line: nothing of it may come from a capture
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def cases(usual: int) -> int:
    """How many to run."""
    return int(os.environ.get(FULL, usual))


def hangs(*_):
    """What an alarm does."""
    raise TimeoutError("it hangs")


def wrong_with(words: list[str]) -> str:
    """Run a command; what is wrong with how it ended, "" for nothing."""
    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        code, out, err = run_here(words)
    except BaseException as error:
        return f"{words}: it raised {error!r}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    said = f"{words}: exit {code}: {err[-300:]!r}"
    if code not in (0, 1, 2):
        return said
    if "Traceback" in out + err or "internal error" in err:
        return said
    if code == 2 and not err.strip() and not out.strip():
        return f"{said}: silence"
    if RAW.search(err) or RAW.search(out):
        return f"{said}: raw control characters in {(out + err)[:200]!r}"
    return (
        f"{said}: {wrong}"
        if words[0] in WITH_JSON and "--json" in words and (wrong := _wrong_json(code, out, err))
        else ""
    )


def _wrong_json(code: int, out: str, err: str) -> str:
    """Flags that cannot be read print no JSON; all else does, with the exit code in it."""
    if not out and FLAGS.search(err):
        return ""
    try:
        told = json.loads(out)
    except ValueError:
        return f"no JSON: {out[:100]!r}"
    return "" if told["exit"] == code else f"it exits with {code}, and says {told['exit']}"
