"""What a planted fault is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from specscope import Engine
from specscope.analyze.diagnose.causes import Cause

Install = Callable[[pytest.MonkeyPatch, Engine], None]


@dataclass(frozen=True)
class Fault:
    """A mistake that is put into a running engine.

    `setting` names the run in which it shows (settings.py); `about` says what is wrong, in a line.
    """

    name: str
    cause: Cause
    install: Install
    setting: str
    about: str
