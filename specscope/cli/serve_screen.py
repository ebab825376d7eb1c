"""`specscope serve --screen`: the server in a process of its own, and the screen that listens to its spans here."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile

from specscope.cli.streams import need_terminal
from specscope.errors import UserError
from specscope.interrupt import ends_at_once, handled_by
from specscope.lifetime import Lifetime

GRACE_SECONDS = 10.0  # in addition to --shutdown-timeout, for what the server saves


def run_with_screen(lifetime: Lifetime, endpoint: str | None, shutdown: float) -> int:
    """Run the server with the same flags until the screen closes; returns its exit code. Raises UserError.

    0 where it was ended from here, also while it still loaded.
    """
    from specscope.debug.viewer import Viewer
    from specscope.remote.attached import Attached

    if endpoint is not None:
        raise UserError(
            "--screen has its own listener: leave out --otlp-endpoint, or use specscope watch --listen instead"
        )
    need_terminal("specscope serve without --screen")
    with ends_at_once():
        from specscope.tui.app import run_app

        attached = Attached("127.0.0.1", 0, 0)
    viewer = Viewer(control=attached)
    attached.viewer = viewer
    flags = [flag for flag in sys.argv[1:] if flag != "--screen"]
    flags += ["--otlp-endpoint", f"http://127.0.0.1:{attached.listening.grpc_port}", "--otlp-protocol", "grpc"]
    with tempfile.NamedTemporaryFile(prefix="specscope-serve-", suffix=".log", delete=False) as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "specscope", *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    lifetime.leave = process.terminate
    try:
        run_app(viewer, lifetime, title=f"specscope serve · log: {log.name}")
    finally:
        _end(process, shutdown)
        attached.close()
    print(f"the server's messages are in {log.name}")
    code = process.returncode
    return 0 if code in (-signal.SIGTERM, 128 + signal.SIGTERM) else code


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End the server as Ctrl-C does: requests finish. Another Ctrl-C does not wait for them; a last resort kills it."""
    process.terminate()
    with handled_by(lambda number: process.terminate()):
        try:
            process.wait(seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
