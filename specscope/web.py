"""`specscope tui --web`: the screen in a browser, through textual-serve."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from specscope.errors import UserError

REMEDY = "pip install 'specscope[web]'"


def serve(command: Sequence[str], host: str, port: int) -> None:
    """Serve `specscope COMMAND` until Ctrl-C; each page that is opened runs its own. Raises UserError."""
    try:
        from textual_serve.server import Server
    except ImportError:
        raise UserError(f"the browser needs textual-serve: {REMEDY}") from None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    # -P: nothing in the folder where this runs shall stand for a package.
    line = shlex.join([sys.executable, "-P", "-m", "specscope.cli", *command])
    templates = Path(__file__).parent / "tui" / "web"  # textual-serve's own page asks another host for a font
    Server(line, host=host, port=port, title="specscope", templates_path=templates).serve()
