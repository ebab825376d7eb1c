"""A small engine with vLLM's names: scheduler's output, model runner, sampler. The plugin's own hooks are put into it.

Its target is a table of logits by last token, and its drafter another one.
"""

import importlib.util
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from specscope.trace.inside.hooking import ErrorGuard
from specscope.trace.inside.recorder import Recorder
from specscope.trace.record.records import RunInfo
from specscope.trace.record.vocabulary import Vocabulary
from specscope.vllm.scheduling import ATTRIBUTE, Ended, SchedulerNotes
from specscope.vllm.v1.debugger import Debugger, Limit
from specscope.vllm.v1.runner import RunnerHooks
from specscope.vllm.v1.sampler import SamplerHooks
from specscope.vllm.witness import Witness

V = 50


def run_info(**changed):
    values = {
        "run_id": "0" * 32,
        "target": "table",
        "revision": "",
        "drafter": "draft_model",
        "draft_model": "table",
        "tree": "top:3",
        "device": "cpu",
        "dtype": "float32",
        "backend": "vllm",
        "seed": 0,
        "eos_tokens": (),
        "max_context": 4096,
        "blocks": 0,
        "block_size": 16,
        "params": {},
        "versions": {"vllm": "0.0"},
        "evidence": "full",
        "speculation": {"method": "draft_model", "num_speculative_tokens": 3},
    }
    return RunInfo(**(values | changed))


def fresh_sampler():
    """A new copy of the sampler's module, without hooks."""
    spec = importlib.util.spec_from_file_location("fake_sampler", Path(__file__).parent / "fake_sampler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_runner_class(sampler_module):
    class GPUModelRunner:
        def __init__(self, tables, depth, sampled_drafts):
            self.target, self.draft = tables
            self.depth, self.sampled_drafts = depth, sampled_drafts
            self.rejection_sampler = sampler_module.RejectionSampler()
            self.drafter = SimpleNamespace(model=None)
            self.output = None
            self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))

        def execute_model(self, scheduled):
            names = list(scheduled.num_scheduled_tokens)
            self.input_batch = SimpleNamespace(
                req_ids=names,
                num_computed_tokens_cpu=np.array([scheduled.computed[name] for name in names]),
                block_table=SimpleNamespace(block_tables=[]),
            )
            self.discard_request_mask = SimpleNamespace(np=np.zeros(len(names), bool))
            self.scheduled = scheduled

        def _sample(self, logits, metadata):
            probs = self.scheduled.draft_probs if self.sampled_drafts and len(metadata.draft_token_ids) else None
            return self.rejection_sampler.forward(metadata, probs, logits, self.scheduled.sampling)

        def sample_tokens(self):
            drafts = self.scheduled.drafts
            rows = [token for name in drafts for token in (self.scheduled.last[name], *drafts[name])]
            counts = [len(drafts[name]) for name in drafts]
            starts = np.cumsum([0, *(count + 1 for count in counts)])
            metadata = SimpleNamespace(
                num_draft_tokens=counts,
                draft_token_ids=torch.tensor([t for name in drafts for t in drafts[name]], dtype=torch.int32),
                target_logits_indices=torch.tensor(
                    [s + i for s, c in zip(starts, counts, strict=False) for i in range(c)], dtype=torch.int64
                ),
                bonus_logits_indices=torch.tensor([s + c for s, c in zip(starts, counts, strict=False)]),
            )
            self.output = self._sample(self.target[torch.tensor(rows)], metadata).sampled_token_ids
            return [[t for t in row if t >= 0] for row in self.output.tolist()]

        def propose_draft_token_ids(self, last, generator):
            """(tokens, q [depth, V]) after a token."""
            tokens, rows = [], []
            for _ in range(self.depth):
                q = self.draft[last].softmax(-1)
                last = int(torch.multinomial(q, 1, generator=generator) if self.sampled_drafts else q.argmax())
                tokens.append(last)
                rows.append(q)
            return tokens, torch.stack(rows)

    return GPUModelRunner


class FakeVllm:
    """Runs requests on a thread of its own, which is the worker's; `debugger` is in it as the plugin puts it there."""

    def __init__(self, *, temperature=0.8, requests=2, tokens=60, sampled_drafts=False, limit=None, seed=1):
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(V, V, generator=generator) * 2
        tables = target, target + torch.randn(V, V, generator=generator)
        self.guard, self.debugger, self.records = ErrorGuard(), Debugger(), []
        self.debugger.limit = limit or Limit(None)
        self.generator, self.temperature, self.tokens = generator, temperature, tokens
        module = fresh_sampler()
        sampler = SamplerHooks(self.guard)
        sampler.install(module)
        sampler.install_plain(module)
        runner = make_runner_class(module)
        hooks = RunnerHooks(self.guard, sampler, self._witness, self.debugger)
        hooks.install(SimpleNamespace(GPUModelRunner=runner))
        self.runner = runner(tables, 3, sampled_drafts)
        self.contexts = {f"r{n}": [5 + n] for n in range(requests)}
        self.drafts = {name: [] for name in self.contexts}
        self.draft_probs = {name: torch.zeros(0, V) for name in self.contexts}
        self.ended = []
        self.steps = 0
        self.pause = 0.0  # seconds between two steps
        self.thread = threading.Thread(target=self.run, daemon=True)

    def _witness(self, runner):
        def publish(record):
            self.records.append(record)
            self.guard.safely(self.debugger.finished, record)

        self.debugger.history.run = run_info()
        return Witness(Recorder(run_info(), Vocabulary(), publish), full=True)

    @property
    def params(self):
        return SimpleNamespace(
            temperature=self.temperature,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            seed=None,
            max_tokens=self.tokens,
            stop=(),
            stop_token_ids=[],
            ignore_eos=True,
        )

    def run(self):
        while any(name not in self.ended for name in self.contexts):
            self.step()
        self.runner.execute_model(self._scheduled({}, new=()))

    def _scheduled(self, running, new):
        notes = SchedulerNotes(running=len(running))
        for name in [n for n in self.contexts if n not in running and n not in self.ended]:
            self.ended.append(name)
            notes.ended.append(Ended(name, time.time_ns(), "length", "", self.contexts[name][1:], [5], self.params))
        count = len(running)
        sampling = SimpleNamespace(
            all_greedy=self.temperature == 0,
            temperature=None if self.temperature == 0 else torch.full((count,), self.temperature),
            top_p=None,
            top_k=None,
            generators=[self.generator],
        )
        scheduled = {name: 1 + len(self.drafts[name]) for name in running}
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=n, prompt_token_ids=running[n], sampling_params=self.params) for n in new
            ],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=()),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            computed={name: len(context) - 1 for name, context in running.items()},
            last={name: context[-1] for name, context in running.items()},
            drafts={name: self.drafts[name] for name in running},
            draft_probs=torch.cat([self.draft_probs[name] for name in running]) if running else None,
            sampling=sampling,
            **{ATTRIBUTE: notes},
        )

    def step(self):
        running = {n: c for n, c in self.contexts.items() if len(c) <= self.tokens and n not in self.ended}
        scheduled = self._scheduled(running, new=[n for n in running if self.steps == 0])
        self.runner.execute_model(scheduled)
        if not running:
            return
        for name, tokens in zip(running, self.runner.sample_tokens(), strict=True):
            room = self.tokens + 1 - len(self.contexts[name])
            self.contexts[name] += tokens[:room]
            self.drafts[name], self.draft_probs[name] = self.runner.propose_draft_token_ids(
                self.contexts[name][-1], self.generator
            )
        self.steps += 1
        time.sleep(self.pause)
