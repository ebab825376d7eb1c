"""Edits of real records: each check passes over the run and convicts what was edited, and diagnose names its cause."""

import math
from dataclasses import replace

import numpy as np
import pytest

from specscope import SamplingParams
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import CheckResult, Exit
from specscope.analyze.verify.trial import judge
from specscope.trace.record.draft_vocabulary import draft_tokens
from specscope.trace.record.records import FinalKind, FinishReason, Outcome, Preceded
from specscope.trace.record.tree import Drawn
from tests.analyze import edits
from tests.analyze.edits import at, changed, check, edited, elder, failed, of, passed, put, replaced, sample
from tests.analyze.histories import history as history_of
from tests.analyze.synthetic import Synthetic
from tests.engines import PROMPTS, fresh
from tests.heads import DRAFT_VOCAB

ACCEPTED, REJECTED, UNTRIED = Outcome.ACCEPTED, Outcome.REJECTED, Outcome.UNTRIED
RATIO = lambda p, i: p.verdict.accept_prob[i]  # noqa: E731


def second_p(part):
    i = edits.node(part, None, lambda p, i: p.verdict.outcome[i] and elder(p, i) and p.verdict.p_trial[i] > 0.001)
    if i is None:
        return None
    p = part.verdict.p_trial[i] * 1.1
    ratio = put(part.verdict.accept_prob, i, min(1.0, float(p) / float(part.verdict.q_trial[i])))
    return replaced(part, verdict__p_trial=put(part.verdict.p_trial, i, p), verdict__accept_prob=ratio)


def rejected_came_out(part):
    last = part.verdict.path[-1] if part.verdict.accepted else -1
    i = edits.node(part, REJECTED, lambda p, i: p.tree.parent[i] == last and p.verdict.residual_mass[i] > 0.01)
    return None if i is None else replaced(part, verdict__token=int(part.tree.token[i]))


def first_parent(where=lambda part: True, **values):
    """An edit of the evidence on a step's first parent."""
    arrays = {name: lambda part, name=name, v=v: put(getattr(part.parents, name), 0, v) for name, v in values.items()}
    there = lambda part: len(part.parents.node) and where(part)  # noqa: E731
    return of(there, **{f"parents__{name}": value for name, value in arrays.items()})


def sure(low, high):
    return lambda part: low <= part.parents.choice_p[0] < high


def final_p(low, high):
    return lambda part: low < part.verdict.final_p < high


COIN_ABOVE = at(ACCEPTED, lambda p, i: RATIO(p, i) < 0.9, verdict__coin=0.95)
MASS = at(REJECTED, verdict__residual_mass=1.01)
TWIN = at(None, elder, tree__token=lambda p, i: p.tree.token[p.tree.parent == p.tree.parent[i]][0])
SHIFTED = of(lambda part: part.index == 4, context_len=lambda part: part.context_len + 1)
NOT_ALL_EMITTED = of(lambda part: part.emitted > 1 and part.index < 10, emitted=lambda part: part.emitted - 1)
NOT_MOVED = of(lambda p: len(p.moved), moved=np.zeros(0, np.int32))
Q_AS_DRAWN = at(None, edits.renormalised, verdict__q_trial=lambda p, i: p.tree.q[i])
EDITS = [
    ("accept probability", "sampled", at(REJECTED, lambda p, i: RATIO(p, i) > 0.01, verdict__accept_prob=0)),
    ("outcomes", "sampled", COIN_ABOVE),
    ("trial order", "sampled", at(UNTRIED, lambda p, i: p.tree.parent[i] >= 0, verdict__outcome=REJECTED)),
    ("p at later trials", "sampled", second_p),
    ("p at later trials", "deterministic", second_p),
    ("q at trials", "sampled", Q_AS_DRAWN),
    ("q at trials", "deterministic", at(REJECTED, verdict__q_trial=0.5)),
    ("residual mass", "sampled", MASS),
    ("residual mass", "deterministic", MASS),
    ("siblings", "sampled", TWIN),
    ("paths", "sampled", of(lambda p: p.verdict.accepted, verdict__path=lambda p: p.verdict.path[:-1])),
    ("kind of final token", "sampled", of(edits.recovered, verdict__kind=FinalKind.BONUS)),
    ("final tokens", "sampled", rejected_came_out),
    ("final tokens", "deterministic", rejected_came_out),
    ("coins", "greedy", at(UNTRIED, verdict__coin=0.123)),
    ("coins unequal", "sampled", at(UNTRIED, lambda p, i: i > 0, verdict__coin=lambda p, i: p.verdict.coin[i - 1])),
    ("target's choice", "sampled", first_parent(sure(0.01, 2), choice_p=0.0)),
    ("ranks", "sampled", at(REJECTED, lambda p, i: p.verdict.p[i] > 0.02, parents__rank=100)),
    ("raw probabilities", "sampled", at(REJECTED, parents__raw_p=1.0)),
    ("drafter's likeliest", "sampled", first_parent(choice_q=1.0, choice_rank=2)),
    (  # a first child's
        "drafter's likeliest",
        "deterministic",
        of(lambda p: p.notes is not None and len(p.tree), notes__prob=lambda p: put(p.notes.prob, 0, 0.5)),
    ),
    ("entropies", "sampled", first_parent(sure(0.0101, 0.99), entropy=0.0)),
    ("greedy tokens", "greedy", at(REJECTED, verdict__p=0.3)),
    ("greedy tokens", "greedy", of(edits.recovered, verdict__token=lambda p: (p.verdict.token + 1) % 256)),
    ("entropy of the final draw", "sampled", of(final_p(0.01, 0.9), parents__final_entropy=0.0)),
    (
        "share of the final token",
        "deterministic",
        of(lambda p: edits.recovered(p) and p.verdict.final_p > 1e-3, verdict__final_p=lambda p: p.verdict.final_p / 2),
    ),
    ("step numbers", "sampled", of(lambda p: p.index == 4, index=5)),
    ("tokens in the cache", "sampled", SHIFTED),
    ("positions", "sampled", SHIFTED),
    ("tokens emitted", "sampled", NOT_ALL_EMITTED),
    ("outputs", "sampled", NOT_ALL_EMITTED),
    ("what preceded", "sampled", of(lambda p: p.preceded is Preceded.NOTHING, preceded=Preceded.PREEMPTION)),
    ("accepted KV moved", "moved", NOT_MOVED),
    ("blocks kept", "sampled", of(lambda p: p.context_len % 16 and p.index > 1, blocks=lambda p: p.blocks + 50)),
]
LATER = ("outputs", "step numbers", "positions", "tokens in the cache")  # seen where the request goes on, or ends


