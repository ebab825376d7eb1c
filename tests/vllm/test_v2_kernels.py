"""V2's rejection sampler and its real kernels, from vLLM's sources alone, run by Triton's interpreter under our hooks.

python -m tests.vllm.sources FOLDER; SPECSCOPE_VLLM_SOURCE=FOLDER/vllm pytest -m slow tests/vllm/test_v2_kernels.py
"""

import functools
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.runtime.interpreter as interpreter

from specscope.trace.record.records import FinalKind
from specscope.vllm import known
from tests.vllm import interpreted
from tests.vllm.small import SLOTS, Request, Speculation, V2Sampler, params, parts, record
from tests.vllm.sources import REJECTION, sources
from tests.vllm.test_recording import failed

SOURCES = os.environ.get("SPECSCOPE_VLLM_SOURCE", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCES, reason="SPECSCOPE_VLLM_SOURCE=FOLDER[:FOLDER] names no sources of vLLM"),
]
HEAT = {"a": 0.0, "b": 0.7, "c": 1.0, "d": 1.4}
SEEDS = (5, 2**31 - 3, 1, 99991)
K = 3


@pytest.fixture(params=SOURCES.split(os.pathsep), scope="module")
def vllm(request):
    """The module of the rejection sampler."""
    builder, own = interpreter.InterpreterBuilder, sources(Path(request.param))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("create_masked_load", "create_masked_store"):
            patch.setattr(builder, name, getattr(builder, name))
        interpreted.take_integer_masks()
        yield own.load(patch, REJECTION)[0]
    own.forget()


@dataclass
class Spec(Speculation):
    """With what its other rules ask."""

    enable_adaptive_verification: bool = False
    synthetic_acceptance_rates: tuple = (0.8, 0.5, 0.3)
    fly_window_size: int = 1
    fly_entropy_threshold: float = 0.3
    fly_entropy_top_k: int = 3


class PlainSampler(V2Sampler):
    """With what the rejection sampler asks of vLLM's."""

    compute_nans = use_fp64_gumbel = return_sampling_mask = False
    logprobs_mode = "raw_logprobs"

    def __init__(self, engine):
        super().__init__(engine)
        self.sampling_states.max_num_logprobs = lambda slots: -1
        lengths = np.zeros(SLOTS, np.int32)
        self.lengths = lengths  # by slot; drafts up to there are none
        self.req_states = SimpleNamespace(prefill_len=SimpleNamespace(np=lengths, gpu=torch.from_numpy(lengths)))

    def apply_sampling_params(self, logits, slots, *rest):
        heat = self.sampling_states.temperature.gpu[slots][:, None]
        return logits / torch.where(heat == 0, 1, heat)


class Kernels:
    """Runs of the small engine whose steps with drafts the real kernels decide."""

    def __init__(self, vllm):
        self.rejection, self.chunks, self.given = (
            vllm,
            [],
            [],
        )  # of each step with drafts: calls of `_verify`; what came out

    def sampler(self):
        """The real one, with a constructor like the small one's; its tokens become the step's."""
        kernels, real = self, self.rejection.RejectionSampler

        class RejectionSampler(real):
            def __init__(self, engine, sampler):
                super().__init__(sampler, engine.spec, torch.device("cpu"))
                self.engine = engine

            def __call__(self, logits, batch, draft_logits=None, invalid_drafts=None):
                invalid = batch.input_ids < 0
                batch.input_ids = torch.where(invalid, 0, batch.input_ids)
                batch.logits_indices = torch.arange(len(batch.input_ids))
                batch.cu_num_logits_np = batch.cu_num_logits.numpy()
                batch.seq_lens = (batch.positions[batch.cu_num_logits[1:] - 1] + 1).int()
                batch.expanded_local_pos = batch.expanded_local_pos.int()
                kernels.chunks.append(0)
                made = super().__call__(logits, batch, draft_logits, invalid if invalid.any() else None)
                rows = zip(made.sampled_token_ids, made.num_sampled.tolist(), strict=True)
                self.engine.runner.step.tokens = [row[:n].tolist() for row, n in rows]
                kernels.given.append(dict(zip(batch.req_ids, self.engine.runner.step.tokens, strict=True)))

            @functools.wraps(real._verify)
            def _verify(self, *args, **kwargs):
                kernels.chunks[-1] += 1
                return super()._verify(*args, **kwargs)

        return RejectionSampler

    def run(self, method="standard", *, sampled=True, chunk=None, steps=12, run=lambda engine: None, **engine):
        """The history of some steps behind the prompts: what is recorded is what the kernels gave."""

        def some(made):
            run(made)
            for _ in range(steps + 1):
                made.step()

        self.rejection.get_max_chunk_logits = lambda vocabulary: chunk or 10**6
        function = self.rejection.rejection_sample
        others = {
            known.V2_REJECTION: {"RejectionSampler": self.sampler(), "rejection_sample": function},
            known.V2_PLAIN: {"Sampler": PlainSampler},
        }
        spec = Spec(draft_sample_method="probabilistic" if sampled else "greedy", rejection_sample_method=method)
        asked = zip(HEAT.items(), SEEDS, strict=True)
        requests = [Request(n, params(temperature=heat, seed=seed, max_tokens=1000)) for (n, heat), seed in asked]
        engine = {"config": {"max_model_len": 1000}, **engine}
        history, _, _ = record(requests, spec, run=some, others=others, v2=True, **engine)
        assert failed(history) == []
        recorded = [
            {part.request: part.tokens() for part in step.requests} for step in history.steps[1:] if step.requests
        ]
        assert recorded == self.given
        return history


