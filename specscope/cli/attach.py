"""`specscope tui --listen`: the screen for engines elsewhere."""

from __future__ import annotations

from specscope.cli.streams import need_terminal
from specscope.debug.viewer import Viewer
from specscope.errors import UserError
from specscope.interrupt import ends_at_once
from specscope.lifetime import Lifetime
from specscope.remote.attached import Attached, checked_address


def run_attached(address: str, http_port: int | None, lifetime: Lifetime) -> None:
    """Listen on HOST:PORT for gRPC, and on `http_port` (None: the port after it) for HTTP, and show what comes."""
    host, port = checked_address(address, "--listen")
    if http_port is None and port == 65535:
        raise UserError(f"--listen {address}: there is no next port for HTTP: give --http-port too")
    need_terminal(f"specscope tui --web --listen {address}")
    with ends_at_once():
        from specscope.tui.app import run_app

        attached = Attached(host, port, http_port if http_port is not None else (port + 1 if port else 0))
    viewer = Viewer(control=attached)
    attached.viewer = viewer
    try:
        run_app(viewer, lifetime, title=attached.where)
    finally:
        attached.close()
