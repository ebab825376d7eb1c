"""What is configured differently, or seen to run differently: a line each, and the stage of a step where it enters.

A setting explains what differs at its stage and at those that are computed from it, and nothing else: another drafter
explains other trees, and never another target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from specscope.analyze.compare.align import LENGTH, Matched
from specscope.analyze.compare.result import NOT_KNOWN, Difference, Field, StepStage
from specscope.analyze.compare.side import Side
from specscope.trace.history.wording import plural, shared_beginning
from specscope.trace.record.draft_vocabulary import DIGEST, digest, is_old_digest, old_digest
from specscope.trace.record.params import PARAM_NAMES
from specscope.trace.record.records import TEMPLATE, RunInfo
from specscope.trace.record.vocabulary import printable

NONE = "–"
SHOWN = 4  # values of a side
LONGEST = 200  # characters of a value
BEFORE = 10  # of them before what differs, where a value's beginning does not
FROM: dict[
    StepStage, tuple[StepStage, ...]
] = {  # what each is computed from; a coin and a verdict are judged for themselves
    StepStage.TARGET: (),
    StepStage.SAMPLING: (StepStage.TARGET,),
    StepStage.FEATURES: (StepStage.TARGET,),
    StepStage.DRAFTER: (StepStage.FEATURES, StepStage.SAMPLING),
    StepStage.COINS: (),
    StepStage.TREE: (StepStage.DRAFTER, StepStage.COINS),
    StepStage.VERDICT: (StepStage.COINS,),
}
# Of a run: its name, its value, the stage where it enters, and what it leads to. A version, a device or the load enters
# nowhere: whether these change the evidence is the question asked. A dtype explains differences by its rounding, which
# the tolerances allow for.
_RUN: tuple[tuple[str, Callable[[RunInfo], object], StepStage | None, str], ...] = (
    ("model", lambda run: run.target, StepStage.TARGET, "other probabilities everywhere"),
    (
        "revision",
        lambda run: run.revision,
        StepStage.TARGET,
        "the weights or the configuration of the model differ",
    ),
    ("drafter", lambda run: run.drafter, StepStage.DRAFTER, ""),
    ("draft model", lambda run: run.draft_model, StepStage.DRAFTER, "other drafts"),
    (
        "draft revision",
        lambda run: run.draft_digest,
        StepStage.DRAFTER,
        "the weights or the configuration of the draft model differ",
    ),
    ("tree", lambda run: run.tree, StepStage.TREE, "acceptance length depends on it; compare by depth"),
    ("step costs", lambda run: run.costs, StepStage.TREE, "adaptive trees follow from them"),
    ("aux layers", lambda run: ", ".join(run.aux_layers), StepStage.FEATURES, "the head is fed other hidden states"),
    ("draft vocabulary", lambda run: run.draft_vocab or "", StepStage.DRAFTER, "tokens outside it cannot be drafted"),
    (
        "draft tokens",
        lambda run: digest(run.draft_tokens).removeprefix(DIGEST),
        StepStage.DRAFTER,
        "the drafter knows other tokens, or has them in another order",
    ),
    ("dtype", lambda run: run.dtype, None, "probabilities differ by rounding"),
    ("backend", lambda run: run.backend, None, "probabilities differ by rounding"),
    ("device", lambda run: run.device, None, "probabilities differ by rounding"),
    ("seed", lambda run: run.seed, None, ""),
    ("max context", lambda run: run.max_context, None, ""),
    ("KV blocks", lambda run: f"{run.blocks} of {run.block_size}", None, "preemptions may differ"),
    ("EOS tokens", lambda run: ", ".join(map(str, run.eos_tokens)), None, "outputs end elsewhere"),
    ("evidence", lambda run: run.evidence, None, ""),
    ("trace sampling", lambda run: run.sampling, None, "figures are of the requests that were kept"),
)
# Other drafters have none of these and older captures do not record them: a side that lacks one is not a difference
_OF_HEADS = ("aux layers", "draft vocabulary", "draft tokens", "draft revision")


def models(a: Side, b: Side) -> tuple[str, str]:
    """The targets' names on both sides; where these are the same and the models are not, with what tells them apart."""
    runs = [a.runs, b.runs]

    def listed(name: Callable[[RunInfo], str]) -> tuple[str, str]:
        first, second = (", ".join(dict.fromkeys(printable(name(run)) for run in side)) for side in runs)
        return first or NOT_KNOWN, second or NOT_KNOWN

    names = listed(lambda run: run.target)
    if all(run.target_digest for side in runs for run in side):
        whole = listed(lambda run: f"{run.target} ({run.target_digest[:8]})")
    else:
        whole = listed(lambda run: run.target_path or run.target)
    return whole if names[0] == names[1] and whole[0] != whole[1] else names


