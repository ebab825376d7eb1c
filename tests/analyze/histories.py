"""Histories built by hand, and one that looks like a run."""

from __future__ import annotations

import random
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


WORDS = [
    "the",
    "drafter",
    "proposes",
    "a",
    "token",
    "and",
    "target",
    "accepts",
    "it",
    "or",
    "draws",
    "another",
    "from",
    "residual",
    "<b>&amp;",
    "你好",
    "\n",
]
PROMPTS = [
    "Summarise the following paragraph in one sentence, keeping all the names and dates that are in it.",
    "Write a Python function that parses ISO 8601 dates.",
    "<script>alert('x')</script> [bold]markup[/bold] \x1b[31mred\x1b[0m",
    "Translate to German: the cat sat on the mat.",
]


def demo(requests: int = 12, steps: int = 90, seed: int = 1) -> History:
    """A run of several requests with tree drafts that looks like a real one."""
    rng = random.Random(seed)
    shape = parse_tree("[(0,),(1,),(2,),(0,0),(0,1),(1,0),(0,0,0),(0,0,0,0)]")
    names = [f"req-{n:03d}" for n in range(requests)]
    kinds = ["code", "prose", "chat"]
    infos = {
        name: info(name, PROMPTS[n % len(PROMPTS)], {"kind": kinds[n % 3]}, max_tokens=200, seed=n)
        for n, name in enumerate(names)
    }
    ease = {name: rng.uniform(0.25, 0.9) for name in names}
    outputs: dict[str, list[int]] = {name: [] for name in names}
    records = []
    for number in range(steps):
        parts = []
        for name in names:
            if number == 0:
                parts.append(step(name, prefill=True))
                continue
            node, path = -1, []
            while (children := shape.children(node)) and rng.random() < ease[name]:
                node = rng.choice(children)
                path.append(node)
            tokens = [rng.randrange(3, len(WORDS) + 3) for _ in range(len(shape))]
            tree = None if number == 1 else shape
            one = step(name, tree, path if tree else (), tokens if tree else (), rng.randrange(3, len(WORDS) + 3))
            outputs[name] += one.tokens()
            parts.append(one)
        millis = [rng.uniform(0.1, 0.3), rng.uniform(2, 4), rng.uniform(28, 40), rng.uniform(1, 2), rng.uniform(0.3, 1)]
        last = number == steps - 1
        records.append(
            record(
                number,
                parts,
                millis,
                start_ms=number * 55,
                admitted=tuple(infos.values()) if number == 0 else (),
                blocks_used=100 + number * 3,
                blocks_free=412 - number * 3,
                speculation=number not in (0, 1),
                speculation_off="" if number > 1 else "prefill",
                finished=tuple(end(infos[n], outputs[n]) for n in names[:-1]) if last else (),
            )
        )
    pieces = {n: (word + " ").encode() for n, word in enumerate(WORDS, start=3)}
    return history(records, pieces=pieces)
