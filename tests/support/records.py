"""Records built by hand. What is not given is nothing, or a number that a test that looks at it must give."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import (
    FinalKind,
    FinishReason,
    Outcome,
    ParentNotes,
    Phase,
    RequestEnd,
    RequestInfo,
    RequestStep,
    StepRecord,
    Verdict,
)
from specscope.trace.record.tree import ROOT, DraftTree

MS = 1_000_000
PHASES = ("schedule", "draft", "forward", "verify", "commit")


def ints(values: ArrayLike) -> NDArray[np.int32]:
    return np.asarray(values, np.int32)


def floats(values: ArrayLike) -> NDArray[np.float32]:
    return np.asarray(values, np.float32)


def chain(tokens: Iterable[int]) -> DraftTree:
    """A tree in which no node has siblings."""
    drafted = list(tokens)
    return DraftTree.build(drafted, list(range(-1, len(drafted) - 1)))


def outcomes(nodes: int, accepted: Sequence[int] = (), rejected: Sequence[int] = ()) -> NDArray[np.uint8]:
    """Of each node; the others were not tried."""
    found = np.full(nodes, Outcome.UNTRIED, np.uint8)
    found[list(accepted)], found[list(rejected)] = Outcome.ACCEPTED, Outcome.REJECTED
    return found


def kind_of(parents: Sequence[int], path: Sequence[int]) -> FinalKind:
    """Of the final token behind a path through a tree."""
    if not len(parents):
        return FinalKind.TARGET
    return FinalKind.RECOVERED if (path[-1] if len(path) else ROOT) in list(parents) else FinalKind.BONUS


def verdict(
    outcome: Sequence[int] | NDArray[np.uint8],
    path: Sequence[int] = (),
    token: int = 9,
    kind: FinalKind = FinalKind.TARGET,
    *,
    p: ArrayLike | None = None,
    p_trial: ArrayLike | None = None,
    q_trial: ArrayLike | None = None,
    accept_prob: ArrayLike | None = None,
    coin: ArrayLike | None = None,
    residual_mass: ArrayLike | None = None,
    final_p: float = 0.5,
    final_coin: float = 0.5,
    **more: object,
) -> Verdict:
    """A verdict whose numbers are zeros where they are not given."""
    n = len(outcome)

    def single(values: ArrayLike | None) -> NDArray[np.float32]:
        return np.zeros(n, np.float32) if values is None else floats(values)

    def double(values: ArrayLike | None) -> NDArray[np.float64]:
        return np.zeros(n) if values is None else np.asarray(values, np.float64)

    return Verdict(
        outcome=np.asarray(outcome, np.uint8),
        p=single(p),
        p_trial=single(p_trial),
        q_trial=single(q_trial),
        accept_prob=double(accept_prob),
        coin=double(coin),
        residual_mass=double(residual_mass),
        path=ints(path),
        token=token,
        kind=kind,
        final_p=final_p,
        final_coin=final_coin,
        **more,
    )


def parents(node: Sequence[int], nodes: int, **given: ArrayLike) -> ParentNotes:
    """What was noted at some parents of a tree of so many nodes: nothing but what is given."""
    k = len(node)
    whole = dict.fromkeys(("top", "draft_top"), np.zeros((k, 0))) | dict.fromkeys(
        ("choice", "choice_rank"), np.zeros(k)
    )
    whole |= {"node": node} | dict.fromkeys(("rank", "q_rank"), np.zeros(nodes))
    names = ("choice_p", "entropy", "varentropy", "q_entropy", "q_varentropy", "choice_q", "outside")
    real = dict.fromkeys(names, np.zeros(k)) | dict.fromkeys(("top_p", "draft_top_p"), np.zeros((k, 0)))
    real["raw_p"] = np.zeros(nodes)
    final = {"final_entropy": 0.0, "final_varentropy": 0.0, "final_target_p": 0.5}
    return ParentNotes(
        **{name: ints(given.pop(name, value)) for name, value in whole.items()},
        **{name: floats(given.pop(name, value)) for name, value in real.items()},
        **(final | given),
    )


def part(
    request: str,
    tree: DraftTree,
    judged: Verdict | None,
    *,
    index: int = 0,
    context: int = 16,
    prefill: int = 0,
    emitted: int | None = None,
    drafter: str = "ngram",
    **more: object,
) -> RequestStep:
    """A request's step, which emits all that was accepted and the final token."""
    made = 0 if judged is None else len(judged.path) + 1
    given = made if emitted is None else emitted
    return RequestStep(request, index, context, prefill, drafter, tree, judged, given, **more)


def phases(start: int, millis: Sequence[float] = (1, 2, 10, 3, 4)) -> tuple[Phase, ...]:
    """The phases of a step, one behind the other."""
    ends = start + np.cumsum([int(ms * MS) for ms in millis])
    starts = [start, *ends[:-1]]
    return tuple(Phase(name, int(at), int(end)) for name, at, end in zip(PHASES, starts, ends, strict=True))


def record(
    number: int, parts: Sequence[RequestStep] = (), during: Sequence[Phase] | None = None, **change: object
) -> StepRecord:
    """An engine step; one starts every 100 ms."""
    values: dict[str, object] = {
        "step": number,
        "phases": phases(number * 100 * MS) if during is None else tuple(during),
        "running": len(parts),
        "waiting": 0,
        "blocks_used": 10,
        "blocks_free": 90,
        "speculation": True,
        "speculation_off": "",
        "admitted": (),
        "requests": tuple(parts),
        "preempted": (),
        "finished": (),
    }
    return StepRecord(**(values | change))


def info(
    name: str,
    prompt: str = "",
    tokens: ArrayLike = (),
    labels: Mapping[str, str] | None = None,
    *,
    arrived: int = 0,
    admitted: int = 0,
    params: SamplingParams | None = None,
    **more: str,
) -> RequestInfo:
    """A request as it came in."""
    asked = SamplingParams() if params is None else params
    return RequestInfo(name, arrived, admitted, prompt, ints(tokens), asked, labels or {}, **more)


def end(
    about: RequestInfo,
    output: ArrayLike = (),
    reason: FinishReason = FinishReason.LENGTH,
    *,
    finished: int = 0,
    stop: str = "",
    error: str = "",
) -> RequestEnd:
    """The end of a request."""
    return RequestEnd(about, finished, reason, stop, ints(output), error)


def received(exports):
    """(attributes of its resource, the span) of all spans that a Receiver handed over."""
    return [(resource, span) for export in list(exports) for resource, spans in export.parts for span in spans]