def differences(a: Side, b: Side, pairs: Matched) -> list[Difference]:
    """All differences in the configuration and in what was observed to run, those that explain most first."""
    both = bool(a.runs and b.runs)
    params = _params(a, b, pairs)
    lines = [_template(a, b), _observed_q(a, b), *(_of_runs(a, b) if both else [])]
    if any(line.name == "seed" for line in params):  # the run's seed says the same
        lines = [line for line in lines if line is None or line.name != "seed"]
    lines += [_unlike("rule", a.rules, b.rules, note="of verification", enters=StepStage.COINS), *params, *_load(a, b)]
    if both:
        lines += [*_named(a, b, "speculation"), *_named(a, b, "settings"), *_named(a, b, "versions")]
    return [line for line in lines if line is not None]


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
        line = _unlike(name, *([told(run) for run in side] for side in runs), note=note, enters=enters)
        if line is not None and not (name in lacking and NONE in (line.a, line.b)):
            lines.append(_renamed(line, runs))
    return lines


def _renamed(line: Difference, runs: Sequence[Sequence[RunInfo]]) -> Difference:
    """A line that names other models: the same weights under another name are no other model."""
    told = {"model": "target_digest", "draft model": "draft_digest"}.get(line.name)
    first, second = ({getattr(run, told) if told else "" for run in side} for side in runs)
    if first != second or "" in first:
        return line
    return Difference(f"{line.name}'s name", line.a, line.b, "the same weights under another name")


# Of what a run holds by name: how the name of a line begins, and the stage where it enters
_NAMED: dict[str, tuple[str, StepStage | None]] = {
    "speculation": ("speculative config: ", StepStage.DRAFTER),  # of another engine
    "settings": ("engine setting: ", None),
    "versions": ("version of ", None),
}
_PLAN = ("num_speculative_tokens",)  # of another engine's speculation, what makes a tree


def _named(a: Side, b: Side, what: str) -> list[Difference | None]:
    """Differences in what runs hold by name: another engine's settings, where both sides come from such an engine."""
    prefix, enters = _NAMED[what]
    first, second = ([getattr(run, what) for run in side.runs] for side in (a, b))
    if what != "versions" and not (any(first) and any(second)):
        return []
    return [
        _unlike(
            f"{prefix}{name}",
            *([own.get(name, "") for own in side] for side in (first, second)),
            enters=StepStage.TREE if name in _PLAN and enters else enters,
        )
        for name in dict.fromkeys(chain.from_iterable((*first, *second)))
    ]


def _unlike(
    name: str, a: Iterable[object], b: Iterable[object], *, note: str = "", enters: StepStage | None = None
) -> Difference | None:
    first, second = (list(dict.fromkeys(map(str, side))) for side in (a, b))
    return None if set(first) == set(second) else Difference(printable(name), *_both(first, second), note, enters)


def _both(a: Sequence[str], b: Sequence[str]) -> tuple[str, str]:
    """Both sides' values; where they are the same as far as they are shown, from shortly before they differ."""
    first, second = _some(a), _some(b)
    if first != second:
        return first, second
    whole = [printable(", ".join(side)) for side in (a, b)]
    start = max(shared_beginning(*whole) - BEFORE, 0)
    return f"…{whole[0][start : start + LONGEST]}", f"…{whole[1][start : start + LONGEST]}"


def _some(values: Sequence[str]) -> str:
    shown = [printable(value)[:LONGEST] or NONE for value in values[:SHOWN]]
    return ", ".join([*shown, f"{len(values) - SHOWN} more"] if len(values) > SHOWN else shown) or NONE


