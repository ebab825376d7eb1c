"""Linear layers on the CPU: those over one input as one product, their weight laid out for the fastest library.

What a step of few rows costs is reading the weights. Float32 weights that were published in bfloat16 or float16 can be
kept in 16 bits and lose no more than float32 rounds away. Which library lays them out is found by trial
(fast_paths.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from specscope.model.fast_paths import Product, usable
from specscope.model.path_speeds import FEW, MANY, path_speeds

PACKED_SHARE = 1 / 4  # of the machine's memory: weights that take more are not laid out again


class PackedLinear(nn.Module):
    """One or more linear layers over one input; gives their outputs side by side.

    Packed, bfloat16 weights are read at up to three times the speed, and float32 ones at up to twice.
    """

    def __init__(self, linears: Sequence[nn.Linear], *, pack: bool) -> None:
        super().__init__()
        first = linears[0]
        self.weight, self.bias = first.weight, first.bias  # one layer: tied embeddings stay tied
        if len(linears) > 1:
            self.weight = _join([linear.weight for linear in linears])
            self.bias = None if first.bias is None else _join([linear.bias for linear in linears])
        self.out_features, self.in_features = self.weight.shape
        self._transposed = self.weight.detach().t()
        unpacked = None, self.weight.itemsize
        self._product, item_size = _packed_product(self.weight.detach(), self.bias) if pack else unpacked
        self.read_bytes = self.weight.numel() * item_size  # by a product of few rows

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        if self._product is not None:
            return self._product(x)
        if x.dim() == 2 and self.bias is None:
            return torch.mm(x, self._transposed)  # what linear comes to, without its way there
        return functional.linear(x, self.weight, self.bias)


def _packed_product(weight: Tensor, bias: Tensor | None) -> tuple[Product | None, int]:
    """x -> x W^T + b with a repacked weight, on the fastest paths that work; None where none does.

    Also the bytes of each number that a product of few rows reads. A library that is the fastest for one row may not
    be for many: then there are two layouts of the weight.
    """
    fitting = {path.name: path for path in usable(weight.dtype) if path.fits(weight)}
    found: dict[str, Product] = {}
    speeds = path_speeds(weight.dtype)
    for rows in (FEW, MANY):
        for name in speeds.fastest(rows, fitting):
            try:
                found[name] = found.get(name) or fitting[name].lay_out(weight, bias)
                break
            except Exception:  # what a small weight's trial did not show, such as memory running out
                del fitting[name]
    item_size = 2 if found and fitting[next(iter(found))].halves else weight.itemsize
    if len(found) < 2:
        return next(iter(found.values()), None), item_size
    few, many = found
    most, few_rows, many_rows = speeds.most_rows(few, many) * weight.shape[1], found[few], found[many]
    return lambda x: few_rows(x) if x.numel() <= most else many_rows(x), item_size


def _join(parts: Sequence[Tensor]) -> nn.Parameter:
    """One parameter out of several. Each becomes a view of it, so that memory holds the numbers once."""
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return nn.Parameter(whole, requires_grad=False)


def may_pack(model: nn.Module) -> bool:
    """Whether the weights of a model can be repacked, and memory has room for them twice."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    known = all(usable(dtype) for dtype in {weight.dtype for weight in weights})
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return False
    return known and sum(weight.nbytes for weight in weights) <= memory * PACKED_SHARE