def named(value):
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("name", "run", "change"), EDITS, ids=named)
def test_one_edit_is_convicted(runs, sound, name, run, change):
    assert sound[run][name].result is CheckResult.PASSED
    history = edited(runs[run], change)
    found = check(history, name)
    assert found.result is CheckResult.FAILED
    assert found.failed >= 1
    assert found.detail
    assert f"#{found.example}'" in found.example.command("run.jsonl")
    before, after = ([part for record in each.steps for part in record.requests] for each in (runs[run], history))
    (wrong,) = [b for a, b in zip(before, after, strict=True) if a != b]
    assert wrong.request == found.example.request
    assert name in LATER or wrong.index == found.example.index


def untried(part):
    return np.flatnonzero(part.verdict.outcome == UNTRIED)


def open_coin(part, i):
    """A node that chance decided: rejected at even positions, accepted at odd ones."""
    return part.verdict.outcome[i] == (ACCEPTED if part.position % 2 else REJECTED) and 0.05 < RATIO(part, i) < 0.95


def other_side(part, i):
    """A coin on the wrong side of a: below it where it was rejected, above it where it was accepted."""
    return (1 + RATIO(part, i)) / 2 if part.verdict.outcome[i] == ACCEPTED else RATIO(part, i) / 2


accepted_by_p = of(  # the ratio test without q, and the verdicts as they were
    lambda part: not np.allclose(part.verdict.accept_prob, part.verdict.p_trial, atol=1e-3),
    verdict__accept_prob=lambda part: part.verdict.p_trial.astype(np.float64),
)
untried_pair = of(  # the coins of two nodes that were not tried made equal
    lambda part: len(untried(part)) > 1,
    verdict__coin=lambda part: put(part.verdict.coin, untried(part)[1], part.verdict.coin[untried(part)[0]]),
)
CAUSES = [
    ("accepted KV moved", NOT_MOVED, "sampled", Cause.TARGET_KV),
    ("accept probability", accepted_by_p, "sampled", Cause.RATIO_TEST),
    ("probabilities", at(None, verdict__p=np.nan), "sampled", Cause.NOT_A_NUMBER),
    ("probabilities", at(None, verdict__p=-0.25), "eagle", Cause.NOT_A_NUMBER),
    ("q at trials", Q_AS_DRAWN, "sampled", Cause.RESIDUAL_NOT_RENORMALISED),
    ("outcomes", at(None, open_coin, verdict__coin=other_side), "sampled", Cause.RATIO_TEST),
    ("coins unequal", untried_pair, "sampled", Cause.COINS),
]


