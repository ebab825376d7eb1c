"""A small vLLM: its scheduler, both of its runners and their samplers, over tables of logits, with the plugin in them.

The target's logits after a token are a row of a table, and so are the drafter's. All that is random follows from a
request's seed and a position: so both runners put out the same. Nothing of what is recorded is looked at but captures.
"""

import logging
import os
import pickle
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specscope.trace.inside.chain import of_step, uniform
from specscope.trace.wire.reading import read_capture
from specscope.vllm import known, plugin
from specscope.vllm.known import ENDS
from specscope.vllm.v1 import debugger
from specscope.vllm.v1 import runner as v1_runner
from tests.support.sources import by_name, put

V, SLOTS, BLOCK, BLOCKS = 12, 8, 4, 4097
PROMPT = (1, 2, 3, 5, 4, 7)
PIECES = {token: f"Ġt{token}" for token in range(V)}  # as a byte-level tokenizer has them
DRAFT, FINAL = 1, 2  # what is drawn


def params(**given):
    """vLLM's SamplingParams."""
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "logit_bias": None, "seed": None, "stop": []}
    plain |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0}
    plain |= {"max_tokens": 12, "ignore_eos": True, "eos_token_id": 2, "stop_token_ids": [], "structured_outputs": None}
    return SimpleNamespace(**(plain | given))


@dataclass
class Speculation:
    """vLLM's SpeculativeConfig."""

    method: str = "draft_model"
    model: str = "org/draft"
    num_speculative_tokens: int = 3
    draft_sample_method: str = "greedy"
    rejection_sample_method: str = "standard"
    parallel_drafting: bool = False

    @property
    def has_model(self):
        return self.method not in ("ngram", "suffix")

    @property
    def samples(self):
        return self.draft_sample_method == "probabilistic"


def config(speculation=None, parallel=(), **model):
    """vLLM's VllmConfig."""
    told = {"served_model_name": None, "model": "org/model", "revision": None, "dtype": torch.float32, "seed": 0}
    told |= {"max_model_len": 64, "hf_config": SimpleNamespace(eos_token_id=2), "try_get_generation_config": dict}
    ranks = {"data_parallel_index": 0, "distributed_executor_backend": "uni", "world_size": 1, "use_ray": False}
    return SimpleNamespace(
        model_config=SimpleNamespace(**(told | model)),
        cache_config=SimpleNamespace(num_gpu_blocks=BLOCKS, block_size=BLOCK),
        speculative_config=speculation,
        parallel_config=SimpleNamespace(**ranks | dict(parallel)),
    )


@dataclass
class Request:
    """vLLM's, and what its runners keep of it."""

    request_id: str
    sampling_params: SimpleNamespace = field(default_factory=params)
    prompt_token_ids: list = field(default_factory=lambda: list(PROMPT))
    trace_headers: dict | None = None
    arrival_time: float = 2.5
    stop_reason: int | None = None
    output_token_ids: list = field(default_factory=list)
    reason: str = ""
    slot: int = 0
    computed: int = 0  # tokens whose KV is there
    blocks: list = field(default_factory=list)
    drafts: list = field(default_factory=list)
    q: list = field(default_factory=list)  # rows that these were drawn from
    is_known: bool = False  # to the worker
    rejected: int = 0  # of the drafts of its last step: a host that runs ahead counts them too

    @property
    def tokens(self):
        return self.prompt_token_ids + self.output_token_ids

    def left(self, longest):
        """Tokens that it may still make, in a context of so many."""
        return min(self.sampling_params.max_tokens - len(self.output_token_ids), longest - len(self.tokens))

    @property
    def heat(self):
        return self.sampling_params.temperature

    @property
    def seed(self):
        return self.sampling_params.seed or 7 + self.slot

    def get_finished_reason(self):
        return self.reason

    def told(self):
        """vLLM's NewRequestData."""
        own = {"prompt_token_ids": self.tokens, "sampling_params": self.sampling_params, "block_ids": (self.blocks,)}
        return SimpleNamespace(req_id=self.request_id, **own)


