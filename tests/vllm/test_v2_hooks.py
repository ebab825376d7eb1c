"""The hooks of V2's runner, around stand-ins that call what vLLM's code calls, in its order and with its arguments."""

import dataclasses
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specscope.trace.inside.hooking import ErrorGuard
from specscope.trace.inside.recorder import Recorder
from specscope.trace.record.records import Preceded
from specscope.trace.record.vocabulary import Vocabulary
from specscope.vllm.scheduling import ATTRIBUTE, Ended, SchedulerNotes
from specscope.vllm.v2.runner import V2Hooks
from specscope.vllm.v2.scores import DraftLogits
from specscope.vllm.witness import Witness
from tests.trace.strategies import RUN
from tests.vllm.random_calls import call
from tests.vllm.test_v2_rows import verified

HEAT = [0.8, 0.8]


class Sampler:
    """S33/v1/worker/gpu/sample/sampler.py"""

    def __init__(self, one):
        self.one, self.sampling_states = one, one.states

    def __call__(self, logits, input_batch):
        sampled, _ = self.sample(
            logits,
            self.one.expanded_idx_mapping,
            self.one.idx_mapping,
            self.one.idx_mapping_np,
            self.one.pos,
            self.one.tokens,
            self.one.expanded_local_pos,
            None,
            return_logprobs=False,
        )
        return SimpleNamespace(sampled_token_ids=sampled.view(-1, 1))

    def sample(
        self,
        logits,
        expanded_idx_mapping,
        idx_mapping,
        idx_mapping_np,
        pos,
        input_ids,
        expanded_local_pos,
        seq_lens_upper_bound_np,
        return_logprobs=False,
    ):
        return self._sample_random(self.one.processed, None, None, None, None, None, False, False)

    def _sample_random(
        self,
        processed_logits,
        expanded_idx_mapping,
        idx_mapping_np,
        pos,
        top_k,
        top_p,
        has_topp_only_rows,
        use_fused_sampler,
    ):
        return self.one.sampled[:, 0], processed_logits


class RejectionSampler:
    """S33/v1/worker/gpu/spec_decode/rejection_sampler.py"""

    use_block_verification = False

    def __init__(self, one):
        self.one, self.sampler = one, SimpleNamespace(sampling_states=one.states)

    def __call__(self, logits, input_batch, draft_logits=None, invalid_drafts=None):
        one, cu = self.one, self.one.cu_num_logits
        for start in range(input_batch.num_reqs):  # a chunk for each request
            low, high = int(cu[start]), int(cu[start + 1])
            self._verify(
                logits[low:high],
                draft_logits,
                one.tokens[low:high],
                one.pos[low:high],
                cu[start : start + 2] - low,
                one.idx_mapping[start : start + 1],
                one.idx_mapping_np[start : start + 1],
                one.expanded_idx_mapping[low:high],
                one.expanded_local_pos[low:high],
                None,
                one.tokens[low:high],
            )
        return "output"

    def _verify(
        self,
        logits,
        draft_logits,
        draft_sampled,
        pos,
        cu_num_logits,
        idx_mapping,
        idx_mapping_np,
        expanded_idx_mapping,
        expanded_local_pos,
        seq_lens_upper_bound_np,
        verify_draft_sampled,
    ):
        at = int((self.one.idx_mapping == idx_mapping).nonzero())
        low = int(self.one.cu_num_logits[at])
        processed = self.one.processed[low : low + len(logits)]
        return processed, self.one.sampled[at : at + 1], self.one.num_sampled[at : at + 1]


class GPUModelRunner:
    """S33/v1/worker/gpu/model_runner.py"""

    adaptive_verification = None

    def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False): ...

    def sample_tokens(self, grammar_output):
        if self.batch.num_draft_tokens:
            return RejectionSampler(self.one)(self.one.logits, self.batch, self.one.draft_logits, None)
        return Sampler(self.one)(self.one.logits, self.batch)


@pytest.fixture
def hooked(monkeypatch):
    """(The runner's class with hooks around it, the records, what went wrong)."""
    made = {one.__name__: type(one.__name__, (one,), {}) for one in (Sampler, RejectionSampler, GPUModelRunner)}
    monkeypatch.setitem(globals(), "Sampler", made["Sampler"])
    monkeypatch.setitem(globals(), "RejectionSampler", made["RejectionSampler"])
    module = types.SimpleNamespace(**made)
    records, guard = [], ErrorGuard()
    run = dataclasses.replace(RUN, block_size=4, speculation={"num_speculative_tokens": 3})
    witness = Witness(Recorder(run, Vocabulary(), records.append), full=True)
    hooks = V2Hooks(guard, lambda runner: witness, DraftLogits(guard, lambda: True))
    hooks.install_plain(module)
    hooks.install_rejection(module)
    hooks.install_runner(module)
    return made["GPUModelRunner"], records, guard, witness


def scheduled(counts, new=(), more=(), **notes):
    """vLLM's SchedulerOutput. `more`: further blocks of requests that run."""
    more = dict(more)
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(counts.values()),
        num_scheduled_tokens=counts,
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=name,
                prompt_token_ids=[5] * 10,
                sampling_params=None,
                block_ids=([10 * row + i for i in range(3)],),
            )
            for row, name in enumerate(new, 1)
        ],
        scheduled_cached_reqs=SimpleNamespace(
            resumed_req_ids=set(), req_ids=list(more), new_block_ids=[(blocks,) for blocks in more.values()]
        ),
        finished_req_ids=set(),
        **{ATTRIBUTE: SchedulerNotes(**notes)},
    )


