"""Verifier: the verdicts of an engine's steps, on the backend that holds its tensors, and what is noted beside them.

Notes decide nothing: what target and drafter gave at the parents that were tried, likeliest tokens, entropies and
ranks. The distributions are still there when a step has been judged; this keeps what a capture is put on trial by. Only
the rows that were reached are looked at, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specscope.kernels.tree_batch import NOBODY, FlatTrees, Tree, put
from specscope.model.batch import pick
from specscope.model.places import Backend
from specscope.speculate.allowed import unpacked
from specscope.speculate.changes import Changes
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.verify import host, match, traversal
from specscope.speculate.verify.batch import BatchEvidence, VerifyBatch, step_batch
from specscope.speculate.verify.distribution import Left, Residual
from specscope.trace.record.notes import FormNotes, Logprobs, ParentsBuilder, RawRow, spread
from specscope.trace.record.own_rule import OwnRule
from specscope.trace.record.records import FinalKind, ParentNotes, Verdict
from specscope.trace.record.rules import LOOK_AHEAD, MATCH, STANDARD
from specscope.trace.record.tree import ROOT, Drawn, Floats

Part = tuple[Context, Draft, Tensor]  # a request, its draft, the target's logits [n + 1, V]


def _notes(
    batch: VerifyBatch, part: int, verdict: Verdict, draft: Draft, logits: Tensor, left: Left | None
) -> ParentNotes:
    """The notes of one part. `left`: what its final token was drawn from; None: what the standard rule leaves."""
    tree, root, above = draft.tree, int(batch.trees.root[part]) + 1, set(draft.tree.parent.tolist())
    nodes = [node for node in (ROOT, *verdict.path.tolist()) if node in above]
    notes = ParentsBuilder(len(tree), len(nodes))
    for index, node in enumerate(nodes):
        children = np.array(tree.children(node))
        tokens, raw, p = tree.token[children], raw_row(logits[node + 1]), _p(batch, part, root + node)
        notes.raw(index, raw, children, tokens)
        if isinstance(p, int):
            notes.chosen(index, p, children, tokens)
        else:
            notes.target(index, p, children, tokens)
        if tree.drawn[children[0]] != Drawn.DETERMINISTIC:
            q = batch.q[int(batch.trees.q_row[root + node])]
            notes.drawn(index, q.float().cpu().numpy(), children, tokens)
        if (own := draft.row(tree.token[tree.path_to(node)].tolist())) is not None:
            notes.drafter(index, raw_row(own.logits[0]), raw, None if own.d2t is None else own.d2t.cpu().numpy())
    last = root + (int(verdict.path[-1]) if len(verdict.path) else ROOT)
    p = _p(batch, part, last)
    parents = np.array(nodes, np.int32)
    if isinstance(p, int):
        return notes.done(parents, (0.0, 0.0), float(verdict.final_p))
    drawn_from = p
    if isinstance(left, Residual):
        drawn_from = left.row.cpu().numpy()
    elif verdict.kind is FinalKind.RECOVERED:
        drawn_from = host.residual(batch, last).cpu().numpy()
    return notes.done(parents, spread(drawn_from), float(p[verdict.token]))


def _p(batch: VerifyBatch, part: int, row: int) -> Floats | int:
    """The target's distribution at a row, as it is sampled from; of a greedy request its choice alone."""
    behind = int(batch.trees.p_row[row])
    return int(batch.target.choices[behind]) if batch.trees.greedy[part] else batch.target.p[behind].cpu().numpy()


def raw_row(logits: Tensor) -> RawRow:
    """A row of logits [V], on the host."""
    row = logits.cpu()
    if row.dtype is torch.bfloat16:  # the upper half of a float32; torch would wake its threads
        return RawRow.of((row.view(torch.uint16).numpy().astype(np.uint32) << 16).view(np.float32))
    return RawRow.of(row.numpy().astype(np.float32, copy=False))


def logprobs(logits: Tensor, verdict: Verdict, tokens: list[int], count: int) -> Logprobs:
    """Of the first emitted `tokens` of a verdict, with the `count` likeliest. logits [n + 1, V]: root, then nodes.

    A token's row is its parent's on the accepted path: the row that it was accepted or drawn from.
    """
    behind = [0, *(verdict.path + 1).tolist()][: len(tokens)]
    rows = pick(logits, behind).float().log_softmax(-1)
    emitted = rows.gather(1, put(np.array(tokens, np.int64), rows.device)[:, None])[:, 0]
    top = rows.topk(min(count, rows.shape[1]))
    parts = (emitted, top.indices.to(torch.int32), top.values)
    del rows  # before the copies: what stays for long must not lie behind it, for the heap could never shrink again
    return Logprobs(*(part.cpu().numpy().copy() for part in parts))


