"""What is installed is all there is: packages are named one by one in pyproject.toml."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_package_is_installed():
    told = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    there = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "specscope").rglob("__init__.py")}
    assert sorted(told) == sorted(there | {"specscope.kernels"})
