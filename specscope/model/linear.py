"""Linear layers on the CPU: those over one input as one product, their weight laid out for oneDNN."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

# Up to this many rows the plain weight is read faster than the packed one.
PLAIN_ROWS = {torch.float32: 3, torch.bfloat16: 0}
PACKED_SHARE = 1 / 4  # of the machine's memory: weights that take more are not laid out a second time

_packed_product = torch.ops.mkldnn._linear_pointwise.default


class PackedLinear(nn.Module):
    """One or more linear layers over one input; gives their outputs side by side.

    Packed, bfloat16 weights are read at up to three times the speed, and float32 ones are faster from four rows on.
    """

    def __init__(self, linears: Sequence[nn.Linear], *, pack: bool) -> None:
        super().__init__()
        first = linears[0]
        self.weight, self.bias = first.weight, first.bias  # one layer: tied embeddings stay tied
        if len(linears) > 1:
            self.weight = _join([linear.weight for linear in linears])
            self.bias = None if first.bias is None else _join([linear.bias for linear in linears])
        self.in_features, self.out_features = first.in_features, self.weight.shape[0]
        self._transposed = self.weight.detach().t()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach()) if pack else None
        self._plain_numbers = PLAIN_ROWS.get(self.weight.dtype, 0) * self.in_features

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        if self._packed is not None and x.numel() > self._plain_numbers:
            return _packed_product(x, self._packed, self.bias, "none", [], "")  # type: ignore[no-any-return]
        if x.dim() == 2 and self.bias is None:
            return torch.mm(x, self._transposed)  # what linear comes to, without its way there
        return functional.linear(x, self.weight, self.bias)


def _join(parts: Sequence[Tensor]) -> nn.Parameter:
    """One parameter out of several. Each becomes a view of it, so that memory holds the numbers once."""
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return nn.Parameter(whole, requires_grad=False)


def may_pack(model: nn.Module) -> bool:
    """Whether the weights of a model can be laid out for oneDNN, and memory has room for them twice."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    known = all(weight.dtype in PLAIN_ROWS for weight in weights) and torch.backends.mkldnn.is_available()
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return False
    return known and sum(weight.nbytes for weight in weights) <= memory * PACKED_SHARE