class Scheduler:
    """All that waits runs with the next step; a prompt is fed in chunks of the engine's size."""

    def __init__(self, engine):
        self.engine, self.running, self.waiting, self.preempted = engine, [], [], set()
        free = lambda: BLOCKS - 1 - sum(len(request.blocks) for request in self.running)  # noqa: E731
        pool = SimpleNamespace(num_gpu_blocks=BLOCKS, get_num_free_blocks=free)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)

    def add_request(self, request):
        request.slot = len(self.engine.requests)
        self.engine.requests[request.request_id] = request
        self.waiting.append(request)

    def _preempt_request(self, request, timestamp, drop_stale_output=False):
        self.running.remove(request)
        self.waiting.append(request)
        self.preempted.add(request.request_id)
        request.computed, request.blocks, request.drafts, request.rejected = 0, [], [], 0

    def _free_request(self, request, delay_free_blocks=False):
        (self.running if request in self.running else self.waiting).remove(request)

    def schedule(self, throttle_prefills=False):
        v2, fresh = self.engine.v2, self.waiting
        self.running, self.waiting = self.running + fresh, []
        counts, more = {}, {}
        for request in self.running:
            left = len(request.tokens) - request.computed
            count = 1 + len(request.drafts) if left == 1 and request.output_token_ids else min(left, self.engine.chunk)
            counts[request.request_id] = count
            there = len(request.blocks)
            needed = (request.computed + count - 1) // BLOCK + 1
            request.blocks += [512 * request.slot + number for number in range(there, needed)]
            more[request.request_id] = request.blocks[there:]
        new = [request for request in fresh if v2 or not request.is_known]
        cached = [request for request in self.running if request not in new]
        resumed = {request.request_id for request in fresh if request.is_known and not v2}
        output = SimpleNamespace(
            scheduled_new_reqs=[request.told() for request in new],
            scheduled_cached_reqs=SimpleNamespace(
                resumed_req_ids=resumed,
                req_ids=[request.request_id for request in cached],
                new_block_ids=[(more[request.request_id],) for request in cached],
            ),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            finished_req_ids=set(),
            preempted_req_ids=self.preempted,
        )
        self.preempted = set()
        for request in new:
            request.is_known = True
        return output

    def update_from_output(self, scheduler_output, model_runner_output):
        for name, tokens in model_runner_output.items():
            request = self.engine.requests[name]
            for token in tokens:
                request.output_token_ids.append(token)
                ends = token in request.sampling_params.stop_token_ids
                if ends or (token == 2 and not request.sampling_params.ignore_eos):
                    request.reason, request.stop_reason = "stop", token if ends else None
                elif request.left(self.engine.config.model_config.max_model_len) <= 0:
                    request.reason = "length"
                if request.reason:
                    self._free_request(request)
                    break

    def get_num_unfinished_requests(self):
        return len(self.running) + len(self.waiting)


def drawn(p, seed, position, what):
    """A token by p; rows that are no numbers give token 0."""
    made = torch.Generator().manual_seed(int(seed) * 1000 + 10 * int(position) + what)
    return int(p.nan_to_num(0).clamp_min(1e-30).multinomial(1, generator=made))


def apply_top_k_top_p(logits, k, p):
    """Of each row its likeliest tokens; in place, as vLLM's."""
    order = logits.sort(dim=-1)
    out = order.values.softmax(-1).cumsum(-1) <= 1 - p[:, None]
    out[:, -1] = False
    return logits.masked_fill_(out.gather(1, order.indices.argsort(1)), -torch.inf)


