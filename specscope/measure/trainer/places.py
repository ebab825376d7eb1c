"""The places at which training and serving are compared: pairs from which a recorded step drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specscope.analyze.audit.audit import step_numbers
from specscope.analyze.audit.contexts import AuditedStep, Contexts, contexts_of
from specscope.analyze.questions.groups import Share
from specscope.errors import UserError
from specscope.trace.history.history import History
from specscope.trace.record.params import SamplingParams

PLACES = 512  # by default, evenly spread
LONGEST = 1024  # tokens of a text: training attends densely, [T, T] a query head
DEEPEST = 8  # depths that are compared
RESHAPING = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "structured_outputs")
PLAIN = SamplingParams()


@dataclass(frozen=True)
class DraftedPlace:
    """The pair t: the target's feature of position t with the token at t + 1, the root of a recorded step."""

    pair: int
    step: AuditedStep


@dataclass(frozen=True)
class TextPlaces:
    """One request's text, and the places in it."""

    request: str
    tokens: list[int]
    places: tuple[DraftedPlace, ...]
    plain: bool  # whether nothing but the model decides which token a greedy draft holds

    @property
    def pairs(self) -> list[int]:
        """The place of each pair."""
        return [place.pair for place in self.places]


def places_of(history: History, sample: int | None) -> tuple[list[TextPlaces], int, int]:
    """(texts with their places, depths that are compared, places there are). Raises UserError where there are none."""
    whole = [contexts for request in history.requests if (contexts := _contexts(history, request)) is not None]
    depths = min(max((_depth(step) for contexts in whole for step in contexts.steps), default=0), DEEPEST)
    found = [(contexts, step) for contexts in whole for step in contexts.steps if _fits(contexts, step, depths)]
    if not found:
        raise UserError("the capture holds no drafts whose text is known: there is nothing to compare training with")
    count = min(PLACES if sample is None else sample, len(found))
    chosen: dict[str, list[DraftedPlace]] = {}
    for index in range(count):
        contexts, step = found[index * len(found) // count]
        chosen.setdefault(contexts.request, []).append(DraftedPlace(step.part.position - 1, step))
    texts = [_text(contexts, chosen[contexts.request], depths) for contexts in whole if contexts.request in chosen]
    return texts, depths, len(found)


def recorded(texts: Sequence[TextPlaces], depth: int) -> Share:
    """Of the steps whose draft was accepted down to the depth above and went on, how many were accepted there too.

    That is what teacher-forced acceptance is in serving: the tokens before are right.
    """
    steps = [place.step for text in texts for place in text.places]
    tried = [step for step in steps if _depth(step) >= depth and _accepted(step) >= depth - 1]
    return Share(sum(_accepted(step) >= depth for step in tried), len(tried))


def _contexts(history: History, name: str) -> Contexts | None:
    request = history.requests[name]
    return contexts_of(request, range(len(request.steps)), step_numbers(history, name), history.run)


def _fits(contexts: Contexts, step: AuditedStep, depths: int) -> bool:
    """Whether a step drafted, and the text goes on far enough to force every depth and to know what follows."""
    end = step.part.position + depths  # of what is fed
    return _depth(step) > 0 and step.part.position > 0 and end <= min(len(contexts.text), LONGEST)


def _text(contexts: Contexts, places: list[DraftedPlace], depths: int) -> TextPlaces:
    end = max(place.pair for place in places) + 1 + depths
    params = contexts.drafter_params
    plain = not contexts.limits and all(getattr(params, name) == getattr(PLAIN, name) for name in RESHAPING)
    return TextPlaces(contexts.request, contexts.text[:end], tuple(places), plain)


def _depth(step: AuditedStep) -> int:
    return step.part.tree.max_depth


def _accepted(step: AuditedStep) -> int:
    return 0 if step.part.verdict is None else len(step.part.verdict.path)
