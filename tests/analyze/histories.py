"""Histories built by hand: every token, outcome and figure that a test looks at is given."""

import dataclasses

import numpy as np

from specscope.trace.history.history import History
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import DraftNotes, FinishReason, RunInfo
from specscope.trace.record.tree import DraftTree
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tree_shape import TreeShape, parse_tree
from tests.support import records as made
from tests.support.records import floats, ints
from tests.trace.samples import written

MS = made.MS
PROMPT = 10  # tokens, of what `decode` gives
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


def step(request="a", tree=None, path=(), tokens=(), final=9, emitted=None, prefill=False):
    """A request's step: a tree (None: nothing drafted), its accepted path, its tokens (1, 2, ... by default)."""
    shape = TreeShape(()) if tree is None else parse_tree(tree) if isinstance(tree, str) else tree
    n = len(shape)
    drafted = DraftTree.build(list(tokens) or list(range(1, n + 1)), shape.parent)
    if prefill:
        return made.part(request, drafted, None, context=0, prefill=16)
    judged = made.verdict(made.outcomes(n, path), path, final, made.kind_of(shape.parent, path))
    return made.part(request, drafted, judged, emitted=emitted)


def decode(tokens=(), path=(), rejected=(), final=99, *, own=None, dropped=(), request="a", output=0, **more):
    """A chain's step. `own`: the drafter's p; `dropped`: (token, parent); `output`: tokens before it."""
    n, tree = len(tokens), made.chain(tokens)
    kind = made.kind_of(tree.parent.tolist(), path)
    judged = made.verdict(made.outcomes(n, path, rejected), path, final, kind, q_trial=tree.q, final_coin=0.0)
    if own is not None:
        left_out = [ints([one[place] for one in dropped]) for place in (0, 1)]
        more["notes"] = DraftNotes(floats(own), floats(np.zeros(n)), *left_out, floats(np.zeros(len(dropped))))
    return made.part(request, tree, judged, context=PROMPT + output - 1, drafter="made", **more)


def noted(nodes, tree_size, top, top_p, raw_p, **more):
    """What the target (and a drafter that is a model) gave at these parents."""
    choice = [row[0] for row in top]
    return made.parents(nodes, tree_size, top=top, top_p=top_p, raw_p=raw_p, choice=choice, **more)


def info(name, prompt="", labels=None, **params):
    """A request that waited 2 ms."""
    return made.info(name, prompt, [5, 6, 7], labels, admitted=2 * MS, params=SamplingParams(**params))


def end(about, output, reason=FinishReason.LENGTH, **more):
    """An end 3 s after arrival."""
    return made.end(about, output, reason, finished=3000 * MS, **more)


def record(number, parts, millis=(1, 2, 10, 3, 4), start_ms=None, **change):
    """An engine step that starts every 100 ms, with the time of each phase in ms."""
    start = int((number * 100 if start_ms is None else start_ms) * MS)
    return made.record(number, parts, made.phases(start, millis), **change)


def history(records, run=RUN, pieces=None):
    """A history of these records."""
    whole = History(run=run, vocabulary=Vocabulary(dict(pieces or {n: b"t%d " % n for n in range(100)}), {2}))
    for one in records:
        whole.append(one)
    return whole


def run_of(parts, kinds=None, **change):
    """One engine step each, in which the request has its next index; every request is admitted with the first."""
    index = dict.fromkeys((part.request for part in parts), 0)
    labels = {name: {"kind": kinds[name]} if kinds else {} for name in index}
    infos = tuple(made.info(name, "", np.zeros(PROMPT), labels[name]) for name in index)
    records = []
    for number, part in enumerate(parts):
        numbered = dataclasses.replace(part, index=index[part.request])
        index[part.request] += 1
        records.append(record(number, [numbered], admitted=() if number else infos))
    return history(records, run=dataclasses.replace(RUN, **change))


FORK = "[(0,),(1,),(0,0)]"  # nodes: 0 and 1 below the root, 2 below 0
A = info("a", "Say hello", {"kind": "chat"})
B = info("b", "def f(", {"kind": "code", "lang": "py"}, temperature=0.5, seed=3)


def small():
    """Two requests: a with steps without draft, rejected, a whole path; b with a whole chain, then one of three."""
    ends = end(A, [40, 23, 41, 43, 44]), end(B, [11, 12, 13, 14, 31], FinishReason.STOP, stop="t13")
    crowded = {"blocks_used": 25, "blocks_free": 75, "preempted": ("a",), "finished": ends[1:]}
    last = {"speculation": False, "speculation_off": "batch above 8", "finished": ends[:1]}
    cut = step("b", "3", (0,), (31, 32, 33), 34, emitted=1)
    return history(
        [
            record(0, [step("a", prefill=True)], admitted=(A, B), waiting=1),
            record(1, [step("a", final=40), step("b", "3", (0, 1, 2), (11, 12, 13), 14)], (3, 2, 20, 3, 4)),
            record(2, [step("a", "2", (), (21, 22), 23), cut], (2, 2, 60, 3, 4), **crowded),
            record(3, [step("a", FORK, (0, 2), (41, 42, 43), 44)], **last),
        ]
    )


def write(history, path, run=None):
    """The capture of a history. `run`: another header for it."""
    return written(path, history.steps, run or history.run, history.vocabulary)