def _template(a: Side, b: Side) -> Difference | None:
    """Named first: with thinking on or off a model writes other texts, and no figure is of the same thing."""
    infos = [[request.info for request in side.requests if request.info is not None] for side in (a, b)]
    first, second = ([info.labels.get(TEMPLATE, "") for info in each] for each in infos)
    return _unlike(TEMPLATE, first, second, note="other prompts and other outputs: acceptance may differ by that alone")


def _observed_q(a: Side, b: Side) -> Difference | None:
    """A drafter that lost its q is verified by another rule: its acceptance falls, and no metric says why."""
    first, second = (_how_drawn(side) for side in (a, b))
    lost = "with q" in first + second and "without q" in first + second
    note = "without q a draft is accepted with probability p alone" if lost else ""
    return None if first == second else Difference("drafts", first, second, note, StepStage.DRAFTER)


def _how_drawn(side: Side) -> str:
    if not len(side.columns.sampled):
        return "none"
    share = float(np.mean(side.columns.sampled))
    if share in (0.0, 1.0):
        return "sampled, with q" if share else "deterministic, without q"
    return "partly sampled, with q; partly without q"


def _params(a: Side, b: Side, pairs: Matched) -> list[Difference]:
    """Sampling parameters that differ within pairs."""
    seen: dict[str, Counter[tuple[str, str]]] = {}
    sampled = False
    for first, second, _ in pairs:
        infos = a.requests[first].info, b.requests[second].info
        if infos[0] is None or infos[1] is None:
            continue
        sampled |= not (infos[0].params.greedy and infos[1].params.greedy)
        for name in (*PARAM_NAMES, "left_out"):
            mine, theirs = (getattr(info.params, name) for info in infos if info is not None)
            if mine != theirs:
                seen.setdefault(name, Counter())[str(mine), str(theirs)] += 1
    lines = []
    for name, counts in seen.items():
        values = [list(dict.fromkeys(pair[side] for pair in counts)) for side in (0, 1)]
        note = f"in {plural(counts.total(), 'pair')}"
        if name == "seed" and sampled:
            note += "; sampled outputs part, so only distributions can be compared"
        shapes = name in PARAM_NAMES - LENGTH  # p, and q with it
        enters = StepStage.SAMPLING if shapes else None
        lines.append(Difference(name, _some(values[0]), _some(values[1]), note, enters))
    return sorted(lines, key=lambda line: (line.name == "seed", line.name))


def _load(a: Side, b: Side) -> list[Difference | None]:
    """What the scheduler was observed to do."""
    preempted = [[request.preempted for request in side.requests] for side in (a, b)]
    counts = [[sum(filter(None, each))] for each in preempted]
    batch = [[f"{float(np.mean(side.batch)):.1f}"] for side in (a, b)]
    chunks = [[f"{sum(each.prefills for each in side.captures) / len(side.requests):.1f}"] for side in (a, b)]
    drafting, forced = (
        [[f"{100 * float(np.mean(getattr(side, name))):.0f}%"] for side in (a, b)] for name in ("drafts", "forced")
    )
    notes = "KV was computed again", "another batch moves the last bits of p", "their acceptance measures nothing"
    return [
        None if None in chain(*preempted) else _unlike("preemptions", *counts, note=notes[0]),
        _unlike("requests in a step, mean", *batch, note=notes[1]),
        _unlike("prefill steps of a request, mean", *chunks),
        _unlike("steps with drafts", *drafting),
        _unlike("forced verdicts", *forced, note=notes[2], enters=StepStage.VERDICT),
    ]


def explaining(stage: StepStage | None, differences: Iterable[Difference], *, alike: bool = False) -> tuple[str, ...]:
    """The settings that explain a difference at a stage. `alike`: it is of pairs with the same parameters alone."""
    reached: set[StepStage | None] = set()
    ahead = [] if stage is None else [stage]
    while ahead:
        reached.add(here := ahead.pop())
        ahead += FROM[here]
    reached -= {StepStage.SAMPLING} if alike else set()
    return tuple(difference.name for difference in differences if difference.enters in reached)


def explained(fields: Sequence[Field], differences: Sequence[Difference], *, alike: bool) -> list[Field]:
    """The fields; those that the configuration explains are no longer suspect."""
    checked = []
    for field in fields:
        names = explaining(field.stage, differences, alike=alike) if field.suspect or field.unsure else ()
        checked.append(replace(field, suspect=False, unsure=False, explained=names) if names else field)
    return checked
