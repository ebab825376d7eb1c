"""Prompt lookup once more, the plain way: what a text that repeats itself makes the n-gram drafter propose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from specscope.analyze.audit.contexts import Contexts, Judged
from specscope.analyze.audit.tally import Tally
from specscope.trace.plan import StaticPlan, TreePlan
from specscope.trace.tree import ROOT

SIZES = [
    (4, 2),
    (4, 1),
    (3, 1),
    (3, 2),
    (2, 1),
    (2, 2),
    (5, 1),
    (5, 2),
    (3, 3),
    (4, 3),
    (1, 1),
]  # longest, shortest suffix


def lookup(tokens: Sequence[int], depth: int, width: int, longest: int, shortest: int) -> dict[tuple[int, ...], int]:
    """The tree as its paths, each with its node: the latest different continuations of the longest suffix found."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        kept: list[tuple[int, ...]] = []
        for end in _ends(tokens, size):
            follows = tuple(tokens[end : end + depth])
            if not any(other[: len(follows)] == follows for other in kept):
                kept.append(follows)
                if len(kept) == width:
                    break
        if kept:
            paths = [one[: at + 1] for at in range(depth) for one in kept if len(one) > at]
            return {path: node for node, path in enumerate(dict.fromkeys(paths))}
    return {}


def _ends(tokens: Sequence[int], size: int) -> Iterator[int]:
    """Where the last `size` tokens occurred before, latest first: the place after them."""
    suffix, last = list(tokens[-size:]), tokens[-1]
    for end in range(len(tokens) - 1, size - 1, -1):
        if tokens[end - 1] == last and list(tokens[end - size : end]) == suffix:
            yield end


def judge_ngram(contexts: Sequence[Contexts], plan: TreePlan, most: int, tally: Tally) -> str:
    """Compare the tree of every step; returns a remark. `most`: the longest context of a request.

    A capture does not say how long the suffixes were: those under which most of the first steps agree are taken.
    """
    assert isinstance(plan, StaticPlan)
    depth, width = plan.max_depth, len(plan.shape.children(ROOT))
    steps = [(one, step) for one in contexts for step in one.steps if step.part.position + 1 + depth < most]
    some = steps[:: max(1, len(steps) // 100)]
    agree = {sizes: sum(_tree(c, s, depth, width, sizes) == _paths(s) for c, s in some) for sizes in SIZES}
    sizes = max(SIZES, key=lambda one: agree[one])
    for one, step in steps:
        wanted, recorded = _tree(one, step, depth, width, sizes), _paths(step)
        text = f"it drafts {_first(recorded, tally.show)}; the text gives {_first(wanted, tally.show)}"
        tally.add(
            step.at(None),
            differs=wanted != recorded,
            recorded=float(len(recorded)),
            judged=float(len(wanted)),
            text=text,
        )
    return f"suffixes of {sizes[1]} to {sizes[0]} tokens"


def _tree(
    contexts: Contexts, step: Judged, depth: int, width: int, sizes: tuple[int, int]
) -> dict[tuple[int, ...], int]:
    return lookup(contexts.text[: step.part.position + 1], depth, width, *sizes)


def _paths(step: Judged) -> dict[tuple[int, ...], int]:
    tree = step.part.tree
    return {tuple(int(tree.token[i]) for i in tree.path_to(node)): node for node in range(len(tree))}


def _first(tree: dict[tuple[int, ...], int], show: Callable[[int], str]) -> str:
    """The tokens of its first path, for people."""
    longest = max(tree, key=len, default=())
    return " ".join(map(show, longest)) or "nothing"
