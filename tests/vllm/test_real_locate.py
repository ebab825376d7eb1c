"""Faults put into the real vLLM at run time, located at class and method; healthy runs, in which nothing is located.

SPECSCOPE_VLLM_PYTHON=/path/to/vllm/bin/python pytest -m slow tests/vllm/test_real_locate.py

A capture of each engine is recorded once, of a healthy vLLM; then vLLM runs it again with a fault (again_planted.py).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from specscope.analyze.audit.options import ModelSource
from specscope.analyze.findings import Exit
from specscope.analyze.locate.located import Stage
from specscope.errors import UserError
from specscope.measure.locate.inside_vllm.again import Again
from specscope.measure.locate.vllm import locate_vllm
from specscope.trace.history.history import History
from specscope.trace.inside.settings import CAPTURE
from specscope.trace.record.params import SamplingParams
from specscope.trace.wire.reading import read_capture
from tests.faults.models import story
from tests.vllm.models import DRAFT, HEAD, TARGET

PYTHON = os.environ.get("SPECSCOPE_VLLM_PYTHON", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="SPECSCOPE_VLLM_PYTHON names no vLLM")]
HERE = Path(__file__).parent
QUIET = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "FAULT_KNOWN": "74"}
EAGLE: dict[str, Any] = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 3}
MODEL: dict[str, Any] = {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 3}
SAMPLED = {"draft_sample_method": "probabilistic"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}


@dataclass(frozen=True)
class Engine:
    """A vLLM, and what it is asked."""

    speculation: dict[str, Any]
    v2: bool = False
    batched: int = 256  # tokens of a step at most
    requests: int = 4
    characters: int = 60  # of a prompt
    tokens: int = 24
    temperature: float = 0
    top_p: float = 1

    @property
    def draft(self) -> ModelSource | None:
        """Its drafter's model."""
        model = self.speculation.get("model")
        return None if model is None else ModelSource(model, Path(model).name)

    def job(self, tokens_of: Any) -> dict[str, Any]:
        """For specscope.vllm.again."""
        texts = [story(10**7 + number, self.characters) for number in range(self.requests)]
        plain = SamplingParams(self.temperature, top_p=self.top_p, ignore_eos=True)
        params = [replace(plain, seed=seed) for seed in range(1, 1 + self.requests)]
        engine = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "enable_prefix_caching": False}
        return {
            "v2": self.v2,
            "model": str(TARGET),
            "speculation": self.speculation,
            "engine": engine | {"max_num_batched_tokens": self.batched},
            "requests": [
                {"prompt": tokens_of(text), "params": own.to_dict(), "tokens": self.tokens, "seeded": not own.greedy}
                for text, own in zip(texts, params, strict=True)
            ],
        }


