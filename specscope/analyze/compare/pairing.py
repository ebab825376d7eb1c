"""Which request of one side belongs to which of the other; and where none does, why, and what to type."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from specscope.analyze.compare.columns import Side, SideRequest
from specscope.analyze.compare.result import PairedBy
from specscope.trace.record.params import PARAM_NAMES
from specscope.trace.record.vocabulary import printable

SHORTEST = 12  # characters of a prompt that says something where it stands within another
LOOKED = 200  # requests of a side: what holds for these holds for the others


def match(a: Side, b: Side) -> list[tuple[int, int, PairedBy]]:
    """Pairs of places in both lists of requests, in A's order.

    Matched by prompt and all parameters, then without the seed, then by prompt alone, then by order.
    Of several equal requests, the first of A is paired with the first of B. Only requests whose prompt is not known on
    one side (captures made with --no-text) are paired by order: requests with different prompts make no pair. Nor do
    requests of which steps are missing.
    """
    left, right = ({i: request for i, request in enumerate(side.requests) if request.whole} for side in (a, b))
    pairs: list[tuple[int, int, PairedBy]] = []
    for kind, key in _KEYS:
        theirs: dict[Hashable, list[int]] = defaultdict(list)
        for place, request in right.items():
            if (mark := key(request)) is not None:
                theirs[mark].append(place)
        for place, request in list(left.items()):
            mark = key(request)
            if mark is not None and theirs[mark]:
                other = theirs[mark].pop(0)
                pairs.append((place, other, kind))
                del left[place], right[other]
    for place in list(left):
        other_place = next((o for o in right if _prompt(left[place]) is None or _prompt(right[o]) is None), None)
        if other_place is not None:
            pairs.append((place, other_place, PairedBy.ORDER))
            del left[place], right[other_place]
    return sorted(pairs)


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


def unpaired(a: Side, b: Side, matched: Sequence[tuple[int, int, PairedBy]]) -> str:
    """Why no request of A has a pair, in a sentence; "" where one has."""
    if matched:
        return ""
    for name, side in (("A", a), ("B", b)):
        if not side.tells_tokens:
            return f"no requests are paired: {name} was recorded with --no-tokens"
        if not any(request.whole for request in side.requests):
            return f"no requests are paired: of each request of {name} steps are missing"
    why = hint(a, b, matched)
    return "no request of A has the prompt of one of B" + (f": {why}" if why else "")


def hint(a: Side, b: Side, matched: Sequence[tuple[int, int, PairedBy]]) -> str:
    """What keeps requests from being paired whose prompts look alike, with an example; "" where none do."""
    left = [request for _, request in _left(a, {first for first, _, _ in matched})]
    right = [request for _, request in _left(b, {second for _, second, _ in matched})]
    for mine in left:
        for theirs in right:
            example = f"{printable(mine.id)} of A and {printable(theirs.id)} of B"
            text, other = _text(mine), _text(theirs)
            if text and text == other:
                return f"{example} are one text in different tokens: give both the same special tokens"
            if _within(text, other, mine):
                return f"A's are within a chat template ({example}): {_advice(('A', a), ('B', b))}"
            if _within(other, text, theirs):
                return f"B's are within a chat template ({example}): {_advice(('B', b), ('A', a))}"
            if (title := _title(mine)) and title == _title(theirs):
                return f"{example} ask the same within other chat templates, or behind other system prompts"
    return ""


def _left(side: Side, taken: set[int]) -> Iterator[tuple[int, SideRequest]]:
    """Requests without a pair whose prompts are known, as many as are looked at."""
    known = ((place, request) for place, request in enumerate(side.requests) if place not in taken and request.info)
    return (each for _, each in zip(range(LOOKED), known, strict=False))


def _text(request: SideRequest) -> str:
    return "" if request.info is None else request.info.prompt.strip()


def _title(request: SideRequest) -> str:
    return "" if request.info is None else request.info.title.strip()


def _within(whole: str, part: str, request: SideRequest) -> bool:
    """Whether a prompt is another within a template."""
    return bool(part) and part != whole and part in whole and (len(part) >= SHORTEST or _title(request) == part)


def _advice(templated: tuple[str, Side], bare: tuple[str, Side]) -> str:
    """What to type, where one of them is our own engine's."""
    ours = [all(c.run is not None and c.run.is_ours for c in side.captures) for _, side in (templated, bare)]
    if ours[0]:
        return f"record {templated[0]} with --raw"
    if ours[1]:
        return f"record {bare[0]} without --raw"
    return "send both to the same endpoint (/v1/completions takes a prompt as it is)"
