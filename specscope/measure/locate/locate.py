"""`locate`: where a run breaks, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import compress

from specscope.analyze.audit.audit import of_drafter
from specscope.analyze.audit.contexts import Contexts, contexts_of
from specscope.analyze.audit.model.rules import RequestForms
from specscope.analyze.audit.options import Progress
from specscope.analyze.diagnose.diagnosis import JudgedCase
from specscope.analyze.findings import Reference
from specscope.analyze.locate.decided import RESIDUAL, P
from specscope.analyze.locate.formulas import ORDER, located_cut, located_draws, located_formulas
from specscope.analyze.locate.located import Located, Location, Operation, Stage, Walk, operation, ranked
from specscope.analyze.locate.model.reference import ModelReference
from specscope.errors import UserError, first_line
from specscope.live.start import start_engine
from specscope.measure.locate.decisions import DecisionWatch
from specscope.measure.locate.drafter import drafter_watch
from specscope.measure.locate.drive import Drive, KVOverwritten, WalkPlan, located_config
from specscope.measure.locate.pairs import HEAD, MODEL, located_in
from specscope.measure.locate.vllm import Again, locate_vllm
from specscope.measure.locate.watch import ModelWatch, target_watch
from specscope.plans.kinds import model_part, runs_head, text_part
from specscope.plans.plan import read_plan
from specscope.trace.history.history import History, PlaceName
from specscope.trace.history.wording import plural
from specscope.trace.record.records import RunInfo

REQUESTS = 4  # that are watched where the models disagree, and where nothing says where to look
ROWS = 3000  # that are compared at most, unless a place is named
LITTLE = 6  # decode steps of one request, where nothing is known to be wrong


@dataclass(frozen=True)
class Question:
    """What is located: a run, the models that judge, and where to look. `little`: nothing is known to be wrong."""

    session: JudgedCase
    place: PlaceName | None
    progress: Progress
    little: bool = False
    # Of sampling and verdict, as the engine had them run again: said where the evidence has no place of that side
    driven: list[Located] = field(default_factory=list)

    @property
    def run(self) -> RunInfo:
        assert self.history.run is not None
        return self.history.run

    @property
    def history(self) -> History:
        return self.session.case.history

    def differing(self, *, drafter: bool) -> dict[str, int]:
        """By request, the first engine step in which target (or drafter) differs."""
        items = list[Reference]()
        for finding in self.session.audited.findings:
            name = finding.name
            if name != "context" and of_drafter(name) == drafter and (drafter or "raw" in name or "top" in name):
                items += compress(finding.items, finding.differs)
        return {item.request: item.step for item in sorted(items, key=lambda item: -item.step)}

    def watched(self, *, drafter: bool) -> WalkPlan:
        """Whom to watch. Raises UserError where no text is known."""
        if self.little and self.place is None:
            names, first, until = _little(self.history, self.session.audited.doubts)
        else:
            names, first, until = self._chosen(self.differing(drafter=drafter))
        contexts = {name: known for name in names if (known := contexts_until(self.history, name, until)) is not None}
        if not contexts:
            raise UserError("no request's whole text is in the capture, so there is nothing to feed")
        return WalkPlan(contexts, until, first)

    def _chosen(self, differs: dict[str, int]) -> tuple[list[str], int, int]:
        """The requests to watch, and the places in the history of the first and the last step to run."""
        history, place = self.history, self.place
        if place is not None:
            request = history.requests[place.request]
            index = len(request.steps) - 1
            if place.index is not None:
                index = next(i for i, part in enumerate(request.steps) if part.index == place.index)
            return [place.request], 0, request.engine_steps[index]
        if differs:
            names = sorted(differs, key=lambda name: differs[name])[:REQUESTS]
            last = max(differs[name] for name in names)
            return names, 0, max(i for i, record in enumerate(history.steps) if record.step <= last)
        names, rows, until = list[str](), 0, 0
        for number, record in enumerate(history.steps):
            until = number
            rows += sum(part.prefill_tokens + 1 + len(part.tree) for part in record.requests)
            names += [part.request for part in record.requests if part.request not in names]
            if rows > ROWS:
                break
        return names[:REQUESTS], 0, until


def _little(history: History, doubts: Mapping[tuple[str, int], int]) -> tuple[list[str], int, int]:
    """Some steps of a request, likewise: where most figures need much of what rounding explains, then with the most
    drafts, the most rules, a short prompt."""

    def rank(name: str, steps: Sequence[int]) -> tuple[int, ...]:
        request = history.requests[name]
        assert request.info is not None
        params, parts = request.info.params, [request.steps[i] for i in steps]
        cuts = [params.top_k > 0, params.top_p < 1, params.min_p > 0, params.temperature != 1, params.penalised]
        rules = sum((not params.greedy, *cuts, params.limited, bool(params.logit_bias)))
        doubtful = sum(doubts.get((name, part.index), 0) for part in parts)
        return -doubtful, -sum(len(part.tree) > 0 for part in parts), -rules, len(request.info.prompt_tokens)

    windows = list[tuple[str, list[int]]]()
    for name, each in history.requests.items():
        if each.info and each.steps and not each.steps[0].index:
            decoded = [i for i, part in enumerate(each.steps) if part.verdict is not None]
            begins = [n for n, i in enumerate(decoded) if not n or (name, each.steps[i].index) in doubts]
            windows += [(name, decoded[n : n + LITTLE]) for n in begins]
    if not windows:
        return [], 0, 0
    name, steps = min(windows, key=lambda window: rank(*window))
    request = history.requests[name]
    is_first = all(part.verdict is None for part in request.steps[: steps[0]])
    return [name], request.engine_steps[0 if is_first else steps[0]], request.engine_steps[steps[-1]]


def contexts_until(history: History, name: str, until: int) -> Contexts | None:
    """A request's contexts in the steps up to a place of the history; its text no longer than these need."""
    request = history.requests[name]
    steps = zip(request.engine_steps, request.steps, strict=True)
    places = [i for i, (step, part) in enumerate(steps) if step <= until and part.verdict is not None]
    whole = contexts_of(history, name, places)
    if whole is None or not whole.steps:
        return None
    return whole.of(whole.steps, max(step.part.position + len(step.verdict.path) + 2 for step in whole.steps))


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
    """Walk both sides of a run to the first operation that differs, and search its evidence. `little`: nothing is known
    to be wrong, and a few steps of one request are walked. Raises UserError where nothing can be looked at."""
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
    for check in () if located or unplaced else ask.session.case.trial.failed:
        yield f"verify: {check.name}: {check.detail or check.about}"


