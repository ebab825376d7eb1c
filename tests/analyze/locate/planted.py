"""Mistakes in sampling rules and verdicts that no row of diagnose knows, each planted while an engine runs."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import torch

from specscope.speculate import sampling
from specscope.speculate.drafters import tree_builder
from specscope.speculate.drafters.base import Context
from specscope.speculate.verify import batch as inputs
from specscope.speculate.verify import host, traversal, verifier
from tests.faults.planted.rules import params_of


def softmax(change):
    """sampling.softmax_ of the target alone, in another way: `change` [R, V] rows and parameters to p."""

    def install(patch, engine):
        drafted = tree_builder.all_probabilities
        right = sampling.softmax_
        patch.setattr(sampling, "softmax_", lambda rows, params: rows.copy_(change(rows, params, right)))

        def as_before(*given):
            with_fault, sampling.softmax_ = sampling.softmax_, right
            try:
                return drafted(*given)
            finally:
                sampling.softmax_ = with_fault

        patch.setattr(tree_builder, "all_probabilities", as_before)

    return install


def min_p_by_the_first_row(rows, params, right):
    """What is dropped is what is small beside the largest of the first row."""
    if params.min_p > 0:
        small = (rows < rows[:1].amax() + math.log(params.min_p)) & (rows < rows.amax(-1, keepdim=True))
        rows = rows.masked_fill(small, -torch.inf)
    return right(rows, dataclasses.replace(params, min_p=0.0))


def in_bfloat16(rows, params, right):
    """All rules in float32, the softmax in bfloat16."""
    kept = right(rows.clone(), params) > 0
    return rows.masked_fill(~kept, -torch.inf).bfloat16().softmax(-1).float()


def top_k_last(rows, params, right):
    """Top-k after top-p."""
    first = right(rows.clone(), dataclasses.replace(params, top_k=0)) > 0
    return right(rows.masked_fill(~first, -torch.inf), dataclasses.replace(params, min_p=0.0, top_p=1.0))


def penalties_twice(patch, engine):
    """Shaped rows are shaped once more."""
    right = inputs.logit_rows

    def rows(context, draft, logits):
        made = right(context, draft, logits)
        return dataclasses.replace(made, logits=made.shaped())

    patch.setattr(inputs, "logit_rows", rows)


def no_bias_in_the_draft(patch, engine):
    """The drafter's rows know no logit bias."""
    right = Context.rows

    def drafted(self, logits, paths):
        made = right(self, logits, paths)
        return dataclasses.replace(made, params=dataclasses.replace(made.params, logit_bias={}))

    patch.setattr(Context, "rows", drafted)
    params_of(lambda params: {})(patch, engine)


def bonus_without_top_p(patch, engine):
    """The row of an accepted leaf has no top-p where the bonus token is drawn from it."""
    right_rows, right_batch, free = host.target_left, verifier.step_batch, []

    def batch(parts, changes):
        bare = [
            (dataclasses.replace(context, params=dataclasses.replace(context.params, top_p=1.0)), draft, logits)
            for context, draft, logits in parts
        ]
        other = sampling.target_rows([inputs.logit_rows(*part) for part in bare])
        free[:] = [host.Residual(row) for row in other.p]
        return right_batch(parts, changes)

    def rows(made):
        targets, children = right_rows(made), made.trees.children()
        return [free[row] if not children[row] else target for row, target in enumerate(targets)]

    patch.setattr(verifier, "step_batch", batch)
    patch.setattr(host, "target_left", rows)


def judged_by_the_next_request(patch, engine):
    """p is noted right; the trials of each request read the rows of the next one, where it has as many."""
    right = host.target_left

    def rows(batch):
        targets, starts = right(batch), batch.trees.root.tolist()
        spans = [targets[start:end] for start, end in pairwise(starts)]
        moved = [*spans[1:], *spans[:1]]
        return [
            row for own, other in zip(spans, moved, strict=True) for row in (other if len(own) == len(other) else own)
        ]

    patch.setattr(host, "target_left", rows)


def q_one_step_old(patch, engine):
    """The ratio test reads the q of the request's previous step, where that has as many rows."""
    step_batch, before = verifier.step_batch, {}

    def batch(parts, *more):
        made, start, q = step_batch(parts, *more), 0, []
        for context, draft, _ in parts:
            own = list(made.q[start : start + len(draft.q)])
            start += len(own)
            old = before.get(context.request, own)
            q += old if len(old) == len(own) else own
            before[context.request] = own
        return dataclasses.replace(made, q=q)

    patch.setattr(verifier, "step_batch", batch)


def no_top_p_in_some_rows(patch, engine):
    """Each second row of the target's has no top-p, whatever node it is of."""

    def change(rows, params, right):
        some = torch.arange(len(rows)) % 2 == 0
        whole, cut = right(rows.clone(), dataclasses.replace(params, top_p=1.0)), right(rows.clone(), params)
        return torch.where(some[:, None], whole, cut)

    softmax(change)(patch, engine)


def accepted_by_p_alone(patch, engine):
    """What is noted as the ratio is p."""
    right = host.BatchEvidence.trial
    patch.setattr(
        host.BatchEvidence, "trial", lambda self, child, outcome, p, q, a: right(self, child, outcome, p, q, p)
    )


def ratios_without_their_path(patch, engine):
    """Under block a draft goes by its own ratio, not by that times its path's."""
    right, below = traversal._Walk.below, []

    def without(self, row, ratio, *, root=False):
        if below and self.batch.trees.parent[row] >= 0:
            ratio = min(1.0, below[-1])
        return right(self, row, ratio, root=root)

    def alone(self, row, outcome, p, q, accept):
        below[:] = [p / q if q > 0 else 0.0]
        return trial(self, row, outcome, p, q, min(1.0, below[-1]))

    trial = host.BatchEvidence.trial
    patch.setattr(host.BatchEvidence, "trial", alone)
    patch.setattr(traversal._Walk, "below", without)