def judged(history):
    """(the names of verify's failed checks, the diagnosis)."""
    found = examine(history, "run.jsonl")
    return [check.name for check in found.stages["verify"].failed], found


@pytest.mark.every(2)
@pytest.mark.parametrize("often", [False, True], ids=["once", "always"])
@pytest.mark.parametrize(("name", "edit", "source", "cause"), CAUSES, ids=named)
def test_an_edit_in_one_step_or_in_all_has_its_cause_named(name, edit, source, cause, often):
    history = sample(source)
    wrong, found = judged(changed(history, edit) if often else edited(history, edit))
    assert name in wrong
    assert found.faults[0].cause is cause
    assert found.exit is Exit.INCONSISTENT


rejected_choice = of(  # the last accepted draft is said to have been rejected, and so was the target's choice
    lambda part: len(part.verdict.path),
    verdict__outcome=lambda part: put(part.verdict.outcome, part.verdict.path[-1], REJECTED),
    verdict__path=lambda part: part.verdict.path[:-1],
)


def accepted_other(part):
    """A rejected draft is said to have been accepted, behind the path."""
    path = part.verdict.path
    i = edits.node(part, REJECTED, lambda part, i: part.tree.parent[i] == (path[-1] if len(path) else -1))
    if i is None:
        return None
    outcome = put(part.verdict.outcome, i, ACCEPTED)
    return replaced(part, verdict__outcome=outcome, verdict__path=np.append(path, i).astype(np.int32))


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["eagle", "ngram"])
@pytest.mark.parametrize("edit", [rejected_choice, accepted_other])
def test_greedy_acceptance_is_checked(edit, name):
    history = sample(name)
    count = len(edits.able(history, edit))
    assert count
    assert "greedy acceptance" not in judged(history)[0]
    wrong, found = judged(changed(history, edit))
    assert "greedy acceptance" in wrong
    assert Cause.ACCEPTED_COUNT in [fault.cause for fault in found.faults] or count < 8
    assert not any("greedy acceptance" in line for line in found.unexplained)
    if count < 8:
        return  # too few to tell a count from decisions that are wrong one by one
    way = "longer" if edit is accepted_other else "shorter"
    assert any(f"1 {way} in" in line for fault in found.faults for line in fault.for_)
    wrong, found = judged(edited(history, edit))
    assert "greedy acceptance" in wrong
    assert found.exit is Exit.INCONSISTENT


def test_a_rule_that_is_named_and_not_used():
    """The header says block, every step says standard."""
    wrong, found = judged(edits.rebuilt(sample("sampled"), rule="block"))
    assert wrong == ["rule of verification"]
    assert found.faults[0].cause is Cause.OTHER_RULE
    assert "41 of 41 steps" in found.faults[0].for_[0]


@pytest.mark.parametrize("coin", [float("nan"), float("inf"), -1.0, 2.0])
def test_a_coin_that_is_no_number_is_convicted_and_left_out_of_sums(coin):
    whole = edits.rebuilt(sample("sampled"), versions={"vllm": "0.32.0"})  # ours are computed, and no chance
    spoilt = changed(whole, of(verdict__coin=lambda part: put(part.verdict.coin, -1, coin)), {20})
    right, checks = ({each.name: each for each in judge(one, source="x").checks} for one in (whole, spoilt))
    assert checks["probabilities"].wrong.tolist() == [20]
    for name in ("coins uniform", "coins in series", "coins and draws"):
        assert checks[name].tested < right[name].tested
        assert math.isfinite(checks[name].statistic)


def parts_of(change):
    """A record's requests through `change`, which gives all of them."""
    return lambda record: replace(record, requests=tuple(change(record)))


def taken():
    """A block of a request that does not run in a step is written to by one that does."""
    held = {}

    def change(record):
        parts = list(record.requests)
        for part in parts:
            held.setdefault(part.request, part.blocks[0])
        if record.step == 6:
            other = next(block for name, block in held.items() if name not in (parts[0].request, parts[1].request))
            parts = [replace(parts[0], blocks=np.array([other], np.int32)), parts[1]]
        return parts

    return parts_of(change)


def shared(record):
    first, *rest = record.requests
    return (first, *(replace(part, blocks=first.blocks) for part in rest[:1]), *rest[1:])


def unfed(record):
    return (part if part.index else replace(part, prefill_tokens=part.prefill_tokens - 1) for part in record.requests)


