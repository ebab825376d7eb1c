"""Drafts from a text computed again, independent of the engine's: prompt lookup, and suffix decoding (arXiv 2411.04975,
section 3), each tree from the whole text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specscope.analyze.audit.contexts import AuditedStep, Contexts
from specscope.analyze.audit.tally import Tally
from specscope.plans.kinds import text_part
from specscope.plans.plan import StaticPlan, TreePlan
from specscope.trace.record.notes import TEXT
from specscope.trace.record.records import RequestStep, RunInfo
from specscope.trace.record.tree import ROOT, DraftTree

# Longest and shortest suffix, where a capture does not tell them
SIZES = [(4, 2), (4, 1), (3, 1), (3, 2), (2, 1), (2, 2), (5, 1), (5, 2), (3, 3), (4, 3), (1, 1)]
Path = tuple[int, ...]  # tokens from the root's child on


@dataclass(frozen=True)
class Rule:
    longest: int  # tokens of a suffix
    shortest: int
    earliest: bool = False  # vLLM's V1 runner and transformers take what follows the earliest occurrence
    filled: bool = False  # vLLM's V2 runner fills the chain with the text's last token where the text ends it
    cut: bool = False  # transformers leaves out its end, from the first token on that the processors forbid

    @property
    def words(self) -> str:
        words = f"suffixes of {self.shortest} to {self.longest} tokens"
        if self.filled:
            return f"{words}, what followed the latest occurrence, and the last token if nothing did"
        words += ", and what followed the earliest occurrence" if self.earliest else ""
        return f"{words}, as far as a draft goes" if self.cut else words

    def agrees(self, drafted: Collection[Path], given: Collection[Path]) -> bool:
        """Whether the drafted paths are those that the text gives."""
        return set(drafted) <= set(given) if self.cut else set(drafted) == set(given)


def lookup(tokens: Sequence[int], depth: int, width: int, rule: Rule, shift: int = 0) -> dict[Path, int]:
    """The tree as its paths, each with its node: the distinct continuations of the longest suffix that recurs.

    `shift`: tokens by which they are taken too late, to reproduce a fault.
    """
    tree = _found(tokens, depth, width, rule, shift)
    path = max(tree, key=len, default=())
    chain = (*path, *[int(tokens[-1])] * (depth - len(path)))
    return {chain[: node + 1]: node for node in range(depth)} if rule.filled else tree


def _found(tokens: Sequence[int], depth: int, width: int, rule: Rule, shift: int) -> dict[Path, int]:
    for size in range(min(rule.longest, len(tokens) - 1), rule.shortest - 1, -1):
        found, ends = list[Path](), _ends(tokens, size)
        for begin in (end + shift for end in (reversed(list(ends)) if rule.earliest else ends)):
            following = tuple(tokens[begin : begin + depth]) if begin >= 0 else ()
            if following and len(found) < width and not any(o[: len(following)] == following for o in found):
                found.append(following)
            if len(found) == width:
                break
        if found:
            paths = [other[:size] for size in range(1, depth + 1) for other in found if len(other) >= size]
            return {path: node for node, path in enumerate(dict.fromkeys(paths))}
    return {}


def _ends(tokens: Sequence[int], size: int) -> Iterator[int]:
    """Where the last `size` tokens occurred before, latest first: the place after them."""
    suffix = list(tokens[-size:])
    for end in range(len(tokens) - 1, size - 1, -1):
        if tokens[end - 1] == suffix[-1] and list(tokens[end - size : end]) == suffix:
            yield end


def told_rules(speculation: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The rules of another engine, where its configuration is in the capture. vLLM's does not name the runner."""
    if isinstance(longest := speculation.get("max_matching_ngram_size"), int):  # transformers
        return (Rule(longest, 1, earliest=True, cut=True),)
    longest, shortest = speculation.get("prompt_lookup_max"), speculation.get("prompt_lookup_min")
    if not isinstance(longest, int) or not isinstance(shortest, int):
        return ()
    return Rule(longest, shortest, earliest=True), Rule(longest, shortest, filled=True)


