"""Code of your own, named as module:Name on a command line, or in a call. It is imported where it was named, only."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any

from specscope.errors import MISTAKES, UserError, failed, short

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_named(text: str) -> bool:
    """Whether it is written as module:Name."""
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True)
class NamedCode:
    """What somebody named, and may be imported: a capture and a debug socket make none of these."""

    name: str  # module:Name
    folder: str  # of the module; "" where it is installed

    @staticmethod
    def find(name: str, flag: str) -> NamedCode:
        """Raises UserError where there is no such module; nothing is imported."""
        if not is_named(name):
            raise UserError(f"{flag} {short(name)}: write module:name")
        module, _, inside = name.partition(":")
        if module.endswith(".py"):
            raise UserError(f"{flag} {name}: leave out .py, as in {flag} {module.removesuffix('.py')}:{inside}")
        top = module.partition(".")[0]
        if top in sys.modules or importlib.util.find_spec(top) is not None:
            return NamedCode(name, "")
        folder = os.getcwd()
        if PathFinder.find_spec(top, [folder]) is None:
            raise UserError(f"{flag} {name}: there is no module {top}, neither installed nor in {folder}")
        return NamedCode(name, folder)

    def load(self, flag: str) -> Any:  # noqa: ANN401
        """Import it. Of the folder only that module is run. Raises UserError with the place of its mistake."""
        module, _, name = self.name.partition(":")
        top = module.partition(".")[0]
        spec = PathFinder.find_spec(top, [self.folder]) if self.folder and top not in sys.modules else None
        try:
            if spec is not None and spec.loader is not None:
                sys.modules[top] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(sys.modules[top])
            made: Any = importlib.import_module(module)
        except MISTAKES as error:
            sys.modules.pop(top, None)
            raise failed(f"{flag} {self.name} cannot be imported", error) from error
        for part in name.split("."):
            if not hasattr(made, part):
                raise UserError(f"{flag} {self.name}: {module} has no {name}")
            made = getattr(made, part)
        return made


def name_of(code: Callable[..., Any] | NamedCode) -> str:
    """module:Name."""
    return code.name if isinstance(code, NamedCode) else f"{code.__module__}:{code.__qualname__}"