class Step:
    """The batch of a step and what is decided: N rows, a request's together, of which the last is behind its drafts."""

    def __init__(self, engine, counts):
        self.engine, self.requests = engine, [engine.requests[name] for name in counts]
        self.counts, runs = list(counts.values()), list(zip(self.requests, counts.values(), strict=True))
        self.ended = [r.computed + count >= len(r.tokens) for r, count in runs]  # False in the midst of a prompt
        self.drafts = engine.verified(self.requests)
        roots = [r.computed + count - 1 - len(r.drafts) for r, count in runs]
        fed = [[r.tokens[at], *own] for r, at, own in zip(self.requests, roots, self.drafts, strict=True)]
        self.fed = torch.tensor([token for row in fed for token in row])
        self.sizes = torch.tensor([len(row) for row in fed])
        self.of = torch.repeat_interleave(torch.arange(len(fed)), self.sizes)
        self.place = torch.cat([torch.arange(size) for size in self.sizes])
        self.position = torch.tensor(roots)[self.of] + self.place
        self.behind = self.sizes.cumsum(0) - 1  # each request's last row
        self.judging = torch.tensor(sorted({*range(len(self.fed))} - {*self.behind.tolist()}), dtype=torch.int64)
        self.heat = torch.tensor([float(r.heat) for r in self.requests])
        cuts = torch.tensor([float(r.sampling_params.top_p) for r in self.requests])
        self.top_p = cuts if (cuts < 1).any() else None
        self.logits = engine.target[self.fed.clamp_min(0)].clone()
        engine.spoil(engine.steps, self.logits)
        self.processed = self.logits / torch.where(self.heat == 0, 1, self.heat)[self.of][:, None]
        if self.top_p is not None:
            apply_top_k_top_p(self.processed, None, self.top_p[self.of])
        self.p, own = self.processed.softmax(-1), [row for r in self.requests for row in r.q[: len(r.drafts)]]
        self.q = torch.stack(own) if own and engine.spec.samples else None
        seeds = np.array([r.seed for r in self.requests])[self.of]
        by_place = self.place.numpy() * (engine.by_block and engine.step_seeds)
        self.coins = torch.from_numpy(uniform(of_step(seeds, by_place), self.position.numpy()))
        rows = zip((self.behind + 1 - self.sizes).tolist(), (self.behind + 1).tolist(), strict=True)
        self.tokens = [self._decided(row, low, high) for row, (low, high) in enumerate(rows)]
        engine.wrong(self.tokens)

    def _decided(self, row, low, high):
        """What a request is given."""
        request, drafts, p, coins = self.requests[row], self.drafts[row], self.p[low:high], self.coins[low:high]
        choices = self.processed[low:high].argmax(-1).tolist()
        q = torch.eye(V)[torch.tensor(drafts, dtype=torch.int64).clamp_min(0)]
        q = torch.stack(request.q[: len(drafts)]) if self.q is not None and drafts else q
        fits = [token >= 0 and float(p[at, token] / q[at, token]) >= coins[at] for at, token in enumerate(drafts)]
        scale = [1.0] * len(p)
        if request.heat == 0:
            fits = [choices[at] == token for at, token in enumerate(drafts)]
        elif self.engine.by_block:  # the longest prefix that passes
            h, scale = block(p.double(), q.double(), drafts)
            longest = max((at for at in range(len(h)) if coins[at] <= h[at]), default=-1)
            fits = [at <= longest for at in range(len(h))]
        n = fits.index(False) if False in fits else len(fits)
        if request.heat == 0:
            return [*drafts[:n], choices[n]]
        left = p[n]
        if n < len(drafts) and (drafts[n] >= 0 or (self.q is not None and not self.engine.v2)):
            left = (left * scale[n] - q[n]).clamp(min=0)
        return [*drafts[:n], drawn(left, request.seed, self.position[low + n], FINAL)]

    @property
    def sampled(self):
        """[B, K + 1] the tokens, then 10**9: nobody writes there."""
        wide = self.engine.spec.num_speculative_tokens + 1
        return torch.tensor([row + [10**9] * (wide - len(row)) for row in self.tokens])

    @property
    def computed(self):
        """As a host has it that runs ahead of its device: with drafts that were rejected."""
        return np.array([r.computed + r.rejected * self.engine.ahead for r in self.requests], np.int32)

    def take(self):
        """Give each request its tokens, where its prompt has ended; the cache is behind by the final one."""
        given = {}
        for r, count, own, ended in zip(self.requests, self.counts, self.tokens, self.ended, strict=True):
            r.rejected = len(r.drafts) + 1 - len(own) if ended else 0
            r.computed += count - r.rejected
            r.drafts, r.q, given[r.request_id] = [], [], own if ended else []
        return given


def block(p, q, drafts):
    """(h of each draft, the ratio before each row), from whole distributions (Sun et al., 2024, algorithm 2)."""
    ratio, h, before = 1.0, [], [1.0]
    for at, token in enumerate(drafts):
        ratio = min(ratio * float(p[at, token] / q[at, token]), 1)
        before.append(ratio)
        mass = float((ratio * p[at + 1] - q[at + 1]).clamp(min=0).sum()) if at + 1 < len(drafts) else None
        h.append(ratio if mass is None else mass / (mass + 1 - ratio) if mass + 1 - ratio > 0 else 1.0)
    return h, before


def as_vllm(module, name):
    """Makes a function of vLLM's parameters of one that takes them all as one object."""
    return by_name(name, known.parameters_of(module, name))


