"""What is installed is all there is: packages are named one by one in pyproject.toml."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_package_is_installed():
    told = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    inside = {path.parent.relative_to(ROOT).parts for path in (ROOT / "specscope").rglob("__init__.py")}
    kernels = {path.parent.relative_to(ROOT).parts for path in (ROOT / "kernels").rglob("__init__.py")}
    there = inside | {("specscope", *parts) for parts in kernels}  # kernels/ is imported as specscope.kernels
    assert sorted(told) == sorted(".".join(parts) for parts in there)
