"""Tree rejection sampling as its rules are written, in float64: what the kernel of tree_verify.py is held against."""

from __future__ import annotations

import torch
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

SLACK = 1e-12  # of a sum of float64: so near to an end is at it


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
            p_i, node, accepted = whole[row], child[row], False
            q_i = None if q is None or q_row[row] < 0 else q[q_row[row]].double()
            while node != NOBODY and not accepted:
                x = token[node]
                q_x = 1.0 if drawn[node] == DETERMINISTIC or q_i is None else float(q_i[x])
                accept = min(1.0, float(p_i[x]) / q_x) if q_x > 0 else 0.0
                out.p_trial[node], out.q_trial[node], out.accept_prob[node] = p_i[x], q_x, accept
                accepted = coin[node] < accept if forced[node] == UNTRIED else forced[node] == ACCEPTED
                out.outcome[node] = ACCEPTED if accepted else REJECTED
                if accepted:
                    row, left = node, whole[node]
                else:
                    rest = _without(p_i, x) if drawn[node] == DETERMINISTIC or q_i is None else (p_i - q_i).clamp(min=0)
                    out.residual_mass[node] = rest.sum()
                    left = p_i = rest / rest.sum() if rest.sum() > 0 else p_i
                    if drawn[node] == WITHOUT_REPLACEMENT and q_i is not None and _without(q_i, x).sum() > 0:
                        q_i = _without(q_i, x) / _without(q_i, x).sum()
                    node = sibling[node]
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