def _lookup(ask: Question, found: Location) -> None:
    """Text lookup as a drafter: audit searches the text again."""
    finding = ask.session.audited.finding(LOOKUP)
    if finding is None or not finding.tested or not text_part(ask.run.drafter):
        return
    steps, operation = plural(finding.tested, "step"), Operation(Stage.DRAFTER, "lookup", "the lookup in the text")
    if not finding.failed:
        found.ruled_out += (f"the drafter: its tree is what a lookup in the text gives in {steps}",)
        return
    sentence = f"the drafted tree is not what a lookup in the text gives in {finding.failed:,} of {steps}"
    looks, counts = finding.sentence if finding.condition else "", (finding.failed, finding.failed, "step", False)
    found.located += (Located(operation, sentence, looks, finding.detail, finding.example, *counts),)


def _inside_vllm(ask: Question, found: Location) -> None:
    """Target and drafter inside vLLM, which runs again in its own Python."""
    if ask.run.backend != "vllm":
        raise UserError(f"{ask.run.backend} cannot be run again here: only its evidence is searched")
    differs, options = ask.differing(drafter=False) | ask.differing(drafter=True), ask.session.options
    names = [ask.place.request] if ask.place is not None else sorted(differs, key=lambda name: differs[name])
    inside = locate_vllm(ask.history, options.target, options.draft, Again.found(), names=names, progress=ask.progress)
    found.located, found.walks = inside.located, inside.walks
    found.ruled_out, found.left_out = inside.ruled_out, inside.left_out