class Sampler:
    """V1's: it samples the bonus token, and overwrites its logits."""

    def sample(self, logits, sampling_metadata, logprobs_mode_override=None):
        logits.div_(7)
        return sampling_metadata.step.sampled[:, -1:]


class RejectionSampler:
    """V1's."""

    def __init__(self):
        self.sampler = sys.modules[known.PLAIN].Sampler()

    def forward(self, metadata, draft_probs, logits, sampling_metadata):
        bonus = self.sampler.sample(logits[metadata.bonus_logits_indices], sampling_metadata)
        drafts, counts = metadata.draft_token_ids, metadata.num_draft_tokens
        target, ends = sampling_metadata.step.processed[metadata.target_logits_indices], torch.tensor(counts).cumsum(0)
        judge = sys.modules[known.REJECTION].rejection_sample
        sampled = judge(drafts, counts, max(counts), ends, draft_probs, target, bonus, sampling_metadata)
        return SimpleNamespace(sampled_token_ids=sampled)


@as_vllm(known.REJECTION, "rejection_sample")
def rejection_sample(given):
    if not given.sampling_metadata.all_greedy:
        module, told = sys.modules[known.REJECTION], given.sampling_metadata
        module.generate_uniform_probs(len(given.draft_token_ids), given.num_draft_tokens, told, "cpu")
        before = given.max_spec_len, given.num_draft_tokens, given.cu_num_draft_tokens, given.draft_token_ids
        module.sample_recovered_tokens(*before, given.draft_probs, given.target_logits.softmax(-1), told, "cpu")
    sampled = given.sampling_metadata.step.sampled[:, : given.max_spec_len + 1]
    return torch.where(sampled == 10**9, -1, sampled).int()


def generate_uniform_probs(num_tokens, num_draft_tokens, generators, device):
    return generators.step.coins[generators.step.judging].double()


@as_vllm(known.REJECTION, "sample_recovered_tokens")
def sample_recovered_tokens(given):
    return given.target_probs.argmax(-1)


class Drafter:
    """The model of V1's."""

    def __init__(self, table):
        self.table = table

    def compute_logits(self, hidden):
        return self.table[hidden].clone()


class GPUModelRunner:
    """V1's."""

    def __init__(self, engine):
        self.engine, self.vllm_config, self.model_config = engine, engine.config, engine.config.model_config
        self.rejection_sampler = sys.modules[known.REJECTION].RejectionSampler()
        self.drafter = SimpleNamespace(model=Drafter(engine.draft) if engine.spec.has_model else None)
        self.use_async_scheduling = engine.ahead

    def initialize_kv_cache(self, kv_cache_config, is_profiling=False): ...

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        counts = scheduler_output.num_scheduled_tokens
        step = self.step = Step(self.engine, counts) if counts else None
        if step is None:
            return
        self.input_batch = SimpleNamespace(req_ids=list(counts), num_computed_tokens_cpu=step.computed)
        self.discard_request_mask = SimpleNamespace(np=~np.array(step.ended))

    def _sample(self, logits, spec_decode_metadata):
        step, greedy = self.step, bool((self.step.heat == 0).all())
        rules = {"temperature": None if greedy else step.heat, "top_p": step.top_p, "top_k": None}
        sampling = SimpleNamespace(all_greedy=greedy, step=step, **rules)
        sampling.generators = sampling
        return self.rejection_sampler.forward(spec_decode_metadata, step.q, logits, sampling)

    def sample_tokens(self, grammar_output):
        step = self.step
        metadata = SimpleNamespace(
            num_draft_tokens=[len(own) for own in step.drafts],
            draft_token_ids=torch.tensor([token for own in step.drafts for token in own], dtype=torch.int32),
            target_logits_indices=step.judging,
            bonus_logits_indices=step.behind,
        )
        self._sample(step.logits, metadata)
        given = step.take()
        self.propose_draft_token_ids(given)
        return given

    def propose_draft_token_ids(self, given):
        model = self.drafter.model or Drafter(self.engine.draft)
        self.engine.propose(self.step, given, lambda tokens, rows, depths: model.compute_logits(tokens))


