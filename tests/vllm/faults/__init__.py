"""Faults planted in a process that runs vLLM: each is a few lines of a wrong engine. In vLLM's own environment.

Not a test: tests/vllm/offline.py plants them, all at once and before the plugin is loaded, each behind a switch.
"""

from . import bookkeeping, drafts, features, inside, kv, mended, noise, rejection, rows  # noqa: F401 - each tells its own
from .switch import FAULTS, ON, plant, plant_alone

__all__ = ["FAULTS", "ON", "plant", "plant_alone"]
