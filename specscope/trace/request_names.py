"""The fields of a request as a whole that the condition of --keep can use: their types, and what they are."""

from __future__ import annotations

from collections.abc import Mapping

# Where a breakpoint's condition has a field for a step (debug/events.py), the same name is the request's sum here.
NAMES: Mapping[str, tuple[type, str]] = {
    "request": (str, "the request's id"),
    "tau": (float, "mean acceptance length; unknown if nothing was drafted"),
    "rate": (float, "draft acceptance rate: accepted / drafted nodes; unknown if nothing was drafted"),
    "drafts": (int, "steps with at least one drafted token"),
    "nodes": (int, "nodes drafted"),
    "accepted": (int, "nodes accepted"),
    "emitted": (int, "output tokens"),
    "steps": (int, "engine steps in which it took part"),
    "prompt": (int, "tokens of the prompt"),
    "error": (bool, "whether it failed"),
    "cancelled": (bool, "whether it was cancelled"),
    "reason": (str, "why it ended: eos, stop, length, cancelled or error"),
    "ms": (float, "milliseconds from its arrival to its end"),
    "queue_ms": (float, "milliseconds that it waited for admission"),
    "ttft_ms": (float, "milliseconds to its first output token; unknown if there was none"),
    "preempted": (int, "times that it lost its KV"),
    "forced": (bool, "whether a verdict was forced"),
    "rule": (str, "the rule of verification of its last step"),
    "labels": (tuple, 'its labels, as in "kind=code" in labels'),
}