def recorded_paths(tree: DraftTree) -> list[Path]:
    return _paths(tree.parent.tolist(), tree.token.tolist())


def _paths(parents: Sequence[int], tokens: Sequence[int]) -> list[Path]:
    """The paths of all candidates, dropped ones included; a candidate's number may be less than its parent's."""

    def path(node: int) -> Path:
        return () if node == ROOT else (*path(parents[node]), tokens[node])

    return [path(node) for node in range(len(tokens))]


def _first(paths: Iterable[Path], show: Callable[[int], str]) -> str:
    """The tokens of the first longest path, for people."""
    longest: Path = max(paths, key=len, default=())
    return " ".join(map(show, longest)) or "nothing"


LONGEST = 64  # tokens that are compared
OCCURRENCES = 128  # the latest ones are looked at
BESIDE = 8, 3  # depth and width of prompt lookup beside a model
SHARES = 1e-6  # shares closer than this are the same: they are stored as float32


@dataclass(frozen=True)
class TextDraft:
    paths: tuple[Path, ...] = ()  # in draw order
    share: tuple[float, ...] = ()  # in suffix decoding, of the occurrences that continue along each path
    match: int = 0  # tokens that matched
    count: int = 0  # occurrences


def redraw(tokens: Sequence[int], nodes: int, depth: int) -> TextDraft:
    """The tree that follows `tokens`. Each length of suffix gives one of at most twice as many nodes, the likeliest
    path first; the one with the largest sum of shares is taken, of equals that of the longest suffix.
    """
    tokens = list(tokens)
    ends, best, best_sum, before = list(_ends(tokens, 2))[:OCCURRENCES], TextDraft(), 0.0, 0
    for size in range(min(LONGEST, len(tokens)), 1, -1):
        suffix = tokens[-size:]
        follows = [tokens[end : end + depth] for end in ends if end >= size and tokens[end - size : end] == suffix]
        if len(follows) == before:
            continue  # the longer suffix occurred as often
        before = len(follows)
        paths, counts = _likeliest(follows, min(nodes, 2 * size))
        if sum(counts) / before > best_sum:  # divided once, so that equals are equal
            best = TextDraft(tuple(paths), tuple(count / before for count in counts), size, before)
            best_sum = sum(counts) / before
    return best


def _likeliest(follows: Sequence[Sequence[int]], nodes: int) -> tuple[list[Path], list[int]]:
    """The paths that most occurrences follow, with their counts. Of equals, the one whose parent was taken earlier."""
    count = Counter(tuple(tokens[:size]) for tokens in follows for size in range(1, len(tokens) + 1))
    often = [path for path, times in count.items() if times >= 0.1 * len(follows)]  # in the order of their first
    known, taken = [path for path in often if not path[1:]], list[Path]()  # that can be taken: children of taken ones
    while known and len(taken) < nodes:
        taken.append(max(known, key=count.__getitem__))  # the first of equals
        known.remove(taken[-1])
        known += [path for path in often if path[:-1] == taken[-1]]
    return taken, [count[path] for path in taken]


