"""Faults in what an EAGLE head is fed: features, positions and KV; and at which positions the target computes."""

import dataclasses

import torch

from .drafts import BASE
from .noise import RUNNER
from .switch import fault

NOWHERE = -1  # a slot that is not written
ROWS = "target_hidden_states"
kept: dict[str, object] = {}


def changed(kwargs, name, change):
    """The arguments of a call with one of them changed, where it is given."""
    return kwargs if kwargs.get(name) is None else kwargs | {name: change(kwargs[name])}


def decoding(told, most):
    """[requests] whether each is fed what was drafted, and not a part of its prompt. `most`: drafts of a request."""
    return told.query_start_loc.diff() <= most + 1


@fault(f"{BASE}.propose", "drafter_fed")
def features_missing(original, *args, **kwargs):
    """The head is fed zeros for what the target computed."""
    return original(*args, **changed(kwargs, ROWS, torch.zeros_like))


@fault(f"{BASE}.propose", "drafter_fed")
def features_shifted(original, *args, **kwargs):
    """The head is fed each position with the features of the previous position it, across the whole batch."""
    return original(*args, **changed(kwargs, ROWS, lambda rows: rows.roll(1, 0)))


@fault(f"{BASE}.propose", "drafter_fed")
def features_of_the_step_before(original, *args, **kwargs):
    """The head is fed the features of the step before, where those are as many."""

    def change(rows):
        before, kept["rows"] = kept.get("rows"), rows.clone()
        return before if before is not None and before.shape == rows.shape else rows

    return original(*args, **changed(kwargs, ROWS, change))


@fault("vllm.model_executor.models.llama:LlamaModel.forward", "drafter_fed")
def layers_one_lower(original, self, *args, **kwargs):
    """The head is fed what enters each of its layers, not what leaves it."""
    layers = self.aux_hidden_state_layers
    self.aux_hidden_state_layers = tuple(max(layer - 1, 0) for layer in layers)
    try:
        return original(self, *args, **kwargs)
    finally:
        self.aux_hidden_state_layers = layers


@fault(f"{BASE}.propose", "rotary_positions")
def positions_high_in_decode(original, *args, **kwargs):
    """The head's positions are one high while it decodes, and right in prompts."""

    def change(positions):
        told = kwargs["common_attn_metadata"]
        own, lengths = decoding(told, kwargs["num_speculative_tokens"]), told.query_start_loc.diff()
        return positions + own.repeat_interleave(lengths.long()).to(positions.dtype)

    return original(*args, **changed(kwargs, "target_positions", change))


def without_slots(kwargs, choose):
    """The arguments of `propose`, where the KV of some requests' last rows is not written: an older one stays there."""
    rejected, rows = kwargs.get("num_rejected_tokens_gpu"), kwargs.get("token_indices_to_sample")
    if rejected is None or rows is None:
        return kwargs
    told = kwargs["common_attn_metadata"]
    slots = told.slot_mapping.clone()
    chosen = choose(rejected) & decoding(told, kwargs["num_speculative_tokens"])
    slots[rows[chosen].long()] = NOWHERE
    return kwargs | {"common_attn_metadata": dataclasses.replace(told, slot_mapping=slots)}


@fault(f"{BASE}.propose", "drafter_kv")
def kv_stale_after_rejection(original, *args, **kwargs):
    """After a rejection the head's KV of the last accepted position is not written: the rejected draft's stays."""
    return original(*args, **without_slots(kwargs, lambda rejected: rejected > 0))


@fault(f"{BASE}.propose", "drafter_kv")
def kv_stale_after_full(original, *args, **kwargs):
    """After a full acceptance the head's KV of the last accepted position is not written."""
    return original(*args, **without_slots(kwargs, lambda rejected: rejected == 0))


@fault(f"{BASE}._get_slot_mapping")
def slots_one_block_off(original, self, count, mapping=None):
    """While it drafts, the head writes its KV one block further on, and reads it where it should be."""
    found = original(self, count, mapping)
    if mapping is None:
        for rows in found.values():
            rows += self.block_size
    return found


@fault(f"{BASE}.propose")
def rejected_kv_attended(original, *args, **kwargs):
    """While it drafts, the head attends to the KV of rejected drafts."""
    return original(*args, **changed(kwargs, "num_rejected_tokens_gpu", lambda _: None))


# The target


def behind_rejections(runner, scheduled):
    """Of each request whose last step rejected drafts: its row, and how many: it was given fewer than it had."""
    for row, name in enumerate(runner.input_batch.req_ids):
        now = int(runner.input_batch.num_computed_tokens_cpu[row])
        before, fed = kept.get(name, (now, 0))
        kept[name] = now, len(scheduled.scheduled_spec_decode_tokens.get(name, ())) + 1
        if fed > 1 and now - before < fed:
            yield row, fed - (now - before)


def raised(runner, scheduled, some):
    """Positions of some rows of the batch, one higher."""
    first = 0
    for row, name in enumerate(runner.input_batch.req_ids):
        count = scheduled.num_scheduled_tokens[name]
        if row in some:
            runner.positions[first : first + count] += 1
        first += count


@fault(f"{RUNNER}._prepare_inputs")
def rejected_kv_attended_by_target(original, self, scheduled, *args, **kwargs):
    """Behind a step in which drafts were rejected the target attends to as many slots more."""
    found = original(self, scheduled, *args, **kwargs)
    for row, rejected in behind_rejections(self, scheduled):
        self.seq_lens[row] += rejected
    return found


@fault(f"{RUNNER}._prepare_inputs", "rotary_positions")
def target_positions_high_after_rejection(original, self, scheduled, *args, **kwargs):
    """After a rejection the target computes the request's next step at positions that are one high."""
    found = original(self, scheduled, *args, **kwargs)
    raised(self, scheduled, dict(behind_rejections(self, scheduled)))
    return found


@fault(f"{RUNNER}._prepare_inputs")
def target_positions_high_in_decode(original, self, scheduled, *args, **kwargs):
    """The target's positions are one high while it decodes, and right in prompts."""
    found, batch = original(self, scheduled, *args, **kwargs), self.input_batch
    rows = range(len(batch.req_ids))
    raised(self, scheduled, [row for row in rows if batch.num_computed_tokens_cpu[row] >= batch.num_prompt_tokens[row]])
    return found
