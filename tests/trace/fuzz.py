"""Damaged captures under everything that looks at one: `python -m tests.trace.fuzz FOLDER FIRST LAST`.

In a process of its own with a bound on memory and an alarm for each case, so that a hang or growth is a failure and not
a dead machine. Prints a JSON line for each case that went wrong, and how many were shown.
"""

import contextlib
import io
import json
import resource
import signal
import sys
import traceback
from pathlib import Path

from specscope.errors import UserError
from tests.trace.damage import SAMPLES, damaged, small
from tests.trace.look_at import look_at

SECONDS = 5  # a case
GROWTH = 1500 * 2**20  # bytes of address space beyond what the first, whole capture took


def main(folder: str, first: int, last: int) -> None:
    """Cases by their seeds."""
    lines = [small(name) for name in SAMPLES]
    path = Path(folder) / "damaged.jsonl"
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines[0]))
    shown = int(look_at(path, page=True) > 0)
    assert shown, "a whole capture shows steps"
    bound = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + GROWTH
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    signal.signal(signal.SIGALRM, _hangs)
    for seed in range(first, last):
        path.write_bytes(damaged(lines[seed % len(lines)], seed))
        signal.alarm(SECONDS)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                shown += look_at(path, page=seed % 50 == 0) > 0
        except UserError as error:
            if len(str(error).splitlines()) != 1:
                print(json.dumps({"seed": seed, "error": f"not one line: {error}"}))
        except BaseException as error:  # that it comes out at all is the failure
            where = traceback.extract_tb(error.__traceback__)[-4:]
            text = f"{type(error).__name__}: {error} at {[f'{at.filename}:{at.lineno}' for at in where]}"
            print(json.dumps({"seed": seed, "error": text}))
        finally:
            signal.alarm(0)
    print(json.dumps({"shown": shown}))


def _hangs(*_: object) -> None:
    raise TimeoutError(f"longer than {SECONDS} s")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
