"""`audit --trainer`: a healthy pair agrees; a weight, a map or a setting that differs is named by its key."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch

from specscope.analyze.findings import Exit
from tests.heads import head_tensors, write_parallel_head
from tests.measure.head_runs import compared, head_copy, served
from tests.tools.conftest import data, target  # noqa: F401


def nudged(tensors):
    up = tensors["midlayer.mlp.up_proj.weight"].float()
    noise = torch.randn(up.shape, generator=torch.Generator().manual_seed(0))
    return {**tensors, "midlayer.mlp.up_proj.weight": (up + 0.02 * up.std() * noise).bfloat16()}


def with_an_embedding(tensors):
    own = torch.randn(300, 48, generator=torch.Generator().manual_seed(1)) * 0.2
    return {**tensors, "embed_tokens.weight": own.bfloat16()}


def swapped(tensors):
    """The first two draft tokens are each other's."""
    offsets = tensors["d2t"].clone()
    offsets[0], offsets[1] = tensors["d2t"][1] + 1, tensors["d2t"][0] - 1
    return {**tensors, "d2t": offsets}


@dataclass(frozen=True)
class Folders:
    """The keys that differ; what is set in the trainer's and in the served config, what is made of their tensors."""

    keys: tuple[str, ...]
    trained: Mapping = field(default_factory=dict)
    serving: Mapping = field(default_factory=dict)
    of_trainer: Callable | None = None
    of_served: Callable | None = None
    says: str = "The served head is not the trained one"


ROPE = {"rope_theta": 300.0}
LAYERS = "eagle_aux_hidden_state_layer_ids"
CASES = {
    "healthy": Folders((), says="settings compared, none differs"),
    "rope base": Folders(("config: rope_theta",), serving=ROPE),
    "norm before residual": Folders(("config: norm_before_residual",), serving={"norm_before_residual": True}),
    "layers one lower": Folders((f"config: {LAYERS}",), serving={LAYERS: [1, 2, 3]}),
    "norm_output ignored": Folders(("config: norm_output",), {"norm_output": True}),
    "sliding window": Folders(
        ("config: sliding_window",), serving={"layer_types": ["sliding_attention"], "sliding_window": 16}
    ),
    "a weight, first of all": Folders(
        ("weights: midlayer.mlp.up_proj.weight", "config: rope_theta"),
        serving=ROPE,
        of_served=nudged,
        says="midlayer.mlp.up_proj.weight differs (relative 0.02), and 1 other difference",
    ),
    "an embedding of its own that was not exported": Folders(
        ("weights: embed_tokens.weight",), of_trainer=with_an_embedding
    ),
    "a map of another vocabulary": Folders(("weights: d2t",), of_served=swapped, says="d2t differs at 2 of"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_differs_is_named_by_its_key(name, tmp_path):
    case = CASES[name]
    trainer = head_copy(tmp_path / "trainer", case.trained, case.of_trainer)
    head = head_copy(tmp_path / "head", case.serving, case.of_served)
    audit = compared(served(tmp_path / "run.jsonl", head, requests=1, tokens=4), trainer)
    assert audit.exit is (Exit.INCONSISTENT if case.keys else Exit.CONSISTENT)
    assert tuple(each.key for each in audit.differences) == case.keys
    assert case.says in audit.verdict
    assert min(audit.tensors, audit.settings) > 10


def test_a_one_pass_head(tmp_path):
    tensors = head_tensors(parallel=True, draft=300)
    trainer = write_parallel_head(tmp_path / "trainer", tensors, depths=3)
    path = served(tmp_path / "run.jsonl", trainer, requests=1, tokens=4)
    assert compared(path, trainer).exit is Exit.CONSISTENT
    other = write_parallel_head(tmp_path / "head", tensors, mask_token=9, depths=3)
    (found,) = compared(served(tmp_path / "other.jsonl", other, requests=1, tokens=4), trainer).differences
    assert found.key == "config: mask_token_id"
