"""Random records: any tree, any verdict that the schema allows, tokens whose bytes are no UTF-8 or nothing at all."""

from functools import cache
from itertools import chain
from typing import get_args

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specscope.trace.record.aggregate import Aggregate, LeftOut, Reason, Sampled
from specscope.trace.record.declared import WireForm
from specscope.trace.record.notes import FormNotes, Logprobs, MethodNotes
from specscope.trace.record.params import SamplingParams, StructuredOutputs
from specscope.trace.record.records import (
    DraftNotes,
    FinalKind,
    Flight,
    ParentNotes,
    Phase,
    RequestEnd,
    RequestInfo,
    RequestStep,
    RunInfo,
    StepRecord,
    Verdict,
)
from specscope.trace.record.tree import DraftTree
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.codec import wired

TOKENS = 40
text = st.text(st.characters(), max_size=12)  # lone surrogates among them
clean_text = st.text(st.characters(codec="utf-8"), max_size=12)
labels = st.dictionaries(clean_text, clean_text, max_size=2)
times = st.integers(1, 2**62)
counts = st.integers(0, 10**6)
none = np.zeros(0, np.int32)


# What an engine that went wrong may have computed: it is evidence.
WRONG = (float("nan"), float("inf"), float("-inf"), -0.25, 1.25, -3.0, 2.0**100)
wrong = st.sampled_from(WRONG)


number = st.floats(0, 1) | wrong  # of the evidence, in 64 bits


@cache
def floats(shape, dtype):
    return hnp.arrays(dtype, shape, elements=st.floats(0, 1, width=32 if dtype == np.float32 else 64) | wrong)


@cache
def ints(shape, high=10**6):
    return hnp.arrays(np.int32, shape, elements=st.integers(0, high))


@st.composite
def evidence(draw, kind, sizes, /, **given):
    """A record by the declarations of its fields: its arrays over `sizes` or any others, its numbers of their types."""
    fields = [field for field in wired(kind) if field.name not in given]
    shapes = [field.dimensions for field in fields if field.dtype is not None]
    sizes = {letter: draw(st.integers(0, 3)) for letter in sorted({*chain(*shapes)} - {*sizes})} | sizes
    # Of no rows there are no columns
    sizes |= {inner: 0 for outer, *rest in shapes if not sizes[outer] for inner in rest}
    return draw(st.builds(kind, **{field.name: _of(field, sizes) for field in fields}, **given))


SINGLE = {float: number, bool: st.booleans(), int: counts, str: clean_text, type(None): st.none()}


@cache
def _single(field):
    kinds = get_args(field.base) or (field.base,)
    of_kinds = [SINGLE[kind] if kind in SINGLE else st.sampled_from(kind) for kind in kinds]
    return text if field.wire.form is WireForm.ESCAPED else st.one_of(*of_kinds)


def _of(field, sizes):
    if field.dtype is None:
        return _single(field)
    shape = tuple(sizes[letter] for letter in field.dimensions)
    values = floats(shape, field.dtype) if field.is_float else ints(shape, TOKENS - 1 if field.is_id else 10**6)
    return values | st.just(np.zeros(0, field.dtype)) if field.wire.per.endswith("?") else values


@st.composite
def trees(draw, max_nodes=9):
    n = draw(st.integers(0, max_nodes))
    parents = np.array([draw(st.integers(-1, i - 1)) for i in range(n)], dtype=np.int32)
    drawn = hnp.arrays(np.uint8, n, elements=st.integers(0, 2))
    return draw(evidence(DraftTree, {"n": n}, parent=st.just(parents), drawn=drawn))


@st.composite
def verdicts(draw, tree):
    n = len(tree)
    path = tree.path_to(draw(st.integers(0, n - 1))) if n and draw(st.booleans()) else []
    outcome = draw(hnp.arrays(np.uint8, n, elements=st.integers(0, 2)))
    outcome[path] = 1
    told = {"outcome": st.just(outcome), "path": st.just(np.array(path, dtype=np.int32))}
    told |= {"kind": st.sampled_from(FinalKind), "token": st.integers(0, TOKENS - 1)}
    told["forced"] = hnp.arrays(np.int32, st.integers(0, 3), elements=st.integers(0, n))
    return draw(evidence(Verdict, {"n": n}, rule=st.sampled_from(["standard", "block", "match", "lossy:fly"]), **told))