def form_notes(context: Context, draft: Draft, logits: Tensor, verdict: Verdict, *, full: bool) -> FormNotes | None:
    """What was removed where the step came by; None where every token was allowed. Before the tokens grow.

    `full`: with the mass, of the softmax of the logits themselves.
    """
    if context.allowed is None:
        return None
    nodes, tree = [ROOT, *verdict.path.tolist()], draft.tree
    paths = [tree.token[tree.path_to(node)].tolist() for node in nodes]
    rows = context.allowed.rows(context.tokens[context.prompt_len :], paths)
    if rows is None:
        return None
    if not full:
        return FormNotes(pruned=draft.pruned)
    open_rows = [index for index, row in enumerate(rows) if row.any()]  # behind an end nothing was drawn that was kept
    refused = torch.from_numpy(~unpacked(np.ascontiguousarray(rows[open_rows]), logits.shape[1]))
    mass = pick(logits, [nodes[index] + 1 for index in open_rows]).float().softmax(-1).cpu()
    mass = mass.masked_fill_(~refused, 0).sum(-1)
    return FormNotes(np.array(nodes, np.int32)[open_rows], mass.numpy().copy(), draft.pruned)


@dataclass(frozen=True)
class JudgedStep:
    """The verdicts of a step, and what they were judged by."""

    verdicts: list[Verdict]
    batch: VerifyBatch
    parts: Sequence[Part]
    drawn_from: list[Left] | None  # what the final tokens were drawn from, where that is at hand

    def notes(self) -> list[ParentNotes]:
        """What target and drafter gave at the parents that were tried, for each part."""
        lefts: Sequence[Left | None] = self.drawn_from or [None] * len(
            self.parts
        )  # None: as the standard rule leaves it
        each = enumerate(zip(self.verdicts, self.parts, lefts, strict=True))
        return [_notes(self.batch, i, verdict, draft, logits, left) for i, (verdict, (_, draft, logits), left) in each]


@dataclass
class Verifier:
    """Verifies steps: a pure function of each."""

    backend: Backend
    notes: bool = False  # whether to note what target and drafter gave at the parents that were tried
    rule: str = STANDARD
    own: OwnRule | None = None  # the rule, where it is somebody's own

    def judge(self, parts: Sequence[Part], changes: Changes | None = None) -> JudgedStep | None:
        """Verdicts of one part or more: a request, its draft, the target's logits [n + 1, V] at the root and each node.

        `changes`: what a fork forces. None where there is no part.
        """
        if not parts:
            return None
        batch = step_batch(parts, changes)
        if self.rule == STANDARD and self.backend is Backend.TRITON:
            return JudgedStep(on_device(batch), batch, parts, None)
        batch = batch.on_host()  # the other rules have no kernels
        if self.rule in LOOK_AHEAD:
            verdicts, drawn_from = traversal.verify(batch, self.rule)
        else:
            verdicts, drawn_from = match.verify(batch) if self.rule == MATCH else host.verify(batch, self.own)
        return JudgedStep(verdicts, batch, parts, drawn_from)


def on_device(batch: VerifyBatch, block: int | None = None) -> list[Verdict]:
    """A verdict for each tree, as host.verify on the same coins: a launch, and one read of all evidence."""
    from specscope.kernels.tree_verify import BLOCK, tree_verify  # triton is imported only where it runs

    p, q = batch.target.p, torch.stack(list(batch.q)) if batch.q else None
    read = tree_verify(batch.trees.on(p.device), p, batch.target.choices, q, block or BLOCK).to_host()
    return BatchEvidence(coin=batch.trees.coin, **read).verdicts(batch)  # type: ignore[arg-type]


@torch.inference_mode()
def warm_up_verdicts(vocabulary: int, device: torch.device) -> None:
    """Compile what verdicts launch: of a tree with one node."""
    from specscope.kernels.tree_verify import tree_verify

    p = torch.full((2, vocabulary), 1 / vocabulary, device=device)
    nobody, token = np.full(1, NOBODY, np.int32), np.zeros(1, np.int32)
    tree = Tree(token, nobody, token.astype(np.uint8), np.full(2, 0.5), np.full(2, NOBODY))
    tree_verify(FlatTrees.build([tree]).on(device), p, torch.zeros(0, dtype=torch.int64, device=device), None)
