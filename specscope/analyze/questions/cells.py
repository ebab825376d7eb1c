"""Acceptance by depth and sibling: which node of a tree is not worth its row.

Every drafted node takes a row of the target's pass, tried or not, and gives a token where it is on the accepted path.
So a cell of the tree, a depth and a place among siblings in draw order, is worth accepted / drafted tokens a row. Cells
are ranked by the upper end of their interval, the least worth first, so that none is condemned by a few rows. A cell
that is dropped takes all below it with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.groups import Examples, Share, by_value

FEWEST = 20  # rows below which a cell is not named as one of the least worth
NAMED = 3


@dataclass(frozen=True)
class TreeCell:
    """The nodes at one depth and at one place among their siblings."""

    depth: int  # 1 for the root's children
    sibling: int  # its place in draw order, from 1
    accepted: Share  # on the accepted path, of all that were drafted
    tried: int  # of those drafted
    draft_p: float | None  # mean of the drafter's probability; None where it is not known
    examples: Examples  # clearest: rejected where the drafter was surest; accepted where none was rejected


@dataclass(frozen=True)
class TreeCells:
    """All cells of the trees, the least worth first."""

    cells: tuple[TreeCell, ...]
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> tuple[TreeCell, ...]:
        """Those that are least worth their rows, of those with enough; none where there is but one cell."""
        enough = [cell for cell in self.cells if cell.accepted.total >= FEWEST]
        return tuple(enough[: min(NAMED, len(enough) - 1)]) if enough else ()


def by_cell(evidence: Evidence) -> TreeCells:
    """Acceptance in every cell of the trees."""
    if lacking := evidence.lacking(evidence.drafts):
        return TreeCells((), lacking)
    c = evidence.columns
    nodes = np.flatnonzero(evidence.drafts[c.step])
    span = int(c.sibling.max()) + 1
    keys, groups = by_value(c.depth[nodes] * span + c.sibling[nodes])
    drafted, tried = groups.counts(), groups.counts(c.tried[nodes])
    accepted, draft_p = groups.counts(c.on_path[nodes]), groups.means(c.draft_prob[nodes])
    sure = np.nan_to_num(evidence.confidence[nodes], nan=0.0, posinf=0.0, neginf=0.0)
    examples = groups.examples(c, nodes, sure + 2 * c.rejected[nodes], nodes=True)
    cells = [
        TreeCell(
            int(key) // span,
            int(key) % span + 1,
            Share(accepted[index], drafted[index]),
            tried[index],
            draft_p[index],
            examples[index],
        )
        for index, key in enumerate(keys.tolist())
    ]
    return TreeCells(tuple(sorted(cells, key=_worth)), evidence.notes())


def _worth(cell: TreeCell) -> tuple[float, float, int, int]:
    """The least worth first; of equal ones the deeper and the later."""
    interval = cell.accepted.interval or (0.0, 1.0)
    return interval[1], cell.accepted.value or 0.0, -cell.depth, -cell.sibling
