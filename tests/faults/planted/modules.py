"""Faults in a target's own next-token modules."""

import torch
from torch import nn

from specscope.analyze.diagnose.causes import Cause
from specscope.model.heads.mtp import MtpRunner
from specscope.speculate.drafters.mtp import Mtp
from tests.faults.fault import Fault, replaced
from tests.faults.planted.drafter_kv import nodes_one_further


def in_each(name, change):
    """A part of every module is `change` of what it is."""

    def install(patch, engine):
        for layer in engine.drafter.runner.loaded.model.layers:
            patch.setattr(layer, name, change(getattr(layer, name)))

    return install


class Swapped(nn.Module):
    """A projection whose input is the other way round."""

    def __init__(self, right):
        super().__init__()
        self.right = right

    def forward(self, both):
        return self.right(torch.cat(both.chunk(2, dim=-1)[::-1], dim=-1))


@replaced(MtpRunner, "forward")
def other_module(forward, self, segments, hidden, module=0):
    """Each depth is drafted by the other module."""
    return forward(self, segments, hidden, self.modules - 1 - module)


@replaced(Mtp, "_pass")
def state_before(right, self, module, drafting, segments, states):
    """A module is fed what the one before it was fed, not what it made."""
    level = right(self, module, drafting, segments, states)
    self._fed = {name: (segment, given) for (name, (segment, _)), given in zip(self._fed.items(), states, strict=True)}
    return level


def guesses_stay(patch, engine):
    """What the modules wrote at slots whose tokens were guessed stays in their cache, also where they were rejected."""
    patch.setattr(engine.drafter, "again", 0)


FAULTS = [
    Fault("no norm of the state", Cause.DRAFTER_BUILT, in_each("hnorm", lambda norm: nn.Identity()), "mtp tree"),
    Fault("state before embedding", Cause.DRAFTER_BUILT, in_each("eh_proj", Swapped), "mtp tree"),
    Fault("modules in another order", Cause.DRAFTER_BUILT, other_module, "mtp chain"),
    Fault("module fed the state before", Cause.DRAFTER_BUILT, state_before, "mtp chain"),
    Fault("guesses stay in the cache", Cause.DRAFTER_KV, guesses_stay, "mtp chain hot", rare=10),
    Fault("modules' nodes one further", Cause.ROTARY_POSITIONS, nodes_one_further, "mtp tree"),
]
