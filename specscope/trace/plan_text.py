"""A tree string, drawn: its shape, its attention mask, and what it costs. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specscope.trace.history.wording import plural
from specscope.trace.plan import DynamicPlan, StaticPlan, TreePlan
from specscope.trace.record.tree import ROOT, DraftTree, TreeShape
from specscope.trace.record.vocabulary import shell_word

WIDEST_MASK = 64  # nodes; wider masks are left out


def describe(plan: TreePlan, *, mask: bool, about: str | None = None) -> str:
    """What `specscope tree` prints. `about`: the origin of a tree of another program."""
    lines = [*_static(plan, mask)] if isinstance(plan, StaticPlan) else [*_dynamic(plan)]
    origin = [f"from        {about}"] if about else []
    origin += [f"here        --tree {shell_word(str(plan))}"] if about is not None else []
    return "\n".join([f"tree {plan}", *origin, "", *lines])


def plan_dict(plan: TreePlan, about: str = "") -> dict[str, Any]:
    """What `describe` says, as plain values."""
    values: dict[str, Any] = {"tree": str(plan), "from": about, "nodes": plan.max_nodes, "depth": plan.max_depth}
    values["rows"] = {"verify": plan.max_nodes + 1, "draft": plan.max_fed + 1}
    if isinstance(plan, StaticPlan):
        parents, depths = list(plan.shape.parent), list(plan.shape.depth)
        return values | {"kind": "top" if plan.top else "sampled", "parents": parents, "depths": depths}
    return values | {"kind": "dynamic", "top": plan.top, "candidates": plan.candidates}


def _static(plan: StaticPlan, mask: bool) -> Iterator[str]:
    shape = plan.shape
    yield "●  root: the last committed token"
    yield from _draw(shape)
    yield ""
    yield from _costs(plan, sum(not shape.children(node) for node in range(len(shape))))
    yield (
        "rule        top tokens, deterministic: accepted with p"
        if plan.top
        else "rule        sampled without replacement where the request is sampled, top tokens where it is greedy"
    )
    if mask and len(shape) <= WIDEST_MASK:
        yield ""
        yield "mask        a row may attend to the context, to the root, and to the nodes marked ■"
        yield from _mask(shape)
    elif mask:
        yield f"mask        not drawn for {len(shape)} nodes"


def _draw(shape: TreeShape) -> Iterator[str]:
    """One line a node: its branch, its number, and its path of child ranks."""

    def below(node: int, stem: str, path: tuple[int, ...]) -> Iterator[str]:
        children = shape.children(node)
        for rank, child in enumerate(children):
            last = rank == len(children) - 1
            here = (*path, rank)
            yield f"{stem}{'└─' if last else '├─'} {child}  {','.join(map(str, here))}"
            yield from below(child, stem + ("   " if last else "│  "), here)

    yield from below(ROOT, "", ())


def _costs(plan: TreePlan, leaves: int | None) -> Iterator[str]:
    nodes = plan.max_nodes
    yield f"nodes       {nodes}" + ("" if leaves is None else f", {leaves} of them leaves")
    yield f"depth       {plan.max_depth}: at most {plan.max_depth + 1} tokens per step, with the final token"
    yield f"verify      {nodes + 1} rows per request (root and nodes), {nodes + 1} slots of the target's KV cache"
    passes = plural(plan.max_depth, "pass", "passes")
    yield f"draft       {passes}, {plural(plan.max_fed + 1, 'row')}, where the drafter is a model"


def _dynamic(plan: DynamicPlan) -> Iterator[str]:
    yield f"shape       searched in each step: the {plan.top} likeliest nodes of a depth get {plan.top} children each,"
    yield f"            {plan.depth} deep; of {plan.candidates} candidates the {plan.max_nodes} best are kept"
    yield from _costs(plan, None)
    yield "rule        top tokens, deterministic: accepted with p"


def _mask(shape: TreeShape) -> Iterator[str]:
    tree = DraftTree.build([0] * len(shape), list(shape.parent))
    for node, row in enumerate(tree.ancestors):
        yield f"{node:>4}        " + " ".join("■" if seen else "·" for seen in row)
