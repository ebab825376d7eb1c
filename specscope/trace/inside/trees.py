"""Evidence from the numbers of a verification: chains as every engine's are read, and trees that are walked by match.

Under match a parent's children share one coin, which falls on a child or beside all of them: child i has p_i of it, and
its chance of being accepted once its elder siblings are not is p_i over what they left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specscope.trace.inside.chain import NO_FLOATS, NO_INTS, Judged
from specscope.trace.inside.gathered import Gathered, final_of, parents_of, read
from specscope.trace.record.records import DraftNotes, FinalKind, Outcome, Verdict
from specscope.trace.record.rules import UNSEEN
from specscope.trace.record.tree import ROOT, DraftTree, Ints

Tried = list[tuple[int, list[int]]]  # parents, each with its children


class VerificationError(RuntimeError):
    """A verification was not as it is known: its step is left out."""


@dataclass(frozen=True)
class SentNumbers:
    """One request's, on the host."""

    accepted: int  # drafts
    context: int  # tokens whose KV was there
    candidates: np.ndarray  # [n] root and drafts
    first_child: np.ndarray | None  # [n] slots, -1 for none; None for chains
    next_sibling: np.ndarray | None
    path: np.ndarray  # [accepted] slots
    given: list[int]  # tokens that came out: those of the path, and the final one
    final_coin: float
    scores: np.ndarray | None  # [n - 1] the drafter's probability of the path to each draft


def sent_numbers(sent: Mapping[str, np.ndarray]) -> list[SentNumbers]:
    """[B] of arrays [B, ...] by these names. `index`: root and accepted slots, as rows of all requests."""
    requests, n = [], sent["candidates"].shape[1]
    for b, count in enumerate(sent["accepted"].tolist()):
        row = {name: values.reshape(len(sent["accepted"]), -1)[b] for name, values in sent.items()}
        requests.append(
            SentNumbers(
                accepted=count,
                context=int(row["context"][0]),
                candidates=row["candidates"],
                first_child=row.get("first_child"),
                next_sibling=row.get("next_sibling"),
                path=row["index"][1 : 1 + count].astype(np.int64) - b * n,
                given=row["given"][: 1 + count].tolist(),
                final_coin=float(row["final_coin"][0]) if "final_coin" in row else 0.0,
                scores=row.get("scores"),
            )
        )
    return requests


@dataclass(frozen=True)
class JudgedRequest:
    """One request's part in a verification."""

    judged: Judged
    context: int  # tokens whose KV was there


def slots_above(first_child: Tensor, next_sibling: Tensor) -> Tensor:
    """[B, n] the parent's slot of each slot; a slot that nothing leads to, the root among them, has 0.

    Each slot looks for the eldest of its siblings in log2(n) steps, and that one's parent is known.
    """
    batch, n = first_child.shape
    first_child, next_sibling = first_child.clamp_max(n - 1), next_sibling.clamp_max(n - 1)
    slots = torch.arange(n, device=first_child.device).expand(batch, n)
    nowhere = torch.full((batch, 1), n, device=first_child.device)  # where links of -1 point
    elder = torch.cat([slots, nowhere], dim=1).scatter(1, torch.where(next_sibling < 0, n, next_sibling), slots)
    elder[:, n] = n
    for _ in range(max(n - 1, 1).bit_length()):
        elder = elder.gather(1, elder)
    parent = torch.zeros_like(elder).scatter(1, torch.where(first_child < 0, n, first_child), slots)
    return parent.gather(1, elder)[:, :n]


