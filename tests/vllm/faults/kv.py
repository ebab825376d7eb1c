"""Faults in KV: where the drafter's is written, and at which positions the target computes its own."""

from __future__ import annotations

import dataclasses

from .drafts import BASE, RUNNER
from .features import decoding
from .switch import fault

NOWHERE = -1  # a slot that is not written


def without_slots(choose):
    """`propose`, where the KV of some requests' last rows is not written: an older one stays there."""

    def make(original):
        def propose(self, *args, **kwargs):
            rejected, rows = kwargs.get("num_rejected_tokens_gpu"), kwargs.get("token_indices_to_sample")
            if rejected is None or rows is None:
                return original(self, *args, **kwargs)
            told = kwargs["common_attn_metadata"]
            slots = told.slot_mapping.clone()
            chosen = choose(rejected) & decoding(told, kwargs["num_speculative_tokens"])
            slots[rows[chosen].long()] = NOWHERE
            kwargs["common_attn_metadata"] = dataclasses.replace(told, slot_mapping=slots)
            return original(self, *args, **kwargs)

        return propose

    return make


@fault(f"{BASE}.propose")
def kv_stale_after_rejection(original):
    """After a rejection the head's KV of the last accepted position is not written: the rejected draft's stays."""
    return without_slots(lambda rejected: rejected > 0)(original)


@fault(f"{BASE}.propose")
def kv_stale_after_full(original):
    """After a full acceptance the head's KV of the last accepted position is not written."""
    return without_slots(lambda rejected: rejected == 0)(original)


@fault(f"{BASE}._get_slot_mapping")
def slots_one_block_off(original):
    """While it drafts, the head writes its KV one block further on, and reads it where it should be."""

    def slots(self, count, mapping=None):
        found = original(self, count, mapping)
        if mapping is None:
            for rows in found.values():
                rows += self.block_size
        return found

    return slots


@fault(f"{RUNNER}._prepare_inputs")
def target_positions_high_after_rejection(original):
    """After a rejection the target computes the request's next step at positions that are one high."""

    def prepare(self, scheduled, *args, **kwargs):
        found = original(self, scheduled, *args, **kwargs)
        first = 0
        for row, name in enumerate(self.input_batch.req_ids):
            count = scheduled.num_scheduled_tokens[name]
            if rejected_before(self, row, name):
                self.positions[first : first + count] += 1
            first += count
        return found

    return prepare


def rejected_before(runner, row, name):
    """Whether the request's last step rejected a draft: it was given fewer tokens than it had drafts and one."""
    now = int(runner.input_batch.num_computed_tokens_cpu[row])
    kept = runner.__dict__.setdefault("_fault_computed", {})
    before, drafts = kept.get(name, (now, 0))
    told = runner.__dict__.get("_fault_drafts", {})
    kept[name] = (now, told.get(name, 0))
    return drafts > 0 and now - before < drafts + 1


@fault(f"{RUNNER}.execute_model")
def target_positions_high_after_rejection(original):  # noqa: F811 - the same fault in another place
    """How many drafts each request has in this step."""

    def execute_model(self, scheduled, *args, **kwargs):
        drafts = scheduled.scheduled_spec_decode_tokens
        self._fault_drafts = {name: len(tokens) for name, tokens in drafts.items()}
        return original(self, scheduled, *args, **kwargs)

    return execute_model
