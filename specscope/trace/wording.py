"""How screens, console and command line say the same thing in the same words. No torch."""

from __future__ import annotations

from specscope.trace.records import RequestStep


def plural(count: int, one: str, many: str = "") -> str:
    """`1 request`, `1,000 requests`. `many`: the plural, where it is not `one` with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def finish_text(reason: str) -> str:
    """Why a request ended, for people: `length` alone means the acceptance length everywhere else."""
    return "length limit" if reason == "length" else reason


def accepted_text(step: RequestStep) -> str:
    """What was accepted of a step's tree: `accepted 2 of 16 nodes, depth 2 of 5`.

    One node is accepted per level, so the two first numbers agree; what they are out of differs unless the tree is a
    chain. `nothing drafted` for an empty tree, `prefill of 12 tokens` for a step without a verdict.
    """
    if step.verdict is None:
        return f"prefill of {plural(step.prefill_tokens, 'token')}"
    if not len(step.tree):
        return "nothing drafted"
    accepted = step.verdict.accepted
    return f"accepted {accepted} of {plural(len(step.tree), 'node')}, depth {accepted} of {step.tree.max_depth}"
