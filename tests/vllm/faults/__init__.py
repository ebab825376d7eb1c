"""Faults planted in a process that runs vLLM: each is a few lines of a wrong engine. In vLLM's own environment.

Not a test: tests/vllm/inside.py plants them, all at once and before the plugin is loaded, each behind a switch.
"""

from . import drafts, features, inside, mended, noise, rejection, rows  # noqa: F401 - each tells its own
from .switch import FAULTS, ON, plant

__all__ = ["FAULTS", "ON", "plant"]
