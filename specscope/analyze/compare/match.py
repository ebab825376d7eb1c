"""Which request of one side belongs to which of the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping

from specscope.analyze.compare.columns import Side, SideRequest
from specscope.analyze.compare.result import PairedBy
from specscope.trace.record.params import PARAM_NAMES


def match(a: Side, b: Side) -> list[tuple[int, int, PairedBy]]:
    """Places in both lists of requests, as A has them: by all, then without the seed, by prompt, and by order.

    Of several that are alike the first goes with the first. By order alone go only those whose prompt is not known
    on one side (captures made with --no-text): other prompts make no pair.
    """
    left, right = dict(enumerate(a.requests)), dict(enumerate(b.requests))
    found: list[tuple[int, int, PairedBy]] = []
    for kind, key in _KEYS:
        theirs: dict[Hashable, list[int]] = defaultdict(list)
        for at, request in right.items():
            if (mark := key(request)) is not None:
                theirs[mark].append(at)
        for at, request in list(left.items()):
            mark = key(request)
            if mark is not None and theirs[mark]:
                other = theirs[mark].pop(0)
                found.append((at, other, kind))
                del left[at], right[other]
    for at in list(left):
        other_at = next((o for o in right if _prompt(left[at]) is None or _prompt(right[o]) is None), None)
        if other_at is not None:
            found.append((at, other_at, PairedBy.ORDER))
            del left[at], right[other_at]
    return sorted(found)


def _prompt(request: SideRequest) -> Hashable | None:
    """The prompt's tokens, or its text; None where neither is known."""
    if request.info is None:
        return None
    tokens = request.info.prompt_tokens
    return tokens.tobytes() if len(tokens) else request.info.prompt or None


def _with(*left_out: str) -> Callable[[SideRequest], Hashable | None]:
    names = sorted(PARAM_NAMES - set(left_out))

    def key(request: SideRequest) -> Hashable | None:
        prompt = _prompt(request)
        if prompt is None or request.info is None:
            return None
        params = request.info.params
        return prompt, tuple(map(_plain, (getattr(params, name) for name in names)))

    return key


def _plain(value: object) -> Hashable:
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else str(value)


_KEYS: tuple[tuple[PairedBy, Callable[[SideRequest], Hashable | None]], ...] = (
    (PairedBy.EXACT, _with()),
    (PairedBy.SEED, _with("seed")),
    (PairedBy.PROMPT, _prompt),
)
