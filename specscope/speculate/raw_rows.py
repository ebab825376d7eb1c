"""What is asked of the target's own rows of logits, where a step came by: log-probabilities, mass removed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specscope.speculate.allowed import unpacked
from specscope.speculate.drafters.base import Context, Draft
from specscope.trace.record.notes import FormNotes, Logprobs
from specscope.trace.record.records import Verdict
from specscope.trace.record.tree import ROOT


def logprobs(logits: Tensor, verdict: Verdict, tokens: list[int], count: int) -> Logprobs:
    """Of the first emitted `tokens` of a verdict, with the `count` likeliest. logits [n + 1, V]: root, then nodes.

    A token's row is its parent's on the accepted path: the row that it was accepted or drawn from.
    """
    behind = [0, *(verdict.path + 1).tolist()][: len(tokens)]
    rows = logits[behind].float().log_softmax(-1)
    emitted = rows.gather(1, torch.tensor(tokens, dtype=torch.int64, device=rows.device)[:, None])[:, 0]
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
    nodes = [ROOT, *verdict.path.tolist()]
    output, tree = context.tokens[context.prompt_len :], draft.tree
    paths = [[] if node == ROOT else tree.token[tree.path_to(node)].tolist() for node in nodes]
    rows = context.allowed.rows(output, paths)
    if rows is None:
        return None
    if not full:
        return FormNotes(pruned=draft.pruned)
    open_rows = [index for index, row in enumerate(rows) if row.any()]  # behind an end nothing was drawn that was kept
    refused = torch.from_numpy(~unpacked(np.ascontiguousarray(rows[open_rows]), logits.shape[1]))
    mass = logits[[nodes[index] + 1 for index in open_rows]].float().softmax(-1).cpu().masked_fill_(~refused, 0).sum(-1)
    return FormNotes(np.array(nodes, np.int32)[open_rows], mass.numpy().copy(), draft.pruned)