class V2Sampler:
    """Where a step has no drafts; and the states that the rejection sampler asks."""

    def __init__(self, engine):
        self.engine = engine
        heat, seeds = torch.full((SLOTS,), 9.0), torch.full((SLOTS,), 99)  # those of slots that no request has
        for request in engine.requests.values():
            heat[request.slot], seeds[request.slot] = request.heat, request.seed
        both = {"temperature": heat, "seeds": seeds}
        states = {name: SimpleNamespace(gpu=values, np=values.numpy()) for name, values in both.items()}
        self.sampling_states = SimpleNamespace(**states)

    def __call__(self, logits, input_batch):
        b = input_batch
        slots = b.expanded_idx_mapping, b.idx_mapping, b.idx_mapping_np
        self.sample(logits, *slots, b.positions, b.input_ids, b.expanded_local_pos, None)

    @as_vllm(known.V2_PLAIN, "Sampler.sample")
    def sample(self, given):
        step, slots = self.engine.runner.step, (given.expanded_idx_mapping, given.idx_mapping_np)
        self._sample_random(step.processed, *slots, given.pos, None, None, False)
        return step.sampled[:, 0], step.processed

    @as_vllm(known.V2_PLAIN, "Sampler._sample_random")
    def _sample_random(self, given): ...


class V2RejectionSampler:
    """It verifies a chunk of requests at a time."""

    def __init__(self, engine, sampler):
        self.engine, self.sampler, self.use_block_verification = engine, sampler, engine.by_block

    def __call__(self, logits, input_batch, draft_logits=None, invalid_drafts=None):
        b = input_batch
        for start in range(0, b.num_reqs, 2):
            some = slice(start, min(start + 2, b.num_reqs))
            low, high = int(b.cu_num_logits[some.start]), int(b.cu_num_logits[some.stop])
            ends, tokens = b.cu_num_logits[some.start : some.stop + 1] - low, b.input_ids[low:high]
            slots = b.idx_mapping[some], b.idx_mapping_np[some], b.expanded_idx_mapping[low:high]
            behind = b.expanded_local_pos[low:high], None, tokens
            self._verify(logits[low:high], draft_logits, tokens, b.positions[low:high], ends, *slots, *behind)

    @as_vllm(known.V2_REJECTION, "RejectionSampler._verify")
    def _verify(self, given):
        step, slots = self.engine.runner.step, given.idx_mapping.tolist()
        some = [row for row, request in enumerate(step.requests) if request.slot in slots]
        counts = torch.tensor([len(step.tokens[row]) for row in some])
        return step.processed[torch.isin(step.of, torch.tensor(some))], step.sampled[some], counts


class DraftModelSpeculator:
    """V2's drafter."""

    max_num_reqs = SLOTS

    def __init__(self, engine):
        self.engine, self.num_speculative_steps = engine, engine.spec.num_speculative_tokens
        shape = SLOTS, self.num_speculative_steps, V
        self.draft_logits = torch.full(shape, torch.nan) if engine.spec.samples else None

    def compute_draft_logits(self, hidden_states, spec_step_idx):
        raise NotImplementedError

    @as_vllm(known.V2_DRAFTER, "DraftModelSpeculator.sample_draft")
    def sample_draft(self, given):
        logits = self.compute_draft_logits(given.hidden_states, 0)
        if given.draft_logits is not None:
            given.draft_logits[given.idx_mapping, given.draft_step] = logits
        return logits


class Speculator(DraftModelSpeculator):
    """As vLLM's with logits of their own kind."""

    def compute_draft_logits(self, hidden_states, spec_step_idx):
        return self.engine.draft[hidden_states]


