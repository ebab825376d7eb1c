"""A few of vLLM's own modules without vLLM: from its sources alone, with stand-ins for all that they import.

`python -m tests.vllm.sources FOLDER [VERSION]` gets the sources (336 MB are downloaded, and 10 kept): FOLDER/vllm is
what SPECSCOPE_VLLM_SOURCE is to name.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch
import triton
import triton.language as tl

GPU = "vllm.v1.worker.gpu"
REJECTION, ADAPTIVE = f"{GPU}.spec_decode.rejection_sampler", f"{GPU}.spec_decode.adaptive_verification"
REAL = (
    REJECTION,
    ADAPTIVE,
    f"{GPU}.spec_decode.rejection_sampler_utils",
    f"{GPU}.sample.gumbel",
    f"{GPU}.input_batch",
    "vllm.v1.spec_decode.fly",
)


def to_device(array: Any, *, out: Any = None, **others: Any) -> Any:
    """vLLM's async_tensor_h2d."""
    tensor = torch.as_tensor(array)
    return tensor if out is None else out[: len(tensor)].copy_(tensor)


GIVEN: dict[str, dict[str, Any]] = {
    "vllm.triton_utils": {
        "triton": triton,
        "tl": tl,
        "tldevice": types.SimpleNamespace(log1p=lambda x: tl.log(1.0 + x)),  # the interpreter has no libdevice
    },
    "vllm.utils.torch_utils": {"async_tensor_h2d": to_device},
    "vllm.v1.worker.gpu.sample.output": {"SamplerOutput": types.SimpleNamespace},
    "vllm.v1.spec_decode.utils": {"unconditional_to_conditional_rates": list},
}


class _StandIn(types.ModuleType):
    """A module that has everything."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = GIVEN.get(self.__name__, {}).get(name, MagicMock(name=name))
        setattr(self, name, value)
        return value


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Finder(MetaPathFinder):
    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] != "vllm":
            return None
        if name in REAL:
            file = self._root.joinpath(*name.split(".")[1:]).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file) if file.is_file() else None
        return ModuleSpec(name, _Loader(), is_package=True)


@contextlib.contextmanager
def modules(root: Path, *names: str) -> Iterator[list[types.ModuleType]]:
    """Modules of REAL from the sources under `root`, a folder named vllm; none of them stays imported."""
    finder = _Finder(root)
    sys.meta_path.insert(0, finder)
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]


def main() -> None:
    """Download the wheel, and keep what the plugin is compared with."""
    folder, version = Path(sys.argv[1]), (sys.argv[2:] or ["0.33.0"])[0]
    with tempfile.TemporaryDirectory() as work:
        get = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", work]
        subprocess.run([*get, f"vllm=={version}"], check=True)
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            for name in wheel.namelist():
                if name.startswith(("vllm/v1/", "vllm/config/")) and name.endswith(".py"):
                    wheel.extract(name, folder)
    print(f"export SPECSCOPE_VLLM_SOURCE={folder.resolve() / 'vllm'}")


if __name__ == "__main__":
    main()
