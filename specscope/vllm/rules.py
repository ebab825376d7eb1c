"""How vLLM's configuration of speculation reads in specscope's terms: rules of verification, ways to draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specscope.trace.rules import LOSSY

LOSSLESS = ("standard", "block")  # of `rejection_sample_method`; every other is not, or is not known to be
ONE_PASS = ("dflash", "dspark")  # methods that draft all depths in one pass


def rule_of(speculation: Mapping[str, Any]) -> str:
    """The rule of verification; lossy:NAME where it does not keep the target's distribution."""
    method = str(speculation.get("rejection_sample_method") or "standard")
    return method if method in LOSSLESS else f"{LOSSY}:{method}"


def in_one_pass(speculation: Mapping[str, Any]) -> bool:
    """Whether a block drafter drafts."""
    return speculation.get("method") in ONE_PASS or bool(speculation.get("parallel_drafting"))
