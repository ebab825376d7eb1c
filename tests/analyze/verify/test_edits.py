"""One edit of a real record: each check passes over the run, and convicts the step that was edited."""

from dataclasses import replace

import numpy as np
import pytest

from specscope import SamplingParams
from specscope.analyze.findings import CheckResult
from specscope.trace.history.history import History
from specscope.trace.record.draft_vocabulary import draft_tokens
from specscope.trace.record.records import FinalKind, FinishReason, Outcome, Preceded
from specscope.trace.record.tree import Drawn
from tests.analyze.judges.edits import changed, rebuilt
from tests.analyze.synthetic import Synthetic
from tests.analyze.verify.edits import (
    at,
    check,
    edited,
    elder,
    failed,
    node,
    of,
    passed,
    put,
    recovered,
    renormalised,
    replaced,
)
from tests.engines import PROMPTS, fresh
from tests.heads import DRAFT_VOCAB

ACCEPTED, REJECTED, UNTRIED = Outcome.ACCEPTED, Outcome.REJECTED, Outcome.UNTRIED


def second_p(part):
    i = node(part, None, lambda p, i: p.verdict.outcome[i] and elder(p, i) and p.verdict.p_trial[i] > 0.001)
    if i is None:
        return None
    p = part.verdict.p_trial[i] * 1.1
    ratio = min(1.0, float(p) / float(part.verdict.q_trial[i]))
    arrays = part.verdict.p_trial, part.verdict.accept_prob
    return replaced(part, verdict__p_trial=put(arrays[0], i, p), verdict__accept_prob=put(arrays[1], i, ratio))


def rejected_came_out(part):
    last = part.verdict.path[-1] if part.verdict.accepted else -1
    i = node(part, REJECTED, lambda p, i: p.tree.parent[i] == last and p.verdict.residual_mass[i] > 0.01)
    return None if i is None else replaced(part, verdict__token=int(part.tree.token[i]))


def first_parent(where=lambda part: True, **values):
    """An edit of the evidence on a step's first parent."""
    arrays = {name: lambda part, name=name, v=v: put(getattr(part.parents, name), 0, v) for name, v in values.items()}
    there = lambda part: len(part.parents.node) and where(part)  # noqa: E731
    return of(there, **{f"parents__{name}": value for name, value in arrays.items()})


def noted(part):
    return part.notes is not None and len(part.tree)


def known_share(part):
    return recovered(part) and part.verdict.final_p > 1e-3


COIN_ABOVE = at(ACCEPTED, lambda p, i: p.verdict.accept_prob[i] < 0.9, verdict__coin=0.95)
ANOTHER_COIN = at(UNTRIED, verdict__coin=0.123)
MASS = at(REJECTED, verdict__residual_mass=1.01)
TWIN = at(None, lambda p, i: elder(p, i), tree__token=lambda p, i: p.tree.token[p.tree.parent == p.tree.parent[i]][0])
UNSURE = lambda part: 0.01 < part.parents.choice_p[0] < 0.99  # noqa: E731
SHIFTED = of(lambda part: part.index == 4, context_len=lambda part: part.context_len + 1)
NOT_ALL_EMITTED = of(lambda part: part.emitted > 1 and part.index < 10, emitted=lambda part: part.emitted - 1)
EDITS = [
    (
        "accept probability",
        "sampled",
        at(REJECTED, lambda p, i: p.verdict.accept_prob[i] > 0.01, verdict__accept_prob=0),
    ),
    ("outcomes", "sampled", COIN_ABOVE),
    ("trial order", "sampled", at(UNTRIED, lambda p, i: p.tree.parent[i] >= 0, verdict__outcome=REJECTED)),
    ("p at later trials", "sampled", second_p),
    ("p at later trials", "deterministic", second_p),
    ("q at trials", "sampled", at(None, renormalised, verdict__q_trial=lambda p, i: p.tree.q[i])),
    ("q at trials", "deterministic", at(REJECTED, verdict__q_trial=0.5)),
    ("residual mass", "sampled", MASS),
    ("residual mass", "deterministic", MASS),
    ("siblings", "sampled", TWIN),
    ("paths", "sampled", of(lambda p: p.verdict.accepted, verdict__path=lambda p: p.verdict.path[:-1])),
    ("kind of final token", "sampled", of(recovered, verdict__kind=FinalKind.BONUS)),
    ("final tokens", "sampled", rejected_came_out),
    ("final tokens", "deterministic", rejected_came_out),
    ("coins", "greedy", ANOTHER_COIN),
    ("coins unequal", "sampled", at(UNTRIED, lambda p, i: i > 0, verdict__coin=lambda p, i: p.verdict.coin[i - 1])),
    ("target's choice", "sampled", first_parent(lambda p: p.parents.choice_p[0] >= 0.01, choice_p=0.0)),
    ("ranks", "sampled", at(REJECTED, lambda p, i: p.verdict.p[i] > 0.02, parents__rank=100)),
    ("raw probabilities", "sampled", at(REJECTED, parents__raw_p=1.0)),
    ("drafter's likeliest", "sampled", first_parent(choice_q=1.0, choice_rank=2)),
    (
        "drafter's likeliest",
        "deterministic",
        of(noted, notes__prob=lambda p: put(p.notes.prob, 0, 0.5)),
    ),  # a first child's
    ("entropies", "sampled", first_parent(UNSURE, entropy=0.0)),
    ("greedy tokens", "greedy", at(REJECTED, verdict__p=0.3)),
    ("greedy tokens", "greedy", of(recovered, verdict__token=lambda p: (p.verdict.token + 1) % 256)),
    ("entropy of the final draw", "sampled", of(lambda p: 0.01 < p.verdict.final_p < 0.9, parents__final_entropy=0.0)),
    ("share of the final token", "deterministic", of(known_share, verdict__final_p=lambda p: p.verdict.final_p / 2)),
    ("step numbers", "sampled", of(lambda p: p.index == 4, index=5)),
    ("tokens in the cache", "sampled", SHIFTED),
    ("positions", "sampled", SHIFTED),
    ("tokens emitted", "sampled", NOT_ALL_EMITTED),
    ("outputs", "sampled", NOT_ALL_EMITTED),
    ("what preceded", "sampled", of(lambda p: p.preceded is Preceded.NOTHING, preceded=Preceded.PREEMPTION)),
    ("accepted KV moved", "moved", of(lambda p: len(p.moved), moved=np.zeros(0, np.int32))),
    ("blocks kept", "sampled", of(lambda p: p.context_len % 16 and p.index > 1, blocks=lambda p: p.blocks + 50)),
]


