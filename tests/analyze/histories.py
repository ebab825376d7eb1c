"""Histories built by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specscope.trace.history.history import History
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinishReason, RequestEnd, RequestInfo, RequestStep, RunInfo, StepRecord
from specscope.trace.record.tree import DraftTree
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tree_shape import TreeShape, parse_tree
from tests.support import records as made

MS = made.MS
RUN = RunInfo(
    run_id="run-1",
    target="SmolLM2-135M-Instruct",
    revision="4b2ae1c",
    drafter="ngram",
    draft_model="",
    tree="4",
    device="cpu",
    dtype="bfloat16",
    backend="torch",
    seed=7,
    eos_tokens=(2,),
    max_context=2048,
    blocks=512,
    block_size=16,
    params=SamplingParams().to_dict(),
    versions={"specscope": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
)


def step(
    request: str = "a",
    tree: TreeShape | str | None = None,
    path: Sequence[int] = (),
    tokens: Sequence[int] = (),
    final: int = 9,
    emitted: int | None = None,
    prefill: bool = False,
) -> RequestStep:
    """A request's step: a tree (None: nothing drafted), its accepted path, its tokens (1, 2, ... by default)."""
    shape = TreeShape(()) if tree is None else parse_tree(tree) if isinstance(tree, str) else tree
    n = len(shape)
    drafted = DraftTree.build(list(tokens) or list(range(1, n + 1)), shape.parent)
    if prefill:
        return made.part(request, drafted, None, context=0, prefill=16)
    judged = made.verdict(made.outcomes(n, path), path, final, made.kind_of(shape.parent, path))
    return made.part(request, drafted, judged, emitted=emitted)


def info(name: str, prompt: str = "", labels: Mapping[str, str] | None = None, **params: object) -> RequestInfo:
    """A request that waited 2 ms."""
    return made.info(name, prompt, [5, 6, 7], labels, admitted=2 * MS, params=SamplingParams(**params))


def end(
    about: RequestInfo, output: Sequence[int], reason: FinishReason = FinishReason.LENGTH, **more: str
) -> RequestEnd:
    """An end 3 s after arrival."""
    return made.end(about, output, reason, finished=3000 * MS, **more)


def record(
    number: int,
    parts: Sequence[RequestStep],
    millis: Sequence[float] = (1, 2, 10, 3, 4),
    start_ms: float | None = None,
    **change: object,
) -> StepRecord:
    """An engine step that starts every 100 ms, with the time of each phase in ms."""
    start = int((number * 100 if start_ms is None else start_ms) * MS)
    return made.record(number, parts, made.phases(start, millis), **change)


def history(
    records: Sequence[StepRecord], run: RunInfo | None = RUN, pieces: Mapping[int, bytes] | None = None
) -> History:
    """A history of these records."""
    whole = History(run=run, vocabulary=Vocabulary(dict(pieces or {n: b"t%d " % n for n in range(100)}), {2}))
    for one in records:
        whole.append(one)
    return whole