def method_notes(tree):
    """Of a drafter that has some of what drafters of today have; at least one of it."""
    told = {"source": st.just(none) | ints(len(tree), 2), "match_source": clean_text}
    return evidence(MethodNotes, {"n": len(tree)}, **told).map(lambda one: None if one == MethodNotes() else one)


@st.composite
def notes(draw, tree):
    """Of a tree, which may be empty, and of any nodes left out of it."""
    n, d = len(tree), draw(st.integers(0, 4))
    dropped = np.array([draw(st.integers(-1, n + i - 1)) for i in range(d)], dtype=np.int32)
    return draw(evidence(DraftNotes, {"n": n, "d": d}, dropped_parent=st.just(dropped)))


@st.composite
def form_notes(draw, tree):
    """Of the root and some nodes, or of nothing at all but a count."""
    nodes = [-1, *sorted(draw(st.sets(st.integers(0, len(tree) - 1), max_size=3)))] if len(tree) else [-1]
    nodes = draw(st.just([]) | st.just(nodes))
    return draw(evidence(FormNotes, {"s": len(nodes)}, node=st.just(np.array(nodes, np.int32))))


@st.composite
def parent_notes(draw, tree):
    """Of any of a tree's nodes and its root, with any number of likeliest tokens for each."""
    nodes = sorted(draw(st.sets(st.integers(-1, len(tree) - 1), max_size=3)))
    sizes = {"n": len(tree), "k": len(nodes), "t": draw(st.integers(1, 4)) if nodes else 0}
    return draw(evidence(ParentNotes, sizes, node=st.just(np.array(nodes, dtype=np.int32))))


params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 5),
    top_k=counts,
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 0.9),
    repetition_penalty=st.floats(0.1, 3),
    logit_bias=st.dictionaries(counts, st.floats(-100, 100), max_size=2),
    seed=st.integers(0, 2**63 - 1),
    max_tokens=st.integers(1, 10**6),
    stop=st.lists(clean_text.filter(bool), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 1]),
    logprobs=st.none() | st.integers(0, 20),
    stop_token_ids=st.lists(counts, max_size=2).map(tuple),
    structured_outputs=st.none()
    | st.one_of(
        st.builds(StructuredOutputs, json=st.dictionaries(clean_text, clean_text, max_size=2)),
        st.builds(StructuredOutputs, regex=clean_text.filter(lambda text: text and "\0" not in text)),
        st.builds(StructuredOutputs, choice=st.lists(clean_text.filter(lambda t: t and "\0" not in t), min_size=1)),
        st.sampled_from([StructuredOutputs(json_object=True), StructuredOutputs(grammar='root ::= "a"')]),
    ),
)


@st.composite
def infos(draw, name):
    arrival = draw(times)
    told = {"id": st.just(name), "arrival_ns": st.just(arrival), "admitted_ns": st.just(arrival + draw(counts))}
    told["traceparent"] = st.sampled_from(["", f"00-{7:032x}-{9:016x}-01", f"00-{1 << 100:032x}-{1 << 60:016x}-00"])
    return draw(evidence(RequestInfo, {}, params=params, labels=labels, title=text, **told))


passes = st.lists(st.tuples(times, counts), max_size=3).map(
    lambda spans: tuple(Phase(f"pass {i + 1}", start, start + length) for i, (start, length) in enumerate(spans))
)


@st.composite
def aggregates(draw):
    """Sums of an interval, of which any may not be told."""
    at = tuple(sorted(draw(st.lists(counts, max_size=4)), reverse=True))
    drafts = draw(st.integers(at[0], 2 * 10**6)) if at else draw(st.none() | counts)
    told = {"source": st.sampled_from(["vLLM /metrics", "SGLang /metrics"]), "accepted_at": st.just(at)}
    told["proposed_at"] = st.sampled_from([(), (drafts,) * len(at)])
    told["averages"] = st.dictionaries(clean_text.filter(bool), st.floats(0, 1e6), max_size=2)
    return draw(evidence(Aggregate, {}, drafts=st.just(drafts), kv_usage=st.none() | st.floats(0, 1), **told))


sampled = st.none() | st.builds(Sampled, st.sampled_from(Reason), st.floats(0, 1), st.booleans())
# Of this step; that whole steps before it are missing, test_capture.py has
left_out = st.none() | st.builds(LeftOut, st.just(0), counts, counts, counts, counts, counts)


