"""Faults in what a DFlash head is fed, and in its context and blocks."""

from torch import nn

from specscope.analyze.diagnose.causes import Cause
from specscope.speculate.drafters import dflash
from specscope.speculate.drafters.dflash import DFlash
from tests.faults.fault import Fault, altered, replaced
from tests.faults.planted.features import one_lower

# The norm of the projected features is left out
no_norm = altered("drafter.runner.head.hidden_norm", lambda norm: nn.Identity())


@replaced(dflash, "block_segment")
def other_mask(make, *given):
    """Mask rows are fed the token before the mask token."""
    made = make(*given)
    made.tokens[1:] = [token - 1 for token in made.tokens[1:]]
    return made


@replaced(dflash, "block_segment")
def one_further(make, *given):
    """A block lies one position too far."""
    made = make(*given)
    made.positions = made.positions + 1
    return made


def stale_root(patch, engine):
    """After a rejection what the block's first row left in its slot is kept, and taken for that position's context."""
    rejected: set[int] = set()  # tables

    def noted(commit, self, context, tree, verdict):
        commit(self, context, tree, verdict)
        if len(tree) and len(verdict.path) < tree.max_depth:
            rejected.add(id(self.states[context.request].table))

    def keeping(write, self, segments, features):
        first = [s.table.slots(s.context, s.context + 1)[0] for s in segments if id(s.table) in rejected]
        before = [store[:, :, first].clone() for store in self.cache.stores]
        write(self, segments, features)
        for store, rows in zip(self.cache.stores, before, strict=True):
            store[:, :, first] = rows
        rejected.difference_update(id(s.table) for s in segments)

    replaced(DFlash, "commit")(noted)(patch, engine)
    replaced(DFlash, "write")(keeping)(patch, engine)


@replaced(DFlash, "write")
def row_before(write, self, segments, features):
    """Each position's keys and values are made of the previous row in the batch."""
    self.runner.write_context(segments, self.runner.combine(features).roll(1, 0))


FAULTS = [
    Fault("block: other layers", Cause.DRAFTER_FED, one_lower, "dflash chain", rare=0),
    Fault("block: one further", Cause.ROTARY_POSITIONS, one_further, "dflash chain"),
]
