"""V2's rejection sampler and its real kernels, from vLLM's sources alone, run by Triton's interpreter under our hooks.

python -m tests.vllm.sources FOLDER; SPECSCOPE_VLLM_SOURCE=FOLDER/vllm pytest -m slow tests/vllm/test_v2_kernels.py
"""

import dataclasses
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

from specscope.analyze.findings import CheckResult
from specscope.analyze.verify.trial import judge
from specscope.trace.history.history import History
from specscope.trace.inside.hooking import ErrorGuard
from specscope.trace.inside.recorder import Recorder
from specscope.trace.record.records import FinalKind
from specscope.trace.record.vocabulary import Vocabulary
from specscope.vllm.scheduling import ATTRIBUTE, SchedulerNotes
from specscope.vllm.v2.runner import V2Hooks
from specscope.vllm.v2.scores import DraftLogits
from specscope.vllm.witness import Witness
from tests.vllm import interpreted
from tests.vllm.fakes import run_info
from tests.vllm.small import params
from tests.vllm.sources import ADAPTIVE, REJECTION, modules

SOURCES = os.environ.get("SPECSCOPE_VLLM_SOURCE", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCES, reason="SPECSCOPE_VLLM_SOURCE=FOLDER[:FOLDER] names no sources of vLLM"),
]
V, K, SLOTS, PROMPT = 40, 3, 6, 10
HEAT = [0.0, 0.7, 1.0, 1.4]
NAMES = ["a", "b", "c", "d"]


@pytest.fixture(params=SOURCES.split(os.pathsep), scope="module")
def vllm(request):
    """(The module of the rejection sampler, that of adaptive verification.)"""
    builder = interpreter.InterpreterBuilder
    before = {name: getattr(builder, name) for name in ("create_masked_load", "create_masked_store")}
    interpreted.take_integer_masks()
    with modules(Path(request.param), REJECTION, ADAPTIVE) as loaded:
        yield loaded
    for name, function in before.items():
        setattr(builder, name, function)


class Both:
    """vLLM's UvaBackedTensor."""

    def __init__(self, values, dtype):
        self.gpu = torch.tensor(values, dtype=dtype)
        self.np = self.gpu.numpy()


@dataclass
class Batch:
    """vLLM's InputBatch, as far as the rejection sampler and the hooks read it."""

    req_ids: list[str]
    num_draft_tokens: int
    num_draft_tokens_per_req: np.ndarray
    num_scheduled_tokens: np.ndarray
    num_computed_tokens_np: np.ndarray
    prefill_len_np: np.ndarray
    cu_num_logits: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    idx_mapping: torch.Tensor
    expanded_idx_mapping: torch.Tensor
    expanded_local_pos: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def num_reqs(self):
        return len(self.req_ids)

    @property
    def logits_indices(self):
        return torch.arange(len(self.input_ids))

    @property
    def idx_mapping_np(self):
        return self.idx_mapping.numpy()

    @property
    def cu_num_logits_np(self):
        return self.cu_num_logits.numpy()

    @property
    def seq_lens_cpu_upper_bound(self):
        return torch.from_numpy(self.num_computed_tokens_np + self.num_scheduled_tokens)


class PlainSampler:
    """What the rejection sampler asks of vLLM's Sampler; a prompt's first token goes through it alone."""

    compute_nans = use_fp64_gumbel = return_sampling_mask = False
    logprobs_mode = "raw_logprobs"

    def __init__(self):
        slots = torch.tensor([4, 0, 5, 2])  # a request's
        heat, seeds = torch.full((SLOTS,), 9.0), torch.full((SLOTS,), 99)
        heat[slots], seeds[slots] = torch.tensor(HEAT), torch.tensor([-5, 2**40 + 3, 1, 99991])
        self.slots = slots
        self.sampling_states = SimpleNamespace(
            temperature=Both(heat.tolist(), torch.float32),
            seeds=Both(seeds.tolist(), torch.int64),
            max_num_logprobs=lambda slots: -1,
        )
        self.req_states = SimpleNamespace(prefill_len=Both([PROMPT] * SLOTS, torch.int32))

    def apply_sampling_params(self, logits, slots, *rest):
        heat = self.sampling_states.temperature.gpu[slots][:, None]
        return logits / torch.where(heat == 0, 1, heat)

    def sample(self, logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos):
        processed = self.apply_sampling_params(logits, expanded_idx_mapping)
        return processed.argmax(1), processed

    def _sample_random(self, use_fused_sampler): ...

    def __call__(self, logits, batch):
        places = batch.expanded_idx_mapping, batch.idx_mapping, batch.idx_mapping_np, batch.positions
        sampled, _ = self.sample(logits, *places, batch.input_ids, batch.expanded_local_pos)
        return SimpleNamespace(sampled_token_ids=sampled[:, None], num_sampled=torch.ones_like(sampled))


