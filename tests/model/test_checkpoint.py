"""A checkpoint that is not whole is refused in one line that names what is wrong, before anything is generated."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specscope.errors import UserError
from specscope.model.loader import load_model
from tests.model.test_architectures import CONFIGS, build

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "model")
    return tmp_path / "model"


def told(**changes):
    def tell(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return tell


def weights(change):
    def spoil(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def one_number(name, value):
    return weights(lambda t: t["model." + name].view(-1).__setitem__(3, value))


def file(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def torn(share):
    def tear(folder):
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) * share // 100])

    return tear


NUMBERS = "contains NaN or infinite numbers"
UNREADABLE = "cannot load model: "
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
A_LAYER = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim")  # or one for each layer
NO_SIZES = [(name, value) for name in SIZES for value in (0, "3", [1, "x"], True, 10**30)]
NO_SIZES += [(name, value) for name in A_LAYER for value in (0, "3", 10**9)]
BROKEN = [
    (
        told(model_type="gpt2"),
        r"its config says GPT2LMHeadModel, but .* lacks transformer\.h\.0\.\S+ and \d+ more; has model\.\S+ and \d+",
    ),
    (weights(lambda t: t.pop("lm_head.weight")), r"lacks lm_head\.weight$"),
    (told(num_hidden_layers=99), r"lacks model\.layers\.10\.\S+ and \d+ more"),
    (told(num_hidden_layers=2), r"has model\.layers\.2\.\S+ and 8 more, which this kind of model lacks"),
    (told(intermediate_size=96), r"holds model\.layers\.0\.mlp\.\S+ as \[\d+, \d+\] instead of \[\d+, \d+\]"),
    (one_number("norm.weight", torch.nan), f"norm.weight {NUMBERS}"),
    (one_number("layers.2.mlp.up_proj.weight", -torch.inf), f"layers.2.mlp.up_proj.weight {NUMBERS}"),
    (weights(lambda t: [x.zero_() for x in t.values()]), "contains only zeros"),
    (
        weights(lambda t: t["model.layers.1.self_attn.o_proj.weight"].zero_()),
        r"model\.layers\.1\.self_attn\.o_proj\.weight contains only zeros",
    ),
    *[(told(**{name: value}), rf"config.json is not usable: .* at `\$\.{name}`") for name, value in NO_SIZES],
    *[(file("config.json", text), "config.json is not JSON") for text in (b"\x00broken", b"")],
    (file("config.json", b"[1]"), "config.json is not a JSON object"),
    (file("config.json", b'{"a":' * 100_000), "config.json is not usable: its JSON is nested too deep"),
    *[(file("config.json", text), UNREADABLE) for text in (b"{}", b'{"model_type": "none such"}')],
    *[(torn(share), UNREADABLE) for share in (0, 50, 99)],
    (file("model.safetensors", b"\xff" * 8 + b"x" * 100_000), UNREADABLE),
]


@pytest.mark.parametrize(("spoil", "match"), BROKEN)
def test_what_is_not_whole_is_refused(folder, spoil, match):
    spoil(folder)
    with pytest.raises(UserError, match=match) as error:
        load_model(str(folder), CPU, torch.float32)
    assert "\n" not in str(error.value)
    assert "model" in str(error.value)


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"step3p7"}))  # a folder of which is refused: it sees images
def test_whole_models_of_every_family_are_taken_and_compute_the_same(name, tmp_path):
    build(name).save_pretrained(tmp_path / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    loaded = load_model(str(tmp_path / "model"), CPU, torch.float32).model
    for key, buffer in plain.named_buffers():
        assert torch.equal(loaded.get_buffer(key), buffer), key
    state = loaded.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in plain.state_dict().items())
