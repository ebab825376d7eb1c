"""The plugin in a small SGLang: what it records can be put on trial, output is as without it, and its hooks fit."""

import logging
import re
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from specscope.analyze.findings import CheckResult
from specscope.analyze.verify.trial import judge
from specscope.sglang import hooks as known
from specscope.sglang import plugin, verification
from specscope.sglang.verification import Verification
from specscope.trace.inside.hooking import ErrorGuard, around
from specscope.trace.record.records import FinishReason, Outcome, Preceded
from specscope.trace.record.rules import BLOCK, MATCH, STANDARD, UNSEEN
from tests.sglang import stand
from tests.sglang.wheel import SOURCES
from tests.support.sources import skeleton

CHAIN = stand.Settings()
TREE = stand.Settings(speculative_eagle_topk=2, speculative_num_draft_tokens=6, speculative_num_steps=2)
RATIOS = replace(CHAIN, speculative_use_rejection_sampling=True)
BLOCKS = replace(RATIOS, speculative_use_block_verification=True)
CASES = {
    "chain": (CHAIN, {}, MATCH),
    "chain, greedy": (CHAIN, stand.GREEDY, STANDARD),
    "tree": (TREE, {}, MATCH),
    "tree, greedy": (TREE, stand.GREEDY, STANDARD),
    "tree, hot and cut": (TREE, {"temperature": 1.4, "top_k": 5}, MATCH),
    "ratios": (RATIOS, {}, STANDARD),
    "ratios, cold": (RATIOS, {"temperature": 0.6}, STANDARD),
    "ratios, greedy": (RATIOS, stand.GREEDY, STANDARD),
    "blocks": (BLOCKS, {}, BLOCK),
}


# SGLang puts the breadth of its lookups into topk, 10 where it is not asked for another
OF_TEXT = {"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 10, "speculative_draft_model_path": ""}
LOOKUP = replace(CHAIN, speculative_num_draft_tokens=3, **OF_TEXT)
PADDED = replace(LOOKUP, speculative_num_draft_tokens=8)


def requests(count=4, **params):
    return [stand.Req(f"r{i}", [1, 2, 3 + i % 6], stand.params(**params)) for i in range(count)]


def steps(history):
    return [part for record in history.steps for part in record.requests]


def decoded(history):
    return [part for part in steps(history) if len(part.tree)]


def failed(history):
    return [check.name for check in judge(history, source="a test").checks if check.result is CheckResult.FAILED]


def outputs(reqs):
    return [list(req.output_ids_through_stop) for req in reqs]


@pytest.mark.every(2)
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("name", CASES)
def test_verify_passes_counts_are_sglangs_and_output_is_as_without(anywhere, name, overlap):
    spec, params, rule = CASES[name]
    with_plugin, without = requests(**params), requests(**params)
    history, engine = anywhere(spec, with_plugin, overlap=overlap)
    anywhere(spec, without, environment={"SPECSCOPE_CAPTURE": ""}, overlap=overlap)
    assert outputs(with_plugin) == outputs(without)
    assert failed(history) == []
    parts = decoded(history)
    assert {part.rule for part in parts} == {rule}
    assert [part.verdict.accepted for part in parts] == engine.counts
    made = {end.info.id: end.output.tolist() for record in history.steps for end in record.finished}
    assert [made[req.rid] for req in with_plugin] == outputs(with_plugin)
    assert all(part.rule == UNSEEN for part in steps(history) if not len(part.tree))
    if params != stand.GREEDY:  # and each accepted count follows from its coins: verify's outcomes
        assert any((part.verdict.outcome == Outcome.REJECTED).any() for part in parts)
        assert all(0 < part.verdict.final_coin < 1 for part in parts)


def test_greedy_and_sampled_requests_of_one_batch(recorded):
    reqs = requests(3) + [replace(req, rid=f"g{req.rid}") for req in requests(3, **stand.GREEDY)]
    history, _ = recorded(TREE, reqs)
    assert failed(history) == []
    greedy = [part for part in decoded(history) if part.request.startswith("g")]
    assert greedy
    assert all(np.isin(part.verdict.p, (0, 1)).all() and not part.verdict.coin.any() for part in greedy)
    params = {info.id: info.params for record in history.steps for info in record.admitted}
    assert (params["gr0"].temperature, params["r0"].temperature) == (0, 1)


def test_the_drafters_scores_are_those_of_its_table(recorded):
    history, _ = recorded(TREE, requests(2))
    q = stand.tables()[1].softmax(-1).numpy()
    for part in decoded(history):
        above = [part.verdict.token if parent < 0 else part.tree.token[parent] for parent in part.tree.parent]
        at_depth_2 = part.tree.parent >= 0
        expected = q[np.array(above), part.tree.token]
        np.testing.assert_allclose(part.notes.prob[at_depth_2], expected[at_depth_2], rtol=1e-4)
        assert (np.exp(part.notes.score) <= part.notes.prob + 1e-6).all()


def test_raw_rows_are_those_before_penalties(anywhere):
    penalty = torch.zeros(1, stand.VOCABULARY)
    penalty[0, :4] = -3
    reqs = requests(8, logit_bias={"0": -3, "1": -3, "2": -3, "3": -3})
    history, engine = anywhere(CHAIN, reqs, penalty=penalty)
    raw, ruled = (rows.softmax(-1).numpy() for rows in (engine.target, engine.target + penalty))
    for part in decoded(history):
        if part.verdict.accepted:
            first, second = part.tree.token[:2]
            assert part.parents.raw_p[1] == pytest.approx(raw[first, second], rel=1e-4)
            assert part.verdict.p[1] == pytest.approx(ruled[first, second], rel=1e-4)
    assert any(part.verdict.accepted for part in decoded(history))


def test_on_a_cpu_every_request_is_greedy_and_that_is_said(recorded, caplog):
    caplog.set_level(logging.WARNING)
    history, _ = recorded(TREE, requests(temperature=0.8), on_cpu=True)
    assert failed(history) == []
    assert history.run.speculation["decoded_greedily"]
    (info, *_) = [info for record in history.steps for info in record.admitted]
    assert info.params.temperature == 0
    assert info.labels["temperature"] == "0.8 was requested, but this device decodes greedily"
    assert all(np.isin(part.verdict.p, (0, 1)).all() for part in decoded(history))
    assert "on this device SGLang decodes greedily at any temperature" in caplog.text


def wrong_row(**called):
    called["target_probs"] = called["target_probs"].roll(1, dims=1)
    return called


def thresholds_untold(**called):
    return called | {"threshold_single": 1.0, "threshold_acc": 1.0}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("spec", "falsify"),
    [
        (TREE, wrong_row),
        (CHAIN, wrong_row),
        (RATIOS, wrong_row),
        (replace(CHAIN, speculative_accept_threshold_single=0.1), thresholds_untold),
        (replace(TREE, speculative_accept_threshold_acc=0.5), thresholds_untold),
    ],
    ids=["tree, p of another row", "chain, p of another row", "ratios, p of another row", "single", "acc"],
)
def test_what_is_recorded_wrongly_or_told_as_another_rule_is_convicted(anywhere, monkeypatch, spec, falsify):
    kind = verification.Verification
    sampled = kind.sampled
    monkeypatch.setattr(kind, "sampled", lambda seen, called, *, chain: sampled(seen, falsify(**called), chain=chain))
    history, _ = anywhere(spec, requests(30))
    assert failed(history)