class Engine:
    """Four requests over tables of logits: p and q depend on the last token alone."""

    def __init__(self, vllm, method="standard", *, sampled=True, chunk=None, placeholders=0, invalid=()):
        rejection, self.adaptive = vllm
        spec = SimpleNamespace(
            num_speculative_tokens=K,
            enable_adaptive_verification=False,
            rejection_sample_method=method,
            synthetic_acceptance_rates=[0.8, 0.5, 0.3],
            fly_window_size=1,
            fly_entropy_threshold=0.3,
            fly_entropy_top_k=3,
        )
        self.chunks: list[int] = []  # calls of `_verify` in each step
        self.kept: list[list[int]] = []  # with a budget: drafts of each request that are verified, by step
        self.sampled = sampled
        self.placeholders, self.invalid = placeholders, invalid  # first steps whose drafts are none; (step, row)
        self.random = torch.Generator().manual_seed(5)
        self.target = torch.randn(V, V, generator=self.random) * 2.5
        self.draft = self.target + torch.randn(V, V, generator=self.random)
        self.guard, self.history = ErrorGuard(), History()
        speculation = {"method": "draft_model", "num_speculative_tokens": K, "rejection_sample_method": method}
        run = dataclasses.replace(run_info(), speculation=speculation, block_size=64)
        self.history.run = run
        witness = Witness(Recorder(run, Vocabulary(), self.history.append), full=True)
        hooks = V2Hooks(self.guard, lambda runner: witness, DraftLogits(self.guard, lambda: True))
        sampler = type("RejectionSampler", (rejection.RejectionSampler,), {})  # hooks of this test alone
        runner, plain = type("GPUModelRunner", (Runner,), {}), type("Sampler", (PlainSampler,), {})
        sampler._verify = self._counted(sampler._verify)
        hooks.install_plain(SimpleNamespace(Sampler=plain))
        hooks.install_rejection(SimpleNamespace(RejectionSampler=sampler, rejection_sample=rejection.rejection_sample))
        hooks.install_runner(SimpleNamespace(GPUModelRunner=runner))
        rejection.get_max_chunk_logits = lambda vocabulary: chunk or 10**6
        self.plain = plain()
        self.sampler = sampler(self.plain, spec, torch.device("cpu"))
        self.runner = runner(self)
        self.text = {name: [5] * PROMPT for row, name in enumerate(NAMES)}
        self.draft_logits = torch.full((SLOTS, K, V), torch.nan) if sampled else None
        self.step = 0
        self.given: list[dict[str, list[int]]] = []  # what vLLM's kernels gave, by step and request
        self._prompts()

    def _counted(self, original):
        @functools.wraps(original)
        def _verify(*args, **kwargs):
            self.chunks[-1] += 1
            return original(*args, **kwargs)

        return _verify

    def _prompts(self):
        counts = dict.fromkeys(NAMES, PROMPT)
        batch = self.batch({name: [] for name in NAMES}, [0] * 4, [PROMPT] * 4)
        first = scheduled(counts, new=NAMES)
        for new, heat in zip(first.scheduled_new_reqs, HEAT, strict=True):
            new.sampling_params = params(temperature=heat, max_tokens=1000, ignore_eos=True)
        self.runner.execute_model(first)
        self.take(self.runner.sample_tokens(batch, self.target[batch.input_ids.long()]))

    def batch(self, drafts, computed, counts, kept=None):
        """`drafts`: of each request; `kept`: how many of them are verified, where not all are."""
        kept = [len(drafts[name]) for name in NAMES] if kept is None else kept
        fed = [[self.text[name][-1], *drafts[name][:n]] for name, n in zip(NAMES, kept, strict=True)]
        sizes = torch.tensor([len(row) for row in fed])
        first = torch.tensor([len(self.text[name]) - 1 for name in NAMES])
        place = torch.cat([torch.arange(n) for n in sizes])
        return Batch(
            req_ids=NAMES,
            num_draft_tokens=int(sizes.sum()) - 4,
            num_draft_tokens_per_req=np.array([len(drafts[name]) for name in NAMES], np.int32),
            num_scheduled_tokens=np.array(counts, np.int32),
            num_computed_tokens_np=np.array(computed, np.int32),
            prefill_len_np=np.full(4, PROMPT, np.int32),
            cu_num_logits=torch.cat([torch.zeros(1), sizes.cumsum(0)]).int(),
            input_ids=torch.tensor([token for row in fed for token in row], dtype=torch.int32),
            positions=torch.repeat_interleave(first, sizes) + place,
            idx_mapping=self.plain.slots,
            expanded_idx_mapping=torch.repeat_interleave(self.plain.slots, sizes),
            expanded_local_pos=place.int(),
            seq_lens=(first + sizes).int(),
        )

    def take(self, output):
        rows = [output.sampled_token_ids[row, :n].tolist() for row, n in enumerate(output.num_sampled.tolist())]
        self.given.append(dict(zip(NAMES, rows, strict=True)))
        for name, tokens in self.given[-1].items():
            self.text[name] += tokens

    def drafted(self):
        """Of each request, as V2's drafter draws them."""
        drafts = {}
        for slot, name, heat in zip(self.plain.slots, NAMES, HEAT, strict=True):
            last, drafts[name] = self.text[name][-1], []
            for at in range(K):
                logits = self.draft[last]
                if self.draft_logits is not None:
                    self.draft_logits[slot, at] = logits
                warm = self.sampled and heat > 0
                q = (logits / heat).softmax(0) if warm else logits
                last = int(torch.multinomial(q, 1, generator=self.random) if warm else q.argmax())
                drafts[name].append(last)
        return drafts

    def reallocated(self, budget, batch):
        """How many drafts of each request vLLM's own AdaptiveVerificationManager keeps within a budget."""
        self.adaptive._assign_draft_token_budget_compiled = self.adaptive._assign_draft_token_budget
        manager = object.__new__(self.adaptive.AdaptiveVerificationManager)
        drafted = batch.num_draft_tokens_per_req.tolist()
        manager._batch_budget = dict(zip(NAMES, drafted, strict=True)), dict.fromkeys(NAMES, 1), budget
        manager.num_bonus_tokens, manager.num_speculative_steps = 1, K
        manager._confidence_probs = torch.rand(SLOTS, K, generator=self.random)
        manager._batch_draft_capacity, manager._num_non_draft_tokens = torch.zeros(2, SLOTS, dtype=torch.int32)
        manager._cu_num_logits, manager.query_start_loc = torch.zeros(2, SLOTS + 1, dtype=torch.int32)
        manager._copy_admitted_drafts_to_host = False
        manager.compact_batch(batch.num_draft_tokens_per_req, batch.num_scheduled_tokens, batch.cu_num_logits_np)
        rows = manager.reallocate_drafts(NAMES, batch.idx_mapping)[0]
        self.runner.adaptive_verification = manager
        return (rows.diff() - 1).tolist()

    def run(self, steps, budget=None):
        for _ in range(steps):
            self.step += 1
            drafts = self.drafted()
            counts = [len(drafts[name]) + 1 for name in NAMES]
            computed = [len(self.text[name]) - 1 for name in NAMES]
            batch = self.batch(drafts, computed, counts)
            if budget is not None:
                kept = self.reallocated(budget, batch)
                self.kept.append(kept)
                batch = self.batch(drafts, computed, counts, kept)
            lengths = torch.full((SLOTS,), PROMPT)
            if self.step <= self.placeholders:  # a prompt that ends here, as where its KV came from elsewhere
                lengths[self.plain.slots] = torch.tensor([len(self.text[name]) for name in NAMES])
            self.plain.req_states.prefill_len = Both(lengths.tolist(), torch.int32)
            rows = [row for step, row in self.invalid if step == self.step]
            mask = torch.zeros(len(batch.input_ids), dtype=torch.bool)
            mask[rows] = True
            self.runner.execute_model(scheduled(dict(zip(NAMES, counts, strict=True))))
            self.chunks.append(0)
            logits = self.target[batch.input_ids.long()]
            self.take(self.runner.sample_tokens(batch, logits, mask if rows else None))
        self.runner.execute_model(scheduled({}))
        assert self.guard.errors == 0

    def parts(self):
        """Steps behind the prompts: of each, what is recorded of each request."""
        return [{part.request: part for part in record.requests} for record in self.history.steps[1:]]


