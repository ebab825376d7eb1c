"""Importing transformers without the parts of torch that only compiling and distributed training use.

They are two thirds of a second start's imports: torch._dynamo, which transformers asks for markers that tell the
compiler what to leave alone; torch.distributed's tensors; and SciPy, for losses of object detection. This is for
processes of our own, which never compile and never distribute: in a notebook `Engine` imports transformers as it is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

DYNAMO = "torch._dynamo"
INDEXING = "torch._dynamo._trace_wrapped_higher_order_op"
MARKERS = ("disable", "assume_constant_result", "allow_in_graph")
UNUSED = ("is_torch_distributed_available", "is_scipy_available")


def import_transformers() -> None:
    """Import what a model needs of transformers, the lean way where that works, else as it is."""
    if any(name in sys.modules for name in ("transformers", DYNAMO)):
        return
    try:
        with _stand_ins():
            import transformers

            none: dict[str, Any] = dict.fromkeys(UNUSED, lambda: False)  # as on a machine without them
            utils = transformers.utils
            with patch.multiple(utils.import_utils, **none), patch.multiple(utils, **none):
                for name in ("models", "masking_utils", "modeling_utils"):
                    importlib.import_module(f"transformers.{name}")
    except Exception:  # another version, which asks for more
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
            del sys.modules[name]


def _mark(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:  # noqa: ANN401
    """A decorator that leaves a function as it is, with or without arguments."""
    return _mark if function is None else function


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Stand-ins for torch._dynamo and what masks use of it, for as long as transformers is imported."""
    import torch

    dynamo, indexing = ModuleType(DYNAMO), ModuleType(INDEXING)
    vars(dynamo).update({"__path__": [], **dict.fromkeys(MARKERS, _mark)})  # a package without modules
    # Masks made through vmap enter this context; it is the real one, when it is entered.
    vars(indexing)["TransformGetItemToIndex"] = lambda: importlib.import_module(INDEXING).TransformGetItemToIndex()
    with patch.object(torch.compiler, "disable", _mark):
        sys.modules.update({DYNAMO: dynamo, INDEXING: indexing})
        try:
            yield
        finally:
            for name in (DYNAMO, INDEXING):
                del sys.modules[name]