SHORT: dict[str, Any] = {"requests": 2, "characters": 40, "tokens": 12}
ENGINES = {
    "eagle": Engine(EAGLE),
    "eagle sampled": Engine(EAGLE | SAMPLED, temperature=0.9),
    "eagle chunks": Engine(EAGLE, batched=48, characters=150, tokens=16),
    "model": Engine(MODEL),
    "model sampled": Engine(MODEL | SAMPLED, temperature=1.5),
    "model top-p": Engine(MODEL, temperature=2.0, top_p=0.5, requests=8, tokens=96),
    "ngram": Engine(NGRAM),
    "v2 eagle": Engine(EAGLE, v2=True, **SHORT),
    "v2 model": Engine(MODEL, v2=True, **SHORT),
    "v2 chunks": Engine(EAGLE, v2=True, batched=32, requests=2, characters=80, tokens=8),
}
WORKER, PROPOSER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner", "vllm.v1.spec_decode.llm_base_proposer"
BASE, LAYERS = f"{PROPOSER}.SpecDecodeBaseProposer", "vllm.model_executor.layers"
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator.TargetDependentARSpeculator"
ROTARY = f"{LAYERS}.rotary_embedding.base.RotaryEmbeddingBase._compute_inv_freq"
SCALED = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl.forward"
ATTENTION, NORM = f"{LAYERS}.attention.attention.Attention.forward", f"{LAYERS}.layernorm.RMSNorm.forward_native"
T, D, V, W = Stage.TARGET, Stage.DRAFTER, Stage.VERDICT, Stage.DRAWS
# The fault, the engine, and the first that is located: its stage, operation, class and method
PLANTED = [
    ("rotary_base", "eagle", T, "layers.0.self_attn.query", ROTARY),
    ("attention_scale", "eagle", D, "layers.0.self_attn.attention", SCALED),
    ("head_zeroed", "eagle", T, "layers.4.self_attn.attention", ATTENTION),
    ("norm_of_another_layer", "eagle", T, "layers.3.post_attention_layernorm", NORM),
    ("rejected_kv_attended", "eagle", D, "later keys seen", f"{BASE}.propose"),
    ("rejected_kv_attended_by_target", "eagle", T, "keys seen", f"{WORKER}._prepare_inputs"),
    ("target_positions_high_in_decode", "eagle", T, "positions", f"{WORKER}._prepare_inputs"),
    ("target_positions_high_after_rejection", "eagle", T, "positions", f"{WORKER}._prepare_inputs"),
    ("positions_high_in_decode", "eagle", D, "positions", f"{BASE}.propose"),
    ("positions_high_in_decode", "model", D, "positions", f"{BASE}.propose"),
    ("features_shifted", "eagle", D, "features", f"{BASE}.propose"),
    ("features_of_the_step_before", "eagle", D, "features", f"{BASE}.propose"),
    ("layers_one_lower", "eagle", D, "features", "vllm.model_executor.models.llama.LlamaModel.forward"),
    ("kv_stale_after_full", "eagle", D, "slots", f"{BASE}.propose"),
    ("kv_stale_after_rejection", "eagle", D, "slots", f"{BASE}.propose"),
    ("slots_one_block_off", "eagle", D, "slots", f"{BASE}._get_slot_mapping"),
    ("first_tokens_only", "eagle", W, "draft", f"{BASE}._greedy_sample"),
    ("argmax_of_a_part", "eagle", V, "choice", "vllm.v1.sample.rejection_sampler.rejection_sample"),
    ("next_request_in_the_kernel", "eagle", V, "choice", "vllm.v1.sample.rejection_sampler.rejection_sample"),
    ("p_of_the_next_request", "model", V, "choice", "vllm.v1.sample.rejection_sampler.apply_sampling_constraints"),
    ("bonus_without_top_p", "model top-p", V, "choice", "vllm.v1.sample.sampler.Sampler.sample"),
    ("token_lost", "eagle", T, "tokens", f"{WORKER}._bookkeeping_sync"),
    ("rotary_base", "v2 eagle", T, "layers.0.self_attn.query", ROTARY),
    ("attention_scale", "v2 eagle", D, "layers.0.self_attn.attention", SCALED),
    ("head_zeroed", "v2 eagle", T, "layers.4.self_attn.attention", ATTENTION),
    ("norm_of_another_layer", "v2 eagle", T, "layers.3.post_attention_layernorm", NORM),
    (
        "v2_positions_high_in_decode",
        "v2 eagle",
        T,
        "positions",
        "worker.gpu.model_runner.GPUModelRunner.prepare_inputs",
    ),
    ("v2_too_many_keys", "v2 eagle", T, "keys seen", "worker.gpu.model_runner.GPUModelRunner.prepare_inputs"),
    ("v2_features_shifted", "v2 eagle", D, "features", f"{SPECULATOR}.propose"),
    ("v2_rejected_kv_attended", "v2 eagle", D, "keys seen", f"{SPECULATOR}.propose"),
    ("v2_argmax_of_a_part", "v2 eagle", W, "draft", "speculator.DraftModelSpeculator.sample_draft"),
]


