"""Faults in what an EAGLE head is fed."""

from __future__ import annotations

import torch

from specscope.analyze.diagnose.causes import Cause
from specscope.engine.phases import Phases
from specscope.model.features import AuxHiddenStates
from specscope.speculate.drafters.eagle import Eagle
from tests.faults.fault import Fault


def one_late(patch, engine):
    """Each position is given the feature of the one before it."""
    observe, last = Eagle.observe, {}

    def late(self, request, start, features, tokens):
        before = last.get(request, features[:1]) if start else features[:1]
        last[request] = features[-1:]
        observe(self, request, start, torch.cat([before, features[:-1]]), tokens)

    patch.setattr(Eagle, "observe", late)


def rows_by_index(patch, engine):
    """The accepted tokens' features are taken from the tree's first rows, not from the path's."""

    def show(self, turn):
        accepted = 0 if turn.verdict is None else len(turn.verdict.path)
        rows, request = turn.features[: turn.feed + accepted], turn.request
        self.parts.drafter.observe(request.id, request.computed, rows, request.tokens)

    patch.setattr(Phases, "show_features", show)


def root_only(patch, engine):
    """Accepted tokens get no features; only the root's step does."""
    observe = Eagle.observe

    def sparse(self, request, start, features, tokens):
        if start:
            features = torch.cat([features[:1], torch.zeros_like(features[1:])])
        observe(self, request, start, features, tokens)

    patch.setattr(Eagle, "observe", sparse)


def nothing(patch, engine):
    """All features are zero."""
    observe = Eagle.observe
    zeros = lambda self, request, start, features, tokens: observe(self, request, start, features * 0, tokens)  # noqa: E731
    patch.setattr(Eagle, "observe", zeros)


def normalised(patch, engine):
    """Each layer's features are brought to one norm."""
    observe = Eagle.observe

    def even(self, request, start, features, tokens):
        layers = features.unflatten(-1, (len(self.aux_layers), -1))
        observe(self, request, start, torch.nn.functional.normalize(layers, dim=-1).flatten(-2), tokens)

    patch.setattr(Eagle, "observe", even)


def other_layers(change):
    """Features of the layers that `change` makes of the right ones."""

    def install(patch, engine):
        aux = engine.runner._aux
        layers = change(aux.aux_layers)
        aux.close()
        patch.setattr(engine.runner, "_aux", AuxHiddenStates(engine.runner.loaded.model, layers))

    return install


FAULTS = [
    Fault("features one late", Cause.DRAFTER_FED, one_late, "eagle chain warm"),
    Fault("features by index", Cause.DRAFTER_FED, rows_by_index, "eagle tree"),
    Fault("features of roots only", Cause.DRAFTER_FED, root_only, "eagle chain"),
    Fault("features normalised", Cause.DRAFTER_FED, normalised, "eagle chain"),
    Fault("no features", Cause.DRAFTER_FED, nothing, "eagle dynamic"),
    Fault(
        "layers one lower",
        Cause.DRAFTER_FED,
        other_layers(lambda layers: tuple(layer - 1 for layer in layers)),
        "eagle chain",
        rare=0,
    ),
    Fault(
        "layers in another order",
        Cause.DRAFTER_FED,
        other_layers(lambda layers: tuple(reversed(layers))),
        "eagle dynamic",
        rare=0,
    ),
]