class V2GPUModelRunner:
    """V2's."""

    adaptive_verification = None

    def __init__(self, engine):
        self.engine, self.vllm_config, self.model_config = engine, engine.config, engine.config.model_config
        if engine.budget is not None:
            self.adaptive_verification = SimpleNamespace(_confidence_probs=engine.confidence)

    def initialize_kv_cache(self, kv_cache_config, is_profiling=False):
        self.sampler = sys.modules[known.V2_PLAIN].Sampler(self.engine)
        self.rejection_sampler = sys.modules[known.V2_REJECTION].RejectionSampler(self.engine, self.sampler)
        wrapped = sys.modules[known.V2_DRAFTER].DraftModelSpeculator
        self.speculator = type("Speculator", (Speculator, wrapped), {})(self.engine)

    def prepare_inputs(self): ...

    def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False):
        counts = {} if dummy_run else scheduler_output.num_scheduled_tokens
        step = self.step = Step(self.engine, counts) if counts else None
        if step is None:
            return
        slots = torch.tensor([r.slot for r in step.requests])
        self.batch = SimpleNamespace(
            req_ids=list(counts),
            num_reqs=len(counts),
            num_draft_tokens=len(step.judging),
            num_draft_tokens_per_req=np.array([len(r.drafts) for r in step.requests], np.int32),
            num_scheduled_tokens=np.array(step.counts, np.int32),
            num_computed_tokens_np=step.computed,
            prefill_len_np=np.array([len(r.tokens) for r in step.requests], np.int32),
            seq_lens_cpu_upper_bound=torch.from_numpy(step.computed) + torch.tensor(step.counts),
            cu_num_logits=torch.cat([torch.zeros(1), step.behind + 1]).int(),
            input_ids=step.fed.int(),
            positions=step.position,
            idx_mapping=slots,
            idx_mapping_np=slots.numpy(),
            expanded_idx_mapping=slots[step.of],
            expanded_local_pos=step.place,
        )

    def sample_tokens(self, grammar_output):
        batch, own = self.batch, self.speculator
        if batch.num_draft_tokens:
            self.rejection_sampler(self.step.logits, batch, own.draft_logits, None)
        else:
            self.sampler(self.step.logits, batch)
        given = self.step.take()

        def compute(tokens, rows, depths):
            if not self.engine.spec.has_model:
                return self.engine.draft[tokens]
            return own.sample_draft(tokens, None, batch.idx_mapping[rows], None, None, depths, own.draft_logits)

        self.engine.propose(self.step, given, compute)
        return given


class Engine:
    """Requests through a scheduler and a runner. Attributes may be set between its steps."""

    def __init__(self, requests, speculation=None, *, v2=False, chunk=10**6, ahead=False, varied=False, seed=0, **more):
        """`varied`: some drafts are shorter. `more`: what a drafter knows, a device verifies, a grammar refuses."""
        made = torch.Generator().manual_seed(seed)
        self.target = 2 * torch.randn(V, V, generator=made)
        self.draft = self.target + torch.randn(V, V, generator=made)
        self.draft[:, more.get("knows", V) :] = -torch.inf
        self.spec = Speculation() if speculation is None else speculation
        self.config = config(self.spec, **more.get("config", {}))
        self.v2, self.chunk, self.ahead, self.varied = v2, chunk, ahead, varied
        self.budget, self.invalid = more.get("budget"), more.get("invalid", ())
        self.step_seeds = "spec_step_seed" in globals()  # as since 0.33
        self.by_block = self.spec.rejection_sample_method == "block"
        self.confidence = torch.rand(SLOTS, 5, generator=made)
        self.steps, self.pause, self.halt, self.requests = 0, 0.0, Event(), {}
        self.spoil = lambda step, logits: None  # changes the target's logits
        self.wrong = lambda tokens: None  # changes what requests are given
        self.runner = sys.modules[known.V2_RUNNER if v2 else known.RUNNER].GPUModelRunner(self)
        self.scheduler = sys.modules[known.SCHEDULER].Scheduler(self)
        for request in requests:
            self.scheduler.add_request(request)
        self.runner.initialize_kv_cache(None)

    @property
    def busy(self):
        return bool(self.scheduler.running)

    @property
    def outputs(self):
        return {name: request.output_token_ids for name, request in self.requests.items()}

    def verified(self, requests):
        """Those of each request's drafts that the device verifies; -1 where one is invalid."""
        kept = [request.drafts[: self.budget] for request in requests]
        return [[-1 if at and self.steps in self.invalid else t for at, t in enumerate(own)] for own in kept]

    def propose(self, step, given, compute):
        """Draft behind what each request was given. `compute`: (tokens, rows of the batch, depths) to logits."""
        most, rows = self.spec.num_speculative_tokens, torch.arange(len(step.requests))
        last = torch.tensor([own[-1] if own else 0 for own in given.values()])
        if self.spec.parallel_drafting:  # all depths in one pass
            depths = torch.arange(most).repeat(len(rows))
            every = compute((last[:, None] + torch.arange(most)).flatten() % V, rows.repeat_interleave(most), depths)
        for depth in range(most):
            is_block = self.spec.parallel_drafting
            logits = every[depth::most] if is_block else compute(last, rows, torch.tensor(depth))
            tokens = []
            for row, r in enumerate(step.requests):
                q, place = (logits[row] / (r.heat or 1)).softmax(-1), len(r.tokens) + len(given[r.request_id]) + depth
                is_drawn = self.spec.samples and r.heat
                tokens.append(drawn(q, r.seed, place, DRAFT) if is_drawn else int(logits[row].argmax()))
                wanted = (self.steps + r.slot) % (most + 1) if self.varied else most
                if step.ended[row] and depth < wanted:
                    r.drafts.append(tokens[-1])
                    r.q.append(q)
            last = torch.tensor(tokens)

    def step(self):
        """One, whose scheduler's output travels as to another process."""
        scheduled = pickle.loads(pickle.dumps(self.scheduler.schedule()))
        self.runner.execute_model(scheduled)
        if scheduled.total_num_scheduled_tokens:
            self.scheduler.update_from_output(scheduled, self.runner.sample_tokens(None))
            self.steps += 1

    def run(self):
        while self.scheduler.get_num_unfinished_requests() and not self.halt.wait(self.pause):
            self.step()


