"""Linear layers on the CPU: those over one input as one product, their weight laid out for the fastest library.

What a step of few rows costs is reading the weights. Float32 weights that were published in bfloat16 or float16 can be
kept in 16 bits without losing a digit: FBGEMM then reads half as much, and multiplies and adds in float32 all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

PACKED_DTYPES = (torch.float32, torch.bfloat16)
PACKED_SHARE = 1 / 4  # of the machine's memory: weights that take more are not laid out a second time
# How many rows MKL is told to expect. Its layout for this many is the fastest for fewer too, down to a single one.
EXPECTED_ROWS = 32


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
        self._product = _packed_product(self.weight.detach(), self.bias) if pack else None

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        if self._product is not None:
            return self._product(x)
        if x.dim() == 2 and self.bias is None:
            return torch.mm(x, self._transposed)  # what linear comes to, without its way there
        return functional.linear(x, self.weight, self.bias)


def _packed_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x -> x W^T + b with a weight laid out anew."""
    if weight.dtype == torch.float32 and _is_half(weight):
        half, narrow = (
            torch.ops.quantized.linear_prepack_fp16(weight, bias),
            torch.ops.quantized.linear_dynamic_fp16.default,
        )
        return lambda x: narrow(x, half)
    if weight.dtype == torch.float32 and torch.backends.mkl.is_available():
        layout, width = torch.ops.mkl._mkl_reorder_linear_weight(weight, EXPECTED_ROWS), weight.shape[1]
        multiply = torch.ops.mkl._mkl_linear.default
        return lambda x: multiply(x, layout, weight, bias, x.numel() // width)
    layout, product = torch.ops.mkldnn._reorder_linear_weight(weight), torch.ops.mkldnn._linear_pointwise.default
    return lambda x: product(x, layout, bias, "none", [], "")


def _is_half(weight: Tensor) -> bool:
    """Whether float16 holds every number of a weight, and the library that multiplies by such weights is there."""
    known = "fbgemm" in torch.backends.quantized.supported_engines and hasattr(
        torch.ops.quantized, "linear_prepack_fp16"
    )
    return known and torch.equal(weight.half().float(), weight)


def _join(parts: Sequence[Tensor]) -> nn.Parameter:
    """One parameter out of several. Each becomes a view of it, so that memory holds the numbers once."""
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return nn.Parameter(whole, requires_grad=False)


def may_pack(model: nn.Module) -> bool:
    """Whether the weights of a model can be laid out anew, and memory has room for them twice."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    known = all(weight.dtype in PACKED_DTYPES for weight in weights) and torch.backends.mkldnn.is_available()
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return False
    return known and sum(weight.nbytes for weight in weights) <= memory * PACKED_SHARE
