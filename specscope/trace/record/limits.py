"""What a judge must know before it computes p and q again: what limits a request and is not in the capture (labels that
another engine's witness sets, forms, parameters that were left out), and what engines do in ways of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specscope.trace.record.params import SamplingParams
from specscope.trace.record.privacy import LEFT_OUT, Privacy

FORM = "structured_outputs"  # a label where the form cannot be told in SamplingParams
UNREAD = "params"  # the parameters themselves could not be put into SamplingParams
LIMITING = ("bad_words", "allowed_token_ids", "logits_processors", "thinking_token_budget")
# Names of such labels. What each allows is not in the capture in a form that can be computed again.
LIMITS = (*LIMITING, "min_tokens", FORM, "logit_bias", UNREAD)  # min_tokens in captures of before
RELAXED = "penalties"  # see EngineWays.relaxes_penalties
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


@dataclass(frozen=True)
class EngineWays:
    """What an engine does in its own way, by design. The defaults are our own engine's."""

    drafter_takes: tuple[str, ...] | None = None  # which of a request's parameters its drafter is given; None: all
    raw_is_masked: bool = False  # raw p is that after the form's mask: the logits are masked before its sampler runs
    relaxes_penalties: bool = False  # drafted rows are penalised for tokens that were committed some steps ago
    looks_up_in_all: bool = False  # its n-gram drafter searches the texts of all requests, not only the request's own
    filler: int | None = None  # the token with which that drafter fills a tree; None where it or another does not
    sends_empty: bool = False  # a request for several outputs is preceded by one of 0 tokens, which fills the cache

    def drafter_params(self, params: SamplingParams) -> SamplingParams:
        """What of a request's parameters shapes the drafter's q."""
        names = self.drafter_takes
        return params if names is None else SamplingParams(**{name: getattr(params, name) for name in names})


WAYS = {
    "vllm": EngineWays(drafter_takes=("temperature",), raw_is_masked=True),
    "sglang": EngineWays(
        drafter_takes=("temperature",), relaxes_penalties=True, looks_up_in_all=True, filler=0, sends_empty=True
    ),
}


def ways_of(versions: Mapping[str, str], drafter: str) -> EngineWays:
    """The ways of the engine that made a run, with this drafter. `versions`: the run's."""
    ways = next((ways for name, ways in WAYS.items() if name in versions), EngineWays())
    return ways if drafter == "ngram" else replace(ways, filler=None)
