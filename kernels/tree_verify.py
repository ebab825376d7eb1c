"""The walk down every tree of a batch with its residuals: tree rejection sampling on the device.

At a node with target distribution p and children x_1 .. x_k in draw order, p_1 = p and q_1 = q (SpecInfer, Miao et al.
2023; Jeon et al. 2024): accept x_i when coin < p_i(x_i) / q_i(x_i); else p_{i+1} = norm(max(p_i - q_i, 0)), and
q_{i+1} = norm(q_i without x_i) where siblings were drawn without replacement.

No residual is ever stored. Let R_i be p_i before its division by P_i = sum R_i, and c_i = 1 / sum of q over what was
not rejected yet (1 with replacement). Subtracting again and again what is proportional to q is subtracting once:

    R_i = max(p - A_i q, 0),  A_1 = 0,  A_{i+1} = A_i + c_i P_i,

but at rejected tokens, where q is 0 from then on and R stays what the rejection left: 0, for p_i < q_i there, unless
the rejection was forced. A deterministic child (q_i a point mass) that is rejected is only left out. So a rejection
costs one pass over two rows of the vocabulary, an acceptance none, and the final token one pass or none and a part of
another. In a greedy tree p is one-hot at the target's choice: no row of it is read, or ever made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specscope.kernels.launch import Launch
from specscope.kernels.tree_batch import TreeTensors, Verdicts

SLACK: tl.constexpr = tl.constexpr(1e-12)  # of a sum of float64: so near to an end is at it
BLOCK = 4096  # tokens of the vocabulary that a program looks at together


def tree_verify(trees: TreeTensors, p: Tensor, choices: Tensor, q: Tensor | None, block: int = BLOCK) -> Verdicts:
    """Judge every tree and draw its final token, on the coins in `trees`: one launch, a program a tree.

    p float32 [S, V]: the target's distribution at each root and node of trees that are sampled, S may be 0; choices
    int64 [G]: the target's token at each row of greedy trees; q float32 [Q, V]: the drafter's distribution at parents
    of sampled nodes; p_row and q_row of `trees` say which row is whose. None is changed. Equal to
    specscope.speculate.verify.host on the same batch, but where a coin lies within rounding of a probability.
    """
    count, rows = trees.by_tree.shape[1], trees.by_row.shape[1]
    verdicts, q = Verdicts.empty(count, rows, p.device), p if q is None else q
    block = min(block, triton.next_power_of_2(p.shape[1]))
    Launch(_verify, {"BLOCK": block}, warps=16)(
        (count,),
        *(p, p.stride(0), q, q.stride(0), choices, p.shape[1], trees.by_tree, trees.by_row, trees.coin),
        *(verdicts.numbers, torch.empty(rows, dtype=torch.float64, device=p.device), count, rows),
    )
    return verdicts


@triton.jit
def _left(p_row, choice, q_row, sampled, x, vocabulary, taken, remains, token, sibling, drawn, first, rejected):  # type: ignore[no-untyped-def]
    """(R, q over what is not rejected) at tokens x: float32 each. The first `rejected` children were rejected."""
    inside = x < vocabulary
    r = tl.load(p_row + x, mask=inside & (choice < 0), other=0.0)
    r = tl.where(inside & (x == choice), 1.0, r)
    theirs = tl.zeros_like(r)
    if sampled:
        theirs = tl.load(q_row + x, mask=inside, other=0.0)
        # In float64: where little of q is left, `taken` is beyond float32, and inf times 0 is no number.
        r = tl.maximum(r.to(tl.float64) - taken * theirs.to(tl.float64), 0.0).to(tl.float32)
    child = first
    for _ in range(rejected):
        gone = (x == tl.load(token + child)) & inside & (tl.load(drawn + child) != 2)
        r = tl.where(gone, tl.load(remains + child).to(tl.float32), r)
        theirs = tl.where(gone, 0.0, theirs)
        child = tl.load(sibling + child)
    return r, theirs


@triton.jit
def _at(row, p, p_stride, q, q_stride, choices, one_hot, p_rows, q_rows, child):  # type: ignore[no-untyped-def]
    """(row of p, the target's choice or -1, row of q, first child or -1) of a row."""
    behind = tl.load(p_rows + row)
    choice = tl.load(choices + behind, mask=one_hot != 0, other=-1)
    p_row, q_row = p + behind.to(tl.int64) * p_stride, q + tl.maximum(tl.load(q_rows + row), 0).to(tl.int64) * q_stride
    return p_row, choice, q_row, tl.load(child + row)


@triton.jit  # type: ignore[untyped-decorator]
def _p_of_nodes(start, end, one_hot, p, p_stride, choices, parent, token, p_rows, p_out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The target's probability of every node's token, as its parent's row has it."""
    for begin in range(start + 1, end, BLOCK):
        node = begin + tl.arange(0, BLOCK)
        real = node < end
        x = tl.load(token + node, mask=real, other=0)
        behind = tl.load(p_rows + tl.load(parent + node, mask=real, other=0), mask=real, other=0)
        prob = tl.load(p + behind.to(tl.int64) * p_stride + x, mask=real & (one_hot == 0), other=0.0)
        chosen = tl.load(choices + behind, mask=real & (one_hot != 0), other=-1)
        tl.store(p_out + node, tl.where(chosen == x, 1.0, prob).to(tl.float64), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    p_row, choice, q_row, sampled, vocabulary, taken, remains, token, sibling, drawn, first, rejected,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of R and of q, float64."""
    p_sum = tl.full([], 0.0, tl.float64)
    q_sum = tl.full([], 0.0, tl.float64)
    only = tl.where(sampled, -1, choice).to(tl.int32)  # where p is one number
    for low in range(tl.maximum(only, 0), tl.where(only >= 0, only + 1, vocabulary), BLOCK):
        r, theirs = _left(
            *(p_row, choice, q_row, sampled, low + tl.arange(0, BLOCK), vocabulary, taken),
            *(remains, token, sibling, drawn, first, rejected),
        )
        p_sum += tl.sum(r.to(tl.float64), 0)
        q_sum += tl.sum(theirs.to(tl.float64), 0)
    return p_sum, q_sum


@triton.jit  # type: ignore[untyped-decorator]
def _final_token(  # type: ignore[no-untyped-def]
    p_row, choice, q_row, sampled, vocabulary, taken, remains, token, sibling, drawn, first, rejected,
    coin, given, whole, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first token at which the cumulative sum of R passes the coin's share of the `whole`, or the `given` one.

    Returns the token, its probability and the draw's margin.
    """
    goal = coin * whole
    only = tl.where(sampled, -1, choice).to(tl.int32)
    up_to = tl.full([], 0.0, tl.float64)
    below = tl.full([], 0.0, tl.float64)
    final = tl.where(given >= 0, given, vocabulary)
    last = tl.maximum(only, 0)
    for low in range(tl.maximum(only, 0), tl.where(only >= 0, only + 1, vocabulary), BLOCK):
        if final >= vocabulary:
            x = low + tl.arange(0, BLOCK)
            r, _ = _left(
                *(p_row, choice, q_row, sampled, x, vocabulary, taken),
                *(remains, token, sibling, drawn, first, rejected),
            )
            sums = up_to + tl.cumsum(r.to(tl.float64), 0)
            final = tl.minimum(final, tl.min(tl.where((sums > goal) & (r > 0.0), x, vocabulary), 0))
            below = up_to + tl.sum(tl.where(x < final, r, 0.0).to(tl.float64), 0)
            last = tl.maximum(last, tl.max(tl.where(r > 0.0, x, 0), 0))
            up_to += tl.sum(r.to(tl.float64), 0)
    short = final >= vocabulary  # the sum's last digit: the last token with any mass
    final = tl.where(short, last, final)
    p_here, _ = _left(
        *(p_row, choice, q_row, sampled, final + tl.arange(0, 1), vocabulary, taken),
        *(remains, token, sibling, drawn, first, rejected),
    )
    chosen = tl.sum(p_here.to(tl.float64), 0)
    below = tl.where(short, up_to - chosen, below) / whole
    above = below + chosen / whole
    # A constant is float32: 1 - SLACK would be 1.
    margin = tl.where((below > SLACK) & (1.0 - below > SLACK), tl.abs(coin - below), 1.0)
    margin = tl.minimum(margin, tl.where((above > SLACK) & (1.0 - above > SLACK), tl.abs(above - coin), 1.0))
    return final, chosen / whole, tl.where(given >= 0, 1.0, margin)


@triton.jit
def _chance(node, p_here, q_here, sampled, mass, q_mass, p_trial, q_trial, accept_prob):  # type: ignore[no-untyped-def]
    """(R and q at the token of a node, the probability that it is accepted); all is noted."""
    before = tl.sum(p_here.to(tl.float64), 0)
    q_token = tl.sum(q_here.to(tl.float64), 0)
    p_x = before / mass
    q_x = tl.where(sampled, q_token / q_mass, 1.0)
    accept = tl.where(q_x > 0.0, tl.minimum(p_x / tl.where(q_x > 0.0, q_x, 1.0), 1.0), 0.0)
    tl.store(p_trial + node, p_x)
    tl.store(q_trial + node, q_x)
    tl.store(accept_prob + node, accept)
    return before, q_token, accept


@triton.jit  # type: ignore[untyped-decorator]
def _reject(  # type: ignore[no-untyped-def]
    node, before, q_token, mass, q_mass, whole, residual_mass,
    p_row, choice, q_row, sampled, vocabulary, taken, remains, token, sibling, drawn, first, rejected,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What a rejection leaves: (A, P, the sum of q, the sum of R)."""
    more = tl.where(sampled, mass / q_mass, 0.0)
    tl.store(remains + node, tl.where(sampled, tl.maximum(before - more * q_token, 0.0), 0.0))
    tl.debug_barrier()  # all threads read what one has written
    p_sum, q_sum = _sums(
        *(p_row, choice, q_row, sampled, vocabulary, taken + more),
        *(remains, token, sibling, drawn, first, rejected, BLOCK),
    )
    tl.store(residual_mass + node, p_sum / mass)
    if p_sum > 0.0:
        taken += more
        mass = p_sum
        whole = p_sum
    else:  # nothing is left: p stays what it was
        tl.store(remains + node, before)
        tl.debug_barrier()
    if (tl.load(drawn + node) == 1) & (q_sum > 0.0):
        q_mass = q_sum
    return taken, mass, q_mass, whole


@triton.jit(do_not_specialize=["count", "rows"])  # type: ignore[untyped-decorator]
def _verify(  # type: ignore[no-untyped-def]
    p, p_stride, q, q_stride, choices, vocabulary, by_tree, by_row, coin, numbers, remains, count, rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One tree. `taken` is A, `mass` is P; `remains` holds what a rejection left of R at its token."""
    tree = tl.program_id(0)
    start, end = tl.load(by_tree + tree), tl.load(by_tree + count + tree)
    one_hot, final_given = tl.load(by_tree + 2 * count + tree), tl.load(by_tree + 3 * count + tree)
    parent, child, sibling, token = by_row, by_row + rows, by_row + 2 * rows, by_row + 3 * rows
    drawn, p_rows, q_rows, forced = by_row + 4 * rows, by_row + 5 * rows, by_row + 6 * rows, by_row + 7 * rows
    outcome, p_out, p_trial, q_trial = numbers, numbers + rows, numbers + 2 * rows, numbers + 3 * rows
    accept_prob, residual_mass = numbers + 4 * rows, numbers + 5 * rows
    nothing, everything = tl.full([], 0.0, tl.float64), tl.full([], 1.0, tl.float64)
    none = tl.full([], 0, tl.int32)
    row, rejected = start, none
    taken, mass, q_mass, whole = nothing, everything, everything, nothing  # whole: the sum of R where it is known
    p_row, choice, q_row, first = _at(row, p, p_stride, q, q_stride, choices, one_hot, p_rows, q_rows, child)
    node = first
    while node >= 0:
        x = tl.load(token + node)
        sampled = tl.load(drawn + node) != 0
        p_here, q_here = _left(
            *(p_row, choice, q_row, sampled, x + tl.arange(0, 1), vocabulary, taken),
            *(remains, token, sibling, drawn, first, rejected),
        )
        before, q_token, accept = _chance(node, p_here, q_here, sampled, mass, q_mass, p_trial, q_trial, accept_prob)
        given = tl.load(forced + node)
        if ((given == 0) & (tl.load(coin + node) < accept)) | (given == 1):
            tl.store(outcome + node, 1.0)
            row, rejected = node, none
            taken, mass, q_mass, whole = nothing, everything, everything, nothing
            p_row, choice, q_row, first = _at(row, p, p_stride, q, q_stride, choices, one_hot, p_rows, q_rows, child)
            node = first
        else:
            tl.store(outcome + node, 2.0)
            rejected += 1
            taken, mass, q_mass, whole = _reject(
                *(node, before, q_token, mass, q_mass, whole, residual_mass),
                *(p_row, choice, q_row, sampled, vocabulary, taken),
                *(remains, token, sibling, drawn, first, rejected, BLOCK),
            )
            node = tl.load(sibling + node)
    _p_of_nodes(start, end, one_hot, p, p_stride, choices, parent, token, p_rows, p_out, BLOCK)
    sampled = tl.load(drawn + first, mask=rejected > 0, other=0) != 0
    if whole == 0.0:
        whole, _ = _sums(
            *(p_row, choice, q_row, sampled, vocabulary, taken),
            *(remains, token, sibling, drawn, first, rejected, BLOCK),
        )
    final, prob, margin = _final_token(
        *(p_row, choice, q_row, sampled, vocabulary, taken, remains, token, sibling, drawn, first, rejected),
        *(tl.load(coin + start), final_given, whole, BLOCK),
    )
    last_of = numbers + 6 * rows + tree
    tl.store(last_of, final.to(tl.float64))
    tl.store(last_of + count, prob)
    tl.store(last_of + 2 * count, margin)
    tl.store(last_of + 3 * count, tl.where(rejected > 0, 1.0, 0.0))
