"""`locate`: where a run breaks, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from specscope.analyze.audit.audit import of_drafter
from specscope.analyze.audit.options import Progress
from specscope.analyze.diagnose.judged import JudgedCase
from specscope.analyze.findings import CheckResult
from specscope.analyze.locate.decided import RESIDUAL, P
from specscope.analyze.locate.located import Located, Location, Operation, Stage, ranked
from specscope.errors import UserError, first_line
from specscope.measure.locate.question import Question
from specscope.plans.kinds import text_part
from specscope.trace.history.history import PlaceName
from specscope.trace.history.wording import plural

LOOKUP = "drafter tree"  # the finding of audit on text lookup
OF_RULES = {"p": ("target p", "final p"), "q": ("draft p",)}  # what the sampling rules make
FAULTS = (UserError, RuntimeError, ValueError)  # of loading and running models; anything else is a bug of ours
Look = Callable[[Question, Location], None]  # adds to what is found


def locate(
    session: JudgedCase,
    *,
    place: PlaceName | None = None,
    stages: Sequence[Stage] = tuple(Stage),
    progress: Progress = lambda *_: None,
    little: bool = False,
) -> Location:
    """Walk both sides of a run to the first operation that differs, and search its evidence. Raises UserError where
    nothing can be looked at. `little`: nothing is known to be wrong, and a few steps of one request are walked."""
    began, ask = time.perf_counter(), Question(session, place, progress, little)
    found = Location(session.case.trial.source)
    for name, look in _looks(ask, stages):
        progress(f"looking at the {name}", 0, 0)
        try:
            look(ask, found)
        except FAULTS as error:
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
            found.left_out += (f"{name}: {why}",)
    known = {_side(item) for item in found.located}
    found.located = ranked([*found.located, *(item for item in ask.driven if _side(item) not in known)])
    if little and found.located:  # now something is known to be wrong
        whole = locate(session, progress=progress)
        return whole if whole.located else found
    if tuple(stages) == tuple(Stage) and not little:
        found.unplaced = tuple(_without_place(ask, found))
    found.seconds = time.perf_counter() - began
    return found


def _side(item: Located) -> tuple[Stage, str]:
    """The stage; of sampling whose p or q it is."""
    operation = item.operation
    return operation.stage, operation.words.partition(":")[0] if operation.stage is Stage.SAMPLING else ""


def _looks(ask: Question, stages: Sequence[Stage]) -> Iterator[tuple[str, Look]]:
    """What looks at a run, by name: an engine that cannot be run again is judged by its evidence alone."""
    if ask.run.is_ours:
        from specscope.measure.locate.walk import walk

        yield "walk", lambda ask, found: walk(ask, found, stages)
    elif Stage.TARGET in stages:
        yield "target", _inside_vllm
    if not ask.little:
        by_evidence: tuple[Look, ...] = (_lookup, _sampling, _verdicts, _draws)
        yield from ((stage, look) for stage, look in zip([*Stage][1:], by_evidence, strict=True) if stage in stages)


def _without_place(ask: Question, found: Location) -> Iterator[str]:
    """What audit and verify find wrong where nothing, or nothing of that side, is located."""
    located, unplaced = {item.operation.stage for item in found.located}, False
    for finding in ask.session.audited.findings:
        sides = {Stage.DRAFTER, Stage.DRAWS} if of_drafter(finding.name) else set()
        if finding.failed and not located & {*sides, Stage.TARGET, Stage.SAMPLING, Stage.VERDICT}:
            unplaced = True
            yield f"audit: {finding.sentence}"
    if not located and not unplaced:
        failed = [check for check in ask.session.case.checks.values() if check.result is CheckResult.FAILED]
        yield from (f"verify: {check.name}: {check.detail or check.about}" for check in failed)


def _lookup(ask: Question, found: Location) -> None:
    """Text lookup as a drafter: audit searches the text again."""
    finding = ask.session.audited.finding(LOOKUP)
    if finding is None or not finding.tested or not text_part(ask.run.drafter):
        return
    steps = plural(finding.tested, "step")
    if not finding.failed:
        found.ruled_out += (f"the drafter: its tree is what a lookup in the text gives in {steps}",)
        return
    located = Located(
        Operation(Stage.DRAFTER, "lookup", "the lookup in the text"),
        f"the drafted tree is not what a lookup in the text gives in {finding.failed:,} of {steps}",
        finding.sentence if finding.condition is not None else "",
        finding.detail,
        finding.example,
        explained=finding.failed,
        differing=finding.failed,
        unit="step",
        certain=False,
    )
    found.located += (located,)


def _inside_vllm(ask: Question, found: Location) -> None:
    """Target and drafter inside vLLM, which runs again in its own Python."""
    from specscope.measure.locate.inside_vllm.again import Again
    from specscope.measure.locate.vllm import locate_vllm

    if ask.run.backend != "vllm":
        raise UserError(f"{ask.run.backend} cannot be run again here: only its evidence is searched")
    differs = {**ask.differing(drafter=False), **ask.differing(drafter=True)}
    names = (ask.place.request,) if ask.place is not None else tuple(sorted(differs, key=lambda name: differs[name]))
    options = ask.session.options
    inside = locate_vllm(ask.history, options.target, options.draft, Again.found(), names=names, progress=ask.progress)
    found.located, found.walks = inside.located, inside.walks
    found.ruled_out, found.left_out = inside.ruled_out, inside.left_out


def _sampling(ask: Question, found: Location) -> None:
    """From logits to p and q."""
    walked = {item.operation.stage for item in found.located}
    for name, model in (("p", Stage.TARGET), ("q", Stage.DRAFTER))[: 1 + (ask.session.options.draft is not None)]:
        sampled = ask.session.q if name == "q" else ask.session.p
        checks = [item for item in ask.session.audited.findings if item.name in OF_RULES[name]]
        tested = sum(check.tested for check in checks)
        if sampled is not None and not (sampled.what.startswith("raw") and model in walked):  # else that is why
            found.located += (sampled.located,)
        elif tested and not any(check.failed for check in checks):
            tokens = plural(tested, "token")
            found.ruled_out += (f"the sampling rules: {name} of {tokens} is what they make of the logits",)


def _verdicts(ask: Question, found: Location) -> None:
    """From p, q and coins to what is accepted."""
    from specscope.analyze.locate.formulas import ORDER, located_formulas

    by_formula = located_formulas(ask.session.case)
    unnamed = by_formula  # without what stands in place of the right figure; the walk knows the first that differs
    if any(item.operation.stage is Stage.VERDICT for item in ask.driven):
        unnamed = [item for item in by_formula if item.operation.name == ORDER]
    located = ask.session.verdicts or ([] if found.located else unnamed)
    if P in {item.operation.name for item in ask.driven}:  # what is recorded as p is not the engine's own
        located = [item for item in located if item.operation.name != RESIDUAL]
    found.located += tuple(located)
    outcomes = ask.session.case.checks.get("outcomes")
    if not (located or by_formula) and outcomes is not None and outcomes.tested and not outcomes.failed:
        found.ruled_out += (f"the verdict: {plural(outcomes.tested, 'outcome')} follow from p, q and coin",)


def _draws(ask: Question, found: Location) -> None:
    """From coins to drafted tokens."""
    from specscope.analyze.locate.draws import located_draws

    case = ask.session.case
    located, interval = located_draws(case, ask.session.audited), case.checks.get("draft coins in their intervals")
    found.located += tuple(located)
    if not located and interval is not None and interval.tested and not interval.failed:
        coins = plural(interval.tested, "draft coin")
        found.ruled_out += (f"the draws: {coins} are in their token's interval",)