class Runner:
    """vLLM's runner, as far as the hooks go."""

    adaptive_verification = None

    def __init__(self, engine):
        self.engine = engine

    def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False): ...

    def sample_tokens(self, batch, logits, invalid=None):
        if not batch.num_draft_tokens:
            return self.engine.plain(logits, batch)
        return self.engine.sampler(logits, batch, self.engine.draft_logits, invalid)


def scheduled(counts, new=()):
    """vLLM's SchedulerOutput."""
    made = [
        SimpleNamespace(req_id=name, prompt_token_ids=[5] * 10, sampling_params=None, block_ids=([10 * row],))
        for row, name in enumerate(new, 1)
    ]
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(counts.values()),
        num_scheduled_tokens=counts,
        scheduled_new_reqs=made,
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(), req_ids=[], new_block_ids=[]),
        finished_req_ids=set(),
        **{ATTRIBUTE: SchedulerNotes()},
    )


def failed(history):
    checks = judge(history, source="run").checks
    return [check for check in checks if check.result is CheckResult.FAILED]


def same_as_given(engine):
    """What is recorded is what the kernels gave, at every step and of every request."""
    parts = engine.parts()
    assert len(parts) == len(engine.given) - 1
    for step, given in zip(parts, engine.given[1:], strict=True):
        for name, tokens in given.items():
            assert step[name].tokens() == tokens


