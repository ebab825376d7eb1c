"""vLLM's objects as its hooks meet them, as far as they are looked at; the runner is one that decides nothing."""

from types import SimpleNamespace

import numpy as np

from specscope.trace.inside.recorder import Recorder
from specscope.trace.record.records import RunInfo
from specscope.trace.record.vocabulary import Vocabulary
from specscope.vllm.scheduling import ATTRIBUTE, Arrival, Ended, SchedulerNotes
from specscope.vllm.v1.runner import judge_here, judge_there, places
from specscope.vllm.witness import Witness
from tests.vllm.calls import call

RUN = RunInfo(
    run_id="r",
    target="model",
    revision="",
    drafter="eagle",
    draft_model="head",
    tree="top:3",
    device="cpu",
    dtype="float32",
    backend="vllm",
    seed=0,
    eos_tokens=(2,),
    max_context=64,
    blocks=8,
    block_size=16,
    params={},
    versions={"vllm": "0.32.0"},
    evidence="full",
    speculation={"method": "eagle3", "num_speculative_tokens": 3},
)


def params(**given):
    plain = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "logit_bias": None, "seed": None}
    plain |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": []}
    plain |= {"max_tokens": 8, "ignore_eos": False, "eos_token_id": 2, "stop_token_ids": [], "min_tokens": 0}
    return SimpleNamespace(**(plain | given))


class Engine:
    """Steps of a witness: what the scheduler says, then what the sampler did."""

    def __init__(self, run=RUN, *, device=False):
        """`device`: what the sampler gave is gathered, and comes when `arrive` is called."""
        self.records = []
        self.device = device
        self.away = []
        vocabulary = Vocabulary({i: f"t{i} ".encode() for i in range(11)})
        self.witness = Witness(Recorder(run, vocabulary, self.records.append), full=True)
        self.lengths = {}  # tokens in the cache
        self.notes = SchedulerNotes()

    def step(self, drafts, *, new=None, resumed=(), prompt=0, temperature=None, unfinished=(), seed=0):
        """`drafts`: by request. `new`: {name: (prompt, params)}; `prompt`: tokens fed besides; the sampler's call."""
        new = new or {}
        names = list(drafts)
        for name, (tokens, _) in new.items():
            self.lengths[name] = 0
            prompt = prompt or len(tokens) - 1
        counts = {name: len(drafts[name]) + 1 + prompt for name in names}
        scheduled = self.scheduled(counts, new, resumed)
        self.witness.begin(scheduled)
        self.witness.phase("forward", 10, 20)
        one = call([drafts[n] for n in names], temperature=[(temperature or {}).get(n, 0.0) for n in names], seed=seed)
        there = places(self._runner(names, unfinished), scheduled, one.drafted)
        passes = {place.row: ((), 0) for place in there if place.ended_prompt}
        judgements = (judge_there if self.device else judge_here)(one, passes, full=True)
        if self.device:
            self.away.append(Late(judgements))
            judgements = self.away[-1]
        self.witness.judged(there, judgements)
        for at, name in enumerate(names):
            self.lengths[name] += counts[name] if name in unfinished else counts[name] - len(drafts[name])
            self.lengths[name] += 0 if name in unfinished else sum(t >= 0 for t in one.output[at].tolist()) - 1
        return one

    def scheduled(self, counts, new=None, resumed=()):
        """vLLM's SchedulerOutput, with what the scheduler noted since the last."""
        new = new or {}
        notes, self.notes = self.notes, SchedulerNotes()
        notes.arrived |= {name: Arrival(1, {}) for name in new}
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, prompt_token_ids=tokens, sampling_params=given)
                for name, (tokens, given) in new.items()
            ],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            **{ATTRIBUTE: notes},
        )

    def _runner(self, names, unfinished):
        table = SimpleNamespace(block_table=SimpleNamespace(np=np.arange(64).reshape(-1, 8)))
        return SimpleNamespace(
            input_batch=SimpleNamespace(
                req_ids=names,
                num_computed_tokens_cpu=np.array([self.lengths[name] for name in names]),
                block_table=SimpleNamespace(block_tables=[table]),
            ),
            vllm_config=SimpleNamespace(cache_config=SimpleNamespace(block_size=16)),
            use_async_scheduling=self.device,
            discard_request_mask=SimpleNamespace(np=np.array([name in unfinished for name in names])),
        )

    def ends(self, name, reason, output, stop=""):
        self.notes.ended.append(Ended(name, 99, reason, stop, output, [1], params()))

    def rest(self):
        notes, self.notes = self.notes, SchedulerNotes()
        self.witness.rest(notes)
        return self.records


class Late:
    """Judgements that have not come yet."""

    def __init__(self, judgements):
        self.judgements, self.here = judgements, False
        self.bytes, self.of = judgements.bytes, judgements.of

    def ready(self):
        return self.here

    def wait(self):
        self.here = True
