"""Which kind of head lies in a folder, and that it is refused as that (tests/cli: before torch is imported)."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from specscope.engine.config import EngineConfig
from specscope.errors import UserError
from specscope.model.places import head_place, model_place
from specscope.plans.kinds import is_head, unknown
from specscope.whole_file import LARGEST_OBJECT, read_object

LAYER = {"hidden_size": 48, "num_attention_heads": 4, "vocab_size": 300, "num_hidden_layers": 1, "hidden_act": "silu"}
SPECULATORS = {"transformer_layer_config": LAYER, "draft_vocab_size": 60}
DFLASH = [
    {**LAYER, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": {"mask_token_id": 9}},
    {**SPECULATORS, "speculators_model_type": "dflash", "speculators_config": {"algorithm": "dflash"}},
    {**LAYER, "model_type": "qwen3", "dflash_config": {"mask_token_id": 9}},
]
OTHERS = {
    "DFlash2": [
        {**LAYER, "architectures": ["DFlash2DraftModel"], "dflash_config": {"mask_token_id": 9}},
        {**SPECULATORS, "speculators_model_type": "dflash2"},
    ],
    "DSpark": [
        {**LAYER, "architectures": ["Qwen3DSparkModel"], "dflash_config": {"mask_token_id": 9}},
        {**SPECULATORS, "speculators_config": {"algorithm": "dspark"}},
    ],
    "Domino": [{**SPECULATORS, "architectures": ["DominoDraftModel"]}],
    "MTP": [
        {**LAYER, "architectures": ["Qwen3NextMTP"]},
        {**LAYER, "model_type": "deepseek_mtp"},
        {**SPECULATORS, "speculators_model_type": "mtp"},
        {**LAYER, "architectures": ["DeepseekV3ForCausalLMNextN"]},
    ],
    "Medusa": [{"architectures": ["MedusaModel"], "medusa_num_heads": 3}, {"medusa_num_heads": 3}],
    "Hydra": [{"architectures": ["HydraModel"]}, {"hydra_num_heads": 2, "base_model_name_or_path": "m"}],
    "MLP speculator": [{"model_type": "mlp_speculator"}],
    "jetspec": [{**SPECULATORS, "speculators_model_type": "jetspec"}],
}


def written(folder, config, tensors=("x.weight",)):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.zeros(2, np.float32) for name in tensors}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("kind", "config"), [(kind, config) for kind, all_ in OTHERS.items() for config in all_])
def test_a_head_of_another_kind_is_refused_as_what_it_is(tmp_path, kind, config):
    """As a head, as a draft model and as a target; and it is not taken for a plain model."""
    folder = written(tmp_path / "h", config)
    said = rf"{folder} holds a drafter of the kind {kind}: "
    with pytest.raises(UserError, match=said + "what runs here are EAGLE, EAGLE-3, P-EAGLE and DFlash heads"):
        head_place(str(folder))
    with pytest.raises(UserError, match=said + "give a whole model"):
        model_place(str(folder))
    assert is_head(folder)
    assert EngineConfig(target="x", draft_model=str(folder)).drafter == "eagle"


def test_an_older_eagle_head_is_told_by_what_joins_its_features(tmp_path):
    """Its config is a plain model's."""
    folder = written(tmp_path / "h", LAYER, ("fc.weight", "layers.0.self_attn.q_proj.weight"))
    assert EngineConfig(target="x", draft_model=str(folder)).drafter == "eagle"
    with pytest.raises(UserError, match="but the drafter is ngram: add --drafter eagle"):
        EngineConfig(target="x", drafter="ngram", draft_model=str(folder))


@pytest.mark.parametrize("config", DFLASH)
def test_a_dflash_head_is_told_by_its_folder_and_is_no_target(tmp_path, config):
    folder = written(tmp_path / "h", config)
    assert EngineConfig(target="x", draft_model=str(folder)).drafter == "dflash"
    assert head_place(str(folder)) == folder
    with pytest.raises(UserError, match="holds a drafter of the kind DFlash: give a whole model"):
        model_place(str(folder))


MTP = {**LAYER, "architectures": ["Qwen3NextForCausalLM"], "num_nextn_predict_layers": 1}


def test_mtp_layers_alone_are_told_by_their_tensors(tmp_path):
    """A whole model's config names them too."""
    alone = written(tmp_path / "alone", MTP, ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"))
    with pytest.raises(UserError, match="of the kind MTP"):
        model_place(str(alone))
    whole = written(tmp_path / "whole", MTP, ("mtp.fc.weight", "model.embed_tokens.weight"))
    assert model_place(str(whole)) == whole
    assert not is_head(whole)
    (alone / "model.safetensors").write_bytes(b"broken")
    assert not is_head(alone)


SLIDES = {"layer_types": ["sliding_attention"], "sliding_window": 64}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"layer_types": ["chunked_attention"]}, "layer_types = ['chunked_attention']"),
        ({"layer_types": "sliding_attention"}, "layer_types = sliding_attention"),
        ({"sliding_window": 64}, "sliding_window = 64 without layer_types"),
        (
            {"layer_types": ["sliding_attention"]},
            "layer_types = sliding_attention without a sliding_window that is used",
        ),
        ({**SLIDES, "use_sliding_window": False}, "layer_types = sliding_attention without a sliding_window that"),
        ({**SLIDES, "num_hidden_layers": 2}, "layer_types of 1 layers, and num_hidden_layers = 2"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc beside fc_norm"),
        ({"fc_norm": True, "eagle_config": {"norm_before_fc": True}}, "norm_before_fc beside fc_norm"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type = longrope"),
        ({"rope_scaling": {"type": "dynamic"}}, "type = dynamic"),
        ({"rope_scaling": {"mrope_section": [2, 2]}}, "mrope_section = [2, 2]"),
        ({"transformer_layer_config": {"qk_norm": True}}, "qk_norm"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = {'quant_method': 'fp8'}"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm"),
        ({"use_last_layernorm": False}, "use_last_layernorm = False"),
        ({"next_layer_regular": "first"}, "next_layer_regular = first"),
        ({"transformer_layer_architecture": "GemmaDecoderLayer"}, "transformer_layer_architecture = GemmaDecoderLayer"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step = 4"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, config, said):
    assert unknown(config).startswith(said)
    with pytest.raises(UserError) as error:
        head_place(str(written(tmp_path / "h", {**LAYER, **config})))
    assert f"config.json has `{said}" in str(error.value)


@pytest.mark.parametrize("layer", ["LlamaDecoderLayer", "auto"])
def test_a_head_of_speculators_may_name_the_layer_that_runs(tmp_path, layer):
    config = {"architectures": ["EagleSpeculator"], "transformer_layer_config": LAYER}
    folder = written(tmp_path / "h", {**config, "transformer_layer_architecture": layer})
    assert head_place(str(folder)) == folder


def test_a_config_without_end_or_of_any_size_is_refused(tmp_path):
    """/dev/zero was read until memory ended."""
    folder = written(tmp_path / "h", {})
    with open(folder / "config.json", "wb") as file:
        file.truncate(LARGEST_OBJECT + 1)
    for refuses in (head_place, model_place):
        with pytest.raises(UserError, match=r"config\.json: it is larger than 16 MiB, the limit"):
            refuses(str(folder))
    assert not is_head(folder)
    os.unlink(folder / "config.json")
    os.symlink("/dev/zero", folder / "config.json")
    with pytest.raises(UserError, match=r"config\.json: it is no regular file"):
        read_object(folder / "config.json")
    with pytest.raises(UserError, match=r"config\.json: it is no regular file"):
        head_place(str(folder))
    assert not is_head(folder)