def judge_lookups(steps: Sequence[tuple[Contexts, AuditedStep]], run: RunInfo, plan: TreePlan, tally: Tally) -> str:
    """Compare the tree of each of these steps with what the text gives; returns a remark on how that is looked up.
    Where a capture does not tell how long suffixes were, the lengths under which most sampled steps agree are taken.
    """
    rules = told_rules(run.speculation) or tuple(Rule(*sizes) for sizes in SIZES)
    steps = [(contexts, step) for contexts, step in steps if _may_draft(step.part, run, plan, rules[0])]
    rule: Rule | None = None
    if isinstance(plan, StaticPlan):
        some = steps[:: max(1, len(steps) // 100)]
        off = [sum(bool(_differs(s, _drawn(c, s, run, plan, each), str, each)) for c, s in some) for each in rules]
        rule = rules[off.index(min(off))]
    for contexts, step in steps:
        drawn = _drawn(contexts, step, run, plan, rule)
        fault, size = _differs(step, drawn, tally.show, rule), len(step.part.tree)
        tally.add(step.at(None), differs=bool(fault), recorded=size, judged=len(drawn.paths), text=fault)
    return "own text" if rule is None else rule.words


def _may_draft(part: RequestStep, run: RunInfo, plan: TreePlan, rule: Rule) -> bool:
    """Whether there is room for a draft, and whether the text alone decides on it."""
    reach = plan.max_depth
    if isinstance(plan, StaticPlan):
        # All of a draft may be left out by transformers; vLLM drafts behind a step, so that the first one has none
        is_there = len(part.tree) > 0 if rule.cut else not (run.speculation and part.prefill_tokens)
    else:
        is_there = not part.tree.is_sampled  # the model's draws alone: no nodes of the text are beside them
        if run.drafter != "suffix":
            reach = max(reach, plan.max_nodes if text_part(run.drafter) == "suffix" else min(BESIDE[0], plan.max_nodes))
    return is_there and part.position + 1 + reach < run.max_context


def _drawn(contexts: Contexts, step: AuditedStep, run: RunInfo, plan: TreePlan, rule: Rule | None) -> TextDraft:
    """What the text gives. Beside a model the tree is a choice from both."""
    part, text = step.part, contexts.text[: step.part.position + 1]
    if rule is not None:
        assert isinstance(plan, StaticPlan)
        return TextDraft(tuple(lookup(text, plan.max_depth, len(plan.shape.children(ROOT)), rule)))
    nodes = plan.max_nodes
    if "+" in run.drafter and not len(part.tree):
        return TextDraft()  # no node was worth a row, and then nothing is recorded
    if text_part(run.drafter) == "suffix":
        return redraw(text, nodes, min(plan.max_depth, nodes) if run.drafter == "suffix" else nodes)
    if part.method is None or not (size := part.method.match_length):  # what was not found is not drafted
        return TextDraft()
    return TextDraft(tuple(lookup(text, min(BESIDE[0], nodes), BESIDE[1], Rule(size, size))), match=size)


def _differs(step: AuditedStep, drawn: TextDraft, show: Callable[[int], str], rule: Rule | None) -> str:
    """How the tree differs from what the text gives; "" where it does not. Beside a model the nodes recorded as the
    text's must be exactly those of the text's tree, and all of that tree among the recorded candidates.
    """
    tree, method, notes = step.part.tree, step.part.method, step.part.notes
    recorded = recorded_paths(tree)
    if rule is not None or method is None or not len(method.source):
        if not (tuple(recorded) == drawn.paths if rule is None else rule.agrees(recorded, drawn.paths)):
            return f"it drafts {_first(recorded, show)}; the text gives {_first(drawn.paths, show)}"
        if rule is not None:
            return ""
        shares = () if method is None else tuple(method.confidence.tolist())
        if len(shares) != len(drawn.share) or not np.allclose(shares, drawn.share, atol=SHARES):
            return "the shares of the occurrences differ from the text's"
    else:
        of_text = {path for path, source in zip(recorded, method.source.tolist(), strict=True) if source >= TEXT}
        of_model = set(recorded) - of_text
        if extra := [*(of_text - set(drawn.paths)), *(of_model & set(drawn.paths))]:
            return f"{_first(extra, show)} is {'not ' if extra[0] in of_text else ''}what the text gives"
        if notes is not None:
            parents = [*tree.parent.tolist(), *notes.dropped_parent.tolist()]
            tokens = [*tree.token.tolist(), *notes.dropped_token.tolist()]
            if lost := set(drawn.paths) - set(_paths(parents, tokens)):
                return f"it leaves out {_first(sorted(lost), show)}, which the text gives"
    told_of = (0, 0) if method is None else (method.match_length, method.match_count)
    if len(recorded) and drawn.count and told_of != (drawn.match, drawn.count):
        return f"a match of {told_of[0]}, {told_of[1]} times; in the text {drawn.match}, {drawn.count} times"
    return ""
