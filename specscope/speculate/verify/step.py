"""verify_step: the verdicts of an engine's step, on the backend that holds its tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specscope.model.backend import Backend
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.verify import host
from specscope.speculate.verify.inputs import step_batch
from specscope.trace.changes import Changes
from specscope.trace.records import Verdict


def verify_step(
    parts: Sequence[tuple[Context, Draft, Tensor]], changes: Changes | None, backend: Backend
) -> list[Verdict]:
    """A verdict for each part: a request, its draft, and the target's logits [n + 1, V] at the root and each node."""
    if not parts:
        return []
    batch = step_batch(parts, changes, backend)
    if backend is Backend.TORCH:
        return host.verify(batch)
    from specscope.speculate.verify import device  # triton is imported only where it runs

    return device.verify(batch)
