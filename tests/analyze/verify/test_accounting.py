"""Positions, tokens, requests and blocks from step to step: each check convicts one edit of a real run."""

import dataclasses

import numpy as np
import pytest

from specscope import SamplingParams
from specscope.analyze.findings import CheckResult
from specscope.trace.history.history import History
from specscope.trace.record.records import FinishReason, Preceded
from tests.analyze.verify.edits import check, edited, failed, passed, replaced
from tests.engines import PROMPTS, fresh


def rebuilt(history, change):
    """Every record through `change`, which gives the record that stands in its place, or None for none."""
    out = History(run=history.run, vocabulary=history.vocabulary, lost=history.lost)
    for record in history.steps:
        if (new := change(record)) is not None:
            out.append(new)
    return out


def skipped_number(part):
    return replaced(part, index=part.index + 1) if part.index == 4 else None


def shifted(part):
    return replaced(part, context_len=part.context_len + 1) if part.index == 4 else None


def not_all_emitted(part):
    return replaced(part, emitted=part.emitted - 1) if part.emitted > 1 and part.index < 10 else None


def wrong_before(part):
    return replaced(part, preceded=Preceded.PREEMPTION) if part.preceded is Preceded.NOTHING else None


def nothing_moved(part):
    return replaced(part, moved=np.zeros(0, np.int32)) if len(part.moved) else None


def other_block(part):
    """The block that its request's tokens lie in already is not the one it writes to."""
    return replaced(part, blocks=part.blocks + 50) if part.context_len % 16 and part.index > 1 else None


STEPS = [
    ("step numbers", "sampled", skipped_number),
    ("tokens in the cache", "sampled", shifted),
    ("positions", "sampled", shifted),
    ("tokens emitted", "sampled", not_all_emitted),
    ("outputs", "sampled", not_all_emitted),
    ("what preceded", "sampled", wrong_before),
    ("accepted KV moved", "moved", nothing_moved),
    ("blocks kept", "sampled", other_block),
]


@pytest.mark.parametrize(("name", "run", "change"), STEPS, ids=lambda value: getattr(value, "__name__", value))
def test_one_edit_of_a_step_is_convicted(runs, name, run, change):
    assert passed(runs[run], name)
    found = check(edited(runs[run], change), name)
    assert found.result is CheckResult.FAILED
    assert found.detail
    assert found.example


def test_a_request_twice_in_a_batch(runs):
    def twice(record):
        return dataclasses.replace(record, requests=(*record.requests, *record.requests[:1]))

    assert passed(runs["sampled"], "requests in a batch")
    assert check(rebuilt(runs["sampled"], twice), "requests in a batch").result is CheckResult.FAILED


def test_a_prompt_token_that_is_not_fed(runs):
    def less(record):
        parts = [
            dataclasses.replace(p, prefill_tokens=p.prefill_tokens - 1) if not p.index else p for p in record.requests
        ]
        return dataclasses.replace(record, requests=tuple(parts))

    assert passed(runs["sampled"], "prompt fed")
    assert check(rebuilt(runs["sampled"], less), "prompt fed").result is CheckResult.FAILED


def test_one_block_for_two_requests(runs):
    def shared(record):
        if len(record.requests) < 2:
            return record
        first, second, *rest = record.requests
        return dataclasses.replace(record, requests=(first, dataclasses.replace(second, blocks=first.blocks), *rest))

    assert passed(runs["sampled"], "blocks written")
    found = check(rebuilt(runs["sampled"], shared), "blocks written")
    assert found.result is CheckResult.FAILED
    assert "is written by" in found.detail


def test_a_block_that_holds_another_requests_tokens(runs):
    """Block 3 of a request that does not run in this step is written to by one that does."""
    held = {}

    def taken(record):
        parts = list(record.requests)
        for part in parts:
            held.setdefault(part.request, part.blocks[0])
        if record.step == 6:
            other = next(block for name, block in held.items() if name not in (parts[0].request, parts[1].request))
            parts = [dataclasses.replace(parts[0], blocks=np.array([other], np.int32)), parts[1]]
        return dataclasses.replace(record, requests=tuple(parts))

    assert "holds tokens of" in check(rebuilt(runs["sampled"], taken), "blocks kept").detail


