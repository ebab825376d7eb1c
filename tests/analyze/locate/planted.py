"""Mistakes in sampling rules and verdicts that no row of diagnose knows, each planted while an engine runs."""

import dataclasses
import math
from itertools import pairwise

import torch

from specscope.speculate import sampling
from specscope.speculate.drafters import tree_builder
from specscope.speculate.drafters.base import Context
from specscope.speculate.verify import batch as inputs
from specscope.speculate.verify import distribution, host, match, traversal, verifier
from tests.faults.fault import in_phase, replaced
from tests.faults.planted.rules import params_of


def softmax(change):
    """sampling.softmax_ of the target alone, in another way: `change` [R, V] rows and parameters to p."""

    def install(patch, engine):
        right = sampling.softmax_
        patch.setattr(sampling, "softmax_", lambda rows, params: rows.copy_(change(rows, params, right)))

        def as_before(drafted, *given):
            with_fault, sampling.softmax_ = sampling.softmax_, right
            try:
                return drafted(*given)
            finally:
                sampling.softmax_ = with_fault

        replaced(tree_builder, "all_probabilities")(as_before)(patch, engine)

    return install


def logits(change):
    """What the target's logits [n, V] become before they are judged."""

    def changed(engine, now):
        for turn in now.turns:
            turn.logits = None if turn.logits is None else change(turn.logits)

    return in_phase("verify", changed, before=True)


@softmax
def min_p_by_the_first_row(rows, params, right):
    """What is dropped is what is small beside the largest of the first row."""
    if params.min_p > 0:
        small = (rows < rows[:1].amax() + math.log(params.min_p)) & (rows < rows.amax(-1, keepdim=True))
        rows = rows.masked_fill(small, -torch.inf)
    return right(rows, dataclasses.replace(params, min_p=0.0))


@softmax
def in_bfloat16(rows, params, right):
    """All rules in float32, the softmax in bfloat16."""
    kept = right(rows.clone(), params) > 0
    return rows.masked_fill(~kept, -torch.inf).bfloat16().softmax(-1).float()


@softmax
def top_k_last(rows, params, right):
    """Top-k after top-p."""
    first = right(rows.clone(), dataclasses.replace(params, top_k=0)) > 0
    return right(rows.masked_fill(~first, -torch.inf), dataclasses.replace(params, min_p=0.0, top_p=1.0))


@softmax
def no_top_p_in_some_rows(rows, params, right):
    """Each second row of the target's has no top-p, whatever node it is of."""
    some = torch.arange(len(rows)) % 2 == 0
    whole, cut = right(rows.clone(), dataclasses.replace(params, top_p=1.0)), right(rows.clone(), params)
    return torch.where(some[:, None], whole, cut)


@replaced(sampling, "softmax_")
def one_token_more(right, rows, params):
    """Top-k keeps one token too many."""
    return right(rows, dataclasses.replace(params, top_k=params.top_k and params.top_k + 1))


@replaced(inputs, "logit_rows")
def penalties_twice(right, context, draft, logits):
    """Shaped rows are shaped once more."""
    made = right(context, draft, logits)
    return dataclasses.replace(made, logits=made.shaped())


def no_bias_in_the_draft(patch, engine):
    """The drafter's rows know no logit bias."""

    def drafted(right, self, logits, paths):
        made = right(self, logits, paths)
        return dataclasses.replace(made, params=dataclasses.replace(made.params, logit_bias={}))

    replaced(Context, "rows")(drafted)(patch, engine)
    params_of(lambda params: {})(patch, engine)


