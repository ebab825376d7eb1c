"""What is configured differently, or seen to run differently, a line each; and what of the evidence that explains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from specscope.analyze.compare.columns import Side
from specscope.analyze.compare.evidence import FEATURES, FIRST
from specscope.analyze.compare.parting import LENGTH
from specscope.analyze.compare.result import NOT_KNOWN, Difference, Field, PairedBy, PartingCause
from specscope.analyze.compare.trees import TREE
from specscope.trace.history.wording import plural, shared_beginning
from specscope.trace.record.draft_vocabulary import DIGEST, digest, is_old_digest, old_digest
from specscope.trace.record.params import PARAM_NAMES
from specscope.trace.record.records import TEMPLATE, RunInfo
from specscope.trace.record.tree import Drawn
from specscope.trace.record.vocabulary import printable

NONE = "–"
SHOWN = 4  # values of a side
LONGEST = 200  # characters of a value
BEFORE = 10  # of them before what differs, where a value's beginning does not
# Other drafters have none of these and older captures do not record them: a side that lacks one is not a difference
_OF_HEADS = ("aux layers", "draft vocabulary", "draft tokens", "draft revision")
# Of a run: (name, value, what it leads to)
_RUN: tuple[tuple[str, Callable[[RunInfo], object], str], ...] = (
    ("model", lambda run: run.target, "other probabilities everywhere"),
    ("revision", lambda run: run.revision, "the weights or the configuration of the model differ"),
    ("drafter", lambda run: run.drafter, ""),
    ("draft model", lambda run: run.draft_model, "other drafts"),
    ("draft revision", lambda run: run.draft_digest, "the weights or the configuration of the draft model differ"),
    ("tree", lambda run: run.tree, "acceptance length depends on it; compare by depth"),
    ("step costs", lambda run: run.costs, "adaptive trees follow from them"),
    ("aux layers", lambda run: ", ".join(run.aux_layers), "the head is fed other hidden states"),
    ("draft vocabulary", lambda run: run.draft_vocab or "", "tokens outside it cannot be drafted"),
    ("draft tokens", lambda run: _digest(run), "the drafter knows other tokens, or has them in another order"),
    ("dtype", lambda run: run.dtype, "probabilities differ by rounding"),
    ("backend", lambda run: run.backend, "probabilities differ by rounding"),
    ("device", lambda run: run.device, "probabilities differ by rounding"),
    ("seed", lambda run: run.seed, ""),
    ("max context", lambda run: run.max_context, ""),
    ("KV blocks", lambda run: f"{run.blocks} of {run.block_size}", "preemptions may differ"),
    ("EOS tokens", lambda run: ", ".join(map(str, run.eos_tokens)), "outputs end elsewhere"),
    ("evidence", lambda run: run.evidence, ""),
    ("trace sampling", lambda run: run.sampling, "figures are of the requests that were kept"),
)


def _digest(run: RunInfo) -> str:
    """A digest of the tokens of a reduced draft vocabulary; "" where it is not reduced, or not recorded."""
    return digest(run.draft_tokens).removeprefix(DIGEST)


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


def differences(a: Side, b: Side, pairs: Sequence[tuple[int, int, PairedBy]]) -> list[Difference]:
    """All differences in the configuration and in what was observed to run, those that explain most first."""
    runs = [a.runs, b.runs]
    if any(is_old_digest(run.draft_tokens) for side in runs for run in side):
        runs = [[replace(run, draft_tokens=old_digest(run.draft_tokens)) for run in side] for side in runs]
    lines: list[Difference | None] = [_template(a, b), _observed_q(a, b)]
    if all(runs):
        lines += [
            _unlike(name, [value(run) for run in runs[0]], [value(run) for run in runs[1]], note)
            for name, value, note in _RUN
        ]
        if all(run.target_digest for side in runs for run in side):  # a digest is exact, a revision only a name
            lines = [line for line in lines if line is None or line.name != "revision"]
            first, second = ([run.target_digest for run in side] for side in runs)
            lines.insert(1, _unlike("revision", first, second, "the weights or the configuration of the model differ"))
        lines = [line and _named(line, runs) for line in lines]
    lacking = _OF_HEADS if a.tells_tokens and b.tells_tokens else (*_OF_HEADS, "EOS tokens")
    lines = [line for line in lines if line is None or line.name not in lacking or NONE not in (line.a, line.b)]
    params = _params(a, b, pairs)
    if any(line.name == "seed" for line in params):  # the run's seed says the same
        lines = [line for line in lines if line is None or line.name != "seed"]
    lines += [_rule(a, b), *params, *_load(a, b)]
    if all(runs):
        lines += _of_other_engines(runs, "speculation", OTHER_ENGINE)
        lines += _of_other_engines(runs, "settings", "engine setting: ")
        names = dict.fromkeys(chain.from_iterable(run.versions for side in runs for run in side))
        versions = [[run.versions for run in side] for side in runs]
        lines += [_unlike(f"version of {name}", _each(versions[0], name), _each(versions[1], name)) for name in names]
    return [line for line in lines if line is not None]


def _named(line: Difference, runs: Sequence[Sequence[RunInfo]]) -> Difference:
    """A line that names other models: the same weights under another name are no other model."""
    digest = {"model": "target_digest", "draft model": "draft_digest"}.get(line.name)
    first, second = ({getattr(run, digest) if digest else "" for run in side} for side in runs)
    if first != second or "" in first:
        return line
    return Difference(f"{line.name}'s name", line.a, line.b, "the same weights under another name")


def _of_other_engines(runs: Sequence[Sequence[RunInfo]], what: str, prefix: str) -> list[Difference | None]:
    """Differences in what another engine was set to, where both sides come from such an engine.

    `what`: the field of the run that holds it; `prefix`: how the name of a setting of it begins.
    """
    first, second = ([getattr(run, what) for run in side] for side in runs)
    if not (any(first) and any(second)):
        return []
    names = dict.fromkeys(chain.from_iterable((*first, *second)))
    return [
        _unlike(f"{prefix}{name}", [own.get(name, "") for own in first], [own.get(name, "") for own in second])
        for name in names
    ]


def _unlike(name: str, a: Iterable[object], b: Iterable[object], note: str = "") -> Difference | None:
    first, second = (list(dict.fromkeys(map(str, side))) for side in (a, b))
    return None if set(first) == set(second) else Difference(printable(name), *_both(first, second), note)


def _each(versions: Sequence[Mapping[str, str]], name: str) -> list[str]:
    return [packages.get(name, "") for packages in versions]


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
    return _unlike(TEMPLATE, first, second, "other prompts and other outputs: acceptance may differ by that alone")


def _observed_q(a: Side, b: Side) -> Difference | None:
    """A drafter that lost its q is verified by another rule: its acceptance falls, and no metric says why."""
    first, second = (_how_drawn(side) for side in (a, b))
    lost = "with q" in first + second and "without q" in first + second
    note = "without q a draft is accepted with probability p alone" if lost else ""
    return None if first == second else Difference("drafts", first, second, note)


def _how_drawn(side: Side) -> str:
    drawn = side.nodes["drawn"]
    if not len(drawn):
        return "none"
    share = float(np.mean(drawn != Drawn.DETERMINISTIC))
    if share in (0.0, 1.0):
        return "sampled, with q" if share else "deterministic, without q"
    return "partly sampled, with q; partly without q"


def _rule(a: Side, b: Side) -> Difference | None:
    rules = [[side.names[place] for place in np.unique(side.steps["rule"])] for side in (a, b)]
    return _unlike("rule", rules[0], rules[1], "of verification")


def _params(a: Side, b: Side, pairs: Sequence[tuple[int, int, PairedBy]]) -> list[Difference]:
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
        lines.append(Difference(name, _some(values[0]), _some(values[1]), note))
    return sorted(lines, key=lambda line: (line.name == "seed", line.name))


def _load(a: Side, b: Side) -> list[Difference | None]:
    """What the scheduler was observed to do."""
    preempted = [[request.preempted for request in side.requests] for side in (a, b)]
    counts = [[sum(filter(None, each))] for each in preempted]
    judged = [side.steps[side.steps["judged"]] for side in (a, b)]
    batch = [f"{float(np.mean(steps['batch'])):.1f}" for steps in judged]
    chunks = [f"{float(np.mean(side.steps['prefill'] > 0)) * len(side) / len(side.requests):.1f}" for side in (a, b)]
    drafting = [f"{100 * float(np.mean(steps['nodes'] > 0)):.0f}%" for steps in judged]
    forced = [f"{100 * float(np.mean(steps['forced'])):.0f}%" for steps in judged]
    return [
        None if None in chain(*preempted) else _unlike("preemptions", counts[0], counts[1], "KV was computed again"),
        _unlike("requests in a step, mean", [batch[0]], [batch[1]], "another batch moves the last bits of p"),
        _unlike("prefill steps of a request, mean", [chunks[0]], [chunks[1]]),
        _unlike("steps with drafts", [drafting[0]], [drafting[1]]),
        _unlike("forced verdicts", [forced[0]], [forced[1]], "their acceptance measures nothing"),
    ]


# A version, a device or the load explains nothing: whether these change the evidence is the question asked. A dtype
# explains differences by its rounding, which the tolerances allow for.
_MODEL = ("model", "revision")
_SHAPE = tuple(sorted(PARAM_NAMES - LENGTH))  # parameters that shape p, and q with it
_DRAFTER = ("drafts", "drafter", "draft model", "aux layers", "draft vocabulary", "draft tokens")
_PLAN = ("tree", "step costs", "rule")
OTHER_ENGINE = "speculative config: "  # begins the name of a setting of another engine's speculation
_OTHER_PLAN = f"{OTHER_ENGINE}num_speculative_tokens"

_FIELDS = {
    "target p": (*_MODEL, *_SHAPE),
    "target p, cut": (*_MODEL, *_SHAPE),
    "target entropy": (*_MODEL, *_SHAPE),
    "target p, raw": _MODEL,
    "target p, first token": _MODEL,
    FIRST: _MODEL,
    FEATURES: (*_MODEL, "aux layers"),
    "drafter q": (*_MODEL, *_DRAFTER, *_SHAPE),
    "drafter q, cut": (*_MODEL, *_DRAFTER, *_SHAPE),
    "draft p": (*_MODEL, *_DRAFTER, *_SHAPE),
    "drafter entropy": (*_MODEL, *_DRAFTER, *_SHAPE),
    TREE: (*_MODEL, *_DRAFTER, *_SHAPE, *_PLAN),
    "coin": ("rule",),  # under match siblings share one
    "verdict": ("rule", "forced verdicts"),
}
_CAUSES = {
    PartingCause.TARGET: _MODEL,
    PartingCause.DRAFTER: (*_MODEL, *_DRAFTER),
    PartingCause.COIN: ("rule",),
    PartingCause.VERDICT: ("rule", "forced verdicts"),
    PartingCause.PARAMETERS: _SHAPE,
    PartingCause.RULE: ("rule",),
}


def of_field(name: str, differences: Iterable[Difference], *, alike: bool) -> tuple[str, ...]:
    """What explains a field. `alike`: whether it was compared only where the same parameters shape p."""
    left_out = set(_SHAPE) if alike else set()
    names = [difference.name for difference in differences if difference.name not in left_out]
    allowed = _FIELDS.get(name, ())
    drafting = "drafter" in allowed
    return tuple(
        setting
        for setting in names
        if setting in allowed
        or (drafting and setting.startswith(OTHER_ENGINE) and (name == TREE or setting != _OTHER_PLAN))
    )


def of_cause(cause: PartingCause, differences: Iterable[Difference]) -> tuple[str, ...]:
    """What explains a parting."""
    allowed = _CAUSES.get(cause, ())
    drafting = cause is PartingCause.DRAFTER
    return tuple(
        difference.name
        for difference in differences
        if difference.name in allowed or (drafting and difference.name.startswith(OTHER_ENGINE))
    )


def explained(fields: Sequence[Field], differences: Sequence[Difference], *, alike: bool) -> list[Field]:
    """The fields; those that the configuration explains are no longer suspect."""
    checked = []
    for field in fields:
        names = of_field(field.name, differences, alike=alike) if field.suspect or field.unsure else ()
        checked.append(replace(field, suspect=False, unsure=False, explained=names) if names else field)
    return checked
