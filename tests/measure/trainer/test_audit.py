"""`audit --trainer`: a healthy pair agrees; what serving does otherwise is named by its key, tensor or operation."""

import dataclasses

import pytest
import torch

from specscope.analyze.findings import Exit
from specscope.model.features import AuxHiddenStates
from specscope.model.heads.head_runner import HeadRunner
from tests.faults.models import HEAD
from tests.heads import head_tensors, write_parallel_head
from tests.measure.trainer.runs import compared, head_copy, served


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return served(tmp_path_factory.mktemp("healthy") / "run.jsonl", HEAD)


def names(audit):
    return [located.operation.name for located in audit.location.located]


def first_differing(audit):
    walk = audit.location.walks[-1]
    return next(held.operation.name for held in walk.operations if held.differs)


def test_a_healthy_pair_agrees(healthy):
    audit = compared(healthy, HEAD)
    assert audit.exit is Exit.CONSISTENT, audit.verdict
    assert audit.places == audit.available > 20
    assert f"agrees with training over {audit.places} places of 3 requests" in audit.verdict
    assert "every setting is the trained one" in audit.verdict
    fed, walk = audit.location.walks
    assert [held.operation.name for held in fed.operations] == [
        "recorded.tokens",
        *(f"recorded.features.{layer}" for layer in (2, 3, 4)),
    ]
    assert {"features.2", "depth.1.fc", "depth.3.midlayer.self_attn.attention", "depth.3.lm_head"} <= {
        held.operation.name for held in walk.operations
    }
    assert [rates.depth for rates in audit.rates] == [1, 2, 3]
    for rates in audit.rates:
        assert rates.training.count == rates.served.count
        assert rates.training.total == audit.places
    first = audit.rates[0]
    assert first.recorded.total == audit.places  # a greedy chain: what is accepted at depth 1 is the target's choice
    assert first.recorded.count == first.served.count


def test_the_training_column_is_the_drafts_that_training_would_make(healthy):
    """By another way: at depth 1 of a greedy chain the recorded draft is the head's choice."""
    audit = compared(healthy, HEAD, 10)
    assert audit.places == 10
    assert audit.rates[0].training.count == audit.rates[0].recorded.count


