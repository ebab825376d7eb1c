"""Compiling before the first request what a run launches: every variant of every kernel, and no other.

Which variants those are is the launchers' to say (specscope.kernels.launch): what is done here is what a run does, once
for each size that makes a difference to them.
"""

from __future__ import annotations

from specscope.model.head_runner import HeadRunner
from specscope.model.runner import ModelRunner
from specscope.model.warm_up import warm_up_passes
from specscope.speculate.drafters.base import Drafter
from specscope.speculate.drafters.combined import model_of
from specscope.speculate.drafters.draft_model import DraftModel
from specscope.speculate.drafters.eagle import Eagle


def warm_up(runner: ModelRunner, drafter: Drafter, max_context: int) -> None:
    """Launch each variant once. Needs the triton backend."""
    from specscope.speculate.verify.device import warm_up_verdicts  # triton is imported only where it runs

    runners: list[ModelRunner | HeadRunner] = [runner]
    model = model_of(drafter)
    if isinstance(model, Eagle | DraftModel):
        runners.append(model.runner)
    for one in runners:
        warm_up_passes(one, max_context)
    warm_up_verdicts(runner.loaded.vocab_size, runner.loaded.dtype, runner.cache.device)