def bonus_without_top_p(patch, engine):
    """The row of an accepted leaf has no top-p where the bonus token is drawn from it."""
    free = []

    def batch(right, parts, changes):
        bare = [
            (dataclasses.replace(context, params=dataclasses.replace(context.params, top_p=1.0)), draft, logits)
            for context, draft, logits in parts
        ]
        free[:] = [host.Residual(row) for row in sampling.target_rows([inputs.logit_rows(*part) for part in bare]).p]
        return right(parts, changes)

    def rows(right, made):
        targets, children = right(made), made.trees.children()
        return [free[row] if not children[row] else target for row, target in enumerate(targets)]

    replaced(verifier, "step_batch")(batch)(patch, engine)
    replaced(host, "target_left")(rows)(patch, engine)


@replaced(host, "target_left")
def judged_by_the_next_request(right, batch):
    """p is noted right; the trials of each request read the rows of the next one, where it has as many."""
    targets, starts = right(batch), batch.trees.root.tolist()
    spans = [targets[start:end] for start, end in pairwise(starts)]
    pairs = zip(spans, [*spans[1:], *spans[:1]], strict=True)
    return [row for own, other in pairs for row in (other if len(own) == len(other) else own)]


def q_one_step_old(patch, engine):
    """The ratio test reads the q of the request's previous step, where that has as many rows."""
    before = {}

    def batch(step_batch, parts, *more):
        made, start, q = step_batch(parts, *more), 0, []
        for context, draft, _ in parts:
            own = list(made.q[start : start + len(draft.q)])
            start += len(own)
            old = before.get(context.request, own)
            q += old if len(old) == len(own) else own
            before[context.request] = own
        return dataclasses.replace(made, q=q)

    replaced(verifier, "step_batch")(batch)(patch, engine)


@replaced(host.BatchEvidence, "trial")
def accepted_by_p_alone(right, self, child, outcome, p, q, a):
    """What is noted as the ratio is p."""
    right(self, child, outcome, p, q, p)


def ratios_without_their_path(patch, engine):
    """Under block a draft goes by its own ratio, not by that times its path's."""
    below = []

    def without(right, self, row, ratio, *, root=False):
        if below and self.batch.trees.parent[row] >= 0:
            ratio = min(1.0, below[-1])
        return right(self, row, ratio, root=root)

    def alone(trial, self, row, outcome, p, q, accept):
        below[:] = [p / q if q > 0 else 0.0]
        return trial(self, row, outcome, p, q, min(1.0, below[-1]))

    replaced(host.BatchEvidence, "trial")(alone)(patch, engine)
    replaced(traversal._Walk, "below")(without)(patch, engine)


@replaced(traversal._Walk, "below")
def without_the_path(right, self, row, ratio, *, root=False):
    """The block rule's ratio forgets the path before it."""
    return right(self, row, 1.0 if ratio < 1 and self.children[row] else ratio, root=root)


def louder_now_and_then(patch, engine):
    """One row of seven of the head's logits is 1.05 times too large."""
    runner = engine.drafter.runner
    right, count = runner.lm_head, [0]

    def lm_head(x):
        out = right(x).clone()
        rows = torch.arange(count[0], count[0] + len(out))
        count[0] += len(out)
        out[rows % 7 == 0] *= 1.05
        return out

    patch.setattr(runner, "lm_head", lm_head)


@replaced(distribution, "without")
def q_doubled_where_late(right, q, token):
    """From the second sibling on, q is not what was left of it."""
    return q


@replaced(match, "_draw")
def children_first(right, batch, children, p, found):
    """Under match the token is drawn from what the children leave, with the children's coin."""
    for child in children:
        p, _ = p.reject(int(batch.trees.token[child]), None)
    return right(batch, children, p, found)


@replaced(distribution.Residual, "draw")
def likeliest(right, self, coin):
    """The final token is the likeliest one, whatever the coin."""
    return int(self.row.argmax()), float(self.row.max()), 1.0


@replaced(verifier.ParentsBuilder, "done")
def entropy_in_bits(right, self, nodes, final, final_target_p):
    """Entropies are told in bits."""
    self.parent["entropy"] = self.parent["entropy"] / 0.6931
    return right(self, nodes, final, final_target_p)