def end_with(history, **change):
    """The history with the first end changed."""
    at = first_end(history)

    def changed(record):
        if at not in record.finished:
            return record
        first, *rest = record.finished
        return dataclasses.replace(record, finished=(dataclasses.replace(first, **change), *rest))

    return rebuilt(history, changed)


def first_end(history):
    return next(end for record in history.steps for end in record.finished)


def test_an_output_that_lost_a_token(runs):
    history = runs["sampled"]
    assert passed(history, "outputs")
    found = check(end_with(history, output=np.arange(3, dtype=np.int32)), "outputs")
    assert found.result is CheckResult.FAILED
    assert "the output has 3" in found.detail


@pytest.mark.parametrize("reason", [FinishReason.EOS, FinishReason.STOP])
def test_an_end_without_its_reason(runs, reason):
    assert passed(runs["sampled"], "ends")
    assert "ends" in failed(end_with(runs["sampled"], reason=reason, stop="no such text"))


def test_tokens_after_the_end_of_sequence(runs):
    history = runs["sampled"]
    first = int(next(iter(history.requests.values())).end.output[0])
    history = rebuilt(history, lambda record: record)
    history.run = dataclasses.replace(history.run, eos_tokens=(first,))
    assert "after the end of sequence" in check(history, "ends").detail


def test_a_length_end_that_came_too_soon(runs):
    end = first_end(runs["sampled"])
    params = dataclasses.replace(end.info.params, max_tokens=1000)
    found = check(end_with(runs["sampled"], info=dataclasses.replace(end.info, params=params)), "ends")
    assert "of 1000 tokens" in found.detail


def test_more_than_was_asked_for(runs):
    end = first_end(runs["sampled"])
    params = dataclasses.replace(end.info.params, max_tokens=2)
    found = check(end_with(runs["sampled"], info=dataclasses.replace(end.info, params=params)), "outputs")
    assert "where 2 were allowed" in found.detail


def test_preemption_is_followed(runs):
    """After one a request begins with an empty cache, and its root lies where it would have."""
    history = runs["preempted"]
    assert sum(len(record.preempted) for record in history.steps) > 0
    assert failed(history) == []
    forgotten = rebuilt(history, lambda record: dataclasses.replace(record, preempted=()))
    assert {"tokens in the cache", "what preceded"} <= set(failed(forgotten))


def test_a_token_lost_at_a_preemption(runs):
    """What comes back has one token less than was committed."""
    lost = {name for record in runs["preempted"].steps for name in record.preempted}

    def less(record):
        parts = []
        for part in record.requests:
            back = part.request in lost and part.preceded is Preceded.PREEMPTION and part.prefill_tokens
            parts.append(dataclasses.replace(part, prefill_tokens=part.prefill_tokens - 1) if back else part)
        return dataclasses.replace(record, requests=tuple(parts))

    assert "positions" in failed(rebuilt(runs["preempted"], less))


def test_steps_that_are_known_to_be_missing_are_no_fault(runs):
    def gap(record):
        return None if record.step == 9 else record

    history = rebuilt(runs["sampled"], gap)
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
    for step in sorted(found):
        history.append(found[step])
    assert [record.step for record in history.steps if record.rewound] == [10, 13]
    assert failed(history) == []


def test_a_branch_is_judged_by_itself(runs):
    """An engine that went back and went on otherwise: tokens of the branch it left are not counted twice."""
    history = rebuilt(runs["greedy"], lambda record: record)
    last = history.steps[-1].step
    fork = [r for r in runs["greedy"].steps if r.step > 5]
    for offset, record in enumerate(fork, 1):
        after = 5 if offset == 1 else None
        history.append(dataclasses.replace(record, step=last + offset, branch=1, after=after))
    assert len(history.branches) == 2
    assert failed(history) == []