CONFIGS = {
    "rope base": ({}, {"rope_theta": 300.0}, "config: rope_theta", "depth.1.midlayer.self_attn.query"),
    "partial rotary forgotten": (
        {"partial_rotary_factor": 0.5},
        {},
        "config: partial_rotary_factor",
        "depth.1.midlayer.self_attn.query",
    ),
    "norm before residual": (
        {},
        {"norm_before_residual": True},
        "config: norm_before_residual",
        "depth.1.midlayer.residual",
    ),
    "layers one lower": (
        {},
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        "config: eagle_aux_hidden_state_layer_ids",
        "features.2",
    ),
    "norm_output ignored": ({"norm_output": True}, {}, "config: norm_output", "depth.2.fed back"),
    "sliding window": (
        {},
        {"layer_types": ["sliding_attention"], "sliding_window": 16},
        "config: sliding_window",
        "depth.1.midlayer.self_attn.attention",
    ),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("case", CONFIGS)
def test_a_setting_is_named_by_its_key_and_by_what_shows_it(case, tmp_path):
    trained, serving_config, key, shows = CONFIGS[case]
    trainer = head_copy(tmp_path / "trainer", trained)
    path = served(tmp_path / "run.jsonl", head_copy(tmp_path / "head", serving_config))
    audit = compared(path, trainer)
    assert audit.exit is Exit.INCONSISTENT
    assert names(audit) == [key]
    assert first_differing(audit) == shows


def test_a_weight_that_differs_is_named_first_of_all(tmp_path):
    def nudged(tensors):
        up = tensors["midlayer.mlp.up_proj.weight"].float()
        noise = torch.randn(up.shape, generator=torch.Generator().manual_seed(0))
        return {**tensors, "midlayer.mlp.up_proj.weight": (up + 0.02 * up.std() * noise).bfloat16()}

    path = served(tmp_path / "run.jsonl", head_copy(tmp_path / "head", {"rope_theta": 300.0}, nudged))
    audit = compared(path, HEAD)
    assert names(audit) == ["weights: midlayer.mlp.up_proj.weight", "config: rope_theta"]
    assert "midlayer.mlp.up_proj.weight differs (relative 0.02)" in audit.location.located[0].sentence


def test_an_embedding_of_its_own_that_was_not_exported(tmp_path):
    generator = torch.Generator().manual_seed(1)
    own = (torch.randn(300, 48, generator=generator) * 0.2).bfloat16()
    trainer = head_copy(tmp_path / "trainer", tensors=lambda tensors: {**tensors, "embed_tokens.weight": own})
    path = served(tmp_path / "run.jsonl", head_copy(tmp_path / "head"))
    audit = compared(path, trainer)
    assert names(audit) == ["weights: embed_tokens.weight"]
    assert first_differing(audit) == "depth.1.embed_tokens"


def patched(monkeypatch, change):
    """What our engine makes of the served head, changed."""
    build = HeadRunner.__init__

    def broken(self, loaded, *args, **how):
        build(self, loaded, *args, **how)
        change(self)

    monkeypatch.setattr(HeadRunner, "__init__", broken)


def unturned(runner):
    runner._turns = runner._turns.roll(1, 0)  # every position one low


def embedding_of_target(runner):
    rows = runner.loaded.embedding.weight.roll(1, 0)
    runner.loaded = dataclasses.replace(runner.loaded, embedding=torch.nn.Embedding.from_pretrained(rows))


def scaled(runner):
    for layer in (runner.layer, *runner.further):
        layer.variant = dataclasses.replace(layer.variant, scale=layer.variant.scale * 3**-0.5)
        layer.compiled = None


def raw_state(runner):
    head = runner.head
    head.leave = lambda x: (head.norm(x), x)  # norm_output ignored


def tripled(runner):
    weight = runner.head.midlayer.mlp.act_fn
    runner.layer.act = lambda x: 3 * weight(x)
    runner.layer.compiled = None


CODE = {
    "positions": (unturned, {}, "depth.1.midlayer.self_attn.query"),
    "embedding": (embedding_of_target, {}, "depth.1.embed_tokens"),
    "scale": (scaled, {}, "depth.1.midlayer.self_attn.attention"),
    "norm_output ignored": (raw_state, {"norm_output": True}, "depth.2.fed back"),
    "a factor": (tripled, {}, "depth.1.midlayer.mlp.act"),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("case", CODE)
def test_serving_code_that_errs_is_named_by_its_operation(case, tmp_path, monkeypatch):
    change, config, shows = CODE[case]
    head = head_copy(tmp_path / "head", config)
    path = served(tmp_path / "run.jsonl", head)
    patched(monkeypatch, change)
    audit = compared(path, head)
    assert audit.exit is Exit.INCONSISTENT
    assert names(audit) == [shows]
    (located,) = audit.location.located
    assert located.differing > 0
    if case == "a factor":
        assert located.looks == "a factor of 3 at every row that differs"


def test_features_of_other_layers_than_the_config_says(healthy, monkeypatch):
    take = AuxHiddenStates.__init__
    lower = lambda self, model, layers: take(self, model, [layer - 1 for layer in layers])  # noqa: E731
    monkeypatch.setattr(AuxHiddenStates, "__init__", lower)
    audit = compared(healthy, HEAD)
    assert names(audit) == ["features.2"]


LAYERS = [lambda layers: [layer - 1 for layer in layers], lambda layers: list(reversed(layers))]


@pytest.mark.parametrize(("change", "looks"), zip(LAYERS, ("1, 2, 3", "4, 3, 2"), strict=True))
def test_an_engine_that_fed_other_layers_is_found_by_what_it_recorded(change, looks, tmp_path):
    """The served head agrees here; what was recorded shows that it was fed otherwise there."""

    def install(engine):
        aux = engine.runner._aux
        aux.close()
        engine.runner._aux = AuxHiddenStates(engine.runner.loaded.model, change(aux.aux_layers))

    audit = compared(served(tmp_path / "run.jsonl", HEAD, install=install), HEAD)
    assert names(audit) == ["recorded.features.2"]
    assert audit.location.located[0].looks == f"layers {looks} instead of 2, 3, 4"
    assert audit.exit is Exit.INCONSISTENT
    assert "the recorded drafts lack the head's choice" in " ".join(audit.location.unexplained)
    assert "agrees with training" in audit.verdict


def test_an_engine_that_fed_features_one_late(tmp_path, monkeypatch):
    from tests.faults.planted.features import one_late

    path = served(tmp_path / "run.jsonl", HEAD, install=lambda engine: one_late(monkeypatch, engine))
    audit = compared(path, HEAD)
    assert names(audit) == ["recorded.features.2"]
    assert audit.location.located[0].looks == "the hidden states of the position before"


def test_a_one_pass_head(tmp_path):
    tensors = head_tensors(parallel=True, draft=300)
    trainer = write_parallel_head(tmp_path / "trainer", tensors, depths=3)
    (trainer / "training.jsonl").touch()  # specscope train's log: else it is a checkpoint of speculators
    path = served(tmp_path / "run.jsonl", trainer)
    audit = compared(path, trainer)
    assert audit.exit is Exit.CONSISTENT, audit.verdict
    (_, walk) = audit.location.walks
    assert "depth.3.midlayer.self_attn.attention" in {held.operation.name for held in walk.operations}
    for rates in audit.rates:
        assert rates.training.count == rates.served.count
    other = write_parallel_head(tmp_path / "head", tensors, mask_token=9, depths=3)
    audit = compared(served(tmp_path / "other.jsonl", other), trainer)
    assert names(audit) == ["config: mask_token_id"]
    assert first_differing(audit) == "depth.2.embed_tokens"
