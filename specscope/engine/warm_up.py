"""What an engine on a GPU does before its first request, for its target and for a drafter that is a model.

Every variant of every kernel that a run launches is compiled, and no other: which these are is the launchers' to say
(specscope.kernels.launch), and what is done here is what a run does, once for each size that makes a difference to
them. Then passes are captured as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable

from specscope.engine.config import EngineConfig
from specscope.model.graphs import Capture, Shape, powers, shapes
from specscope.model.heads.head_runner import HeadRunner
from specscope.model.runner import ModelRunner
from specscope.plans.plan import TreePlan
from specscope.speculate.drafters.base import Drafter
from specscope.speculate.drafters.draft_model import DraftModel
from specscope.speculate.drafters.eagle import Eagle
from specscope.speculate.drafters.parallel import ParallelEagle
from specscope.speculate.verify.verifier import warm_up_verdicts
from specscope.trace.record.notes import MODELS


def warm_up(runner: ModelRunner, drafter: Drafter, max_context: int) -> None:
    """Launch each variant once. Needs the triton backend."""
    runners: list[ModelRunner | HeadRunner] = [runner]
    if isinstance(drafter, Eagle | DraftModel):
        runners.append(drafter.runner)
    for model_runner in runners:
        model_runner.warm_up(max_context)
    warm_up_verdicts(runner.loaded.vocab_size, runner.cache.device)


def capture_graphs(
    config: EngineConfig,
    runner: ModelRunner,
    drafter: Drafter,
    max_context: int,
    make_capture: Callable[[], Capture],
    progress: Callable[[str], None],
) -> str:
    """Capture them, one after another; what became of it, in words. `make_capture` makes one for each runner.

    A model that reads a tensor on the host while it runs (some mixtures of experts, some rotary tables) cannot be
    captured, and runs as it did before.
    """
    wanted: list[tuple[ModelRunner | HeadRunner, list[Shape], int]] = [
        (runner, verify_shapes(config), drafter.max_nodes + 1)
    ]
    if isinstance(drafter, Eagle | DraftModel) and config.plan is not None:
        passes = draft_shapes(config, config.plan, one_pass=isinstance(drafter, ParallelEagle))
        wanted.append((drafter.runner, passes, config.plan.max_fed + passes[-1].rows))
    announced, refused, count = 0, "", sum(len(these) for _, these, _ in wanted)
    for model_runner, these, window in wanted:
        try:
            for _ in model_runner.capture(these, make_capture(), max_context, window):
                announced += 1
                progress(f"capturing CUDA graphs: {announced} of {count}")
        except Exception as error:  # whatever a model, a compiler or a driver has against it
            first = error.__context__ or error  # the end of a capture that was broken off complains as well
            reason = (str(first).strip() or type(first).__name__).splitlines()[0]
            refused += (
                f"; {'the drafter' if model_runner is not runner else 'the target'} could not be captured: {reason}"
            )
    done = sum(len(model_runner.graphs) for model_runner, *_ in wanted)
    return f"{done} CUDA graphs{refused}"


def verify_shapes(config: EngineConfig) -> list[Shape]:
    """The shapes of the target's steps: the root of each request, alone or with its tree.

    A drafter that is a model fills its tree; one that looks up text drafts what it finds.
    """
    if config.plan is None:
        return shapes(config.max_batch, [1])
    largest = config.plan.max_nodes + 1
    return shapes(config.max_batch, [1, largest] if config.drafter in MODELS else powers(largest))


def draft_shapes(config: EngineConfig, plan: TreePlan, *, one_pass: bool = False) -> list[Shape]:
    """The shapes of a drafter's passes: what was committed since the last draft, then one level of every tree.

    With `one_pass` a row for each further depth follows what was committed, and there is no other pass.
    """
    if one_pass:
        return shapes(config.max_batch, [plan.max_depth, 2 * plan.max_depth])
    return shapes(config.max_batch, [1, plan.max_depth + 1, *plan.fed])
