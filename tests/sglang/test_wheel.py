"""SGLang's own registry, eagle_sample, chain kernel (by Triton's interpreter) and host side, recorded."""

from dataclasses import replace

import pytest
import torch

from specscope.sglang import verification
from specscope.trace.record.records import Outcome
from tests.sglang import stand, wheel
from tests.sglang.recount import accepted
from tests.sglang.test_plugin import CASES, CHAIN, RATIOS, TREE, decoded, failed, requests, thresholds_untold, wrong_row

pytestmark = pytest.mark.skipif(
    not wheel.SOURCES, reason="needs SPECSCOPE_SGLANG_SOURCES: python -m tests.sglang.fetch"
)


@pytest.fixture(params=wheel.SOURCES, ids=lambda source: source.name)
def source(request):
    return request.param


def run(recorded, monkeypatch, source, spec, reqs, **options):
    modules = wheel.install(monkeypatch, source, spec)
    reqs = [wheel.WheelReq(req.rid, req.origin_input_ids, req.sampling_params) for req in reqs]
    return recorded(spec, reqs, modules=modules, processor=wheel.processor, result=wheel.result, **options)


@pytest.mark.parametrize("name", CASES)
def test_its_own_eagle_sample_is_recorded_and_verify_passes(recorded, monkeypatch, source, name):
    spec, params, rule = CASES[name]
    if rule == "block" and source.name == "sglang-0.5.21":
        pytest.skip("0.5.21 has no block verification")
    history, engine = run(recorded, monkeypatch, source, spec, requests(3, **params))
    assert failed(history) == []
    parts = decoded(history)
    assert {part.rule for part in parts} == {rule}
    assert [part.verdict.accepted for part in parts] == engine.counts
    if params != stand.GREEDY:
        assert [accepted(part) for part in parts] == [part.verdict.accepted for part in parts]
        assert any((part.verdict.outcome == Outcome.REJECTED).any() for part in parts)


@pytest.mark.parametrize("name", ["tree", "chain, greedy", "ratios"])
def test_its_steps_may_overlap(recorded, monkeypatch, name):
    spec, params, _ = CASES[name]
    history, engine = run(recorded, monkeypatch, wheel.SOURCES[-1], spec, requests(3, **params), overlap=True)
    assert failed(history) == []
    assert [part.verdict.accepted for part in decoded(history)] == engine.counts


@pytest.mark.parametrize(
    ("spec", "falsify"),
    [
        (TREE, wrong_row),
        (RATIOS, wrong_row),
        (replace(CHAIN, speculative_accept_threshold_single=0.1), thresholds_untold),
    ],
    ids=["tree, p of another row", "ratios, p of another row", "thresholds told as match"],
)
def test_what_is_recorded_wrongly_of_it_is_convicted(recorded, monkeypatch, spec, falsify):
    draws = verification.KernelCall.of
    false = staticmethod(lambda called, *, chain: draws(falsify(**called), chain=chain))
    monkeypatch.setattr(verification.KernelCall, "of", false)
    history, _ = run(recorded, monkeypatch, wheel.SOURCES[-1], spec, requests(24))
    assert failed(history)


def test_penalties_are_written_into_its_logits_and_raw_rows_are_those_before(recorded, monkeypatch):
    penalty = torch.zeros(1, stand.VOCABULARY)
    penalty[0, :4] = -3
    reqs = requests(6, logit_bias={"0": -3})
    history, engine = run(recorded, monkeypatch, wheel.SOURCES[-1], CHAIN, reqs, penalty=penalty)
    raw = engine.target.softmax(-1).numpy()
    accepted_first = [part for part in decoded(history) if part.verdict.accepted]
    assert accepted_first
    for part in accepted_first:
        assert part.parents.raw_p[1] == pytest.approx(raw[tuple(part.tree.token[:2])], rel=1e-4)
