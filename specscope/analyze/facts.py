"""All that a capture says about a decode step and a node in its tree, by name: what conditions.find searches.

The names are phrases that read well in a condition. Of two facts that separate equally well the first is taken, so
what people think of first comes first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from specscope.analyze.evidence.arrays import siblings
from specscope.analyze.evidence.visits import Visit, visits
from specscope.analyze.findings import Reference
from specscope.trace.history.history import History
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import Outcome, Preceded, RequestStep, StepRecord, Verdict
from specscope.trace.record.tree import ROOT, Drawn
from specscope.trace.words import DRAWN

BLOCK = 16  # tokens of a KV block, where the capture does not say
MOST_REQUESTS = 200  # with more of them, the request is not used as a fact


def facts_table(history: History, items: Sequence[Reference]) -> dict[str, list[Any]]:
    """The facts of steps, or of nodes where all references have one, as columns in the order of `items`."""
    wanted: dict[tuple[str, int], list[int]] = defaultdict(list)
    for place, item in enumerate(items):
        wanted[item.request, item.index].append(place)
    rows: dict[int, dict[str, Any]] = {}
    known: dict[str, _Known] = {}
    labels = sorted({name for request in history.requests.values() if request.info for name in request.info.labels})
    special = frozenset(history.vocabulary.special) | frozenset(history.run.eos_tokens if history.run else ())
    block_size = (history.run.block_size if history.run else 0) or BLOCK
    shared: set[int] = set()
    record: StepRecord | None = None
    last: StepRecord | None = None
    for visit in visits(history):
        name, info, part = visit.request.id, visit.request.info, visit.part
        now = known.setdefault(name, _Known(frozenset(info.prompt_tokens.tolist() if info else ())))
        if visit.record is not record:
            last, record = record, visit.record
            shared = _shared_blocks(record)
        now.preempted += visit.preempted
        now.lost |= visit.preempted
        now.cached += part.found or (0 if part.index else part.context_len)
        now.chunks += part.prefill_tokens > 0
        if part.verdict is not None:
            if places := wanted.get((name, part.index)):
                here = {
                    **_request_facts(visit, now),
                    **_batch_facts(visit, now, last, shared),
                    **_param_facts(info.params if info else SamplingParams()),
                    **{f"label {label}": str((info.labels if info else {}).get(label, "")) for label in labels},
                    "position of the root in its block": part.position % block_size,
                    "request": name,
                }
                ranks = siblings(part.tree.parent).tolist()
                for place in places:
                    node = items[place].node
                    of_node = {} if node is None else _node_facts(part, node, ranks, now, special, block_size)
                    rows[place] = of_node | here
            now.decoded += 1
            now.lost = False
            now.seen.update(part.output())
            now.output += part.emitted
            now.refused += int((part.verdict.outcome == Outcome.REJECTED).sum())
        now.row, now.step = visit.row, visit.record.step
    least = min(rows.values(), key=len, default={})
    table = {name: [rows[place][name] for place in range(len(items))] for name in least}
    if "request" in table and len(set(table["request"])) > MOST_REQUESTS:
        del table["request"]
    return table


@dataclass
class _Known:
    """What is known of a request between its steps."""

    prompt: frozenset[int] = frozenset()
    chunks: int = 0  # passes that fed its prompt
    cached: int = 0  # tokens of its prompt that the prefix cache held
    preempted: int = 0
    lost: bool = False  # whether its KV was taken since its last decode step
    output: int = 0
    refused: int = 0  # drafted tokens that were rejected
    decoded: int = 0  # decode steps so far
    row: int = -1  # its place in the batch then
    step: int = -1  # the engine's step
    seen: set[int] = field(default_factory=set)  # tokens of its output


def _node_facts(
    part: RequestStep, node: int, ranks: Sequence[int], now: _Known, special: Container[int], block_size: int
) -> dict[str, Any]:
    """A node in its tree. `ranks`: of each node among its siblings, from 0."""
    tree, verdict = part.tree, part.verdict
    assert verdict is not None
    token, above, path = int(tree.token[node]), int(tree.parent[node]), tree.path_to(node)
    position = part.position + len(path)
    return {
        "depth": len(path),
        "the parent is the root": above == ROOT,
        "sibling": ranks[node],
        "the parent is a first sibling": above == ROOT or ranks[above] == 0,
        "the path to its parent is all first siblings": not any(ranks[i] for i in path[:-1]),
        "the path is all first siblings": not any(ranks[i] for i in path),
        "the nodes before its parent are its ancestors": above == ROOT or above == len(path) - 2,
        "parent's sibling": -1 if above == ROOT else ranks[above],
        "the parent": "root" if above == ROOT else _outcome(verdict, above),
        "outcome": _outcome(verdict, node),
        "node": node,
        "siblings": len(tree.children(above)),
        "drawn": DRAWN[Drawn(int(tree.drawn[node]))],
        "drafted by": (part.method.source_of(node) if part.method is not None else "") or part.drafter,
        "position of the node": position,
        "position of the node in its block": position % block_size,
        "slot of the node in its block": (part.position + 1 + node) % block_size,
        "slot of its parent in its block": (part.position + 1 + above) % block_size,
        "the token is on its path already": token in tree.token[path[:-1]].tolist(),
        "the token is in the output already": token in now.seen,
        "the token is in the prompt": token in now.prompt,
        "the token is special": token in special,
        "token id": token,
    }


def _outcome(verdict: Verdict, node: int) -> str:
    return Outcome(int(verdict.outcome[node])).name.lower()


def _request_facts(visit: Visit, now: _Known) -> dict[str, Any]:
    """The state of the request, and what its previous step did."""
    part, before = visit.part, visit.before
    accepted = before.verdict.accepted if before is not None and before.verdict is not None else -1
    drafted = len(before.tree) if before is not None else 0
    info = visit.request.info
    return {
        "the step before was accepted as a whole": visit.preceded is Preceded.FULL,
        "drafted tokens rejected before": now.refused,
        "the step before": visit.preceded.value,
        "accepted in the step before": accepted,
        "the path of the step before was moved": before is not None and _moves(before),
        "nodes of the step before": drafted,
        "the request was preempted just before": now.lost,
        "preemptions of the request": now.preempted,
        "prefill chunks": now.chunks,
        "tokens found in the prefix cache": now.cached,
        "prefill tokens in the step": part.prefill_tokens,
        "context length": part.context_len,
        "position of the root": part.position,
        "decode step of the request": now.decoded,
        "output tokens before": now.output,
        "prompt tokens": len(info.prompt_tokens) if info else -1,
        "nodes": len(part.tree),
        "depth of the tree": part.tree.max_depth,
        "the tree is a chain": part.tree.parent.tolist() == list(range(-1, len(part.tree) - 1)),
        "rule": part.rule,
        "drafter": part.drafter,
        "tokens in the drafter's cache": part.notes.cached if part.notes is not None else -1,
    }


def _batch_facts(visit: Visit, now: _Known, last: StepRecord | None, shared: set[int]) -> dict[str, Any]:
    """The other requests in the batch."""
    record, part = visit.record, visit.part
    same = last is not None and [p.request for p in last.requests] == [p.request for p in record.requests]
    return {
        "batch size": record.batch,
        "place in the batch": visit.row,
        "the place in the batch is the same as before": now.row in (-1, visit.row),
        "the batch is the same as in the step before": same,
        "the batch has a prefill": any(p.verdict is None or p.prefill_tokens for p in record.requests),
        "steps since the request's last": record.step - now.step if now.step >= 0 else 0,
        "a block is held by two requests": bool(shared.intersection(part.blocks.tolist())),
        "engine step": record.step,
        "waiting requests": record.waiting,
        "free blocks": record.blocks_free,
        "speculation is on": record.speculation,
    }


def _param_facts(params: SamplingParams) -> dict[str, Any]:
    return {
        "temperature": float(params.temperature),
        "top_k": params.top_k,
        "top_p": float(params.top_p),
        "min_p": float(params.min_p),
        "repetition penalty": float(params.repetition_penalty),
        "presence penalty": float(params.presence_penalty),
        "frequency penalty": float(params.frequency_penalty),
        "the request has penalties": params.penalised,
        "the request has a logit bias": params.has("logit_bias"),
    }


def _moves(part: RequestStep) -> bool:
    """Whether the accepted path was not in the slots right after the root."""
    return part.verdict is not None and part.verdict.path.tolist() != list(range(part.verdict.accepted))


def _shared_blocks(record: StepRecord) -> set[int]:
    """Blocks that two requests of a step write to."""
    times = Counter(block for part in record.requests for block in set(part.blocks.tolist()))
    return {block for block, count in times.items() if count > 1}
