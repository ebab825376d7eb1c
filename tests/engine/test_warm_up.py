"""Nothing is compiled in the middle of a run: what it launches was launched before the first request."""

import pytest

from specscope import Engine, SamplingParams
from specscope.engine.build import warm_up
from specscope.kernels import launch
from tests.heads import head_tensors, write_head
from tests.kernels.variants import H100, watched

PROMPTS = ["long " * 9, "the cat sat on the mat, the cat"]
PARAMS = [
    SamplingParams(max_tokens=3, temperature=0.9, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=0.8, seed=3, ignore_eos=True, repetition_penalty=1.3),
]
DRAFTERS = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram", "tree": "2x3", "ngram_min": 1},
    "draft_model": {"drafter": "draft_model", "draft_model": "self:2", "tree": "[(0,), (1,), (1, 0)]"},
    "eagle": {"drafter": "eagle", "tree": "dynamic:3,depth=2,top=2"},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) == ("eagle", "float32") else pytest.mark.slow)
        for name, dtype in zip(DRAFTERS, ["float32", "bfloat16"] * 2, strict=True)
    ],
)
def test_a_run_compiles_nothing_that_was_not_compiled_at_its_start(deep, tmp_path, monkeypatch, name, dtype):
    """As it would be launched on an H100, with contexts that are worth splitting."""
    monkeypatch.setattr(launch, "limits", lambda _: H100)
    monkeypatch.setattr(launch, "LEAST_BLOCKS", 1)
    monkeypatch.setattr(launch, "BUFFERS", ((16, 2),))
    how = dict(DRAFTERS[name])
    if name == "eagle":
        how["draft_model"] = str(write_head(tmp_path / "head", head_tensors()))
    engine = Engine(
        target=str(deep), dtype=dtype, kv_memory=0.02, backend="triton", device="cpu", max_step_tokens=16, **how
    )
    with watched(dry=True) as known:
        warm_up(engine.runner, engine.drafter, engine.max_context)
    with watched() as launched:
        engine.generate(PROMPTS, PARAMS)
    assert launched <= known, "\n".join(map(repr, launched - known))
    assert {dict(one.constants).get("SPLIT") for one in launched} >= {True, False}
    assert len(known) < 32
