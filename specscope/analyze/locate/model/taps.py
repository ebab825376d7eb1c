"""Every operation inside a part of a model, by the name of its module: what goes in and what comes out, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

IN = ":in"  # behind a module's name: its input, which is what the code around it made


class Taps:
    """What operations gave, in the order in which they were first computed; the rows of several passes one behind
    the other.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}

    def put(self, name: str, rows: Tensor) -> None:
        """Keep a copy, in float32, of what an operation gave: [rows, ...] becomes [rows, width]."""
        self._parts.setdefault(name, []).append(rows.detach().to(torch.float32, copy=True).flatten(1).cpu())

    def take(self) -> dict[str, Tensor]:
        """All of it, [rows, width] by name. It is not kept here."""
        parts, self._parts = self._parts, {}
        return {name: torch.cat(rows) for name, rows in parts.items() if len({x.shape[1] for x in rows}) == 1}


def by_row(x: Tensor, rows: int) -> Tensor | None:
    """A tensor of a pass over so many rows as [rows, ...]; None where it is not one value a row."""
    if x.dim() < 2:
        return None
    x = x[0] if x.dim() > 2 and x.shape[0] == 1 else x
    if x.dim() > 2 and x.shape[0] != rows and x.shape[1] == rows:  # heads first
        x = x.transpose(0, 1)
    return x if x.shape[0] == rows else None


def hooked(part: nn.Module, put: Callable[[str, Tensor], None], rows: Callable[[], int]) -> list[Any]:
    """Hooks on all modules below `part`, which tell what goes into each and what comes out.

    `rows`: how many rows the pass has that runs now.
    """

    def tell(name: str, values: Iterable[Any], most: int | None = None) -> None:
        for index, tensor in enumerate([x for x in values if isinstance(x, Tensor)][:most]):
            x = by_row(tensor, rows())
            if x is not None:
                put(name if not index else f"{name}[{index}]", x)

    def enters(name: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        tell(name + IN, (*given, *named.values()), 1)

    def leaves(name: str, module: nn.Module, given: tuple[Any, ...], out: Any) -> None:  # noqa: ANN401
        tell(name, out if isinstance(out, tuple) else (out,))

    handles = []
    for name, module in part.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(partial(enters, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(leaves, name)))
    return handles


def relative(ours: Tensor, right: Tensor, heads: int = 1) -> Tensor:
    """[rows, heads] |ours - right| / |right| of each row and head, both [rows, width].

    A row that is small beside the others is measured by the usual size of a row: it is no more exact than they are.
    Equal values differ by nothing, infinite ones too; NaN on our side only is infinitely off.
    """
    heads = heads if right.shape[1] % max(heads, 1) == 0 else 1
    a, b = (x.double().unflatten(1, (heads, -1)) for x in (ours, right))
    size = b.norm(dim=-1)
    floor = size.median().clamp(min=1e-30)
    off: Tensor = torch.where(a == b, 0.0, a - b).norm(dim=-1) / size.clamp(min=float(floor))
    return off.nan_to_num(nan=torch.inf).float()