LATER = ("outputs", "step numbers", "positions", "tokens in the cache")  # seen where the request goes on, or ends


@pytest.mark.parametrize(("name", "run", "change"), EDITS, ids=lambda value: value if isinstance(value, str) else "")
def test_one_edit_is_convicted(runs, name, run, change):
    assert passed(runs[run], name)
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
    return (part if part.index else replaced(part, prefill_tokens=part.prefill_tokens - 1) for part in record.requests)


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


def no_such(reason):
    return ending(reason=reason, stop="no such text")


def untold(record):
    return replace(record, preempted=())


RECORDS = [  # check, run, what becomes of each record of a history, words
    ("requests in a batch", "sampled", parts_of(lambda r: (*r.requests, *r.requests[:1])), "twice in one step"),
    ("prompt fed", "sampled", parts_of(unfed), "were due"),
    ("blocks written", "sampled", parts_of(shared), "is written by"),
    ("blocks kept", "sampled", taken(), "holds tokens of"),
    ("outputs", "sampled", ending(output=np.arange(3, dtype=np.int32)), "the output has 3"),
    ("outputs", "sampled", allowed(2), "where 2 were allowed"),
    ("ends", "sampled", allowed(1000), "of 1000 tokens"),
    ("ends", "sampled", no_such(FinishReason.EOS), "which is not in the output"),
    ("ends", "sampled", no_such(FinishReason.STOP), "which is not in the output"),
    ("tokens in the cache", "preempted", untold, "tokens in the cache"),
    ("what preceded", "preempted", untold, "says `preemption`"),
]


@pytest.mark.parametrize(("name", "run", "change", "words"), RECORDS, ids=lambda x: x if isinstance(x, str) else "")
def test_one_edit_of_a_record_is_convicted(runs, name, run, change, words):
    history = runs[run]
    assert failed(history) == []
    assert passed(history, name)
    found = check(rebuilt(history, change), name)
    assert found.result is CheckResult.FAILED
    assert words in found.detail


def test_a_token_lost_at_a_preemption(runs):
    """What comes back has one token less than was committed."""

    def less(part):
        back = part.index and part.preceded is Preceded.PREEMPTION and part.prefill_tokens
        return replace(part, prefill_tokens=part.prefill_tokens - 1) if back else None

    assert "positions" in failed(changed(runs["preempted"], less))


def test_steps_that_are_known_to_be_missing_are_no_fault(runs):
    history = rebuilt(runs["sampled"], lambda record: None if record.step == 9 else record)
    assert "step numbers" in failed(history)
    history.lost = 1
    assert failed(history) == []


@pytest.mark.parametrize("drafter", ["ngram", "eagle dynamic"])
def test_a_run_that_went_back_is_consistent(engines, drafter):
    """KV that was computed again may lie in other blocks than the record of the first time says."""
    engine = engines[drafter]
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
    history = History(run=engine.run_info, vocabulary=engine.vocabulary)
    for _, record in sorted(found.items()):
        history.append(record)
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
    again = edited(history, lambda part: replaced(part, tree__drawn=np.full(3, Drawn.WITHOUT_REPLACEMENT, np.uint8))
                   if part.verdict.outcome[1] else None)  # fmt: skip
    assert "q at trials" in failed(again)


def of_vllm(history, **fields):
    """The history, said to be another engine's."""
    history.run = replace(history.run, versions={"vllm": "0.33"}, **fields)
    return history


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

    history = rebuilt(runs["sampled"], filled)
    assert check(of_vllm(history, drafter="eagle"), "drafts in place").result is CheckResult.FAILED
    of_ngram = check(of_vllm(history, drafter="ngram"), "drafts in place")
    assert of_ngram.result is CheckResult.SKIPPED  # nothing else was drafted