def shutdown(procs, timeout=None):
    """vLLM's, of its engines."""


def modules():
    """By vLLM's names, their members."""
    group = SimpleNamespace(rank_in_group=0, is_last_rank=True)
    tokenizer = SimpleNamespace(
        get_vocab=lambda: {piece: token for token, piece in PIECES.items()}, added_tokens_decoder={}, all_special_ids=[]
    )
    v1 = (generate_uniform_probs, sample_recovered_tokens, rejection_sample, apply_top_k_top_p)
    return {
        known.SCHEDULER: {"Scheduler": Scheduler},
        known.PLAIN: {"Sampler": Sampler},
        known.REJECTION: {"RejectionSampler": RejectionSampler, **{one.__name__: one for one in v1}},
        known.RUNNER: {"GPUModelRunner": GPUModelRunner},
        known.V2_PLAIN: {"Sampler": V2Sampler},
        known.V2_REJECTION: {"RejectionSampler": V2RejectionSampler, "rejection_sample": rejection_sample},
        known.V2_DRAFTER: {"DraftModelSpeculator": DraftModelSpeculator},
        known.V2_RUNNER: {"GPUModelRunner": V2GPUModelRunner},
        ENDS: {"shutdown": lambda *args, **kwargs: shutdown(*args, **kwargs)},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: group, "get_pp_group": lambda: group},
        "vllm": {"envs": SimpleNamespace(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1.0)},
        "vllm.tokenizers": {"cached_tokenizer_from_config": lambda config: tokenizer},
    }


@contextmanager
def installed(others=(), **variables):
    """vLLM with the plugin in it, as SPECSCOPE_* say; gives what the plugin says, and ends as a process does.

    `others`: members of its modules that are not these, by module.
    """
    said, ends, log = [], [], logging.Handler()
    log.emit = lambda record: said.append(record.getMessage())
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SPECSCOPE_")]:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(f"SPECSCOPE_{name}", str(value))
        put(patch, {name: members | dict(others).get(name, {}) for name, members in modules().items()})
        for where in (plugin, debugger):
            patch.setattr(where, "at_exit", ends.append)
        logging.getLogger("specscope").addHandler(log)
        try:
            plugin.register()
            yield said
        finally:
            for end in ends:
                end()
            logging.getLogger("specscope").removeHandler(log)


def record(requests, speculation=None, *, run=Engine.run, gather=None, fails=False, variables=(), others=(), **engine):
    """(The history of a run, its engine, what the plugin said).

    `gather`: V1's tensors are gathered as on a device, inside of this context; `fails`: something goes wrong in hooks.
    """
    with tempfile.TemporaryDirectory() as folder:
        capture = Path(folder) / "run.jsonl"
        with installed(others, CAPTURE=capture, **dict(variables)) as said, pytest.MonkeyPatch.context() as patch:
            if gather is not None:
                patch.setattr(v1_runner, "judge_here", inside(gather, v1_runner.judge_there))
            made = Engine(requests, speculation, **engine)
            run(made)
        assert fails == any("failed" in line or "switched off" in line for line in said), said
        read = read_capture(capture) if capture.exists() else None
    if read is not None:
        assert [line for line in read.warnings if not line.startswith("recorded with --no-")] == []
    return read and read.history, made, said


def inside(context, function):
    def called(*args, **kwargs):
        with context():
            return function(*args, **kwargs)

    return called


def parts(history):
    """Each request's steps."""
    return [part for step in history.steps for part in step.requests]
