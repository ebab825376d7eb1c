"""The facts of nodes and steps: those of a small run, worked out by hand from its records."""

import pytest

from specscope import Engine, SamplingParams
from specscope.analyze.facts import facts_table
from specscope.analyze.findings import Reference
from specscope.trace.history.history import History
from specscope.trace.record.records import Outcome
from specscope.trace.record.tree import ROOT

TREE = "top:[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]"


@pytest.fixture(scope="module")
def history(tiny):
    """Three requests, of which one is preempted; one prompt comes in chunks."""
    engine = Engine(
        target=str(tiny),
        drafter="draft_model",
        draft_model=str(tiny),
        tree=TREE,
        dtype="float32",
        kv_memory=0.01,
        max_batch=3,
        max_step_tokens=24,
    )
    engine.runner.cache.pool.__init__(9)
    found = History(engine.run_info, engine.vocabulary)
    for at, prompt in enumerate(["abc " * 12, "hello hello", "the cat sat"]):
        params = SamplingParams(max_tokens=30, temperature=0.3, seed=at, ignore_eos=True)
        engine.add(prompt, params, labels={"kind": "even" if at % 2 == 0 else "odd"})
    while engine.busy:
        found.append(engine.step())
    return found


def items(history, nodes):
    """Where every decode step is, or every node; with the step and its place in its request."""
    for record in history.steps:
        for part in record.requests:
            for node in (range(len(part.tree)) if nodes else [None]) if part.verdict is not None else ():
                place = history.requests[part.request].place_of(part.index)
                yield Reference(part.request, part.index, record.step, node), part, place


def test_facts_of_nodes(history):
    where = list(items(history, nodes=True))
    table = facts_table(history, [one for one, *_ in where])
    assert {len(column) for column in table.values()} == {len(where)}
    for at, (one, part, _) in enumerate(where):
        path = part.tree.path_to(one.node)
        rank = [part.tree.children(int(part.tree.parent[node])).index(node) for node in path]
        expected = {
            "depth": len(path),
            "sibling": rank[-1],
            "the path is all first siblings": not any(rank),
            "the path to its parent is all first siblings": not any(rank[:-1]),
            "the parent is the root": part.tree.parent[one.node] == ROOT,
            "the nodes before its parent are its ancestors": path[:-1] == list(range(len(path) - 1)),
            "position of the node": part.position + len(path),
            "token id": part.tree.token[one.node],
            "the token is already on its path": part.tree.token[one.node] in part.tree.token[path[:-1]],
        }
        assert {name: table[name][at] for name in expected} == expected


def test_facts_of_steps(history):
    where = list(items(history, nodes=False))
    table = facts_table(history, [one for one, *_ in where])
    assert "depth" not in table
    for at, (one, part, place) in enumerate(where):
        request = history.requests[one.request]
        record, before = history.steps[request.engine_steps[place]], request.steps[place - 1] if place else None
        rejected = [(step.verdict.outcome == Outcome.REJECTED).sum() for step in request.steps[:place] if step.verdict]
        expected = {
            "batch size": len(record.requests),
            "place in the batch": record.requests.index(part),
            "the step before": part.preceded.value,
            "the step before was accepted in full": part.preceded.value == "full",
            "drafted tokens rejected earlier": sum(rejected),
            "position of the root in its block": part.position % 16,
            "output tokens before": part.position + 1 - len(request.info.prompt_tokens),
            "label kind": request.info.labels["kind"],
        }
        if before is not None and before.verdict is not None and part.preceded.value != "preemption":
            path = before.verdict.path.tolist()
            expected["accepted in the previous step"] = len(path)
            expected["the previous step's path was moved"] = path != list(range(len(path)))
        assert {name: table[name][at] for name in expected} == expected
    assert min(table["preemptions of the request"]) == 0
    assert max(table["preemptions of the request"]) >= 1
    assert max(table["prefill chunks"]) >= 2
