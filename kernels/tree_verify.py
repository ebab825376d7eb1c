"""The walk down every tree of a batch with its residuals, in one launch: tree rejection sampling on the device.

At a node with target distribution p and children x_1 .. x_k in draw order, p_1 = p and q_1 = q (SpecInfer, Miao et al.
2023; Jeon et al. 2024): accept x_i when coin < p_i(x_i) / q_i(x_i); else p_{i+1} = norm(max(p_i - q_i, 0)), and
q_{i+1} = norm(q_i without x_i) where siblings were drawn without replacement.

No residual is ever stored. Let R_i be p_i before its division by P_i = sum R_i, and c_i = 1 / sum of q over what was
not rejected yet (1 with replacement). Subtracting again and again what is proportional to q is subtracting once:

    R_i = max(p - A_i q, 0),  A_1 = 0,  A_{i+1} = A_i + c_i P_i,

but at rejected tokens, where q is 0 from then on and R stays what the rejection left: 0, for p_i < q_i there, unless
the rejection was forced. A deterministic child (q_i a point mass) that is rejected is only left out. So a rejection
costs one pass over two rows of the vocabulary, an acceptance none, and the final token two. In a greedy tree p is
one-hot at the target's choice: no row of it is read, or ever made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specscope.kernels.flat_trees import (
    ACCEPTED,
    DETERMINISTIC,
    NOBODY,
    REJECTED,
    UNTRIED,
    WITHOUT_REPLACEMENT,
    TreeTensors,
    Verdicts,
)

SLACK: tl.constexpr = tl.constexpr(1e-12)  # of a sum of float64: so near to an end is at it
BLOCK = 4096  # tokens of the vocabulary that a program looks at together


def tree_verify(trees: TreeTensors, p: Tensor, choices: Tensor, q: Tensor | None, block: int = BLOCK) -> Verdicts:
    """Judge every tree and draw its final token, on the coins in `trees`.

    p float32 [S, V]: the target's distribution at each root and node of trees that are sampled, S may be 0; choices
    int64 [G]: the target's token at each row of greedy trees; q float32 [Q, V]: the drafter's distribution at parents
    of sampled nodes; p_row and q_row of `trees` say which row is whose. None is changed. Equal to
    specscope.speculate.verify.host on the same batch, but where a coin lies within rounding of a probability.
    """
    verdicts, vocabulary = Verdicts.empty(trees), p.shape[1]
    kept = torch.empty(len(trees.parent), dtype=torch.float64, device=p.device)
    q = p if q is None else q
    _verify[(len(trees.first),)](
        *(p, p.stride(0), q, q.stride(0), choices, vocabulary),
        *(trees.first, trees.end, trees.greedy, trees.final),
        *(trees.parent, trees.child, trees.sibling, trees.token, trees.drawn),
        *(trees.p_row, trees.q_row, trees.forced, trees.coin, kept),
        *(verdicts.outcome, verdicts.p, verdicts.p_trial, verdicts.q_trial),
        *(verdicts.accept_prob, verdicts.residual_mass),
        *(verdicts.token, verdicts.final_p, verdicts.final_margin, verdicts.final_row, verdicts.recovered),
        BLOCK=min(block, triton.next_power_of_2(vocabulary)),
        num_warps=16,
    )
    return verdicts


def tree_verify_reference(trees: TreeTensors, p: Tensor, choices: Tensor, q: Tensor | None) -> Verdicts:
    """What tree_verify must give: the rules as they are written, residual by residual, in float64."""
    out = Verdicts.empty(trees)
    child, sibling, token, coin = (x.tolist() for x in (trees.child, trees.sibling, trees.token, trees.coin))
    drawn, q_row, forced = trees.drawn.tolist(), trees.q_row.tolist(), trees.forced.tolist()
    for tree, root in enumerate(trees.first.tolist()):
        rows = range(root, int(trees.end[tree]))
        behind = trees.p_row[rows.start : rows.stop].long()
        one_hot = torch.nn.functional.one_hot(choices[behind], p.shape[1]) if trees.greedy[tree] else p[behind]
        whole = dict(zip(rows, one_hot.double(), strict=True))  # p at every row
        for row in rows[1:]:
            out.p[row] = whole[int(trees.parent[row])][token[row]]
        row, recovered, left = root, False, whole[root]
        while child[row] != NOBODY and not recovered:
            p_i, at, accepted = whole[row], child[row], False
            q_i = None if q is None or q_row[row] < 0 else q[q_row[row]].double()
            while at != NOBODY and not accepted:
                x = token[at]
                q_x = 1.0 if drawn[at] == DETERMINISTIC or q_i is None else float(q_i[x])
                accept = min(1.0, float(p_i[x]) / q_x) if q_x > 0 else 0.0
                out.p_trial[at], out.q_trial[at], out.accept_prob[at] = p_i[x], q_x, accept
                accepted = coin[at] < accept if forced[at] == UNTRIED else forced[at] == ACCEPTED
                out.outcome[at] = ACCEPTED if accepted else REJECTED
                if accepted:
                    row, left = at, whole[at]
                else:
                    rest = _without(p_i, x) if drawn[at] == DETERMINISTIC or q_i is None else (p_i - q_i).clamp(min=0)
                    out.residual_mass[at] = rest.sum()
                    left = p_i = rest / rest.sum() if rest.sum() > 0 else p_i
                    if drawn[at] == WITHOUT_REPLACEMENT and q_i is not None and _without(q_i, x).sum() > 0:
                        q_i = _without(q_i, x) / _without(q_i, x).sum()
                    at = sibling[at]
            recovered = not accepted
        out.final_row[tree], out.recovered[tree] = row, recovered
        out.token[tree], out.final_p[tree], out.final_margin[tree] = _draw(left, coin[root], int(trees.final[tree]))
    return out


def _without(distribution: Tensor, token: int) -> Tensor:
    rest = distribution.clone()
    rest[token] = 0
    return rest


def _draw(left: Tensor, coin: float, given: int) -> tuple[int, float, float]:
    """The final token, its probability, and the draw's margin."""
    if given != NOBODY:
        return given, float(left[given]), 1.0
    total = left.cumsum(0)
    token = min(int(torch.searchsorted(total, coin * float(total[-1]), right=True)), len(left) - 1)
    ends = [float(end) / float(total[-1]) for end in (total[token] - left[token], total[token])]
    return token, float(left[token]), min((abs(coin - end) for end in ends if SLACK < end < 1 - SLACK), default=1.0)


