"""Waiting for what happens. No bound here says how fast something is: only a hang reaches it, however busy the machine.

What takes how long is measured by `specscope bench`, and no test fails by a clock.
"""

import asyncio
import threading
import time
from concurrent.futures import Future

HANG_SECONDS = 120.0  # what the tests wait for comes in a few seconds, on a busy machine in some tens


def until(condition, meanwhile=None, says=""):
    """Wait until `condition()` is true, and give what it gave. `meanwhile`: what is called before each look."""
    end = time.monotonic() + HANG_SECONDS
    while True:
        if meanwhile is not None:
            meanwhile()
        if found := condition():
            return found
        assert time.monotonic() < end, f"this never came: {says() if callable(says) else says or condition}"
        time.sleep(0.01)


def wait_for(true, seconds=HANG_SECONDS):
    """Whether it becomes true in time. `seconds`: less than a hang's only where it must not become true."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(true())


async def comes(condition, says=""):
    """The same for `await condition()`, while the loop goes on."""
    async with asyncio.timeout(HANG_SECONDS):
        while not (found := await condition()):
            await asyncio.sleep(0.01)
    return found


def ends(call, *args):
    """What a call gives, which must come to an end: it runs in a thread, and is left there where it hangs."""
    result = Future()

    def run():
        try:
            result.set_result(call(*args))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result(HANG_SECONDS)