@st.composite
def parts(draw, name):
    """A request's step; one that judged nothing has only what a prefill chunk has."""
    tree = draw(trees())
    verdict = draw(st.none() | verdicts(tree))
    emitted = draw(st.integers(0, verdict.accepted + 1)) if verdict is not None else 0
    told = {"request": st.just(name), "index": st.just(0) | counts, "emitted": st.just(emitted)}
    if verdict is None:
        told |= {"drafter": st.just("none"), "tree": st.just(DraftTree.empty()), "sizing": st.just("")}
        told |= dict.fromkeys(("verdict", "notes", "preceded", "parents", "method", "form", "logprobs"), st.none())
        return draw(evidence(RequestStep, {"v": 0}, **told))
    told |= {"drafter": st.sampled_from(["ngram", "none"]), "tree": st.just(tree), "verdict": st.just(verdict)}
    told |= {"moved": ints(draw(st.integers(0, 2)), len(tree) - 1) if len(tree) else st.just(none)}
    notes_of = {"notes": notes, "parents": parent_notes, "method": method_notes, "form": form_notes}
    told |= {field: st.none() | of(tree) for field, of in notes_of.items()}
    told["logprobs"] = st.none() | evidence(Logprobs, {"e": emitted, "w": draw(st.integers(0, 20))})
    return draw(evidence(RequestStep, {"v": 0}, **told))


def ends(info):
    return evidence(RequestEnd, {}, info=st.just(info), finished_ns=times, sampled=sampled)


@st.composite
def runs(draw, max_steps=4):
    """A few consecutive steps, in which requests come, run and end."""
    alive: dict[str, RequestInfo] = {}
    records = []
    names = iter(f"r{i}" for i in range(100))
    for step in range(draw(st.integers(1, max_steps))):
        admitted = tuple(draw(infos(next(names))) for _ in range(draw(st.integers(0, 2))))
        alive |= {info.id: info for info in admitted}
        requests = tuple(draw(parts(name)) for name in alive)
        ending = [name for name in alive if draw(st.booleans())]
        moments = sorted(draw(st.lists(times, min_size=6, max_size=6)))
        phases = ("schedule", "draft", "forward", "verify", "commit")
        phases = tuple(Phase(n, a, b) for n, a, b in zip(phases, moments[:-1], moments[1:], strict=True))
        told = {"step": step, "phases": phases, "admitted": admitted, "requests": requests}
        told["finished"] = tuple(draw(ends(alive.pop(name))) for name in ending)
        told["preempted"] = tuple(draw(st.lists(st.sampled_from(sorted(alive)), max_size=1))) if alive else ()
        drawn = {"passes": passes, "device_ns": st.lists(counts, max_size=5).map(tuple), "branch": st.integers(0, 3)}
        drawn |= {"after": st.none() | st.integers(-1, step - 1), "aggregate": st.none() | aggregates()}
        drawn |= {"flight": st.none() | st.builds(Flight, times, times, times), "left_out": left_out}
        records.append(draw(evidence(StepRecord, {}, **drawn, **{name: st.just(each) for name, each in told.items()})))
    return records


texts = {i: st.binary(min_size=1, max_size=5) for i in range(TOKENS)}
pieces = st.fixed_dictionaries({}, optional=texts)  # rows that fill a vocabulary up have no text
vocabularies = st.builds(Vocabulary, pieces, st.sets(st.integers(0, TOKENS - 1), max_size=3))

RUN = RunInfo(
    run_id="0123456789abcdef",
    target="a/model",
    revision="abc",
    drafter="ngram",
    draft_model="",
    tree="3x4",
    device="cpu",
    dtype="float32",
    backend="torch",
    seed=3,
    eos_tokens=(2, 7),
    max_context=2048,
    blocks=100,
    block_size=16,
    params=SamplingParams(temperature=0.7).to_dict(),
    versions={"specscope": "0.1", "torch": "2"},
    aux_layers=("2", "15", "final"),
    draft_vocab=8192,
    evidence="full",
    target_path="~/a/model",
    target_digest="0123456789abcdef" * 2,
    draft_path="self:2",
    draft_digest="0123456789abcdef" * 2 + ":2",
)