@pytest.mark.parametrize("sampled", [True, False], ids=["drafts sampled", "drafts greedy"])
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("chunk", [None, 9], ids=["whole", "in chunks"])
def test_lossless_rules(vllm, method, sampled, chunk):
    """Every accepted count and every final token follows from the recorded p, q and coins."""
    engine = Engine(vllm, method, sampled=sampled, chunk=chunk)
    engine.run(12)
    same_as_given(engine)
    assert set(engine.chunks) == {2 if chunk else 1}  # calls of `_verify` in a step: two requests fit into nine rows
    assert failed(engine.history) == []
    tally = Counter()
    for step in engine.parts():
        for name, heat in zip(NAMES, HEAT, strict=True):
            part, verdict = step[name], step[name].verdict
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
    if method == "fly" and not hasattr(Engine(vllm).sampler, "fly_window_size"):
        pytest.skip("this vLLM has no such rule")
    engine = Engine(vllm, method, sampled=sampled)
    engine.run(12)
    same_as_given(engine)
    assert {part.verdict.rule for step in engine.parts() for part in step.values()} == {f"lossy:{method}"}
    assert failed(engine.history) == []
    judged = [part.verdict for step in engine.parts() for part in step.values() if part.verdict.coin.any()]
    against = [(v.coin[: v.accepted] > v.accept_prob[: v.accepted]).any() for v in judged]
    assert any(against)  # drafts are accepted that the coins reject


def test_placeholders_are_no_drafts(vllm):
    engine = Engine(vllm, placeholders=1)
    engine.run(4)
    same_as_given(engine)
    first, *later = engine.parts()
    for part in first.values():
        assert (len(part.tree), part.verdict.kind, part.sizing) == (0, FinalKind.TARGET, "3 invalid drafts left out")
    assert all(len(part.tree) == K for step in later for part in step.values())
    assert failed(engine.history) == []


def test_drafts_that_a_grammar_refuses(vllm):
    """The chain ends before the first of them; the token there is drawn from p."""
    engine = Engine(vllm, invalid=[(step, 6) for step in range(1, 9)])  # the second draft of the second request
    engine.run(8)
    same_as_given(engine)
    for step in engine.parts():
        assert len(step["b"].tree) == 1
        assert step["b"].sizing == "2 invalid drafts left out"
        assert len(step["a"].tree) == K
    assert failed(engine.history) == []


@pytest.mark.parametrize("budget", [5, 1, 0])
def test_drafts_that_a_budget_drops(vllm, budget):
    """Only the device knows how many of its drafts each request keeps: the rest are told as not verified."""
    engine = Engine(vllm)
    engine.run(6, budget)
    same_as_given(engine)
    for record, step, kept in zip(engine.history.steps[1:], engine.parts(), engine.kept, strict=True):
        assert (record.budget, sum(kept)) == (budget, budget)
        for name, count in zip(NAMES, kept, strict=True):
            assert (len(step[name].tree), step[name].method.unverified) == (count, K - count)
            assert len(step[name].method.confidence) == count
    assert failed(engine.history) == []
