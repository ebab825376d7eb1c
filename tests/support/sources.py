"""Sources of other engines, without these engines: fetched, compared, or a few of their modules imported alone."""

import ast
import importlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock


def fetch(requirement: str, folder: Path, wanted: tuple[str, ...]) -> None:
    """Download a wheel, and keep its .py files whose names begin so."""
    with tempfile.TemporaryDirectory() as work:
        get = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", work]
        subprocess.run([*get, requirement], check=True)
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            names = [name for name in wheel.namelist() if name.startswith(wanted) and name.endswith(".py")]
            wheel.extractall(folder, names)


def by_name(name: str, names: tuple[str, ...], **defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function with an engine's parameters of one that takes them as one object, behind its `self`."""

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            given = defaults | dict(zip(names, args, strict=False)) | kwargs
            own = [given.pop("self")] if "self" in given else []
            return function(*own, SimpleNamespace(**given))

        called.__signature__ = Signature([Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in names])
        called.__name__, called.__module__ = name.rpartition(".")[2], function.__module__
        return called

    return make


def put(monkeypatch: Any, modules: Mapping[str, Mapping[str, Any]], **replaced: ModuleType) -> None:
    """Put modules of these members where an engine's are, with copies of classes, so that no wrapper is left in these.

    `replaced`: others in their place, which keep what they have.
    """
    for name, members in modules.items():
        module = replaced.get(name) or ModuleType(name)
        for key, member in members.items():
            if not hasattr(module, key):
                own = type(member.__name__, (member,), {}) if isinstance(member, type) else member
                setattr(module, key, own)
        monkeypatch.setitem(sys.modules, name, module)


class Stub(ModuleType):
    """A module that has whatever is asked of it."""

    def __init__(self, name: str, **members: Any) -> None:
        super().__init__(name)
        self.__path__, self.__all__ = [], []  # type: ignore[var-annotated]
        vars(self).update(members)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class Sources:
    """On sys.meta_path: of an engine's packages the `real` modules from its source, and for any other a stub.

    `root`: the folder of the first package; `given`: members of stubs, by their module.
    """

    def __init__(
        self, root: Path, packages: tuple[str, ...], real: tuple[str, ...], given: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.root, self.packages, self.real, self.given = root, packages, real, given

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.split(".")[0] not in self.packages:
            return None
        file = self.root.joinpath(*name.split(".")[1:]).with_suffix(".py")
        if name in self.real and file.is_file():
            return spec_from_file_location(name, file)
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name, **self.given.get(spec.name, {}))

    def exec_module(self, module: ModuleType) -> None:
        """Nothing."""

    def forget(self) -> None:
        """Nothing of these packages stays imported."""
        for name in [name for name in sys.modules if name.split(".")[0] in self.packages]:
            del sys.modules[name]

    def load(self, monkeypatch: Any, *names: str) -> list[ModuleType]:
        """These modules, imported anew, until the test is over."""
        self.forget()
        monkeypatch.setattr(sys, "meta_path", [self, *sys.meta_path])
        return [importlib.import_module(name) for name in names]


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
