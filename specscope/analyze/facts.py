"""All that a capture says about a decode step and a node in its tree, by name: what conditions.find searches.

The names are phrases that read well in a condition. Of two facts that separate equally well the first is taken, so
what people think of first comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.evidence.visits import visits
from specscope.analyze.findings import Reference
from specscope.trace.history.history import History
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import Outcome, Preceded, RequestStep, StepRecord
from specscope.trace.record.tree import Drawn
from specscope.trace.words import DRAWN

BLOCK = 16  # tokens of a KV block, where the capture does not say
MOST_REQUESTS = 200  # with more of them, the request is not used as a fact
KNOBS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def facts_table(history: History, items: Sequence[Reference]) -> dict[str, Any]:
    """The facts of steps, or of nodes where all references have one, as columns in the order of `items`."""
    if not items:
        return {}
    c = Columns.of(list(visits(history)), history)
    number = {(visit.request.id, visit.part.index): step for step, visit in enumerate(c.visits)}
    steps, which = np.unique([number[item.request, item.index] for item in items], return_inverse=True)
    nodes = [item.node for item in items if item.node is not None]
    of_nodes = _node_facts(c, c.start[steps[which]] + nodes) if len(nodes) == len(items) else {}
    table = of_nodes | {name: np.asarray(column)[which] for name, column in _step_facts(c, steps).items()}
    if len(set(table["request"].tolist())) > MOST_REQUESTS:
        del table["request"]
    return table


def _block_size(c: Columns) -> int:
    return (c.run.block_size if c.run else 0) or BLOCK


def _node_facts(c: Columns, nodes: Indices) -> dict[str, Any]:
    """Nodes in their trees."""
    assert c.history is not None
    step, above, token, size = c.step[nodes], c.above[nodes], c.token[nodes], _block_size(c)
    is_top, root, texts = above < 0, c.position[step], c.texts
    outcomes = np.array([outcome.name.lower() for outcome in Outcome])[c.outcome]
    parts = [(c.parts[s], node) for s, node in zip(step.tolist(), c.node[nodes].tolist(), strict=True)]
    special = {*c.history.vocabulary.special, *(c.run.eos_tokens if c.run else ())}
    again, way = np.zeros(len(nodes), np.bool_), above
    while (way >= 0).any():
        again |= (way >= 0) & (c.token[way] == token)
        way = np.where(way >= 0, c.above[way], -1)
    in_output, in_prompt = np.zeros((2, len(nodes)), np.bool_)
    for s in np.unique(step).tolist():
        mine, request = step == s, texts.request[s]
        in_output[mine] = np.isin(token[mine], texts.text[texts.outputs[request] : texts.behind[s]])
        in_prompt[mine] = np.isin(token[mine], texts.text[texts.begins[request] : texts.outputs[request]])
    return {
        "depth": c.depth[nodes],
        "the parent is the root": is_top,
        "sibling": c.sibling[nodes],
        "the parent is a first sibling": is_top | (c.sibling[above] == 0),
        "the path to its parent is all first siblings": is_top | c.is_first[above],
        "the path is all first siblings": c.is_first[nodes],
        "the nodes before its parent are its ancestors": c.parent[nodes] == c.depth[nodes] - 2,
        "parent's sibling": np.where(is_top, -1, c.sibling[above]),
        "the parent": np.where(is_top, "root", outcomes[above]),
        "outcome": outcomes[nodes],
        "node": c.node[nodes],
        "siblings": np.bincount(c.row)[c.row[nodes]],
        "drawn": np.array([DRAWN[drawn] for drawn in Drawn])[c.drawn[nodes]],
        "drafted by": np.array(
            [(p.method.source_of(i) if p.method is not None else "") or p.drafter for p, i in parts]
        ),
        "position of the node": root + c.depth[nodes],
        "position of the node in its block": (root + c.depth[nodes]) % size,
        "slot of the node in its block": (root + 1 + c.node[nodes]) % size,
        "slot of its parent in its block": (root + 1 + c.parent[nodes]) % size,
        "the token is already on its path": again,
        "the token is already in the output": in_output,
        "the token is in the prompt": in_prompt,
        "the token is special": np.isin(token, list(special)),
        "token id": token,
    }


def _step_facts(c: Columns, steps: Indices) -> dict[str, Any]:
    """The state of the request, what its steps before did, and the batch."""
    assert c.history is not None
    every, here = c.every, [c.visits[step] for step in steps.tolist()]
    parts, records, befores = ([getattr(visit, name) for visit in here] for name in ("part", "record", "before"))
    infos = [visit.request.info for visit in here]
    asked, told = [info.params if info else SamplingParams() for info in infos], [i.labels if i else {} for i in infos]
    at, judged = np.array([visit.number for visit in here]), [visit.part.is_judged for visit in every]

    def so_far(values: Iterable[float]) -> Indices:
        """[visits] of each request the sum up to and with each."""
        column, total = np.array(list(values), np.int64), np.zeros(len(every), np.int64)
        for mine in ([visit.number for visit in one] for one in c.by_request):
            total[mine] = np.cumsum(column[mine])
        return total

    emitted, refused = np.zeros((2, len(every)), np.int64)
    emitted[judged] = [part.emitted for part in c.parts]
    refused[judged] = np.bincount(c.step[c.rejected], minlength=len(c))
    preempted, of_steps, before = so_far(visit.preempted for visit in every), np.flatnonzero(judged), c.before[steps]
    found = so_far(visit.part.found or (0 if visit.part.index else visit.part.context_len) for visit in every)
    last = {visit.number: then for one in c.by_request for then, visit in pairwise(one)}
    thens = [last.get(visit.number, visit) for visit in here]
    batches = list({id(visit.record): visit.record for visit in every}.values())
    same = {id(now): _names(then) == _names(now) for then, now in pairwise(batches)}
    shared = {id(record): _shared_blocks(record) for record in records}
    labels = sorted({name for one in c.history.requests.values() if one.info for name in one.info.labels})
    return {
        "the step before was accepted in full": [visit.preceded is Preceded.FULL for visit in here],
        "drafted tokens rejected earlier": (so_far(refused) - refused)[at],
        "the step before": [visit.preceded.value for visit in here],
        "accepted in the previous step": [part.verdict.accepted if part and part.verdict else -1 for part in befores],
        "the previous step's path was moved": [part is not None and _moves(part) for part in befores],
        "nodes of the previous step": [len(part.tree) if part else 0 for part in befores],
        "the request was just preempted": preempted[at] > np.where(before < 0, 0, preempted[of_steps[before]]),
        "preemptions of the request": preempted[at],
        "prefill chunks": so_far(visit.part.prefill_tokens > 0 for visit in every)[at],
        "tokens found in the prefix cache": found[at],
        "prefill tokens in the step": [part.prefill_tokens for part in parts],
        "context length": [part.context_len for part in parts],
        "position of the root": [part.position for part in parts],
        "decode step of the request": so_far(judged)[at] - 1,
        "output tokens before": (so_far(emitted) - emitted)[at],
        "prompt tokens": [len(info.prompt_tokens) if info else -1 for info in infos],
        "nodes": [len(part.tree) for part in parts],
        "depth of the tree": [part.tree.max_depth for part in parts],
        "the tree is a chain": [part.tree.parent.tolist() == list(range(-1, len(part.tree) - 1)) for part in parts],
        "rule": [part.rule for part in parts],
        "drafter": [part.drafter for part in parts],
        "tokens in the drafter's cache": [part.notes.cached if part.notes is not None else -1 for part in parts],
        "batch size": [record.batch for record in records],
        "place in the batch": [visit.row for visit in here],
        "the place in the batch is unchanged": [a.row == b.row for a, b in zip(thens, here, strict=True)],
        "the batch is the same as in the previous step": [same.get(id(record), False) for record in records],
        "the batch has a prefill": [any(p.verdict is None or p.prefill_tokens for p in r.requests) for r in records],
        "steps since the request's last": [b.record.step - a.record.step for a, b in zip(thens, here, strict=True)],
        "two requests hold one block": [
            bool(shared[id(visit.record)].intersection(visit.part.blocks.tolist())) for visit in here
        ],
        "engine step": [record.step for record in records],
        "waiting requests": [record.waiting for record in records],
        "free blocks": [record.blocks_free for record in records],
        "speculation is on": [record.speculation for record in records],
        **{name.replace("_penalty", " penalty"): [getattr(params, name) for params in asked] for name in KNOBS},
        "the request has penalties": [params.penalised for params in asked],
        "the request has a logit bias": [params.has("logit_bias") for params in asked],
        **{f"label {label}": [str(each.get(label, "")) for each in told] for label in labels},
        "position of the root in its block": c.position[steps] % _block_size(c),
        "request": [visit.request.id for visit in here],
    }


def _names(record: StepRecord) -> list[str]:
    return [part.request for part in record.requests]


def _moves(part: RequestStep) -> bool:
    """Whether the accepted path was not in the slots right after the root."""
    return part.verdict is not None and part.verdict.path.tolist() != list(range(part.verdict.accepted))


def _shared_blocks(record: StepRecord) -> set[int]:
    times = Counter(block for part in record.requests for block in set(part.blocks.tolist()))
    return {block for block, count in times.items() if count > 1}
