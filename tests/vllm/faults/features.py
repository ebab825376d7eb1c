"""Faults in what an EAGLE head is fed: the target's features, and positions."""

from __future__ import annotations

import torch

from .drafts import BASE
from .switch import fault


def changed(name, change):
    """`propose` with one of its arguments changed."""

    def make(original):
        def propose(self, *args, **kwargs):
            if kwargs.get(name) is not None:
                kwargs[name] = change(kwargs[name], kwargs)
            return original(self, *args, **kwargs)

        return propose

    return make


def decoding(told, most):
    """[requests] whether each is fed what was drafted, and not a part of its prompt. `most`: drafts of a request."""
    return told.query_start_loc.diff() <= most + 1


@fault(f"{BASE}.propose")
def features_missing(original):
    """The head is fed zeros for what the target computed."""
    return changed("target_hidden_states", lambda rows, _: torch.zeros_like(rows))(original)


@fault(f"{BASE}.propose")
def features_shifted(original):
    """The head is fed each position with the features of the position before it, across the whole batch."""
    return changed("target_hidden_states", lambda rows, _: rows.roll(1, 0))(original)


@fault(f"{BASE}.propose")
def features_of_the_step_before(original):
    """The head is fed the features of the step before, where those are as many."""
    kept = [None]

    def change(rows, _):
        before, kept[0] = kept[0], rows.clone()
        return before if before is not None and before.shape == rows.shape else rows

    return changed("target_hidden_states", change)(original)


@fault(f"{BASE}.propose")
def positions_high_in_decode(original):
    """The head's positions are one high while it decodes, and right in prompts."""

    def change(positions, kwargs):
        own = decoding(kwargs["common_attn_metadata"], kwargs["num_speculative_tokens"])
        lengths = kwargs["common_attn_metadata"].query_start_loc.diff()
        return positions + own.repeat_interleave(lengths.long()).to(positions.dtype)

    return changed("target_positions", change)(original)


@fault("vllm.model_executor.models.llama:LlamaModel.forward")
def layers_one_lower(original):
    """The head is fed what enters each of its layers, not what leaves it."""

    def forward(self, *args, **kwargs):
        layers, self.aux_hidden_state_layers = (
            self.aux_hidden_state_layers,
            tuple(max(layer - 1, 0) for layer in self.aux_hidden_state_layers),
        )
        try:
            return original(self, *args, **kwargs)
        finally:
            self.aux_hidden_state_layers = layers

    return forward