def test_a_tree_of_a_text_is_recorded(recorded):
    history, engine = recorded(LOOKUP, requests(12))
    assert failed(history) in ([], ["placeholders"])  # of twelve tokens some are drafted often, whoever drafts
    assert [part.verdict.accepted for part in decoded(history)] == engine.counts
    assert (history.run.drafter, history.run.tree) == ("ngram", "dynamic:2,depth=2,top=2")


def test_the_padding_of_an_ngram_tree_is_convicted(recorded):
    """SGLang 0.5.23 fills a tree with token 0 below the root, and its kernel counts p of that token once for each."""
    history, _ = recorded(PADDED, requests(30))
    assert {"siblings", "p at later trials"} <= set(failed(history))
    parts = [part for part in decoded(history) if part.tree.token[0] != 0]
    came = sum(part.tokens()[0] == 0 for part in parts)
    assert came > 3 * sum(float(part.verdict.p[part.tree.token == 0][0]) for part in parts)


def test_requests_of_its_own_are_left_out(recorded):
    """A probe of its health; and, before several outputs of a prompt, a request of no tokens, which fills the cache."""
    probe, empty = (stand.Req("HEALTH_CHECK_1", [1, 2]), stand.Req("own", [1, 2], stand.params(max_new_tokens=0)))
    history, _ = recorded(CHAIN, [probe, *requests(2), empty])
    assert set(history.requests) == {"r0", "r1"}
    assert failed(history) == []


def test_shutdown_gives_the_schedulers_time_to_write(monkeypatch):
    waited = []
    monkeypatch.setattr(plugin, "time", SimpleNamespace(sleep=waited.append))
    assert around(plugin.before_shutdown)(lambda: "ended") == "ended"
    assert waited == [plugin.GRACE_SECONDS]


def test_nothing_is_done_where_no_variable_asks_or_no_scheduler_is(monkeypatch):
    for name in ("SPECSCOPE_CAPTURE", "SPECSCOPE_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plugin, "_install", lambda *_: 1 / 0)
    plugin.register()
    monkeypatch.undo()
    monkeypatch.setenv("SPECSCOPE_CAPTURE", "a.jsonl")
    plugin.register()  # SGLang's modules are not there


ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_each_known_version_is_as_its_source_has_it(source):
    assert known.difference(skeleton(source / "sglang", name) for name in known.WRAPPED) == ""


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_what_the_plugin_imports_is_there(source):
    imported = {plugin.REGISTRY: ("HookRegistry", "HookType")}
    imported[plugin.CONTEXT] = ("get_parallel", "get_spec", "get_server_args")
    for module, names in imported.items():
        assert set(names) <= set(vars(skeleton(source / "sglang", module)))
    verify = (source / "sglang/srt/speculative/eagle_utils.py").read_text()
    assert all(re.search(rf"^{flag} = ", verify, re.M) for flag in ("_is_cpu", "_is_hip", "_is_xpu"))
    spec = (source / "sglang/srt/speculative/spec_utils.py").read_text()
    assert re.search(r"^SIMULATE_ACC_LEN = ", spec, re.M)


def test_what_is_wrapped_is_what_is_known():
    hooks = known.ServerHooks(plugin, lambda processor, req: None, ErrorGuard(), full=True)
    targets = hooks.targets()
    compared = {name: set(functions) - {"_verify_uses_greedy"} for name, functions in known.WRAPPED.items()}
    assert {name: set(functions) for name, functions in targets.items()} == compared


def test_the_entry_point_is_the_plugins():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (value,) = project["entry-points"]["sglang.srt.plugins"].values()
    assert EntryPoint("specscope", value, "sglang.srt.plugins").load() is plugin.register


def test_a_source_that_lacks_a_module_says_which(tmp_path):
    assert known.difference([skeleton(tmp_path, known.VERIFY)]) == f"{known.VERIFY}.eagle_sample is missing"


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