def again(faults: list[str], *, mend: bool = True) -> Again:
    """vLLM with faults in it. `mend`: its own, of sampled rows on a CPU."""
    command = (PYTHON, "-P", str(HERE / "again_planted.py"))
    return Again(command, QUIET | {"PLANTED": json.dumps({"faults": faults, "mend": mend})})


@pytest.fixture(scope="session")
def captures(tmp_path_factory):
    """Gives an engine's capture."""
    made: dict[str, Any] = {}

    def of(name: str):
        if name not in made:
            made[name] = recorded(name, tmp_path_factory.mktemp("captures") / "run")
        return made[name]

    return of


def recorded(name: str, folder: Path) -> History:
    """The capture of an engine, which is made in a folder where it is not there yet."""
    from transformers import AutoTokenizer

    capture = folder / "run.jsonl"
    if not capture.exists():
        folder.mkdir(parents=True)
        tokenizer = AutoTokenizer.from_pretrained(str(TARGET))
        again([]).run(ENGINES[name].job(lambda text: tokenizer(text)["input_ids"]), folder, inside="", mib=1)
    return read_capture(capture).history


def located(captures, name: str, faults: list[str], vllm: Again | None = None):
    target = ModelSource(str(TARGET), "target")
    return locate_vllm(captures(name), target, ENGINES[name].draft, vllm or again(faults))


@pytest.mark.parametrize(
    ("fault", "engine", "stage", "operation", "code"), PLANTED, ids=[f"{row[0]}-{row[1]}" for row in PLANTED]
)
def test_a_fault_is_located_at_its_class_and_method(captures, fault, engine, stage, operation, code):
    found = located(captures, engine, [fault])
    first = found.located[0]
    assert (first.operation.stage, first.operation.name) == (stage, operation)
    assert code in first.operation.code
    if fault != "norm_of_another_layer":  # whose weights were changed, and no function that computes
        assert f"(replaced: {HERE / 'faults'}" in first.operation.code
    assert first.explained > first.differing / 2 or fault == "token_lost"
    assert found.exit is Exit.INCONSISTENT
    walk = next(walk for walk in found.walks if walk.where == first.where)
    names = [held.operation.name for held in walk.operations]
    assert all(not held.differs for held in walk.operations[: names.index(operation)])


def test_the_token_behind_a_prefill_chunk_is_located_where_vllm_makes_it(captures):
    """vLLM's own, in 0.32.0 and by its source in 0.33.0: docs/prefill-chunks.md."""
    (first,) = located(captures, "eagle chunks", []).located
    assert (first.operation.stage, first.operation.name) == (Stage.DRAFTER, "last token")
    assert first.operation.code.startswith(f"{BASE}.prepare_next_token_ids_padded or ")
    assert first.explained == first.differing
    assert located(captures, "eagle chunks", ["chunk_ends_mended"]).located == ()


def test_the_parameters_of_drafted_rows_are_located_where_vllm_leaves_them_unwritten(captures):
    """vLLM's own in 0.32.0 on a CPU: its operator writes them into a copy."""
    first = located(captures, "model top-p", [], again([], mend=False)).located[0]
    assert (first.operation.stage, first.operation.name) == (Stage.SAMPLING, "parameters")
    assert first.operation.code == "vllm.v1.sample.rejection_sampler.expand_batch_to_tokens"
    assert first.explained == first.differing > 0


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "eagle chunks"])
def test_a_healthy_vllm_has_nothing_located(captures, name):
    found = located(captures, name, [])
    assert (found.located, found.left_out, found.exit) == ((), (), Exit.CONSISTENT)
    assert found.ruled_out[0].startswith("The target agrees at ")


def test_what_is_said_where_vllm_does_not_run(captures, tmp_path):
    with pytest.raises(UserError, match=r"vLLM did not run again: .*No module named"):
        located(captures, "eagle", [], Again((PYTHON, "-P", "-m", "no_such_module"), QUIET))
    with pytest.raises(UserError, match="cannot start /no/such/python: No such file"):
        located(captures, "eagle", [], Again(("/no/such/python",), {CAPTURE: str(tmp_path)}))