@pytest.mark.parametrize("sampled", [True, False], ids=["drafts sampled", "drafts greedy"])
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("chunk", [None, 9], ids=["whole", "in chunks"])
def test_lossless_rules(vllm, method, sampled, chunk):
    """Every accepted count and every final token follows from the recorded p, q and coins."""
    kernels = Kernels(vllm)
    history = kernels.run(method, sampled=sampled, chunk=chunk)
    assert set(kernels.chunks) == {2 if chunk else 1}  # calls of `_verify` in a step: two requests fit into nine rows
    tally = Counter()
    for part in (part for step in history.steps[1:] for part in step.requests):
        verdict, heat = part.verdict, HEAT[part.request]
        tally[verdict.kind] += 1
        assert verdict.rule == method
        assert part.tree.is_sampled is (sampled and heat > 0)
        if heat == 0:
            continue
        accepts = verdict.coin <= verdict.accept_prob
        count = len(accepts) if accepts.all() else int(accepts.argmin())
        if method == "block":
            passed = np.flatnonzero(accepts)  # the longest prefix that passes, whatever lies before it
            count = int(passed[-1]) + 1 if len(passed) else 0
        assert verdict.accepted == count
    assert min(tally[FinalKind.BONUS], tally[FinalKind.RECOVERED]) > 0


@pytest.mark.parametrize("sampled", [True, False], ids=["drafts sampled", "drafts greedy"])
@pytest.mark.parametrize("method", ["fly", "synthetic"])
def test_rules_that_are_not_lossless(vllm, method, sampled):
    """They are recorded as what they are, and nothing is proved of them that only a lossless rule has to keep."""
    if method == "fly" and "fly" not in Path(vllm.__file__).read_text():
        pytest.skip("this vLLM has no such rule")
    judged = [part.verdict for part in parts(Kernels(vllm).run(method, sampled=sampled)) if len(part.tree)]
    assert {verdict.rule for verdict in judged} == {f"lossy:{method}"}
    coins = [v for v in judged if v.coin.any()]
    assert any((v.coin[: v.accepted] > v.accept_prob[: v.accepted]).any() for v in coins)  # accepted against its coin


def test_placeholders_are_no_drafts(vllm):
    """Of a prompt that ends here, as where its KV came from elsewhere."""

    def run(engine):
        engine.step()
        engine.runner.sampler.lengths[:] = 7
        engine.step()
        engine.runner.sampler.lengths[:] = 0

    history = Kernels(vllm).run(steps=1, run=run)
    first, *later = history.steps[1:]
    for part in first.requests:
        assert (len(part.tree), part.verdict.kind, part.sizing) == (0, FinalKind.TARGET, "3 invalid drafts left out")
    assert {len(part.tree) for step in later for part in step.requests} == {K}


def test_drafts_that_a_grammar_refuses(vllm):
    """The chain ends before the first of them; the token there is drawn from p."""
    history = Kernels(vllm).run(invalid=range(2, 9))
    told = [(len(part.tree), part.sizing) for step in history.steps[2:9] for part in step.requests]
    assert set(told) == {(1, "2 invalid drafts left out")}
