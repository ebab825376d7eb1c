"""What people who write rules and samplers test them by.

`lossless(rule)`: by enumeration, does a rule emit what the target would? `judge_calls(calls)`: what a sampler was given
and gave: is it possible, by which rule, and distributed as the target?
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specscope.testing.calls import CallsJudged, VerifyCall, judge_calls

if TYPE_CHECKING:
    from specscope.testing.enumeration import Losslessness, lossless

__all__ = ["CallsJudged", "Losslessness", "VerifyCall", "judge_calls", "lossless"]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """What needs torch is imported on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'specscope.testing' has no attribute {name!r}")
    return getattr(import_module("specscope.testing.enumeration"), name)