def tree_verify_bytes(trees: TreeTensors, verdicts: Verdicts, p: Tensor) -> int:
    """Bytes that any verification of these sampled trees must read: rows of p and q where a pass was needed, once."""
    rejected = verdicts.outcome == REJECTED
    parents = trees.parent[rejected].unique()
    sampled = trees.parent[rejected & (trees.drawn != DETERMINISTIC)].unique()
    rows = len(torch.cat([parents, verdicts.final_row.to(parents.dtype)]).unique()) + len(sampled)
    return rows * p.shape[1] * p.element_size()


@triton.jit
def _left(p_row, choice, q_row, sampled, x, vocabulary, taken, kept, token, sibling, drawn, first, rejected):  # type: ignore[no-untyped-def]
    """(R, q over what is not rejected) at tokens x: float32 each. The first `rejected` children were rejected."""
    inside = x < vocabulary
    r = tl.load(p_row + x, mask=inside & (choice < 0), other=0.0)
    r = tl.where(x == choice, 1.0, r)
    theirs = tl.zeros_like(r)
    if sampled:
        theirs = tl.load(q_row + x, mask=inside, other=0.0)
        # In float64: where little of q is left, `taken` is beyond float32, and inf times 0 is no number.
        r = tl.maximum(r.to(tl.float64) - taken * theirs.to(tl.float64), 0.0).to(tl.float32)
    at = first
    for _ in range(rejected):
        gone = (x == tl.load(token + at)) & (tl.load(drawn + at) != 2)
        r = tl.where(gone, tl.load(kept + at).to(tl.float32), r)
        theirs = tl.where(gone, 0.0, theirs)
        at = tl.load(sibling + at)
    return r, theirs


