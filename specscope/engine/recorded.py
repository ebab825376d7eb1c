"""Which passes an engine records as CUDA graphs, for its target and for a drafter that is a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from specscope.engine.config import EngineConfig
from specscope.model.graphs import Record, Shape, shapes
from specscope.model.runner import ModelRunner
from specscope.speculate.draft_model import DraftModel
from specscope.speculate.drafter import Drafter
from specscope.speculate.eagle import Eagle
from specscope.trace.plan import DynamicPlan, TreePlan


def record_graphs(
    config: EngineConfig,
    runner: ModelRunner,
    drafter: Drafter,
    max_context: int,
    record: Record,
    progress: Callable[[str], None],
) -> str:
    """Record them, one after another; what became of it, in words.

    A model that reads a tensor on the host while it runs (some mixtures of experts, some rotary tables) cannot be
    recorded, and runs as it did before.
    """
    todo: list[Iterator[Shape]] = [runner.record(verify_shapes(config), record, max_context, drafter.max_nodes + 1)]
    wanted = len(verify_shapes(config))
    if isinstance(drafter, Eagle | DraftModel) and config.plan is not None:
        drafts = draft_shapes(config, config.plan)
        window = config.plan.max_fed + drafts[-1].rows
        todo.append(drafter.runner.record(drafts, record, max_context, window))
        wanted += len(drafts)
    done, refused = 0, ""
    for part in todo:
        try:
            for _ in part:
                progress(f"recording CUDA graphs: {done + 1} of {wanted}")
                done += 1
        except RuntimeError as error:
            refused = f"; one was refused: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    return f"{done} CUDA graphs{refused}"


def verify_shapes(config: EngineConfig) -> list[Shape]:
    """Of the target's steps: the root and its tree for each request of a batch."""
    return shapes(config.max_batch, 1 if config.plan is None else config.plan.max_nodes + 1)


def draft_shapes(config: EngineConfig, plan: TreePlan) -> list[Shape]:
    """Of a drafter's passes: what was accepted since the last draft, then one level of every tree."""
    widest = plan.top if isinstance(plan, DynamicPlan) else max(map(len, plan.shape.levels))
    return shapes(config.max_batch, max(plan.max_depth + 1, widest))
