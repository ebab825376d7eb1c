"""What limits a request and cannot be computed again: labels that another engine's witness sets, forms, and parameters
that were left out."""

from __future__ import annotations

from collections.abc import Mapping

from specscope.trace.record.params import SamplingParams
from specscope.trace.record.privacy import LEFT_OUT, Privacy

FORM = "structured_outputs"  # a label where the form cannot be told in SamplingParams
UNREAD = "params"  # the parameters themselves could not be put into SamplingParams
RULES = ("bad_words", "allowed_token_ids", "logits_processors", "thinking_token_budget")
# Names of such labels. What each allows is not in the capture in a form that can be computed again.
LIMITS = (*RULES, "min_tokens", FORM, "logit_bias", UNREAD)  # min_tokens in captures of before
NO_SEED = ("seed", "none")  # a label of an engine that drew one itself


def unknown_limits(params: SamplingParams, labels: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the limits that a request of another engine has.

    Of a form each engine makes a grammar of its own: the white space that it allows, for one, is another.
    """
    form = params.structured_outputs is not None
    untold = untold_limits(params)
    return tuple(name for name in LIMITS if name in labels or name in untold or (form and name == FORM))


def untold_limits(params: SamplingParams) -> tuple[str, ...]:
    """The names of those that were left out of a capture."""
    return tuple(name for name in LIMITS if name in params.left_out)


def kept_labels(labels: Mapping[str, str], _: Privacy) -> Mapping[str, str]:
    """Without what people wrote: only that a limit was there, and that there was no seed, is kept."""
    limits = {name: LEFT_OUT for name in LIMITS if name in labels}
    return limits | dict(pair for pair in labels.items() if pair == NO_SEED)