@triton.jit  # type: ignore[untyped-decorator]
def _p_of_nodes(start, end, one_hot, p, p_stride, choices, parent, token, p_rows, p_out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The target's probability of every node's token, as its parent's row has it."""
    for at in range(start + 1, end, BLOCK):
        node = at + tl.arange(0, BLOCK)
        real = node < end
        x = tl.load(token + node, mask=real, other=0)
        behind = tl.load(p_rows + tl.load(parent + node, mask=real, other=0), mask=real, other=0)
        prob = tl.load(p + behind.to(tl.int64) * p_stride + x, mask=real & (one_hot == 0), other=0.0)
        chosen = tl.load(choices + behind, mask=real & (one_hot != 0), other=-1)
        tl.store(p_out + node, tl.where(chosen == x, 1.0, prob).to(tl.float64), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _verify(  # type: ignore[no-untyped-def]
    p, p_stride, q, q_stride, choices, vocabulary,
    first_row, end_row, greedy, final,
    parent, child, sibling, token, drawn,
    p_rows, q_rows, forced, coin, kept,
    outcome, p_out, p_trial, q_trial,
    accept_prob, residual_mass,
    final_token, final_p, final_margin, final_row, recovered,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One tree. `taken` is A; `kept` holds what a rejection left of R at its token."""
    tree = tl.program_id(0)
    start = tl.load(first_row + tree)
    end = tl.load(end_row + tree)
    one_hot = tl.load(greedy + tree)
    _p_of_nodes(start, end, one_hot, p, p_stride, choices, parent, token, p_rows, p_out, BLOCK)
    row = start
    first = tl.load(child + row)
    lanes = tl.arange(0, BLOCK)
    behind = tl.load(p_rows + row)
    p_row = p + behind.to(tl.int64) * p_stride
    choice = tl.load(choices + behind, mask=one_hot != 0, other=-1)
    q_row = q
    sampled = first < -1
    taken = tl.full([], 0.0, tl.float64)
    mass = tl.full([], 1.0, tl.float64)
    rejected = 0
    going = first >= 0
    while going:
        q_row = q + tl.maximum(tl.load(q_rows + row), 0).to(tl.int64) * q_stride
        taken = tl.full([], 0.0, tl.float64)
        mass = tl.full([], 1.0, tl.float64)
        q_mass = tl.full([], 1.0, tl.float64)
        rejected = 0
        accepted = first * 0 - 1
        at = first
        while (at >= 0) & (accepted < 0):
            x = tl.load(token + at)
            how = tl.load(drawn + at)
            sampled = how != 0
            p_here, q_here = _left(
                *(p_row, choice, q_row, sampled, x + tl.arange(0, 1), vocabulary, taken),
                *(kept, token, sibling, drawn, first, rejected),
            )
            before = tl.sum(p_here.to(tl.float64), 0)
            own = tl.sum(q_here.to(tl.float64), 0)
            p_x = before / mass
            q_x = tl.where(sampled, own / q_mass, 1.0)
            accept = tl.where(q_x > 0.0, tl.minimum(p_x / tl.where(q_x > 0.0, q_x, 1.0), 1.0), 0.0)
            tl.store(p_trial + at, p_x)
            tl.store(q_trial + at, q_x)
            tl.store(accept_prob + at, accept)
            given = tl.load(forced + at)
            if ((given == 0) & (tl.load(coin + at) < accept)) | (given == 1):
                tl.store(outcome + at, 1.0)
                accepted = at
            else:
                tl.store(outcome + at, 2.0)
                rejected += 1
                more = tl.where(sampled, mass / q_mass, 0.0)
                tl.store(kept + at, tl.where(sampled, tl.maximum(before - more * own, 0.0), 0.0))
                tl.debug_barrier()  # all threads read what one has written
                p_sum = tl.full([], 0.0, tl.float64)
                q_sum = tl.full([], 0.0, tl.float64)
                for at_token in range(0, vocabulary, BLOCK):
                    r, theirs = _left(
                        *(p_row, choice, q_row, sampled, at_token + lanes, vocabulary, taken + more),
                        *(kept, token, sibling, drawn, first, rejected),
                    )
                    p_sum += tl.sum(r.to(tl.float64), 0)
                    q_sum += tl.sum(theirs.to(tl.float64), 0)
                tl.store(residual_mass + at, p_sum / mass)
                if p_sum > 0.0:
                    taken += more
                    mass = p_sum
                else:  # nothing is left: p stays what it was
                    tl.store(kept + at, before)
                    tl.debug_barrier()
                if (how == 1) & (q_sum > 0.0):
                    q_mass = q_sum
                at = tl.load(sibling + at)
        if accepted >= 0:
            row = accepted
            first = tl.load(child + row)
            going = first >= 0
            behind = tl.load(p_rows + row)
            p_row = p + behind.to(tl.int64) * p_stride
            choice = tl.load(choices + behind, mask=one_hot != 0, other=-1)
            sampled = first < -1
            rejected = 0
        else:
            going = first < 0
    # The final token: the first at which the cumulative sum passes the coin's share of the whole.
    whole = tl.full([], 0.0, tl.float64)
    for at_token in range(0, vocabulary, BLOCK):
        r, theirs = _left(
            *(p_row, choice, q_row, sampled, at_token + lanes, vocabulary, taken),
            *(kept, token, sibling, drawn, first, rejected),
        )
        whole += tl.sum(r.to(tl.float64), 0)
    share = tl.load(coin + start) * whole
    up_to = tl.full([], 0.0, tl.float64)
    below = tl.full([], 0.0, tl.float64)
    final_given = tl.load(final + tree)
    found = tl.where(final_given >= 0, final_given, vocabulary)
    last = first * 0
    for at_token in range(0, vocabulary, BLOCK):
        if found >= vocabulary:
            x = at_token + lanes
            r, theirs = _left(
                *(p_row, choice, q_row, sampled, x, vocabulary, taken),
                *(kept, token, sibling, drawn, first, rejected),
            )
            sums = up_to + tl.cumsum(r.to(tl.float64), 0)
            found = tl.minimum(found, tl.min(tl.where((sums > share) & (r > 0.0), x, vocabulary), 0))
            below = up_to + tl.sum(tl.where(x < found, r, 0.0).to(tl.float64), 0)
            last = tl.maximum(last, tl.max(tl.where(r > 0.0, x, 0), 0))
            up_to += tl.sum(r.to(tl.float64), 0)
    short = found >= vocabulary  # the sum's last digit: the last token with any mass
    found = tl.where(short, last, found)
    p_here, q_here = _left(
        *(p_row, choice, q_row, sampled, found + tl.arange(0, 1), vocabulary, taken),
        *(kept, token, sibling, drawn, first, rejected),
    )
    chosen = tl.sum(p_here.to(tl.float64), 0)
    below = tl.where(short, whole - chosen, below) / whole
    above = below + chosen / whole
    u = share / whole
    # A constant is float32: 1 - SLACK would be 1.
    margin = tl.where((below > SLACK) & (1.0 - below > SLACK), tl.abs(u - below), 1.0)
    margin = tl.minimum(margin, tl.where((above > SLACK) & (1.0 - above > SLACK), tl.abs(above - u), 1.0))
    tl.store(final_token + tree, found.to(tl.float64))
    tl.store(final_p + tree, chosen / whole)
    tl.store(final_margin + tree, tl.where(final_given >= 0, 1.0, margin))
    tl.store(final_row + tree, row.to(tl.float64))
    tl.store(recovered + tree, tl.where(rejected > 0, 1.0, 0.0))
