"""A checkpoint that is not whole is refused in one line that names what is wrong, before anything is generated."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specscope.errors import UserError
from specscope.model.checkpoint import check_numbers
from specscope.model.loader import load_model
from tests.model.test_architectures import CONFIGS, build

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "model")
    return tmp_path / "model"


def told(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder, match, layers=None):
    with pytest.raises(UserError, match=match) as error:
        load_model(str(folder), CPU, torch.float32, layers=layers)
    assert "\n" not in str(error.value)
    assert "model" in str(error.value)


def test_weights_of_another_architecture(folder):
    told(folder, model_type="gpt2")
    refused(
        folder,
        r"its config says GPT2LMHeadModel, but .* lacks transformer\.h\.0\.\S+ and \d+ more; has model\.\S+ and \d+",
    )


def test_an_untied_head_that_is_missing(folder):
    weights(folder, lambda t: t.pop("lm_head.weight"))
    refused(folder, r"lacks lm_head\.weight$")


def test_a_tied_head_need_not_be_there(folder):
    weights(folder, lambda t: t.pop("lm_head.weight"))
    told(folder, tie_word_embeddings=True)
    loaded = load_model(str(folder), CPU, torch.float32)
    assert loaded.output.weight is loaded.embedding.weight


def test_more_layers_in_the_config_than_in_the_file(folder):
    told(folder, num_hidden_layers=99)
    refused(folder, r"lacks model\.layers\.10\.\S+ and \d+ more")


def test_fewer_layers_in_the_config_than_in_the_file(folder):
    told(folder, num_hidden_layers=2)
    refused(folder, r"has model\.layers\.2\.\S+ and 8 more that such a model has no place for")


def test_the_first_layers_alone_may_be_asked_for(folder):
    assert len(load_model(str(folder), CPU, torch.float32, layers=2).layers) == 2
    weights(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    refused(folder, r"lacks model\.layers\.1\.mlp\.up_proj\.weight", layers=2)
    weights(folder, lambda t: t.update({"score.weight": torch.ones(2, 48)}))
    refused(folder, r"has score\.weight", layers=1)


def test_a_shape_that_the_config_does_not_say(folder):
    told(folder, intermediate_size=96)
    refused(folder, r"holds model\.layers\.0\.mlp\.\S+ as \[\d+, \d+\] instead of \[\d+, \d+\]")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["embed_tokens.weight", "norm.weight", "layers.2.mlp.up_proj.weight"])
def test_one_number_that_is_none(folder, name, value):
    weights(folder, lambda t: t["model." + name].view(-1).__setitem__(3, value))
    refused(folder, f"{name} holds NaN or infinite numbers")


def test_nothing_but_nan(folder):
    weights(folder, lambda t: [x.fill_(torch.nan) for x in t.values()])
    refused(folder, "holds NaN or infinite numbers")


def test_nothing_but_zeros(folder):
    weights(folder, lambda t: [x.zero_() for x in t.values()])
    refused(folder, "holds nothing but zeros")


def test_one_matrix_of_zeros(folder):
    weights(folder, lambda t: t["model.layers.1.self_attn.o_proj.weight"].zero_())
    refused(folder, r"model\.layers\.1\.self_attn\.o_proj\.weight holds nothing but zeros")


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [0, -1, "3", 2.5, [1, "x"], True, 10**9, 10**30])
def test_sizes_that_are_none(folder, name, value):
    told(folder, **{name: value})
    refused(folder, rf"config.json is not usable: .* at `\$\.{name}`")


@pytest.mark.parametrize("name", ["num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, "3", 10**9])
def test_other_sizes_that_are_none(folder, name, value):
    told(folder, **{name: value})
    refused(folder, rf"config.json is not usable: .* at `\$\.{name}`")


def test_a_config_that_promises_far_more_than_the_file_holds(folder, monkeypatch):
    """transformers would fill what is missing with random numbers, here 100 GB of them: it is not asked."""
    asked = []
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: asked.append(1))
    told(folder, hidden_size=100_000, num_hidden_layers=4)
    refused(folder, "describes a model of at least 4.* weights, but the files beside it hold")
    assert not asked


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"\x00broken", "config.json is not JSON"),
        (b"", "config.json is not JSON"),
        (b"[1]", "config.json is not a JSON object"),
        (b"null", "config.json is not a JSON object"),
        (b"\xff\xfe", "config.json is not JSON"),
        (b'{"a":' * 100_000, "config.json is not usable: its JSON is nested too deep"),
        (b"{}", "cannot load model: "),
        (b'{"model_type": "none such"}', "cannot load model: "),
        (b'{"model_type": 5}', "cannot load model: "),
    ],
)
def test_configs_that_are_none(folder, content, match):
    (folder / "config.json").write_bytes(content)
    refused(folder, match)


@pytest.mark.parametrize("share", [0, 10, 50, 90, 99])
def test_torn_weights(folder, share):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) * share // 100])
    refused(folder, "cannot load model: |the files beside it hold")


@pytest.mark.parametrize(
    "header", [b"broken", b"\xff" * 8 + b"x" * 100_000, b"\x02" + b"\x00" * 7 + b"{}" + b"x" * 99_000]
)
def test_weights_that_are_none(folder, header):
    (folder / "model.safetensors").write_bytes(header)
    refused(folder, "cannot load model: |the files beside it hold")


def test_what_a_family_declares_as_ignorable_is_no_fault(tmp_path):
    """GPT-2's published file holds its causal masks as well."""
    config = transformers.GPT2Config(vocab_size=199, n_embd=64, n_layer=2, n_head=4, n_positions=64, eos_token_id=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    weights(tmp_path / "model", lambda t: t.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64).tril()}))
    assert load_model(str(tmp_path / "model"), CPU, torch.float32).vocab_size == 199


@pytest.mark.parametrize("name", CONFIGS)
def test_whole_models_of_every_family_are_taken_and_compute_the_same(name, tmp_path):
    build(name).save_pretrained(tmp_path / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    loaded = load_model(str(tmp_path / "model"), CPU, torch.float32).model
    for key, buffer in plain.named_buffers():
        assert torch.equal(loaded.get_buffer(key), buffer), key
    state = loaded.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in plain.state_dict().items())


class Work(TorchDispatchMode):
    """Counts the numbers that PyTorch's operations read and write."""

    def __init__(self):
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.read += sum(leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        self.written += sum(leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))
        return made


def test_the_check_of_numbers_reads_each_once_and_copies_none():
    """A check by way of float32 copies all of them, and takes seven times as long."""
    tensors = [(str(i), torch.full((5000,), 0.5, dtype=torch.bfloat16)) for i in range(9)]
    few = 20  # of a tensor: its least and its greatest
    with Work() as work:
        check_numbers(tensors, "x")
    assert 9 * 5000 <= work.read < 9 * (5000 + few)
    assert work.written < 9 * few
