"""How counts, acceptance and ends are said, once: the console, the screens and the reports all use these."""

from __future__ import annotations

from specscope.trace.records import FinishReason, RequestStep

ENDINGS: dict[FinishReason, str] = {FinishReason.LENGTH: "max_tokens"}  # "length" alone could be any of three lengths


def plural(count: int, noun: str, several: str = "") -> str:
    """`1 step`, `2 steps`; `several` is the noun for more where it is not made with an s."""
    return f"{count:,} " + (noun if count == 1 else several or noun + "s")


def acceptance(step: RequestStep, *, short: bool = False) -> str:
    """`0 of 4 nodes, depth 0 of 1`: how much of a step's tree was accepted, in nodes and in depth.

    `short` gives the same with a stroke for `of`, where there is little room. A step that drafted or judged nothing
    says so.
    """
    if step.verdict is None:
        return f"prefill of {plural(step.prefill_tokens, 'token')}"
    if not len(step.tree):
        return "nothing drafted"
    accepted, depth, of = step.verdict.accepted, step.tree.max_depth, "/" if short else " of "
    return f"{accepted}{of}{plural(len(step.tree), 'node')}, depth {accepted}{of}{depth}"


def ending(reason: FinishReason) -> str:
    """Why a request ended, in a word."""
    return ENDINGS.get(reason, reason.value)