def _sampling(ask: Question, found: Location) -> None:
    walked, session = {item.operation.stage for item in found.located}, ask.session
    for name, model in (("p", Stage.TARGET), ("q", Stage.DRAFTER))[: 1 + (session.options.draft is not None)]:
        sampled = session.q if name == "q" else session.p
        checks = [item for item in session.audited.findings if item.name in OF_RULES[name]]
        if sampled is not None and not (sampled.what.startswith("raw") and model in walked):  # else that is why
            found.located += (sampled.located,)
        elif name == "p" and (cut := located_cut(session.case)) is not None:
            found.located += (cut,)
        elif (tested := sum(check.tested for check in checks)) and not any(check.failed for check in checks):
            tokens = plural(tested, "token")
            found.ruled_out += (f"the sampling rules: {name} of {tokens} is what they make of the logits",)


def _verdicts(ask: Question, found: Location) -> None:
    by_formula, driven = located_formulas(ask.session.case), {item.operation for item in ask.driven}
    unnamed = by_formula  # without what stands in place of the right figure; the walk knows the first that differs
    if any(operation.stage is Stage.VERDICT for operation in driven):
        unnamed = [item for item in by_formula if item.operation.name == ORDER]
    located = ask.session.verdicts or ([] if found.located else unnamed)
    if P in {operation.name for operation in driven}:  # what is recorded as p is not the engine's own
        located = [item for item in located if item.operation.name != RESIDUAL]
    found.located += tuple(located)
    if not (located or by_formula) and (tested := _passed(ask, "outcomes")):
        found.ruled_out += (f"the verdict: {plural(tested, 'outcome')} follow from p, q and coin",)


def _draws(ask: Question, found: Location) -> None:
    located = located_draws(ask.session.case, ask.session.audited)
    found.located += tuple(located)
    if not located and (tested := _passed(ask, "draft coins in their intervals")):
        found.ruled_out += (f"the draws: {plural(tested, 'draft coin')} are in their token's interval",)


def _passed(ask: Question, name: str) -> int:
    """How much a check of verify tested, where nothing of it failed."""
    check = ask.session.case.checks.get(name)
    return 0 if check is None or check.failed else check.tested


NO_MODEL = "the drafter's model was not found"
DECIDED = {Stage.SAMPLING, Stage.VERDICT, Stage.DRAWS}


def walk(ask: Question, found: Location, stages: Iterable[Stage]) -> None:
    """Walk what is asked for, in one run of the engine. Raises UserError."""
    wanted, run, options = {*stages}, ask.run, ask.session.options
    if ask.little and run.drafter != "none" and read_plan(run.tree) is None:
        raise UserError("the capture names no tree that can be read")
    target, drafted = ask.watched(drafter=False), ask.watched(drafter=True)
    draft = options.draft if Stage.DRAFTER in wanted and model_part(run.drafter) else None
    if Stage.DRAFTER in wanted and model_part(run.drafter) and draft is None:
        found.left_out += (f"drafter: {options.why_no_draft or NO_MODEL}",)
    until = max(target.until if wanted - {Stage.DRAFTER} else 0, drafted.until if draft else 0)
    ask.progress("loading the reference", 0, 0)
    reference, watches = ModelReference(options.target), list[ModelWatch]()
    with ExitStack() as stack:
        engine = start_engine(located_config(ask.history, options), lambda what: ask.progress(what, 0, 0))
        stack.callback(engine.close)
        drive = Drive(engine, ask.history, frozenset(target.contexts) if ask.little else None, target.first)
        if Stage.TARGET in wanted:
            drive.stamped = frozenset(target.contexts)
            watches.append(target_watch(drive, target, reference, stack))
        decisions = _decisions(ask, drive, until) if DECIDED & wanted else None
        if draft is not None:
            try:
                watches.append(drafter_watch(drive, drafted, reference, draft, stack))
            except UserError as error:  # the target is walked all the same
                found.left_out += (f"drafter: {error}",)
        for number, _ in enumerate(drive.steps(until)):
            ask.progress("walking the run", number + 1, until + 1)
    if decisions is not None:
        ask.driven.extend(item for item in decisions.located() if item.operation.stage in wanted)
        _agrees(found, dict(decisions.agrees()))
        found.notes += tuple(decisions.notes())
        found.walks += tuple(filter(None, [decisions.walk()]))
    if Stage.DRAFTER in wanted and options.own:
        _of_own(ask, found, drive)
    for watch in watches:
        _of_watch(ask, found, watch, len(reference.layers))


