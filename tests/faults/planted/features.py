"""Faults in what an EAGLE head is fed."""

import torch

from specscope.analyze.diagnose.causes import Cause
from specscope.engine.phases import Phases
from specscope.model.runner import AuxHiddenStates
from specscope.speculate.drafters.eagle import Eagle, HeadDrafter
from tests.faults.fault import Fault, altered, replaced


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
    self.parts.drafter.observe(request.id, turn.step.context_len, rows, request.tokens)


def of_the_step_before(patch, engine):
    """What a step computed is kept for the next one, whose tokens are given it."""
    kept = {}

    def late(show, self, turn):
        request, accepted = turn.request, 0 if turn.verdict is None else len(turn.verdict.path)
        before, kept[request.id] = kept.get(request.id), turn.features
        if turn.verdict is None or before is None or len(before) != len(turn.features):
            return show(self, turn)
        return self.parts.drafter.observe(
            request.id, turn.step.context_len, before[: turn.feed + accepted], request.tokens
        )

    replaced(Phases, "show_features")(late)(patch, engine)


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


@replaced(Eagle, "observe")
def half(observe, self, request, start, features, tokens):
    """The upper half of each position's features is zero."""
    lower = torch.arange(features.shape[-1]) < features.shape[-1] // 2
    observe(self, request, start, features * lower, tokens)


@replaced(HeadDrafter, "_next")
def own_tokens(following, self, held, state, tokens, end, *, logits):
    """Each feature is fed with its own token, not with the next one."""
    segment, features = following(self, held, state, tokens, end, logits=logits)
    segment.tokens[:] = tokens[end - len(segment.tokens) : end]
    return segment, features


@replaced(Eagle, "feed_frontier")
def no_own_state(feed, self, drafting):
    """Below the root the head is fed zeros for what it made at the parent."""
    self._hidden = torch.zeros_like(self._hidden)
    return feed(self, drafting)


def prepared(change):
    """What enters a head's layer: `change` of the residual, the projected embedding and state, and the bare state."""

    def wrong(prepare):
        def other(embedding, hidden):
            residual, both = prepare(embedding, hidden)
            residual, *parts = change(residual, *both.split(hidden.shape[-1], dim=-1), hidden)
            return residual, torch.cat(parts, dim=-1)

        return other

    return altered("drafter.runner.head.prepare", wrong)


def other_layers(change):
    """Features of the layers that `change` makes of the right ones."""

    def install(patch, engine):
        aux = engine.runner._aux
        layers = change(aux.aux_layers)
        aux.close()
        patch.setattr(engine.runner, "_aux", AuxHiddenStates(engine.runner.loaded.model, layers))

    return install


one_lower = other_layers(lambda layers: tuple(layer - 1 for layer in layers))
no_hidden_norm = prepared(lambda residual, token, state, bare: (residual, token, bare))
normed_residual = prepared(lambda residual, token, state, bare: (state, token, state))
normed_output = altered("drafter.runner.head.leave", lambda leave: lambda x: leave(x)[:1] * 2)
backwards = other_layers(lambda layers: tuple(reversed(layers)))
FAULTS = [
    Fault("features one late", Cause.DRAFTER_FED, one_late, "eagle chain warm"),
    Fault("features by index", Cause.DRAFTER_FED, rows_by_index, "eagle tree"),
    Fault("features of the step before", Cause.DRAFTER_FED, of_the_step_before, "eagle chain", rare=0),
    Fault("features of roots only", Cause.DRAFTER_FED, root_only, "eagle chain"),
    Fault("features normalised", Cause.DRAFTER_FED, normalised, "eagle chain"),
    Fault("no features", Cause.DRAFTER_FED, nothing, "eagle dynamic"),
    Fault("half of the features", Cause.DRAFTER_FED, half, "eagle chain"),
    Fault("own tokens", Cause.DRAFTER_FED, own_tokens, "eagle chain"),
    Fault("no state of its own", Cause.DRAFTER_FED, no_own_state, "eagle tree"),
    Fault("no hidden norm", Cause.DRAFTER_BUILT, no_hidden_norm, "eagle chain", rare=0),
    Fault("normed residual", Cause.DRAFTER_BUILT, normed_residual, "eagle tree", rare=0),
    Fault("normed output", Cause.DRAFTER_BUILT, normed_output, "eagle tree", rare=0),
    Fault("layers one lower", Cause.DRAFTER_FED, one_lower, "eagle chain", rare=0),
    Fault("layers in another order", Cause.DRAFTER_FED, backwards, "eagle dynamic", rare=0),
]
