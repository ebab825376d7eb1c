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
    """Where every decode step is, or every node."""
    out = []
    for record in history.steps:
        for part in record.requests:
            if part.verdict is not None:
                here = range(len(part.tree)) if nodes else [None]
                out += [Reference(part.request, part.index, record.step, node) for node in here]
    return out


def test_facts_of_nodes(history):
    where = items(history, nodes=True)
    table = facts_table(history, where)
    assert {len(column) for column in table.values()} == {len(where)}
    for at, one in enumerate(where):
        part = history.requests[one.request].steps[history.requests[one.request].place_of(one.index)]
        path = part.tree.path_to(one.node)
        rank = [part.tree.children(int(part.tree.parent[node])).index(node) for node in path]
        assert table["depth"][at] == len(path)
        assert table["sibling"][at] == rank[-1]
        assert table["the path is all first siblings"][at] == (not any(rank))
        assert table["the path to its parent is all first siblings"][at] == (not any(rank[:-1]))
        assert table["the parent is the root"][at] == (part.tree.parent[one.node] == ROOT)
        assert table["the nodes before its parent are its ancestors"][at] == (path[:-1] == list(range(len(path) - 1)))
        assert table["position of the node"][at] == part.position + len(path)
        assert table["token id"][at] == part.tree.token[one.node]
        assert table["the token is on its path already"][at] == (
            part.tree.token[one.node] in part.tree.token[path[:-1]]
        )


def test_facts_of_steps(history):
    where = items(history, nodes=False)
    table = facts_table(history, where)
    assert "depth" not in table
    assert sum(len(history.requests[name].preemptions) for name in history.requests) > 0
    for at, one in enumerate(where):
        request = history.requests[one.request]
        place = request.place_of(one.index)
        part, record = request.steps[place], history.steps[request.engine_steps[place]]
        assert table["batch size"][at] == len(record.requests)
        assert record.requests[table["place in the batch"][at]] is part
        assert table["the step before"][at] == part.preceded.value
        assert table["the step before was accepted as a whole"][at] == (part.preceded.value == "full")
        assert table["drafted tokens rejected before"][at] == sum(
            int((one.verdict.outcome == Outcome.REJECTED).sum()) for one in request.steps[:place] if one.verdict
        )
        assert table["position of the root in its block"][at] == part.position % 16
        assert table["output tokens before"][at] == part.position + 1 - len(request.info.prompt_tokens)
        assert table["label kind"][at] == request.info.labels["kind"]
        before = request.steps[place - 1] if place else None
        if before is not None and before.verdict is not None and part.preceded.value != "preemption":
            path = before.verdict.path.tolist()
            assert table["accepted in the step before"][at] == len(path)
            assert table["the path of the step before was moved"][at] == (path != list(range(len(path))))
    assert min(table["preemptions of the request"]) == 0
    assert max(table["preemptions of the request"]) >= 1
    assert max(table["prefill chunks"]) >= 2


def test_old_captures_lack_what_preceded(history):
    """It follows from the steps, and agrees with what is recorded."""
    import dataclasses

    old = History(history.run, history.vocabulary)
    for record in history.steps:
        parts = tuple(dataclasses.replace(part, preceded=None) for part in record.requests)
        old.append(dataclasses.replace(record, requests=parts))
    where = items(history, nodes=False)
    assert facts_table(old, where)["the step before"] == facts_table(history, where)["the step before"]
