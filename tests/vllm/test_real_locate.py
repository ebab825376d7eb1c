"""Faults put into the real vLLM at run time, located at class and method; healthy runs, in which nothing is located.

SPECSCOPE_VLLM_PYTHON=/path/to/vllm/bin/python pytest -m slow tests/vllm/test_real_locate.py

A capture of each engine is recorded once, of a healthy vLLM; then vLLM runs it again with a fault (inside.py).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from specscope.analyze.audit.options import ModelSource
from specscope.analyze.findings import Exit
from specscope.analyze.locate.located import Stage
from specscope.errors import UserError
from specscope.measure.locate.vllm import Again, locate_vllm
from specscope.trace.history.history import History
from specscope.trace.inside.settings import CAPTURE
from specscope.trace.wire.reading import read_capture
from tests.vllm.faults import FAULTS
from tests.vllm.models import TARGET
from tests.vllm.planted import HERE, HOT, HOTTEST, WARM, Run, file_name
from tests.vllm.record import record
from tests.vllm.served import PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="SPECSCOPE_VLLM_PYTHON names no vLLM")]
USUAL: dict[str, Any] = {"requests": 4, "tokens": 24}
SHORT: dict[str, Any] = {"requests": 2, "tokens": 12, "prompt": 40}
ENGINES = {
    "eagle": Run("eagle", "eagle", **USUAL),
    "eagle sampled": Run("eagle sampled", "eagle sampled", WARM, **USUAL),
    "eagle chunks": Run("eagle chunks", "eagle chunks", requests=4, tokens=16, prompt=150),
    "model": Run("model", "model", **USUAL),
    "model sampled": Run("model sampled", "model sampled", HOT, **USUAL),
    "model top-p": Run("model top-p", "model", HOTTEST | {"top_p": 0.5}, requests=8, tokens=96),
    "ngram": Run("ngram", "ngram", **USUAL),
    "v2 eagle": Run("v2 eagle", "v2 eagle", **SHORT),
    "v2 model": Run("v2 model", "v2 model", **SHORT),
    "v2 chunks": Run("v2 chunks", "v2 prompts in chunks", requests=2, tokens=8, prompt=80),
}
BASE = "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer"
T, D, V, W = Stage.TARGET, Stage.DRAFTER, Stage.VERDICT, Stage.DRAWS
# Of each engine: the fault, and the first operation that is located
INSIDE = [
    ("rotary_base", T, "layers.0.self_attn.query"),
    ("attention_scale", D, "layers.0.self_attn.attention"),
    ("head_zeroed", T, "layers.4.self_attn.attention"),
    ("norm_of_another_layer", T, "layers.3.post_attention_layernorm"),
]
LOCATED: dict[str, list[tuple[str, Stage, str]]] = {
    "eagle": [
        *INSIDE,
        ("rejected_kv_attended", D, "later keys seen"),
        ("rejected_kv_attended_by_target", T, "keys seen"),
        ("target_positions_high_in_decode", T, "positions"),
        ("target_positions_high_after_rejection", T, "positions"),
        ("positions_high_in_decode", D, "positions"),
        ("features_shifted", D, "features"),
        ("features_of_the_step_before", D, "features"),
        ("layers_one_lower", D, "features"),
        ("kv_stale_after_full", D, "slots"),
        ("kv_stale_after_rejection", D, "slots"),
        ("slots_one_block_off", D, "slots"),
        ("first_tokens_only", W, "draft"),
        ("argmax_of_a_part", V, "choice"),
        ("next_request_in_the_kernel", V, "choice"),
        ("token_lost", T, "tokens"),
    ],
    "model": [("positions_high_in_decode", D, "positions"), ("p_of_the_next_request", V, "choice")],
    "model top-p": [("bonus_without_top_p", V, "choice")],
    "v2 eagle": [
        *INSIDE,
        ("v2_positions_high_in_decode", T, "positions"),
        ("v2_too_many_keys", T, "keys seen"),
        ("v2_features_shifted", D, "features"),
        ("v2_rejected_kv_attended", D, "keys seen"),
        ("v2_argmax_of_a_part", W, "draft"),
    ],
}
# It changes weights, and no function that computes
NORM = {"norm_of_another_layer": "vllm.model_executor.layers.layernorm.RMSNorm.forward_native"}


def code_of(fault: str) -> str:
    """The class and method that a fault is in."""
    return NORM.get(fault) or FAULTS[fault].changes[0][0].replace(":", ".")


PLANTED = [
    (fault, engine, stage, name, code_of(fault)) for engine, rows in LOCATED.items() for fault, stage, name in rows
]


def again(faults: list[str], *, mended: bool = True) -> Again:
    """vLLM with faults in it. `mended`: its own, of sampled rows on a CPU."""
    planted = json.dumps({"faults": faults, "mended": mended})
    return Again((PYTHON, "-P", str(HERE / "inside.py")), {"FAULT_KNOWN": "74", "PLANTED": planted})


@pytest.fixture(scope="session")
def captures(tmp_path_factory):
    """Gives an engine's capture."""
    folder = tmp_path_factory.mktemp("captures")
    return lambda name: recorded(name, folder)


def recorded(name: str, folder: Path) -> History:
    """The capture of an engine, which is made in a folder where it is not there yet."""
    run = ENGINES[name]
    capture = folder / f"{file_name(run)}.jsonl"
    if not capture.exists():
        folder.mkdir(parents=True, exist_ok=True)
        record(folder, [run], PYTHON)
    return read_capture(capture).history


def located(captures, name: str, faults: list[str], vllm: Again | None = None):
    draft = ENGINES[name].draft
    head = None if draft is None else ModelSource(str(draft), draft.name)
    return locate_vllm(captures(name), ModelSource(str(TARGET), "target"), head, vllm or again(faults))


@pytest.mark.parametrize(
    ("fault", "engine", "stage", "operation", "code"), PLANTED, ids=[f"{row[0]}-{row[1]}" for row in PLANTED]
)
def test_a_fault_is_located_at_its_class_and_method(captures, fault, engine, stage, operation, code):
    found = located(captures, engine, [fault])
    first = found.located[0]
    assert (first.operation.stage, first.operation.name) == (stage, operation)
    assert code in first.operation.code
    if fault not in NORM:
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
    first = located(captures, "model top-p", [], again([], mended=False)).located[0]
    assert (first.operation.stage, first.operation.name) == (Stage.SAMPLING, "parameters")
    assert first.operation.code == "vllm.v1.sample.rejection_sampler.expand_batch_to_tokens"
    assert first.explained == first.differing > 0


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "eagle chunks"])
def test_a_healthy_vllm_has_nothing_located(captures, name):
    found = located(captures, name, [])
    assert (found.located, found.left_out, found.exit) == ((), (), Exit.CONSISTENT)
    assert found.ruled_out[0].startswith("The target agrees at ")


def test_what_is_said_where_vllm_does_not_run(captures, tmp_path):
    with pytest.raises(UserError, match=r"vLLM could not be run again: .*No module named"):
        located(captures, "eagle", [], Again((PYTHON, "-P", "-m", "no_such_module"), {}))
    with pytest.raises(UserError, match="cannot start /no/such/python: No such file"):
        located(captures, "eagle", [], Again(("/no/such/python",), {CAPTURE: str(tmp_path)}))
