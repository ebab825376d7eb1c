"""The house rules: imports point down, what people open on a laptop starts without torch, all is installed."""

import ast
import graphlib
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What each part may import of specscope, besides itself and what stands on nothing.
ALLOWED = {
    "plans": set(),
    "trace": {"plans", "specscope"},
    "kernels": set(),
    "model": {"plans", "trace", "kernels"},
    "speculate": {"model", "plans", "trace", "kernels"},
    "debug": {"plans", "trace"},
    "engine": {"speculate", "model", "plans", "trace", "specscope"},
    "live": {"engine", "speculate", "model", "debug", "plans", "trace"},
    "remote": {"debug", "trace"},
    "watch": {"remote", "debug", "trace", "specscope"},
    "analyze": {"plans", "trace"},
    "page": {"analyze", "plans", "trace", "tui", "specscope"},
    "testing": {"analyze", "speculate", "kernels", "trace", "specscope"},
    "vllm": {"remote", "debug", "plans", "trace"},
    "transformers": {"plans", "trace"},
    "sglang": {"plans", "trace"},
    "serve": {"live", "remote", "engine", "debug", "trace", "specscope"},
    "tui": {"analyze", "debug", "trace"},
    "measure": {"analyze", "live", "engine", "speculate", "model", "kernels", "plans", "trace", "debug", "specscope"},
    "cli": {p.stem for p in (ROOT / "specscope").iterdir() if p.suffix in ("", ".py")} | {"specscope"},
}
NOTHING = {"envelope", "errors", "gone", "interrupt", "lifetime", "terminal", "tree_shape", "user_cache", "whole_file"}
LIGHT = ["plans", "trace", "remote", "watch", "analyze", "debug", "tui", "testing", "page"]
# audit, diagnose and locate run models, and what is gathered lies on a device: they import these when they do
HEAVY = (
    "specscope.analyze.audit.model.",
    "specscope.analyze.diagnose.rerun.",
    "specscope.analyze.locate.model.",
    "specscope.trace.inside.gather",
    "specscope.trace.inside.trees",
    "specscope.testing.enumeration",
)


@cache
def imports_of(path):
    """The import statements of a file, those inside functions and for types too."""
    kinds = (ast.Import, ast.ImportFrom)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def imported(path):
    """(module, line) of every import in a file."""
    for node in imports_of(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        else:
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module, node.lineno


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_point_down(part):
    folder = ROOT / "kernels" if part == "kernels" else ROOT / "specscope" / part
    for path in folder.rglob("*.py"):
        for module, line in imported(path):
            if module.split(".")[0] != "specscope":
                continue
            target = module.split(".")[1] if "." in module else "specscope"
            above = f"{path.relative_to(ROOT)}:{line} imports {module}, which lies above it"
            assert target in ALLOWED[part] | NOTHING | {part}, above


def test_no_torch_on_the_light_side():
    files = [p.relative_to(ROOT).with_suffix("") for part in LIGHT for p in (ROOT / "specscope" / part).rglob("*.py")]
    modules = [".".join(p.parts) for p in files if p.name != "__init__"]
    modules = [module for module in modules if not module.startswith(HEAVY)]
    code = "import sys\nfor module in sys.argv[1:]: __import__(module); assert 'torch' not in sys.modules, module"
    subprocess.run([sys.executable, "-c", code, *modules], check=True)


def test_no_circle_of_imports():
    """Over all modules."""
    files = {}
    for path in [*(ROOT / "specscope").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts if parts[0] == "specscope" else ("specscope", *parts)
        files[".".join(parts).removesuffix(".__init__")] = path
    del files["specscope"]  # it names what is public, and imports it when asked
    graph = {}
    for name, path in files.items():
        found = set()
        for node in imports_of(path):
            if isinstance(node, ast.ImportFrom):  # of a package: its modules, else what it holds itself
                found |= {m if (m := f"{node.module}.{alias.name}") in files else node.module for alias in node.names}
            else:
                found |= {alias.name for alias in node.names}
        graph[name] = found & set(files) - {name}
    graphlib.TopologicalSorter(graph).prepare()


def test_folders_of_judges_do_not_import_each_other():
    """What a kind of drafter is, they ask its row in plans."""
    between, kinds = set(), []
    for path in (path for part in ("analyze", "measure") for path in (ROOT / "specscope" / part).rglob("*.py")):
        mine = path.relative_to(ROOT).parts[:-1][:3]
        kinds += [path for quote in "\"'" if f"= {quote}eagle{quote}" in path.read_text().replace("==", "=")]
        for module, _ in imported(path):
            theirs = tuple(module.split(".")[:3])
            if len(mine) == 3 and theirs != mine and (ROOT / Path(*theirs)).is_dir():
                between.add((mine, theirs))
    assert not [(a, b) for a, b in between if (b, a) in between]
    assert not kinds


def test_kernels_is_ours_and_shadows_nothing():
    import specscope.kernels

    assert Path(specscope.kernels.__file__).resolve().parent == ROOT / "kernels"
    assert not list(imported(ROOT / "kernels" / "__init__.py"))


def test_every_package_is_installed():
    told = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    inside = {path.parent.relative_to(ROOT).parts for path in (ROOT / "specscope").rglob("__init__.py")}
    kernels = {path.parent.relative_to(ROOT).parts for path in (ROOT / "kernels").rglob("__init__.py")}
    there = inside | {("specscope", *parts) for parts in kernels}  # kernels/ is imported as specscope.kernels
    assert sorted(told) == sorted(".".join(parts) for parts in there)
