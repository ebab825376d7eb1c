"""A machine on which some fast path is missing: it raises, as a library does on a CPU that it cannot use, or it is
switched off by the variable."""

from contextlib import contextmanager

import pytest
import torch

from specscope.kernels.cpu.product import Panels
from specscope.model.fast import linear
from specscope.model.fast.linear import VARIABLE

OPERATORS = {
    "numba": (Panels, "of"),
    "onednn": (torch.ops.mkldnn, "_reorder_linear_weight"),
}
EACH = [[], ["numba"], ["onednn"], ["numba", "onednn"]]
WITHOUT = [(how, names) for names in EACH for how in ("raises", "off") if names or how == "off"] + [
    ("off", ["fuse"]),
    ("off", ["numba", "onednn", "fuse"]),
]
without = pytest.mark.parametrize(
    ("how", "names"), WITHOUT, ids=[f"{'+'.join(names) or 'nothing'}-{how}" for how, names in WITHOUT]
)


def unsupported(*_):
    raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx_ne_convert or avx512bw")


@contextmanager
def machine_without(how, names):
    """The trials are made anew inside, and forgotten behind it."""
    with pytest.MonkeyPatch.context() as patch:
        if how == "off":
            patch.setenv(VARIABLE, ",".join({*names, *linear.disabled()}))  # what the tests run without stays off
        else:
            for name in names:
                patch.setattr(*OPERATORS[name], unsupported)
        linear.failure.cache_clear()
        try:
            yield
        finally:
            linear.failure.cache_clear()
