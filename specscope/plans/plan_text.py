"""A tree string, drawn: its shape, its attention mask, and what it costs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from specscope.plans.plan import DynamicPlan, StaticPlan, TreePlan
from specscope.tree_shape import ROOT, TreeShape

WIDEST_MASK = 64  # nodes; wider masks are left out
TOP_RULE = "rule        top tokens, deterministic: accepted with p"


def describe(plan: TreePlan, *, mask: bool, about: str | None = None) -> str:
    """What `specscope tree` prints. `about`: the origin of a tree of another program."""
    lines = [*_static(plan, mask)] if isinstance(plan, StaticPlan) else [*_dynamic(plan)]
    origin = [f"from        {about}"] if about else []
    origin += [f"here        --tree {shlex.quote(str(plan))}"] if about is not None else []
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
    yield from _draw(shape, ROOT, "")
    yield ""
    leaves = sum(not shape.children(node) for node in range(len(shape)))
    yield from _costs(plan, f", {leaves} of them leaves")
    sampled = "rule        sampled without replacement if the request is sampled, top tokens if it is greedy"
    yield TOP_RULE if plan.top else sampled
    if mask and len(shape) <= WIDEST_MASK:
        yield ""
        yield "mask        a row may attend to the context, the root and the nodes marked ■"
        for node, path in enumerate(shape.paths):
            seen = ("■" if path[: len(other)] == other else "·" for other in shape.paths)
            yield f"{node:>4}        " + " ".join(seen)
    elif mask:
        yield f"mask        not drawn for {len(shape)} nodes"


def _draw(shape: TreeShape, above: int, stem: str) -> Iterator[str]:
    """One line a node: its branch, its number, and its path of child ranks."""
    children = shape.children(above)
    for node in children:
        last = node == children[-1]
        yield f"{stem}{'└─' if last else '├─'} {node}  {','.join(map(str, shape.paths[node]))}"
        yield from _draw(shape, node, stem + ("   " if last else "│  "))


def _costs(plan: TreePlan, leaves: str) -> Iterator[str]:
    nodes, depth, rows = plan.max_nodes, plan.max_depth, plan.max_fed + 1
    yield f"nodes       {nodes}{leaves}"
    yield f"depth       {depth}: at most {depth + 1} tokens per step, with the final token"
    yield f"verify      {nodes + 1} rows per request (root and nodes), {nodes + 1} slots of the target's KV cache"
    passes, rows_text = f"{depth} pass{'es' * (depth != 1)}", f"{rows:,} row{'s' * (rows != 1)}"
    yield f"draft       {passes}, {rows_text}, if the drafter is a model"


def _dynamic(plan: DynamicPlan) -> Iterator[str]:
    yield f"shape       searched in each step: the {plan.top} likeliest nodes of a depth get {plan.top} children each,"
    yield f"            {plan.depth} deep; of {plan.candidates} candidates the {plan.max_nodes} best are kept"
    yield from _costs(plan, "")
    yield TOP_RULE
