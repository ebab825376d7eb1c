"""Requests from their first token to their end, as SGLang's scheduler moves them; and what the hooks leave alone."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from specscope.sglang import hooks as known
from specscope.sglang.verification import Verification
from specscope.trace.record.records import FinishReason, Preceded
from specscope.trace.record.rules import MATCH, STANDARD, UNSEEN
from tests.sglang import stand
from tests.sglang.test_plugin import CHAIN, TREE, decoded, failed, outputs, requests, steps


def launched(engine, reqs):
    """A step of these requests, all of whose results were taken."""
    tokens = [[*req.origin_input_ids, *req.output_ids] for req in reqs]
    roots = torch.tensor([each[-1] for each in tokens])
    return engine.step(reqs, [len(each) - 1 for each in tokens], roots)


def taken(engine, batch, result):
    engine.processor.process_batch_result_decode(batch, result)


def ended_by(req, kind, **rest):
    """Its next step ends it."""
    req.update_finish_state = lambda new: setattr(req, "finished_reason", stand.reason(kind, **rest))


def finish(engine, reqs, step=launched):
    while live := [req for req in reqs if not req.finished()]:
        taken(engine, *step(engine, live))


def test_a_prompt_in_chunks_and_a_prefix_that_was_found(recorded):
    def run(engine, reqs):
        (req,) = reqs
        for low, high in ((2, 4), (4, 6)):
            req.inflight_middle_chunks = 1
            batch = engine._batch(reqs, [high], None, [low])
            engine.processor.process_batch_result_prefill(batch, SimpleNamespace(next_token_ids=torch.tensor([0])))
        engine.prefill(reqs, prefix=6)
        finish(engine, reqs)

    history, _ = recorded(CHAIN, [stand.Req("r", list(range(1, 10)))], run=run)
    assert failed(history) == []
    assert [(part.context_len, part.prefill_tokens) for part in steps(history)[:3]] == [(2, 2), (4, 2), (6, 2)]
    assert [part.verdict is None for part in steps(history)[:4]] == [True, True, False, False]


def test_a_request_that_loses_its_kv_comes_back(recorded):
    def run(engine, reqs):
        engine.prefill(reqs)
        waiting = launched(engine, reqs)
        reqs[0].is_retracted = True  # while its step runs: what comes is dropped
        taken(engine, *waiting)
        taken(engine, *launched(engine, reqs[1:]))
        reqs[0].is_retracted = False
        engine.prefill(reqs[:1])
        finish(engine, reqs)

    reqs = requests(2)
    history, _ = recorded(CHAIN, reqs, run=run)
    assert failed(history) == []
    assert [record.preempted for record in history.steps if record.preempted] == [("r0",)]
    after = [part for part in steps(history) if part.request == "r0" and part.preceded is Preceded.PREEMPTION]
    assert len(after) == 1
    assert after[0].rule == UNSEEN  # the token that its second prefill gave


def test_a_grammar_that_ends_cuts_the_last_tokens(recorded):
    def run(engine, reqs):
        cls = type(engine.processor)
        resolve = cls._resolve_spec_v2_tokens
        engine.prefill(reqs)
        while True:
            batch, result = launched(engine, reqs)
            if result.accept_lens[0] > 2:
                break
            taken(engine, batch, result)
        cls._resolve_spec_v2_tokens = lambda *given: [tokens[:2] for tokens in resolve(*given)]
        ended_by(reqs[0], "stop", matched=7)
        taken(engine, batch, result)

    reqs = requests(1, max_new_tokens=1000)
    history, _ = recorded(CHAIN, reqs, run=run)
    last = steps(history)[-1]
    assert last.emitted == 2
    assert last.verdict.accepted >= 2
    assert failed(history) == []


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ({"kind": "abort", "message": "Aborted", "status_code": None}, (FinishReason.CANCELLED, "", "")),
        ({"kind": "abort", "message": "no room", "status_code": 500}, (FinishReason.ERROR, "", "no room")),
        ({"kind": "stop", "matched": 7}, (FinishReason.STOP, "", "")),
        ({"kind": "stop", "matched": "]"}, (FinishReason.STOP, "]", "")),
        ({"kind": "stop", "matched": "[0-9]"}, (FinishReason.STOP, "", "")),
    ],
    ids=["aborted", "failed", "stop token", "stop string", "regular expression"],
)
def test_the_reason_of_an_end(recorded, reason, expected):
    def run(engine, reqs):
        engine.prefill(reqs)
        waiting = launched(engine, reqs)
        ended_by(reqs[0], **reason)
        taken(engine, *waiting)

    history, _ = recorded(CHAIN, requests(1, stop_strs=["]"], stop_token_ids={7}), run=run)
    (end,) = [end for record in history.steps for end in record.finished]
    assert (end.reason, end.stop, end.error) == expected


@pytest.mark.parametrize("params", [{}, stand.GREEDY], ids=["sampled", "greedy"])
def test_dflash_is_recorded_where_it_verifies_a_block(recorded, params):
    """Its worker hands over no requests: they are those of the result."""

    def verified(engine, live):
        tokens = [[*req.origin_input_ids, *req.output_ids] for req in live]
        batch = engine._batch(live, [len(t) - 1 for t in tokens], torch.tensor([t[-1] for t in tokens]))
        candidates = engine.worker.draft(batch).draft_token.view(len(live), -1)
        lens, _, bonus, *_ = (
            sys.modules[known.DFLASH]
            .DFlashWorkerV2()
            ._accept_block(
                candidates=candidates,
                next_token_logits=engine.target[candidates.flatten()],
                sampling_info=batch.sampling_info,
                draft_input=None,
                prefix_lens=batch.seq_lens,
                bs=len(live),
            )
        )
        ids = candidates.roll(-1, 1).scatter(1, lens[:, None].long(), bonus[:, None].long()).flatten()
        told = {"accept_lens": lens + 1, "speculative_num_draft_tokens": candidates.shape[1]}
        return batch, SimpleNamespace(next_token_ids=ids, **told)

    def run(engine, reqs):
        engine.prefill(reqs)
        finish(engine, reqs, verified)

    spec = stand.Settings(speculative_algorithm="DFLASH")
    history, _ = recorded(spec, requests(6, **params), run=run)
    parts = decoded(history)
    assert failed(history) == []
    assert {part.rule for part in parts} == {STANDARD if params else MATCH}
    assert all(part.method.one_pass for part in parts)
    assert history.run.drafter == "dflash"


def test_an_error_in_the_hooks_changes_nothing_and_they_step_aside(recorded, monkeypatch, caplog):
    without = requests()
    recorded(TREE, without, environment={"SPECSCOPE_CAPTURE": ""})
    monkeypatch.setattr(Verification, "judged", lambda _: 1 / 0)
    reqs = requests()
    history, _ = recorded(TREE, reqs, ends=False)
    assert outputs(reqs) == outputs(without)
    assert decoded(history) == []
    assert "switched off: 5 errors" in caplog.text


def test_a_changed_signature_is_refused_in_one_line_and_nothing_is_wrapped(recorded, monkeypatch, caplog):
    module = ModuleType(known.VERIFY)

    def eagle_sample(verify_input, batch, logits_output, grammar_mask=None, beams=1): ...

    eagle_sample.__module__ = known.VERIFY
    module.eagle_sample = eagle_sample
    recorded(CHAIN, requests(1), modules={known.VERIFY: module}, run=lambda *_: None)
    (line,) = caplog.messages
    assert line.startswith("specscope: switched off: SGLang unknown is unknown to specscope: ")
    assert "eagle_sample takes (verify_input, batch, logits_output, grammar_mask, beams), not" in line
    assert module.eagle_sample is eagle_sample
