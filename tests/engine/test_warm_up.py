"""Nothing is compiled in the middle of a run: what it launches was launched before the first request."""

import pytest

from specscope import SamplingParams
from specscope.engine.build import warm_up
from specscope.kernels import launch
from tests.engine.test_reads import RUNS
from tests.kernels.variants import H100, watched

PROMPTS = ["long " * 7, "the cat sat"]
PARAMS = [SamplingParams(max_tokens=2, temperature=0.9, ignore_eos=True, repetition_penalty=r) for r in (1.0, 1.3)]


SLOW = (("none", "float32"), ("ngram", "bfloat16"), ("draft tree", "bfloat16"))


@pytest.mark.parametrize(
    ("name", "dtype"), [("eagle dynamic", "float32"), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_a_run_compiles_nothing_that_was_not_compiled_at_its_start(make, monkeypatch, name, dtype):
    """As it would be launched on an H100, with contexts that are worth splitting."""
    monkeypatch.setattr(launch, "limits", lambda _: H100)
    monkeypatch.setattr(launch, "LEAST_BLOCKS", 1)
    monkeypatch.setattr(launch, "BUFFERS", ((16, 2),))
    more = {"kv_memory": 0.02, "backend": "triton", "device": "cpu", "max_step_tokens": 16, "max_batch": 8}
    engine = make(name, tree=RUNS[name][0], dtype=dtype, **more)
    with watched(dry=True) as known:
        warm_up(engine.runner, engine.drafter, engine.max_context)
    with watched() as launched:
        engine.generate(PROMPTS, PARAMS)
    assert launched <= known, "\n".join(map(repr, launched - known))
    assert {dict(one.constants).get("SPLIT") for one in launched} >= {True, False}
    assert len(known) < 32
