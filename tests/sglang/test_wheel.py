"""SGLang's own registry, eagle_sample, chain kernel (by Triton's interpreter) and host side, recorded."""

import pytest

from specscope.trace.record.records import Outcome
from tests.sglang import stand, wheel
from tests.sglang.recount import accepted
from tests.sglang.test_plugin import CASES, decoded, failed, requests

pytestmark = pytest.mark.skipif(
    not wheel.SOURCES, reason="needs SPECSCOPE_SGLANG_SOURCES: python -m tests.sglang.fetch"
)


@pytest.fixture(params=wheel.SOURCES, ids=lambda source: source.name)
def source(request):
    return request.param


@pytest.mark.parametrize("name", CASES)
def test_its_own_eagle_sample_is_recorded_and_verify_passes(recorded, monkeypatch, source, name):
    spec, params, rule = CASES[name]
    if rule == "block" and source.name == "sglang-0.5.21":
        pytest.skip("0.5.21 has no block verification")
    modules = wheel.install(monkeypatch, source, spec)
    reqs = [wheel.WheelReq(req.rid, req.origin_input_ids, req.sampling_params) for req in requests(3, **params)]
    history, engine = recorded(spec, reqs, modules=modules, processor=wheel.processor, result=wheel.result)
    assert failed(history) == []
    parts = decoded(history)
    assert {part.rule for part in parts} == {rule}
    assert [part.verdict.accepted for part in parts] == engine.counts
    if params != stand.GREEDY:
        assert [accepted(part) for part in parts] == [part.verdict.accepted for part in parts]
        assert any((part.verdict.outcome == Outcome.REJECTED).any() for part in parts)
