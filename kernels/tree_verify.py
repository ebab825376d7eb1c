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

Only the passes are long. Where one program a tree would leave a device idle, every tree gets several, and each of them
walks up to the next pass. There it sums over its share of the vocabulary and stops: the next launch adds the shares up,
in float64, and walks on. The last one has a program a tree, ends the walk alone, and draws the final token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specscope.kernels import launch
from specscope.kernels.flat_trees import TreeTensors, Verdicts
from specscope.kernels.launch import Launch

WALKING, REJECTED_ONE, ENDED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # where a walk stands
NUMBERS: tl.constexpr = tl.constexpr(16)  # that one launch leaves to the next, a tree
SLACK: tl.constexpr = tl.constexpr(1e-12)  # of a sum of float64: so near to an end is at it
BLOCK = 4096  # tokens of the vocabulary that a program looks at together
MOST_SHARES = 64  # programs of a tree
MOST_TURNS = 16  # launches before the last: longer walks are rare, and end in it


def tree_verify(
    trees: TreeTensors,
    p: Tensor,
    choices: Tensor,
    q: Tensor | None,
    block: int = BLOCK,
    shares: int | None = None,
    turns: int | None = None,
) -> Verdicts:
    """Judge every tree and draw its final token, on the coins in `trees`.

    p float32 [S, V]: the target's distribution at each root and node of trees that are sampled, S may be 0; choices
    int64 [G]: the target's token at each row of greedy trees; q float32 [Q, V]: the drafter's distribution at parents
    of sampled nodes; p_row and q_row of `trees` say which row is whose. None is changed. Equal to
    specscope.speculate.verify.host on the same batch, but where a coin lies within rounding of a probability.

    `shares`: programs of a tree; `turns`: launches before the last (None: as the device and the trees need).
    """
    verdicts, vocabulary, count = Verdicts.empty(trees), p.shape[1], len(trees.first)
    block = min(block, triton.next_power_of_2(vocabulary))
    if shares is None:
        shares = shares_of(count, triton.cdiv(vocabulary, block), launch.limits(p.device).multiprocessors)
    if turns is None:
        turns = 0 if shares == 1 else min(trees.most_passes, MOST_TURNS)
    share = triton.cdiv(triton.cdiv(vocabulary, shares), block) * block
    scratch = lambda *shape: torch.empty(*shape, dtype=torch.float64, device=p.device)  # noqa: E731
    remains = scratch(len(trees.parent))
    state, partial = scratch(turns + 1, count, NUMBERS.value), scratch(turns + 1, count, shares, 2)
    q = p if q is None else q
    arguments = (
        *(p, p.stride(0), q, q.stride(0), choices, vocabulary),
        *(trees.by_tree, trees.by_row, trees.coin, verdicts.numbers, remains, state, partial),
        *(count, len(trees.parent), shares, share),
    )
    for turn in range(turns):
        verify_launch(block, alone=False)((count, shares), *arguments, turn)
    verify_launch(block, alone=True)((count, 1), *arguments, turns)
    return verdicts


