"""Block verification: what each draft of a chain is accepted by (Sun et al., 2024), as vLLM's V2 sampler has it.

The ratio of a prefix is the product of p / q of its drafts, never above 1 on the way. A prefix is accepted with
h = mass / (mass + 1 - ratio), where the mass is what p has beyond q, with p scaled by the ratio, one position on.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specscope.trace.record.tree import Doubles
from specscope.vllm.rows import Rows


def ratios(rows: Rows, p: Tensor, q: Tensor | None, longest: int) -> Tensor:
    """[R] of the prefix that ends with each row's draft. `p`, `q` [R]: of the drafts; `longest`: drafts of a chain."""
    of_one = p if q is None else p / q
    place = torch.arange(len(p), device=p.device) - rows.first[rows.request]
    found = of_one.clamp_max(1)
    for at in range(1, longest):
        found = torch.where(place == at, (found.roll(1) * of_one).clamp_max(1), found)
    return found


def before(rows: Rows, ratio: Tensor) -> Tensor:
    """[R] of the prefix before each row: 1 at a request's first."""
    is_first = torch.arange(len(ratio), device=ratio.device) == rows.first[rows.request]
    return torch.where(is_first, 1, ratio.roll(1))


def masses(rows: Rows, scale: Tensor, step: int) -> Tensor:
    """[R] what scaled p has beyond q at each row."""
    assert rows.probs is not None
    found = []
    for low in range(0, len(scale), step):
        high = min(low + step, len(scale))
        left = rows.probs(low, high) * scale[low:high, None]
        if rows.q is not None:
            found.append((left - rows.q(low, high)).clamp_min(0).sum(1))
        else:  # all of q is at the draft
            token = rows.tokens[low:high].clamp_min(0)[:, None]
            found.append(left.scatter(1, token, 0).sum(1))
    return torch.cat(found) if found else scale


def thresholds(ratio: Doubles, mass: Doubles) -> Doubles:
    """[n] what each draft of a chain is accepted by: h, and the ratio itself where nothing follows."""
    h = ratio.copy()
    below = mass[1:] + 1 - ratio[:-1]
    h[:-1] = np.where(below <= 0, 1, mass[1:] / np.where(below > 0, below, 1))
    h[:-1][np.isnan(below)] = np.nan
    return h
