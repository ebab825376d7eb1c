"""What limits a request of another engine and cannot be computed again: labels that its witness sets, and forms."""

from __future__ import annotations

from specscope.trace.records import RequestInfo

FORM = "structured_outputs"  # a label where the form cannot be told in SamplingParams
UNREAD = "params"  # the parameters themselves could not be put into SamplingParams
RULES = ("bad_words", "allowed_token_ids", "logits_processors", "thinking_token_budget")
# Names of such labels. What each allows is not in the capture in a form that can be computed again.
LIMITS = (*RULES, "min_tokens", FORM, UNREAD)  # min_tokens in captures of before


def unknown_limits(info: RequestInfo) -> tuple[str, ...]:
    """The names of the limits that a request of another engine has.

    Of a form each engine makes a grammar of its own: the white space that it allows, for one, is another.
    """
    form = info.params.structured_outputs is not None
    return tuple(name for name in LIMITS if name in info.labels or (form and name == FORM))