@dataclass(frozen=True)
class _Shape:
    """Which slots are nodes: those that the links lead to, parents before children and siblings as they are tried."""

    slots: Ints  # [m]
    parent: Ints  # [m] nodes, or ROOT

    @staticmethod
    def of(numbers: SentNumbers) -> _Shape:
        n = len(numbers.candidates)
        if numbers.first_child is None or numbers.next_sibling is None:
            return _Shape(np.arange(1, n, dtype=np.int32), np.arange(-1, n - 2, dtype=np.int32))
        first, following = numbers.first_child.tolist(), numbers.next_sibling.tolist()
        slots: list[int] = []
        parents: list[int] = []
        place, at = ROOT, 0
        while True:
            child = first[at]
            while child >= 0:
                if len(slots) >= n - 1:
                    raise VerificationError("the links of a tree form a cycle")
                slots.append(child)
                parents.append(place)
                child = following[child]
            place += 1
            if place >= len(slots):
                return _Shape(np.array(slots, np.int32), np.array(parents, np.int32))
            at = slots[place]

    @property
    def is_chain(self) -> bool:
        """Whether each node is the slot behind the one before."""
        return bool((self.slots == np.arange(1, len(self.slots) + 1)).all()) and bool(
            (self.parent == np.arange(-1, len(self.slots) - 1)).all()
        )

    def path(self, slots: Ints) -> Ints:
        """The accepted slots as nodes. Raises VerificationError where they are no path."""
        node_of = {slot: node for node, slot in enumerate(self.slots.tolist())}
        path = [node_of.get(slot, -2) for slot in slots.tolist()]
        above = ROOT
        for node in path:
            if node < 0 or self.parent[node] != above:
                raise VerificationError(f"the accepted slots {slots.tolist()} are not a path of the tree")
            above = node
        return np.array(path, np.int32)

    def walk(self, path: Ints) -> tuple[Tried, list[int]]:
        """(Each parent that was tried with its children, the nodes that were rejected)."""
        tried, rejected = [], []
        for parent, accepted in zip([ROOT, *path.tolist()], [*path.tolist(), None], strict=True):
            children = np.flatnonzero(self.parent == parent).tolist()
            if children:
                tried.append((parent, children))
            rejected += children if accepted is None else children[: children.index(accepted)]
        return tried, rejected


def judged(numbers: Sequence[SentNumbers], call: Gathered | None, rule: str) -> list[JudgedRequest]:
    """[B] the evidence of each request; `call`: None where the rule was not seen. Raises VerificationError."""
    if call is None:
        return [JudgedRequest(_outcome_alone(each, rule), each.context) for each in numbers]
    for each in numbers:
        if each.candidates[each.path].tolist() != each.given[:-1]:
            raise VerificationError(f"the slots {each.path.tolist()} gave the tokens {each.given}")
    shapes = [_Shape.of(each) for each in numbers]
    chains = read(call) if all(shape.is_chain for shape in shapes) else []
    requests = []
    for row, (each, shape) in enumerate(zip(numbers, shapes, strict=True)):
        made = chains[row] if len(chains) and len(shape.slots) == len(chains[row].tree) else None
        if made is None:
            made = _of_tree(call, row, each, shape)
        final_coin = 0.0 if bool(call.tables["ends"]["greedy"][row]) else each.final_coin
        verdict = dataclasses.replace(made.verdict, rule=rule, final_coin=final_coin)
        notes = None if each.scores is None else _notes(each.scores[shape.slots - 1], shape.parent)
        requests.append(JudgedRequest(dataclasses.replace(made, verdict=verdict, notes=notes), each.context))
    return requests


