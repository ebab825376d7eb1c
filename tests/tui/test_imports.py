"""The screen starts without torch, and soon."""

from __future__ import annotations

import subprocess
import sys

from tests.waiting import HANG_SECONDS


def test_the_screen_needs_no_torch():
    heavy = "{'torch', 'transformers', 'grpc'}"
    code = f"import sys, specscope.tui.app; sys.exit(' '.join({heavy} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