def _agrees(found: Location, lines: Mapping[str, Stage]) -> None:
    """What the engine that ran again does right."""
    found.ruled_out, found.rerun = (*found.ruled_out, *lines), {**found.rerun, **lines}


def _of_own(ask: Question, found: Location, drive: Drive) -> None:
    """Whether a drafter of somebody's own, asked again, drafts the recorded trees."""
    name, steps, other = ask.run.drafter, plural(drive.proposed, "step"), drive.otherwise
    if not other:
        again = f"{name}, asked again, drafts the recorded tree in {steps}"
        found.ruled_out += (f"drafts that depend on chance or state: {again}",)
    elif not ask.little:  # where it may not have seen what it depends on
        differs = f"drafts another tree than the recorded one in {len(other):,} of {steps}, first in {other[0]}"
        found.unexplained += (f"the drafter: {name}, asked again, {differs}",)


def _decisions(ask: Question, drive: Drive, until: int) -> DecisionWatch:
    """Watches sampling and verdicts of every request whose text is known."""
    records = ask.history.steps[: until + 1]
    names = drive.only or dict.fromkeys(part.request for record in records for part in record.requests)
    contexts = {name: known for name in names if (known := contexts_until(ask.history, name, until)) is not None}
    limited, vocab = any(each.params.limited for each in contexts.values()), drive.engine.runner.loaded.vocab_size
    forms = RequestForms(ask.session.options.target, vocab, ask.run.eos_tokens) if limited else None
    return DecisionWatch(drive, ask.session.case, contexts, forms)


def _of_watch(ask: Question, found: Location, watch: ModelWatch, layers: int) -> None:
    """What a model's passes come to."""
    is_target = watch.stage is Stage.TARGET
    head = not is_target and runs_head(ask.run.drafter)
    if head and any(item.operation.stage is Stage.TARGET for item in found.located):
        found.ruled_out += ("the drafter was not walked: it is fed the target's features, and they differ",)
        return
    compared = watch.wrong or next(reversed(watch.last.values()), None)
    if compared is not None:
        walked = (compared.stage, compared.where, compared.rows, tuple(compared.held))
        found.walks += (Walk(*walked, "specscope, in float32", HEAD if head else MODEL),)
    overwritten = watch.drive.overwritten if is_target else []
    if watch.wrong is not None:
        text = watch.plan.contexts[watch.wrong.where.request].text
        found.located += (located_in(watch.wrong, text, ask.history, overwritten),)
        return
    found.located += tuple(_overwritten(each) for each in overwritten[:1])
    steps = watch.plan.until + 1 - watch.plan.first
    of_what = f"{plural(steps, 'engine step')} of {plural(len(watch.plan.contexts), 'request')}"
    if is_target:
        rows = f"{watch.rows:,} rows at the borders of {plural(layers, 'layer')} agree over {of_what}"
        line = f"the target: {rows}, within {watch.largest:.0%} of what rounding explains"
        _agrees(found, {line: watch.stage})
    elif watch.passes:
        passes = f"{plural(watch.passes, 'pass', 'passes')} over {of_what} agree"
        _agrees(found, {f"the drafter: {passes}, from their inputs to the chosen tokens": watch.stage})
    if is_target and (differs := ask.differing(drafter=False)):
        requests = plural(len(differs), "request")
        found.unexplained += (
            f"the target's recorded figures differ from the model's in {requests}, but the engine, run again, agrees "
            "with the model: the recording came from another build, other weights, or the error is after the logits",
        )


def _overwritten(found: KVOverwritten) -> Located:
    count, first, request = len(found.positions), found.positions[0], found.before.request
    place = operation(Stage.TARGET, f"layers.{found.layer}.self_attn.keys read")
    sentence = f"the KV of {plural(count, 'position')} of {request}, the first {first}, has changed {found.when}"
    return Located(place, sentence, "", f"{request}, position {first}", found.before, count, count, "position")
