"""Faults in what an EAGLE head is fed."""

from __future__ import annotations

import torch

from specscope.analyze.diagnose.causes import Cause
from specscope.engine.phases import Phases
from specscope.model.runner import AuxHiddenStates
from specscope.speculate.drafters.eagle import Eagle
from tests.faults.fault import Fault, replaced


def one_late(patch, engine):
    """Each position is given the feature of the one before it."""
    last = {}

    def late(observe, self, request, start, features, tokens):
        before = last.get(request, features[:1]) if start else features[:1]
        last[request] = features[-1:]
        observe(self, request, start, torch.cat([before, features[:-1]]), tokens)

    replaced(Eagle, "observe")(late)(patch, engine)


@replaced(Phases, "show_features")
def rows_by_index(show, self, turn):
    """The accepted tokens' features are taken from the tree's first rows, not from the path's."""
    accepted = 0 if turn.verdict is None else len(turn.verdict.path)
    rows, request = turn.features[: turn.feed + accepted], turn.request
    self.parts.drafter.observe(request.id, request.computed, rows, request.tokens)


@replaced(Eagle, "observe")
def root_only(observe, self, request, start, features, tokens):
    """Accepted tokens get no features; only the root's step does."""
    if start:
        features = torch.cat([features[:1], torch.zeros_like(features[1:])])
    observe(self, request, start, features, tokens)


@replaced(Eagle, "observe")
def nothing(observe, self, request, start, features, tokens):
    """All features are zero."""
    observe(self, request, start, features * 0, tokens)


@replaced(Eagle, "observe")
def normalised(observe, self, request, start, features, tokens):
    """Each layer's features are brought to one norm."""
    layers = features.unflatten(-1, (len(self.aux_layers), -1))
    observe(self, request, start, torch.nn.functional.normalize(layers, dim=-1).flatten(-2), tokens)


def other_layers(change):
    """Features of the layers that `change` makes of the right ones."""

    def install(patch, engine):
        aux = engine.runner._aux
        layers = change(aux.aux_layers)
        aux.close()
        patch.setattr(engine.runner, "_aux", AuxHiddenStates(engine.runner.loaded.model, layers))

    return install


one_lower = other_layers(lambda layers: tuple(layer - 1 for layer in layers))
backwards = other_layers(lambda layers: tuple(reversed(layers)))
FAULTS = [
    Fault("features one late", Cause.DRAFTER_FED, one_late, "eagle chain warm"),
    Fault("features by index", Cause.DRAFTER_FED, rows_by_index, "eagle tree"),
    Fault("features of roots only", Cause.DRAFTER_FED, root_only, "eagle chain"),
    Fault("features normalised", Cause.DRAFTER_FED, normalised, "eagle chain"),
    Fault("no features", Cause.DRAFTER_FED, nothing, "eagle dynamic"),
    Fault("layers one lower", Cause.DRAFTER_FED, one_lower, "eagle chain", rare=0),
    Fault("layers in another order", Cause.DRAFTER_FED, backwards, "eagle dynamic", rare=0),
]