def ending(**change):
    """The first end with these fields, or what gives them of it."""
    done = []

    def of_record(record):
        first, *rest = record.finished or (None,)
        if first is None or (done and record.step != done[0]):
            return record
        done.append(record.step)
        fields = {name: value(first) if callable(value) else value for name, value in change.items()}
        return replace(record, finished=(replace(first, **fields), *rest))

    return of_record


def allowed(count):
    """The first end's request was allowed so many tokens."""
    return ending(info=lambda end: replace(end.info, params=replace(end.info.params, max_tokens=count)))


def untold(record):
    return replace(record, preempted=())


EOS, STOP = (ending(reason=reason, stop="no such text") for reason in (FinishReason.EOS, FinishReason.STOP))
RECORDS = [  # check, run, what becomes of each record of a history, words
    ("requests in a batch", "sampled", parts_of(lambda r: (*r.requests, *r.requests[:1])), "twice in one step"),
    ("prompt fed", "sampled", parts_of(unfed), "were due"),
    ("blocks written", "sampled", parts_of(shared), "is written by"),
    ("blocks kept", "sampled", taken(), "holds tokens of"),
    ("outputs", "sampled", ending(output=np.arange(3, dtype=np.int32)), "the output has 3"),
    ("outputs", "sampled", allowed(2), "where 2 were allowed"),
    ("ends", "sampled", allowed(1000), "of 1000 tokens"),
    ("ends", "sampled", EOS, "which is not in the output"),
    ("ends", "sampled", STOP, "which is not in the output"),
    ("tokens in the cache", "preempted", untold, "tokens in the cache"),
    ("what preceded", "preempted", untold, "says `preemption`"),
]


@pytest.mark.parametrize(("name", "run", "change", "words"), RECORDS, ids=named)
def test_one_edit_of_a_record_is_convicted(runs, sound, name, run, change, words):
    assert sound[run][name].result is CheckResult.PASSED
    found = check(edits.rebuilt(runs[run], change), name)
    assert found.result is CheckResult.FAILED
    assert words in found.detail


def test_an_output_token_that_is_another_is_placed_where_it_was_emitted_and_none_is_lost(runs):
    request = next(each for each in runs["sampled"].requests.values() if len(each.steps) > 4)
    through = sum(step.emitted for step in request.steps[:3])  # the first token of the fourth step
    output = request.end.output.copy()
    output[through] += 1
    found = edits.rebuilt(
        runs["sampled"],
        lambda record: replace(
            record,
            finished=tuple(replace(e, output=output) if e.info.id == request.id else e for e in record.finished),
        ),
    )
    assert str(check(found, "outputs").example) == f"{request.id}@{request.steps[3].index}"
    assert Cause.TOKEN_LOST not in {suspect.cause for suspect in judged(found)[1].suspects}


def test_a_token_lost_at_a_preemption(runs):
    """What comes back has one token less than was committed."""

    def less(part):
        back = part.index and part.preceded is Preceded.PREEMPTION and part.prefill_tokens
        return replace(part, prefill_tokens=part.prefill_tokens - 1) if back else None

    assert "positions" in failed(changed(runs["preempted"], less))


def test_steps_that_are_known_to_be_missing_are_no_fault(runs):
    history = edits.rebuilt(runs["sampled"], lambda record: None if record.step == 9 else record)
    assert "step numbers" in failed(history)
    history.lost = 1
    assert failed(history) == []


@pytest.mark.every(2)
@pytest.mark.parametrize("drafter", ["ngram", "eagle dynamic"])
def test_a_run_that_went_back_is_consistent(bench, drafter):
    """KV that was computed again may lie in other blocks than the record of the first time says."""
    engine = bench.engine(drafter)
    fresh(engine, 60)
    for seed, prompt in enumerate(PROMPTS):
        engine.add(prompt, SamplingParams(max_tokens=40, seed=seed, temperature=1.0))
    found = {}
    for back, steps in ((None, 10), (4, 9), (6, 500)):
        if back is not None:
            engine.rewind(back)
        while engine.busy and steps:
            record = engine.step()
            found[record.step] = record
            steps -= 1
    history = history_of([record for _, record in sorted(found.items())], engine.run_info)
    assert [record.step for record in history.steps if record.rewound] == [10, 13]
    assert failed(history) == []


