"""Prompt lookup computed again, the plain way: what the n-gram drafter proposes for a text that repeats itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specscope.analyze.audit.contexts import AuditedStep, Contexts
from specscope.analyze.audit.tally import Tally
from specscope.plans.plan import StaticPlan, TreePlan
from specscope.trace.record.tree import ROOT

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


Path = tuple[int, ...]  # tokens from the root's child on


@dataclass(frozen=True)
class Rule:
    """How a text is looked up."""

    longest: int  # tokens of a suffix
    shortest: int
    earliest: bool = False  # vLLM's V1 runner and transformers take what follows the earliest occurrence
    filled: bool = False  # vLLM's V2 runner fills the chain with the text's last token where the text ends it
    cut: bool = False  # transformers leaves out its end, from the first token on that the processors forbid

    def agrees(self, drafted: Collection[Path], given: Collection[Path]) -> bool:
        """Whether the drafted paths are those that the text gives."""
        return set(drafted) <= set(given) if self.cut else set(drafted) == set(given)


def lookup(tokens: Sequence[int], depth: int, width: int, rule: Rule, shift: int = 0) -> dict[Path, int]:
    """The tree as its paths, each with its node: the distinct continuations of the longest suffix that recurs.

    `shift`: tokens by which they are taken too late, to reproduce a fault.
    """
    tree = _found(tokens, depth, width, rule, shift)
    if not rule.filled:
        return tree
    path = max(tree, key=len, default=())
    chain = (*path, *[int(tokens[-1])] * (depth - len(path)))
    return {chain[: node + 1]: node for node in range(depth)}


def _found(tokens: Sequence[int], depth: int, width: int, rule: Rule, shift: int) -> dict[Path, int]:
    for size in range(min(rule.longest, len(tokens) - 1), rule.shortest - 1, -1):
        continuations: list[Path] = []
        ends = _ends(tokens, size)
        for end in reversed(list(ends)) if rule.earliest else ends:
            begin = end + shift
            if not 0 <= begin < len(tokens):
                continue
            following = tuple(tokens[begin : begin + depth])
            if not any(other[: len(following)] == following for other in continuations):
                continuations.append(following)
                if len(continuations) == width:
                    break
        if continuations:
            paths = [
                continuation[: index + 1]
                for index in range(depth)
                for continuation in continuations
                if len(continuation) > index
            ]
            return {path: node for node, path in enumerate(dict.fromkeys(paths))}
    return {}


def _ends(tokens: Sequence[int], size: int) -> Iterator[int]:
    """Where the last `size` tokens occurred before, latest first: the place after them."""
    suffix, last = list(tokens[-size:]), tokens[-1]
    for end in range(len(tokens) - 1, size - 1, -1):
        if tokens[end - 1] == last and list(tokens[end - size : end]) == suffix:
            yield end


def judge_ngram(
    contexts: Sequence[Contexts], plan: TreePlan, limit: int, tally: Tally, speculation: Mapping[str, Any]
) -> str:
    """Compare the tree of every step; returns a remark. `limit`: the longest context of a request.

    Our captures do not record how long the suffixes were: the lengths under which most sampled steps agree are taken.
    `speculation`: another engine's configuration, which records them.
    """
    assert isinstance(plan, StaticPlan)
    depth, width = plan.max_depth, len(plan.shape.children(ROOT))
    steps = [
        (request, step) for request in contexts for step in request.steps if step.part.position + 1 + depth < limit
    ]
    rules = told_rules(speculation) or tuple(Rule(*sizes) for sizes in SIZES)
    if rules[0].cut:  # all of a draft may be left out
        steps = [(request, step) for request, step in steps if len(step.part.tree)]
    elif speculation:  # vLLM drafts behind a step, so that a request's first one has nothing to judge
        steps = [(request, step) for request, step in steps if not step.part.prefill_tokens]
    some = steps[:: max(1, len(steps) // 100)]
    agree = {rule: sum(rule.agrees(_paths(s), _tree(c, s, depth, width, rule)) for c, s in some) for rule in rules}
    rule = max(rules, key=lambda rule: agree[rule])
    for request, step in steps:
        wanted, recorded = _tree(request, step, depth, width, rule), _paths(step)
        text = f"it drafts {_first(recorded, tally.show)}; the text gives {_first(wanted, tally.show)}"
        tally.add(
            step.at(None),
            differs=not rule.agrees(recorded, wanted),
            recorded=float(len(recorded)),
            judged=float(len(wanted)),
            text=text,
        )
    remark = f"suffixes of {rule.shortest} to {rule.longest} tokens"
    if rule.filled:
        return f"{remark}, what followed the latest occurrence, and the last token where nothing did"
    remark += ", and what followed the earliest occurrence" if rule.earliest else ""
    return f"{remark}, as far as a draft goes" if rule.cut else remark


def told_rules(speculation: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The rules of another engine, where its configuration is in the capture. vLLM's does not name the runner."""
    if isinstance(longest := speculation.get("max_matching_ngram_size"), int):  # transformers
        return (Rule(longest, 1, earliest=True, cut=True),)
    longest, shortest = speculation.get("prompt_lookup_max"), speculation.get("prompt_lookup_min")
    if not isinstance(longest, int) or not isinstance(shortest, int):
        return ()
    return Rule(longest, shortest, earliest=True), Rule(longest, shortest, filled=True)


def _tree(contexts: Contexts, step: AuditedStep, depth: int, width: int, rule: Rule) -> dict[Path, int]:
    return lookup(contexts.text[: step.part.position + 1], depth, width, rule)


def _paths(step: AuditedStep) -> dict[Path, int]:
    tree = step.part.tree
    return {tuple(int(tree.token[i]) for i in tree.path_to(node)): node for node in range(len(tree))}


def _first(tree: dict[Path, int], show: Callable[[int], str]) -> str:
    """The tokens of its first path, for people."""
    longest = max(tree, key=len, default=())
    return " ".join(map(show, longest)) or "nothing"