def shares_of(trees: int, blocks: int, multiprocessors: int) -> int:
    """Programs of a tree, so that all trees fill the device; each has a block of the vocabulary at least."""
    return max(1, min(multiprocessors // max(trees, 1), blocks, MOST_SHARES))


def verify_launch(block: int, *, alone: bool) -> Launch:
    """A program that walks up to the next pass, for a share of it; or `alone` to the end."""
    return Launch(_verify, {"ALONE": alone, "MOST": MOST_SHARES, "BLOCK": block}, warps=16)


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
    low, high, p_row, choice, q_row, sampled, taken, remains, token, sibling, drawn, first, rejected,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of R and of q over tokens low to high - 1, float64."""
    p_sum = tl.full([], 0.0, tl.float64)
    q_sum = tl.full([], 0.0, tl.float64)
    only = tl.where(sampled, -1, choice).to(tl.int32)  # where p is one number
    low = tl.where(only >= 0, tl.maximum(low, only), low)
    high = tl.where(only >= 0, tl.minimum(high, only + 1), high)
    for at_token in range(low, high, BLOCK):
        r, theirs = _left(
            *(p_row, choice, q_row, sampled, at_token + tl.arange(0, BLOCK), high, taken),
            *(remains, token, sibling, drawn, first, rejected),
        )
        p_sum += tl.sum(r.to(tl.float64), 0)
        q_sum += tl.sum(theirs.to(tl.float64), 0)
    return p_sum, q_sum


@triton.jit  # type: ignore[untyped-decorator]
def _final_token(  # type: ignore[no-untyped-def]
    p_row, choice, q_row, sampled, taken, remains, token, sibling, drawn, first, rejected, vocabulary,
    coin, given, p_parts, known, share, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first token at which the cumulative sum of R passes the coin's share of the whole, or the one that is given.

    p_parts [MOST]: the sum of R over each share of the vocabulary, where they are `known`. Returns the token, its
    probability and the draw's margin.
    """
    low, high = 0 * vocabulary, vocabulary
    up_to = tl.full([], 0.0, tl.float64)
    if known:
        whole = tl.sum(p_parts, 0)
    else:
        whole, _ = _sums(
            *(low, high, p_row, choice, q_row, sampled, taken),
            *(remains, token, sibling, drawn, first, rejected, BLOCK),
        )
    goal = coin * whole
    if known:  # the share in which it lies
        part = tl.arange(0, MOST)
        passed = (tl.cumsum(p_parts, 0) > goal) & (p_parts > 0.0)
        found_in = tl.min(tl.where(passed, part, MOST), 0)
        found_in = tl.where(found_in < MOST, found_in, tl.max(tl.where(p_parts > 0.0, part, 0), 0))
        up_to = tl.sum(tl.where(part < found_in, p_parts, 0.0), 0)
        low = found_in * share
        high = tl.minimum(low + share, vocabulary)
    only = tl.where(sampled, -1, choice).to(tl.int32)
    low = tl.where(only >= 0, tl.maximum(low, only), low)
    high = tl.where(only >= 0, tl.minimum(high, only + 1), high)
    below = 0.0 * up_to
    final = tl.where(given >= 0, given, vocabulary)
    last = first * 0
    for at_token in range(low, high, BLOCK):
        if final >= vocabulary:
            x = at_token + tl.arange(0, BLOCK)
            r, _ = _left(
                *(p_row, choice, q_row, sampled, x, high, taken),
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
    u = goal / whole
    # A constant is float32: 1 - SLACK would be 1.
    margin = tl.where((below > SLACK) & (1.0 - below > SLACK), tl.abs(u - below), 1.0)
    margin = tl.minimum(margin, tl.where((above > SLACK) & (1.0 - above > SLACK), tl.abs(above - u), 1.0))
    return final, chosen / whole, tl.where(given >= 0, 1.0, margin)


@triton.jit(do_not_specialize=["count", "rows", "shares", "share", "turn"])  # type: ignore[untyped-decorator]
def _verify(  # type: ignore[no-untyped-def]
    p, p_stride, q, q_stride, choices, vocabulary,
    by_tree, by_row, coin, numbers, remains, state, partial,
    count, rows, shares, share, turn,
    ALONE: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tree. `taken` is A, `mass` is P; `remains` holds what a rejection left of R at its token.

    Programs of one tree decide alike, and what several of them store is the same.
    """
    tree, mine = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(by_tree + tree), tl.load(by_tree + count + tree)
    one_hot, final_given = tl.load(by_tree + 2 * count + tree), tl.load(by_tree + 3 * count + tree)
    parent, child, sibling, token = by_row, by_row + rows, by_row + 2 * rows, by_row + 3 * rows
    drawn, p_rows, q_rows, forced = by_row + 4 * rows, by_row + 5 * rows, by_row + 6 * rows, by_row + 7 * rows
    outcome, p_out, p_trial, q_trial = numbers, numbers + rows, numbers + 2 * rows, numbers + 3 * rows
    accept_prob, residual_mass = numbers + 4 * rows, numbers + 5 * rows
    # What the turn before left: the node that the walk is at, the child to try or just rejected, and the residual.
    was, later = state + (turn * count + tree) * NUMBERS, turn > 0
    phase = tl.load(was, mask=later, other=0.0).to(tl.int32)
    row = tl.load(was + 1, mask=later, other=start.to(tl.float64)).to(tl.int32)
    node = tl.load(was + 2, mask=later, other=tl.load(child + start).to(tl.float64)).to(tl.int32)
    rejected = tl.load(was + 3, mask=later, other=0.0).to(tl.int32)
    taken = tl.load(was + 4, mask=later, other=0.0)
    mass = tl.load(was + 5, mask=later, other=1.0)
    q_mass = tl.load(was + 6, mask=later, other=1.0)
    before = tl.load(was + 7, mask=later, other=0.0)
    summed = tl.load(was + 8, mask=later, other=-1.0).to(tl.int32)  # the turn whose sums are those of this state
    part = tl.arange(0, MOST)
    place = partial + ((tl.maximum(summed, 0) * count + tree) * shares + part) * 2
    p_parts = tl.load(place, mask=(part < shares) & (summed >= 0), other=0.0)
    q_parts = tl.load(place + 1, mask=(part < shares) & (summed >= 0), other=0.0)
    p_sum, q_sum = tl.sum(p_parts, 0), tl.sum(q_parts, 0)
    behind = tl.load(p_rows + row)
    p_row = p + behind.to(tl.int64) * p_stride
    choice = tl.load(choices + behind, mask=one_hot != 0, other=-1)
    q_row = q + tl.maximum(tl.load(q_rows + row), 0).to(tl.int64) * q_stride
    first = tl.load(child + row)
    going = phase != ENDED
    while going:
        if phase == REJECTED_ONE:
            how = tl.load(drawn + node)
            tl.store(residual_mass + node, p_sum / mass)
            if p_sum > 0.0:
                taken += tl.where(how != 0, mass / q_mass, 0.0)
                mass = p_sum
            else:  # nothing is left: p stays what it was
                tl.store(remains + node, before)
                tl.debug_barrier()
                summed = -1 + 0 * summed
            if (how == 1) & (q_sum > 0.0):
                q_mass = q_sum
            node = tl.load(sibling + node)
            phase = 0 * phase
        if node < 0:  # no child, or none that was accepted
            phase = 0 * phase + 2
            going = node >= 0
        else:
            x = tl.load(token + node)
            sampled = tl.load(drawn + node) != 0
            p_here, q_here = _left(
                *(p_row, choice, q_row, sampled, x + tl.arange(0, 1), vocabulary, taken),
                *(remains, token, sibling, drawn, first, rejected),
            )
            before = tl.sum(p_here.to(tl.float64), 0)
            q_token = tl.sum(q_here.to(tl.float64), 0)
            p_x = before / mass
            q_x = tl.where(sampled, q_token / q_mass, 1.0)
            accept = tl.where(q_x > 0.0, tl.minimum(p_x / tl.where(q_x > 0.0, q_x, 1.0), 1.0), 0.0)
            tl.store(p_trial + node, p_x)
            tl.store(q_trial + node, q_x)
            tl.store(accept_prob + node, accept)
            given = tl.load(forced + node)
            if ((given == 0) & (tl.load(coin + node) < accept)) | (given == 1):
                tl.store(outcome + node, 1.0)
                row = node
                first = tl.load(child + row)
                node = first
                behind = tl.load(p_rows + row)
                p_row = p + behind.to(tl.int64) * p_stride
                choice = tl.load(choices + behind, mask=one_hot != 0, other=-1)
                q_row = q + tl.maximum(tl.load(q_rows + row), 0).to(tl.int64) * q_stride
                rejected = 0 * rejected
                summed = -1 + 0 * summed
                taken = 0.0 * taken
                mass = 0.0 * mass + 1.0
                q_mass = 0.0 * q_mass + 1.0
            else:
                tl.store(outcome + node, 2.0)
                rejected += 1
                more = tl.where(sampled, mass / q_mass, 0.0)
                tl.store(remains + node, tl.where(sampled, tl.maximum(before - more * q_token, 0.0), 0.0))
                tl.debug_barrier()  # all threads read what one has written
                phase = 0 * phase + 1
                if ALONE:
                    summed = -1 + 0 * summed
                    p_sum, q_sum = _sums(
                        *(0, vocabulary, p_row, choice, q_row, sampled, taken + more),
                        *(remains, token, sibling, drawn, first, rejected, BLOCK),
                    )
                else:
                    going = node < 0
    sampled = tl.load(drawn + first, mask=rejected > 0, other=0) != 0
    if ALONE:
        _p_of_nodes(start, end, one_hot, p, p_stride, choices, parent, token, p_rows, p_out, BLOCK)
        final, prob, margin = _final_token(
            *(p_row, choice, q_row, sampled, taken, remains, token, sibling, drawn, first, rejected, vocabulary),
            *(tl.load(coin + start), final_given, p_parts, summed >= 0, share, MOST, BLOCK),
        )
        last_of = numbers + 6 * rows + tree
        tl.store(last_of, final.to(tl.float64))
        tl.store(last_of + count, prob)
        tl.store(last_of + 2 * count, margin)
        tl.store(last_of + 3 * count, row.to(tl.float64))
        tl.store(last_of + 4 * count, tl.where(rejected > 0, 1.0, 0.0))
    else:
        # The sums after this rejection, or those to draw from, unless they are known.
        if (phase == REJECTED_ONE) | (summed < 0):
            more = tl.where((phase == REJECTED_ONE) & sampled, mass / q_mass, 0.0)
            p_sum, q_sum = _sums(
                *(mine * share, tl.minimum(mine * share + share, vocabulary)),
                *(p_row, choice, q_row, sampled, taken + more),
                *(remains, token, sibling, drawn, first, rejected, BLOCK),
            )
            stored = partial + ((turn * count + tree) * shares + mine) * 2
            tl.store(stored, p_sum)
            tl.store(stored + 1, q_sum)
            summed = 0 * summed + turn
        if mine == 0:
            next_one = state + ((turn + 1) * count + tree) * NUMBERS
            tl.store(next_one, phase.to(tl.float64))
            tl.store(next_one + 1, row.to(tl.float64))
            tl.store(next_one + 2, node.to(tl.float64))
            tl.store(next_one + 3, rejected.to(tl.float64))
            tl.store(next_one + 4, taken)
            tl.store(next_one + 5, mass)
            tl.store(next_one + 6, q_mass)
            tl.store(next_one + 7, before)
            tl.store(next_one + 8, summed.to(tl.float64))