@pytest.mark.parametrize("why", ["forced", "another rule"])
def test_what_follows_from_force_or_another_rule_is_left_out(runs, why):
    """A node that was forced against its coin, a rule that is not lossless."""

    def change(part):
        new = COIN_ABOVE(part)
        if new is None or why == "another rule":
            return new and replaced(new, verdict__rule="lossy:typical")
        return replaced(new, verdict__forced=np.flatnonzero(new.verdict.coin == 0.95).astype(np.int32))

    assert "outcomes" in failed(edited(runs["sampled"], COIN_ABOVE))
    assert "outcomes" not in failed(edited(runs["sampled"], change))


def test_with_replacement_q_stays(runs):
    """Where tokens are put back, q at later trials is q."""
    history = Synthetic(1, "3x1", Drawn.WITH_REPLACEMENT).run(1, 200)
    assert failed(history) == []
    without = np.full(3, Drawn.WITHOUT_REPLACEMENT, np.uint8)
    assert "q at trials" in failed(edited(history, of(lambda p: p.verdict.outcome[1], tree__drawn=without)))


def of_vllm(history, **fields):
    """The history, said to be another engine's."""
    return edits.rebuilt(history, versions={"vllm": "0.33"}, **fields)


def test_the_last_step_of_a_request_that_another_process_stopped_may_give_nothing(runs):
    """As of vLLM, whose front end finds stop strings while the next step runs."""
    ended = edits.rebuilt(of_vllm(runs["sampled"]), ending(reason=FinishReason.STOP))
    request = next(each for each in ended.requests.values() if each.end.reason is FinishReason.STOP)
    last = request.steps[-1]

    def thrown_away(part):
        return replace(part, emitted=0) if (part.request, part.index) == (last.request, last.index) else None

    def without(end):
        return end.output[: len(end.output) - last.emitted]

    history = edits.rebuilt(changed(ended, thrown_away), ending(output=without))
    assert "tokens emitted" not in failed(history)


def test_a_token_outside_the_draft_vocabulary_is_found(runs, monkeypatch):
    name, history = "draft vocabulary", runs["deterministic"]  # of an EAGLE head with a reduced vocabulary
    good, known = check(history, name), set(draft_tokens(history.run).tolist())
    assert (good.result, good.note) == (CheckResult.PASSED, f"{DRAFT_VOCAB} tokens of the target")
    assert good.tested > 100
    unknown = next(token for token in range(300) if token not in known)
    assert "is not among them" in check(edited(history, at(None, tree__token=unknown)), name).detail
    assert check(runs["sampled"], name).note == "the drafter's vocabulary is not reduced"
    monkeypatch.setattr(history, "run", replace(history.run, draft_tokens="", evidence=""))
    untold = check(history, name)
    assert (untold.result, untold.note) == (CheckResult.SKIPPED, "the draft vocabulary is not recorded")


def test_an_engine_that_verifies_a_part_of_a_chain_is_not_accused(runs):
    """vLLM's scheduler cuts chains: by a form, by the step's budget, where a request is about to end."""

    def cut(part):
        n = len(part.tree) - 1
        if n < 1 or part.verdict.outcome[n] or not part.tree.is_sampled:
            return None
        arrays = ("outcome", "p", "p_trial", "q_trial", "accept_prob", "coin", "residual_mass")
        verdict = {f"verdict__{name}": getattr(part.verdict, name)[:n] for name in arrays}
        tree = {f"tree__{name}": getattr(part.tree, name)[:n] for name in ("token", "parent", "q", "drawn")}
        return replaced(part, **verdict, **tree, notes=None, parents=None)

    history = edited(runs["sampled"], cut)
    assert check(history, "drafts as planned").result is CheckResult.FAILED
    assert passed(of_vllm(history), "drafts as planned")


def test_what_an_n_gram_is_filled_with_is_no_draft_in_another_place(runs):
    """vLLM's V2 runner fills the chain with the root's token where the text holds nothing more."""
    roots = {}

    def filled(record):
        roots.update({info.id: int(info.prompt_tokens[-1]) for info in record.admitted})
        parts = []
        for part in record.requests:
            tokens = np.full(len(part.tree), roots[part.request], np.int32)
            rejected = {} if part.verdict is None else {"verdict__path": np.zeros(0, np.int32), "emitted": 1}
            parts.append(replaced(part, tree__token=tokens, **rejected))
            roots[part.request] = roots[part.request] if part.verdict is None else part.verdict.token
        return replace(record, requests=tuple(parts))

    history = edits.rebuilt(runs["sampled"], filled)
    assert check(of_vllm(history, drafter="eagle"), "drafts in place").result is CheckResult.FAILED
    of_ngram = check(of_vllm(history, drafter="ngram"), "drafts in place")
    assert of_ngram.result is CheckResult.SKIPPED  # nothing else was drafted
