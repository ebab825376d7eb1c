"""The functions of an engine's source without their bodies: what hooks know of it is compared, and nothing imported."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType


def skeleton(root: Path, name: str) -> ModuleType:
    """Of the module in the source under `root`, the folder of its package; empty where there is none."""
    path, made = root.joinpath(*name.split(".")[1:]).with_suffix(".py"), ModuleType(name)
    if path.is_file():
        exec("\n".join(_lines(ast.parse(path.read_text()).body, "")), vars(made))
    return made


def _lines(nodes: Iterable[ast.stmt], pad: str) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield from (f"{pad}class {node.name}:", f"{pad}    pass", *_lines(node.body, f"{pad}    "))
        elif isinstance(node, ast.FunctionDef):
            given = node.args
            given.defaults, given.kw_defaults = [], [None for _ in given.kwonlyargs]
            for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
                if each is not None:
                    each.annotation = None
            yield f"{pad}def {node.name}({ast.unparse(given)}): pass"
