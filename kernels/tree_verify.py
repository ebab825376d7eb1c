"""The walk down every tree of a batch with its residuals, in one launch: tree rejection sampling on the device.

At a node with target distribution p and children x_1 .. x_k in draw order, p_1 = p and q_1 = q (SpecInfer, Miao et al.
2023; Jeon et al. 2024): accept x_i when coin < p_i(x_i) / q_i(x_i); else p_{i+1} = norm(max(p_i - q_i, 0)), and
q_{i+1} = norm(q_i without x_i) where siblings were drawn without replacement.

No residual is ever stored. Let R_i be p_i before its division by P_i = sum R_i, and c_i = 1 / sum of q over what was
not rejected yet (1 with replacement). Subtracting again and again what is proportional to q is subtracting once:

    R_i = max(p - A_i q, 0),  A_1 = 0,  A_{i+1} = A_i + c_i P_i,

for a rejected token has R = 0 from then on anyhow: it was rejected because p_i < q_i there. A deterministic child
(q_i a point mass) that is rejected is only left out. So a rejection costs one pass over two rows of the vocabulary, an
acceptance none, and the final token two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from specscope.kernels.flat_trees import DETERMINISTIC, NOBODY, WITHOUT_REPLACEMENT, Forest, Verdicts
from torch import Tensor

SLACK: tl.constexpr = tl.constexpr(1e-12)  # of a sum of float64: so near to an end is at it
BLOCK = 4096  # tokens of the vocabulary that a program looks at together


def tree_verify(forest: Forest, p: Tensor, q: Tensor | None = None, block: int = BLOCK) -> Verdicts:
    """Judge every tree and draw its final token, on the coins in `forest`.

    p float32 [R, V]: the target's distribution at each root and node; q float32 [Q, V]: the drafter's at parents of
    sampled nodes, by `forest.q_row`; neither is changed. Equal to specscope.speculate.verify.host on the same
    coins, but where a coin lies within rounding of an acceptance probability.
    """
    verdicts, vocabulary = Verdicts.empty(forest), p.shape[1]
    q = p if q is None else q
    _verify[(len(forest.root),)](
        *(p, p.stride(0), q, q.stride(0), vocabulary),
        *(forest.root, forest.child, forest.sibling, forest.token, forest.drawn, forest.coin, forest.q_row),
        *(verdicts.outcome, verdicts.p_trial, verdicts.q_trial, verdicts.accept_prob, verdicts.residual_mass),
        *(verdicts.token, verdicts.final_p, verdicts.final_margin, verdicts.final_row, verdicts.recovered),
        BLOCK=min(block, triton.next_power_of_2(vocabulary)),
        num_warps=16,
    )
    return verdicts


def tree_verify_reference(forest: Forest, p: Tensor, q: Tensor | None = None) -> Verdicts:
    """What tree_verify must give: the rules as they are written, residual by residual, in float64."""
    out = Verdicts.empty(forest)
    child, sibling, token, coin = (x.tolist() for x in (forest.child, forest.sibling, forest.token, forest.coin))
    drawn, q_row = forest.drawn.tolist(), forest.q_row.tolist()
    for tree, root in enumerate(forest.root.tolist()):
        row, recovered, left = root, False, p[root].double()
        while child[row] != NOBODY and not recovered:
            p_i, at, accepted = p[row].double(), child[row], False
            q_i = None if q is None or q_row[row] < 0 else q[q_row[row]].double()
            while at != NOBODY and not accepted:
                x = token[at]
                q_x = 1.0 if drawn[at] == DETERMINISTIC else float(q_i[x])
                accept = min(1.0, float(p_i[x]) / q_x) if q_x > 0 else 0.0
                out.p_trial[at], out.q_trial[at], out.accept_prob[at] = p_i[x], q_x, accept
                accepted = coin[at] < accept
                out.outcome[at] = 1 if accepted else 2
                if accepted:
                    row, left = at, p[at].double()
                else:
                    rest = (p_i - q_i).clamp(min=0) if drawn[at] != DETERMINISTIC else _without(p_i, x)
                    out.residual_mass[at] = rest.sum()
                    left = p_i = rest / rest.sum() if rest.sum() > 0 else p_i
                    if drawn[at] == WITHOUT_REPLACEMENT and _without(q_i, x).sum() > 0:
                        q_i = _without(q_i, x) / _without(q_i, x).sum()
                    at = sibling[at]
            recovered = not accepted
        total = left.cumsum(0)
        final = min(int(torch.searchsorted(total, coin[root] * float(total[-1]), right=True)), len(left) - 1)
        out.token[tree], out.final_p[tree], out.final_row[tree], out.recovered[tree] = (
            final,
            left[final],
            row,
            recovered,
        )
        ends = [float(total[final] - left[final]), float(total[final])]
        borders = [abs(coin[root] - end / float(total[-1])) for end in ends]
        inside = [SLACK < end / float(total[-1]) < 1 - SLACK for end in ends]
        out.final_margin[tree] = min((b for b, yes in zip(borders, inside, strict=True) if yes), default=1.0)
    return out


def _without(distribution: Tensor, token: int) -> Tensor:
    rest = distribution.clone()
    rest[token] = 0
    return rest


def tree_verify_bytes(forest: Forest, verdicts: Verdicts, p: Tensor) -> int:
    """Bytes that any verification of these trees must read: the rows of p and q where a pass was needed, once."""
    rejected = verdicts.outcome == 2
    parents = forest.parent[rejected].unique()
    sampled = forest.parent[rejected & (forest.drawn != DETERMINISTIC)].unique()
    rows = len(torch.cat([parents, verdicts.final_row.to(parents.dtype)]).unique()) + len(sampled)
    return rows * p.shape[1] * p.element_size()


@triton.jit
def _left(p_row, q_row, x, vocabulary, taken, token, sibling, first, rejected):  # noqa: ANN001, ANN202
    """(R, q over what is not rejected) at tokens x: float32 each. The first `rejected` children are left out."""
    inside = x < vocabulary
    r = tl.load(p_row + x, mask=inside, other=0.0)
    theirs = tl.zeros_like(r)
    if taken >= 0.0:
        theirs = tl.load(q_row + x, mask=inside, other=0.0)
        r = tl.maximum(r - taken.to(tl.float32) * theirs, 0.0)
    at = first
    for _ in range(rejected):
        gone = x == tl.load(token + at)
        r = tl.where(gone, 0.0, r)
        theirs = tl.where(gone, 0.0, theirs)
        at = tl.load(sibling + at)
    return r, theirs


@triton.jit
def _verify(  # noqa: ANN202
    p, p_stride, q, q_stride, vocabulary,  # noqa: ANN001
    root, child, sibling, token, drawn, coin, q_rows,  # noqa: ANN001
    outcome, p_trial, q_trial, accept_prob, residual_mass,  # noqa: ANN001
    final_token, final_p, final_margin, final_row, recovered,  # noqa: ANN001
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One tree. `taken` is A, and -1 where nothing sampled was rejected, so that q need not be read."""
    tree = tl.program_id(0)
    start = tl.load(root + tree)
    row = start
    first = tl.load(child + row)
    lanes = tl.arange(0, BLOCK)
    p_row, q_row = p + row.to(tl.int64) * p_stride, q
    taken = tl.full([], -1.0, tl.float64)
    mass = tl.full([], 1.0, tl.float64)
    rejected = 0
    gone = 0  # how many rejected children R leaves out: all, unless nothing else has mass
    going = first >= 0
    while going:
        p_row = p + row.to(tl.int64) * p_stride
        q_row = q + tl.maximum(tl.load(q_rows + row), 0).to(tl.int64) * q_stride
        taken = tl.full([], -1.0, tl.float64)
        mass = tl.full([], 1.0, tl.float64)
        q_mass = tl.full([], 1.0, tl.float64)
        rejected = 0
        gone = 0
        accepted = first * 0 - 1
        at = first
        while (at >= 0) & (accepted < 0):
            x = tl.load(token + at)
            how = tl.load(drawn + at)
            p_x = tl.load(p_row + x).to(tl.float64)
            q_x = tl.full([], 1.0, tl.float64)
            if how != 0:
                own = tl.load(q_row + x).to(tl.float64)
                q_x = own / q_mass
                if taken >= 0.0:
                    p_x = tl.maximum(p_x - taken * own, 0.0)
            p_x = p_x / mass
            accept = tl.where(q_x > 0.0, tl.minimum(p_x / tl.where(q_x > 0.0, q_x, 1.0), 1.0), 0.0)
            tl.store(p_trial + at, p_x.to(tl.float32))
            tl.store(q_trial + at, q_x.to(tl.float32))
            tl.store(accept_prob + at, accept)
            if tl.load(coin + at) < accept:
                tl.store(outcome + at, tl.full([], 1, tl.uint8))
                accepted = at
            else:
                tl.store(outcome + at, tl.full([], 2, tl.uint8))
                rejected += 1
                more = taken
                if how != 0:
                    more = tl.maximum(taken, 0.0) + mass / q_mass
                p_sum = tl.full([], 0.0, tl.float64)
                q_sum = tl.full([], 0.0, tl.float64)
                for at_token in range(0, vocabulary, BLOCK):
                    r, theirs = _left(p_row, q_row, at_token + lanes, vocabulary, more, token, sibling, first, rejected)
                    p_sum += tl.sum(r.to(tl.float64), 0)
                    q_sum += tl.sum(theirs.to(tl.float64), 0)
                tl.store(residual_mass + at, p_sum / mass)
                if p_sum > 0.0:
                    taken = more
                    mass = p_sum
                    gone = rejected
                if (how == 1) & (q_sum > 0.0):
                    q_mass = q_sum
                at = tl.load(sibling + at)
        if accepted >= 0:
            row = accepted
            first = tl.load(child + row)
            going = first >= 0
            p_row = p + row.to(tl.int64) * p_stride
            taken = tl.full([], -1.0, tl.float64)
            rejected = 0
            gone = 0
        else:
            going = first < 0
    # The final token: the first at which the cumulative sum passes the coin's share of the whole.
    whole = tl.full([], 0.0, tl.float64)
    for at_token in range(0, vocabulary, BLOCK):
        r, theirs = _left(p_row, q_row, at_token + lanes, vocabulary, taken, token, sibling, first, gone)
        whole += tl.sum(r.to(tl.float64), 0)
    share = tl.load(coin + start) * whole
    before = tl.full([], 0.0, tl.float64)
    below = tl.full([], 0.0, tl.float64)
    found = vocabulary
    last = first * 0
    for at_token in range(0, vocabulary, BLOCK):
        if found >= vocabulary:
            x = at_token + lanes
            r, theirs = _left(p_row, q_row, x, vocabulary, taken, token, sibling, first, gone)
            sums = before + tl.cumsum(r.to(tl.float64), 0)
            found = tl.minimum(found, tl.min(tl.where((sums > share) & (r > 0.0), x, vocabulary), 0))
            below = before + tl.sum(tl.where(x < found, r, 0.0).to(tl.float64), 0)
            last = tl.maximum(last, tl.max(tl.where(r > 0.0, x, 0), 0))
            before += tl.sum(r.to(tl.float64), 0)
    short = found >= vocabulary  # the sum's last digit: the last token with any mass
    found = tl.where(short, last, found)
    r, theirs = _left(p_row, q_row, found + tl.arange(0, 1), vocabulary, taken, token, sibling, first, gone)
    own = tl.sum(r, 0).to(tl.float64)
    below = tl.where(short, whole - own, below) / whole
    above = below + own / whole
    u = share / whole
    margin = tl.where((below > SLACK) & (below < 1.0 - SLACK), tl.abs(u - below), 1.0)
    margin = tl.minimum(margin, tl.where((above > SLACK) & (above < 1.0 - SLACK), tl.abs(above - u), 1.0))
    tl.store(final_token + tree, found)
    tl.store(final_p + tree, (own / whole).to(tl.float32))
    tl.store(final_margin + tree, margin)
    tl.store(final_row + tree, row)
    tl.store(recovered + tree, (rejected > 0).to(tl.uint8))
