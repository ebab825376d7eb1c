"""What hooks rely on in another engine: functions and their parameters, compared with its modules or their sources.

A function is to have one of its known signatures, and what differs from the newest of them is told.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType

# By "function" or "Class.function": its parameters by name, * before a star's; several where versions differ, the
# oldest first
Functions = Mapping[str, str | tuple[str, ...]]
Parameters = tuple[str, ...]


def signatures(functions: Functions, name: str) -> list[Parameters]:
    """Those that are known of a function, the oldest first."""
    written = functions[name]
    return [tuple(each.split()) for each in ((written,) if isinstance(written, str) else written)]


def differing(module: ModuleType, functions: Functions) -> Iterator[str]:
    """What is not as known in a module, a line each. A function that somebody else put there is passed over:

    what counts is how the engine calls it, which has not changed.
    """
    return _compared(module.__name__, functions, partial(_live, module))


def differing_in_text(tree: ast.Module, module: str, functions: Functions) -> Iterator[str]:
    """What is not as known in a module's source."""
    return _compared(module, functions, lambda name, _: _written(tree, name))


def source_of(root: Path, module: str) -> ast.Module:
    """A module's source under `root`, the folder of its package; nothing is imported. Empty where there is none."""
    path = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])


def _compared(module: str, functions: Functions, read: Callable[[str, Parameters], Parameters | None]) -> Iterator[str]:
    for name in functions:
        known = signatures(functions, name)
        there = read(name, known[-1])
        if there is None:
            yield f"{module}.{name} is missing"
        elif there not in known:
            yield f"{module}.{name} takes ({', '.join(there)}), not ({', '.join(known[-1])})"


def _live(module: ModuleType, name: str, known: Parameters) -> Parameters | None:
    """A function's parameters in a module. Where somebody else put another there: `known`."""
    member: object = module
    for part in name.split("."):
        member = getattr(member, part, None)
    if member is None or not callable(member):
        return None
    if member.__module__ != module.__name__:
        return known
    parameters = inspect.signature(member).parameters.values()
    return tuple(str(each).split("=")[0].split(":")[0].strip() for each in parameters)  # with its stars


def _written(tree: ast.Module, name: str) -> Parameters | None:
    """A function's parameters in a source."""
    node: ast.AST = tree
    for part in name.split("."):
        inside: list[ast.stmt] = getattr(node, "body", [])
        named = [each for each in inside if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name == part]
        if not named:
            return None
        node = named[0]
    if not isinstance(node, ast.FunctionDef):
        return None
    given = node.args
    plain = [each.arg for each in (*given.posonlyargs, *given.args)]
    starred = [f"*{given.vararg.arg}"] if given.vararg else []
    named_only = [each.arg for each in given.kwonlyargs]
    return (*plain, *starred, *named_only, *([f"**{given.kwarg.arg}"] if given.kwarg else []))