def _of_tree(call: Gathered, row: int, numbers: SentNumbers, shape: _Shape) -> Judged:
    end = {name: values[row].item() for name, values in call.tables["ends"].items()}
    greedy = end["greedy"]
    rows = {name: values[end["first"] + shape.slots - 1] for name, values in call.tables["rows"].items()}
    path = shape.path(numbers.path)
    tried, rejected = shape.walk(path)
    m = len(shape.slots)
    outcome, p = np.full(m, Outcome.UNTRIED, np.uint8), rows["p"].astype(np.float32)
    outcome[path], outcome[rejected] = Outcome.ACCEPTED, Outcome.REJECTED
    p_trial, mass = np.zeros(m), np.zeros(m)
    for _, children in tried:
        left = 1.0
        for child in (child for child in children if outcome[child] != Outcome.UNTRIED):
            p_trial[child] = min(float(p[child]) / left, 1.0) if left > 0 else 0.0
            if outcome[child] == Outcome.REJECTED:
                mass[child] = 1 - p_trial[child]
                left -= float(p[child])
    was_tried = outcome != Outcome.UNTRIED
    final = final_of(end, rows["choice"][tried[-1][1][0]] if _ends_at(tried, path) else None)
    verdict = Verdict(
        outcome=outcome,
        p=p,
        p_trial=p_trial.astype(np.float32),
        q_trial=was_tried.astype(np.float32),
        accept_prob=p_trial,
        coin=np.where(was_tried & (not greedy), rows.get("coin", 0.0), 0.0),
        residual_mass=mass,
        path=path,
        token=numbers.given[-1],
        kind=_kind(shape, tried, path),
        final_p=final.p,
        final_coin=0.0,
    )
    parents = None
    if call.full:
        first = np.array([children[0] for _, children in tried], np.int64)
        every = np.array([child for _, children in tried for child in children], np.int64)
        parents = parents_of(rows, np.array([parent for parent, _ in tried], np.int64), first, every, final, {})
    tree = DraftTree.build(rows["token"].tolist(), shape.parent.tolist())
    return Judged(tree, verdict, parents, None, len(numbers.candidates) - 1 - m)


def _kind(shape: _Shape, tried: Tried, path: Ints) -> FinalKind:
    if not len(shape.slots):
        return FinalKind.TARGET
    return FinalKind.RECOVERED if _ends_at(tried, path) else FinalKind.BONUS


def _ends_at(tried: Tried, path: Ints) -> bool:
    """Whether the walk ended at a parent whose children were all rejected, and not at a leaf."""
    return bool(tried) and tried[-1][0] == (path[-1] if len(path) else ROOT)


def _notes(scores: np.ndarray, parent: Ints) -> DraftNotes:
    """`scores` [m]: the drafter's probability of the path to each node."""
    tiny = float(np.finfo(np.float32).tiny)
    above = np.where(parent == ROOT, 1.0, scores[np.maximum(parent, 0)]) if len(parent) else scores
    prob = np.minimum(scores / np.maximum(above, tiny), 1.0).astype(np.float32)
    return DraftNotes(prob, np.log(np.maximum(scores, tiny)).astype(np.float32), NO_INTS, NO_INTS, NO_FLOATS)


def _outcome_alone(numbers: SentNumbers, rule: str) -> Judged:
    """Tokens and outcomes, without p."""
    shape, tokens = _Shape.of(numbers), numbers.candidates.astype(np.int32)
    nodes = shape.path(numbers.path)
    tried, rejected = shape.walk(nodes)
    verdict = _blank(len(shape.slots), numbers.given[-1], rule)
    verdict.outcome[nodes], verdict.outcome[rejected] = Outcome.ACCEPTED, Outcome.REJECTED
    verdict = dataclasses.replace(verdict, path=nodes, kind=_kind(shape, tried, nodes))
    tree = DraftTree.build(tokens[shape.slots].tolist(), shape.parent.tolist())
    return Judged(tree, verdict, None, None, len(tokens) - 1 - len(tree))


def _blank(nodes: int, token: int, rule: str) -> Verdict:
    """Nothing was tried, and no probability is known."""
    zeros = np.zeros(nodes)
    floats = zeros.astype(np.float32)
    outcome = np.full(nodes, Outcome.UNTRIED, np.uint8)
    kind = FinalKind.TARGET
    return Verdict(outcome, floats, floats, floats, zeros, zeros, zeros, NO_INTS, token, kind, 0.0, 0.0, rule=rule)


def unseen(token: int) -> Judged:
    """A token without drafts, drawn from what specscope does not see."""
    return Judged(DraftTree.empty(), _blank(0, token, UNSEEN), None, None, 0)