def step(runner, drafted, output, *, computed=(10, 10), drafts=None, fed=None, names=("a", "b")):
    """One step of the runner over requests with a prompt of ten tokens."""
    made = call(1, drafted, HEAT, tokens=12)
    wide = max(map(len, output))
    made.output = torch.tensor([[*row, *[-1] * (wide - len(row))] for row in output], dtype=torch.int32)
    one = verified(made, HEAT)
    drafts = drafted if drafts is None else drafts
    counts = fed or [n + 1 for n in drafts]
    runner.one = one
    runner.batch = SimpleNamespace(
        req_ids=list(names),
        num_reqs=len(drafted),
        num_draft_tokens=sum(drafted),
        num_draft_tokens_per_req=np.array(drafts, np.int32),
        num_scheduled_tokens=np.array(counts, np.int32),
        num_computed_tokens_np=np.array(computed, np.int32),
        prefill_len_np=np.array([10, 10], np.int32),
        seq_lens_cpu_upper_bound=torch.tensor(computed) + torch.tensor(counts),
        cu_num_logits=one.cu_num_logits,
    )
    return made, runner.sample_tokens(None)


def test_steps_of_v2(hooked):
    """A prefill that goes through the plain sampler, and two steps with drafts, verified in chunks."""
    runner_class, records, guard, witness = hooked
    runner = runner_class()
    runner.execute_model(None, None, True)  # a dummy run is no step
    runner.execute_model(scheduled({"a": 10, "b": 10}, new=("a", "b")))
    step(runner, [0, 0], [[3], [4]], computed=(0, 0), fed=[10, 10])
    runner.execute_model(scheduled({"a": 3, "b": 2}, more={"a": [13], "b": [23]}))
    made, output = step(runner, [2, 1], [[1, 2], [7]])
    assert output == "output"
    drafts = made.draft_tokens.tolist()
    runner.execute_model(scheduled({"a": 2, "b": 2}))
    # the host thinks that both of a's drafts were accepted, of which one was, and that three more were scheduled
    step(runner, [1, 1], [[1], [2]], computed=(13, 12), drafts=[3, 1])
    end = Ended("a", 99, "length", "", [3, drafts[0], 2, 1], [5] * 10, None)
    runner.execute_model(scheduled({}, ended=[end]))
    assert guard.errors == 0
    assert [len(record.requests) for record in records] == [2, 2, 2]
    first, second, third = records
    assert [part.tokens() for part in first.requests] == [[3], [4]]
    assert [part.prefill_tokens for part in first.requests] == [9, 9]
    assert [part.preceded for part in third.requests] == [Preceded.PARTIAL, Preceded.NOTHING]
    a, b = second.requests
    assert (a.tree.token.tolist(), a.verdict.accepted, a.verdict.token) == (drafts[:2], 1, 2)
    assert (b.tree.token.tolist(), b.verdict.accepted, b.verdict.token) == (drafts[2:], 0, 7)
    a, b = third.requests
    assert (a.context_len, b.context_len) == (12, 11)
    assert (a.blocks.tolist(), b.blocks.tolist()) == ([13], [22, 23])
    assert (len(a.tree), a.prefill_tokens, a.method.unverified, b.method) == (1, 0, 2, None)
    assert [end.info.id for end in third.finished] == ["a"]
    assert witness.bytes > 0


def test_a_request_that_was_preempted_comes_back_as_a_new_one(hooked):
    """V2 forgets it, and is given its prompt and output as one prompt; it stays one request."""
    runner_class, records, guard, _ = hooked
    runner = runner_class()
    runner.execute_model(scheduled({"a": 10, "b": 10}, new=("a", "b")))
    step(runner, [0, 0], [[3], [4]], computed=(0, 0), fed=[10, 10])
    again = scheduled({"a": 11, "b": 1}, new=("a",))
    again.preempted_req_ids = {"a"}
    runner.execute_model(again)
    step(runner, [0, 0], [[5], [6]], computed=(0, 10), fed=[11, 1])
    runner.execute_model(scheduled({}))
    assert guard.errors == 0
    first, second = records
    assert (first.preempted, second.preempted) == ((), ("a",))  # scheduling the second took its KV, as in our engine
    assert [info.id for info in second.admitted] == []
    a, b = second.requests
    assert (a.preceded, b.preceded) == (Preceded.PREEMPTION, Preceded.NO_DRAFT)
    assert (a.index, a.context_len, a.prefill_tokens) == (1, 0, 10)
    assert (b.context_len, b.prefill_tokens) == (10, 0)


def test_samplers_that_run_outside_of_a_step_are_not_listened_to(hooked):
    """vLLM calls them to warm up, and after a step in which nothing was scheduled."""
    runner_class, _, guard, witness = hooked
    runner = runner_class()
    runner.execute_model(scheduled({"a": 10}, new=("a",)))
    runner.execute_model(scheduled({}))
    step(runner, [0, 0], [[3], [4]])
    runner.execute_model(None, None, True)
    step(runner, [1, 0], [[3], [4]])
    assert (guard.errors, witness.bytes) == (0, 0)
