"""What is configured differently, or seen to run differently: a line each, and the stage of a step where it enters.

A setting explains what differs at its stage and at those that are computed from it, and nothing else: another drafter
explains other trees, and never another target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain

import numpy as np

from specscope.analyze.compare.align import LENGTH, Matched
from specscope.analyze.compare.side import Side
from specscope.trace.history.wording import plural
from specscope.trace.record.draft_vocabulary import DIGEST, digest, is_old_digest, old_digest
from specscope.trace.record.params import PARAM_NAMES
from specscope.trace.record.records import TEMPLATE, RunInfo
from specscope.trace.record.vocabulary import printable

DRAFTS = "drafts"  # whether they were sampled, as observed
NOT_KNOWN = "not known"  # a model or drafter of a side whose run is not recorded
NONE = "–"
SHOWN = 4  # values of a side
LONGEST = 200  # characters of a value


class StepStage(StrEnum):
    """A stage of a step: where a setting enters, and where evidence comes from."""

    TARGET = "target"
    SAMPLING = "sampling"  # temperature and rules, which shape p, and q with it
    FEATURES = "features"  # of the target, that feed a drafter
    DRAFTER = "drafter"
    COINS = "coins"
    TREE = "tree"
    VERDICT = "verdict"


_TO_DRAFT = {StepStage.TARGET, StepStage.SAMPLING, StepStage.FEATURES, StepStage.DRAFTER}
FROM: Mapping[StepStage, set[StepStage]] = {  # what each follows from; a coin and a verdict are judged alone
    StepStage.TARGET: {StepStage.TARGET},
    StepStage.SAMPLING: {StepStage.TARGET, StepStage.SAMPLING},
    StepStage.FEATURES: {StepStage.TARGET, StepStage.FEATURES},
    StepStage.DRAFTER: _TO_DRAFT,
    StepStage.COINS: {StepStage.COINS},
    StepStage.TREE: {*_TO_DRAFT, StepStage.COINS, StepStage.TREE},
    StepStage.VERDICT: {StepStage.COINS, StepStage.VERDICT},
}


@dataclass(frozen=True)
class Difference:
    """One line of the configuration, or of what was observed, that is not the same."""

    name: str
    a: str
    b: str
    note: str = ""  # what it leads to
    enters: StepStage | None = None  # it explains what differs from there on; None: nothing


ROUNDED = "probabilities differ by rounding"
OTHER_TOKENS = "the draft vocabulary differs, or its order"
# A line each: its name, the value, the stage where it enters, and what it leads to. A version, a device or the load
# enters nowhere: whether these change the evidence is the question asked. A dtype explains differences by its rounding,
# which the tolerances allow for.
_RUN: tuple[tuple[str, Callable[[RunInfo], object], StepStage | None, str], ...] = (
    ("model", lambda run: run.target, StepStage.TARGET, "other probabilities everywhere"),
    ("revision", lambda run: run.revision, StepStage.TARGET, "the weights or the configuration of the model differ"),
    ("drafter", lambda run: run.drafter, StepStage.DRAFTER, ""),
    ("draft model", lambda run: run.draft_model, StepStage.DRAFTER, "other drafts"),
    ("draft revision", lambda run: run.draft_digest, StepStage.DRAFTER, "its weights, configuration or code differ"),
    ("tree", lambda run: run.tree, StepStage.TREE, "acceptance length depends on it; compare by depth"),
    ("step costs", lambda run: run.costs, StepStage.TREE, "adaptive trees follow from them"),
    ("aux layers", lambda run: ", ".join(run.aux_layers), StepStage.FEATURES, "the head is fed other hidden states"),
    ("draft vocabulary", lambda run: run.draft_vocab or "", StepStage.DRAFTER, "tokens outside it cannot be drafted"),
    ("draft tokens", lambda run: digest(run.draft_tokens).removeprefix(DIGEST), StepStage.DRAFTER, OTHER_TOKENS),
    ("dtype", lambda run: run.dtype, None, ROUNDED),
    ("backend", lambda run: run.backend, None, ROUNDED),
    ("device", lambda run: run.device, None, ROUNDED),
    ("seed", lambda run: run.seed, None, ""),
    ("max context", lambda run: run.max_context, None, ""),
    ("KV blocks", lambda run: f"{run.blocks} of {run.block_size}", None, "preemptions may differ"),
    ("EOS tokens", lambda run: ", ".join(map(str, run.eos_tokens)), None, "outputs end elsewhere"),
    ("evidence", lambda run: run.evidence, None, ""),
    ("trace sampling", lambda run: run.sampling, None, "figures cover the requests that were kept"),
)
BATCHES, MADE_UP = "another batch moves the last bits of p", "their acceptance measures nothing"
# Of what was observed to run, likewise; None where a side does not tell
_OBSERVED: tuple[tuple[str, Callable[[Side], object], StepStage | None, str], ...] = (
    ("preemptions", lambda side: side.preemptions, None, "KV was recomputed"),
    ("requests in a step, mean", lambda side: f"{np.mean(side.batch):.1f}", None, BATCHES),
    ("prefill steps of a request, mean", lambda side: f"{side.prefills / len(side.requests):.1f}", None, ""),
    ("steps with drafts", lambda side: f"{100 * np.mean(side.drafts):.0f}%", None, ""),
    ("forced verdicts", lambda side: f"{100 * np.mean(side.forced):.0f}%", StepStage.VERDICT, MADE_UP),
)
# Of what a run holds by name: how the name of a line begins, and the stage where it enters. Settings are compared where
# both sides come from an engine that has them.
_NAMED: Mapping[str, tuple[str, StepStage | None]] = {
    "speculation": ("speculative config: ", StepStage.DRAFTER),  # of another engine
    "settings": ("engine setting: ", None),
    "versions": ("version of ", None),
}
_PLAN = ("num_speculative_tokens",)  # of another engine's speculation, what makes a tree
# Other drafters have none of these and older captures do not record them: a side that lacks one is not a difference
_OF_HEADS = ("aux layers", "draft vocabulary", "draft tokens", "draft revision")
_DIGESTS = {"model": "target_digest", "draft model": "draft_digest"}  # that tell whether a name alone is another


def differences(a: Side, b: Side, pairs: Matched) -> list[Difference]:
    """All differences in the configuration and in what was observed to run, those that explain most first.

    The template is named before all else: with thinking on or off a model writes other texts.
    """
    params, told = _params(a, b, pairs), bool(a.runs and b.runs)
    infos = [[each.info for each in side.requests if each.info is not None] for side in (a, b)]
    templates = [[info.labels.get(TEMPLATE, "") for info in side] for side in infos]
    lines = [_unlike(TEMPLATE, templates, note="other prompts and outputs: that alone may change acceptance")]
    lines += [_drawn(a, b), *(_of_runs(a, b) if told else [])]
    if any(line.name == "seed" for line in params):  # the run's seed says the same
        lines = [line for line in lines if line is None or line.name != "seed"]
    rules = _unlike("rule", [a.columns.rule, b.columns.rule], StepStage.COINS, "of verification")
    lines += [rules, *params]
    for name, value, enters, note in _OBSERVED:
        values = value(a), value(b)
        lines += [] if None in values else [_unlike(name, [[each] for each in values], enters, note)]
    return [line for line in [*lines, *(_named(a, b) if told else [])] if line is not None]


def _unlike(
    name: str, sides: Sequence[Iterable[object]], enters: StepStage | None = None, note: str = ""
) -> Difference | None:
    first, second = (list(dict.fromkeys(map(str, side))) for side in sides)
    return None if set(first) == set(second) else Difference(printable(name), _some(first), _some(second), note, enters)


def _some(values: Sequence[str]) -> str:
    shown = [printable(value)[:LONGEST] or NONE for value in values[:SHOWN]]
    return ", ".join([*shown, f"{len(values) - SHOWN} more"] if len(values) > SHOWN else shown) or NONE


def _of_runs(a: Side, b: Side) -> list[Difference | None]:
    runs = [a.runs, b.runs]
    every = [run for side in runs for run in side]
    if any(is_old_digest(run.draft_tokens) for run in every):
        runs = [[replace(run, draft_tokens=old_digest(run.draft_tokens)) for run in side] for side in runs]
    lacking = _OF_HEADS if a.tells_tokens and b.tells_tokens else (*_OF_HEADS, "EOS tokens")
    exact = all(run.target_digest for run in every)  # a revision is only a name
    lines: list[Difference | None] = []
    for name, value, enters, note in _RUN:
        told = (lambda run: run.target_digest) if name == "revision" and exact else value
        line = _unlike(name, [list(map(told, side)) for side in runs], enters, note)
        if line is None or (name in lacking and NONE in (line.a, line.b)):
            continue
        first, second = ({getattr(run, _DIGESTS.get(name, ""), "") for run in side} for side in runs)
        if first == second and "" not in first:
            line = Difference(f"{name}'s name", line.a, line.b, "the same weights under another name")
        lines.append(line)
    return lines


def _named(a: Side, b: Side) -> list[Difference | None]:
    lines = []
    for what, (prefix, enters) in _NAMED.items():
        first, second = ([getattr(run, what) for run in side.runs] for side in (a, b))
        if what == "versions" or (any(first) and any(second)):
            for name in dict.fromkeys(chain.from_iterable((*first, *second))):
                values = [[own.get(name, "") for own in side] for side in (first, second)]
                lines.append(_unlike(f"{prefix}{name}", values, StepStage.TREE if name in _PLAN and enters else enters))
    return lines


def _drawn(a: Side, b: Side) -> Difference | None:
    """A drafter that lost its q is verified by another rule: its acceptance falls, and no metric says why."""
    shares = [float(np.mean(side.columns.sampled)) if len(side.columns.sampled) else None for side in (a, b)]
    names = {None: "none", 0.0: "deterministic, without q", 1.0: "sampled, with q"}
    first, second = (names.get(share, "partly sampled, with q; partly without q") for share in shares)
    lost = "with q" in first + second and "without q" in first + second
    note = "without q a draft is accepted with probability p alone" if lost else ""
    return None if first == second else Difference(DRAFTS, first, second, note, StepStage.DRAFTER)


def _params(a: Side, b: Side, pairs: Matched) -> list[Difference]:
    both = [(a.requests[first].params, b.requests[second].params) for first, second, _ in pairs]
    known = [(mine, theirs) for mine, theirs in both if mine is not None and theirs is not None]
    lines = []
    for name in sorted((*PARAM_NAMES, "left_out"), key=lambda name: (name == "seed", name)):
        told = [pair for pair in known if not any(name in params.left_out for params in pair)]
        values = [(getattr(mine, name), getattr(theirs, name)) for mine, theirs in told]
        unlike = [(str(mine), str(theirs)) for mine, theirs in values if mine != theirs]
        if not unlike:
            continue
        first, second = (_some(list(dict.fromkeys(side))) for side in zip(*unlike, strict=True))
        note = f"in {plural(len(unlike), 'pair')}"
        if name == "seed" and not all(mine.greedy and theirs.greedy for mine, theirs in known):
            note += "; sampled outputs part, so only distributions can be compared"
        enters = StepStage.SAMPLING if name in PARAM_NAMES - LENGTH else None  # it shapes p, and q with it
        lines.append(Difference(name, first, second, note, enters))
    return lines


def explaining(stage: StepStage | None, differences: Iterable[Difference], *, alike: bool = False) -> tuple[str, ...]:
    """The settings that explain a difference at a stage. `alike`: it is of pairs with the same parameters alone."""
    reached = (FROM[stage] if stage else set()) - ({StepStage.SAMPLING} if alike else set())
    return tuple(difference.name for difference in differences if difference.enters in reached)


def shifting(differences: Iterable[Difference]) -> tuple[str, ...]:
    """The settings that explain another acceptance, which follows from every stage and from the prompts.

    Nobody set that a drafter lost its q.
    """
    settings = (line for line in differences if line.name != DRAFTS)
    return tuple(line.name for line in settings if line.enters or line.name == TEMPLATE)
