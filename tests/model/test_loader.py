"""What --target takes, and what it refuses."""

import pytest
import torch

from specscope.errors import UserError
from specscope.model.loader import load_model, load_tokenizer, pick_device, pick_dtype
from specscope.model.places import head_place, model_place
from specscope.trace.record.vocabulary import read_vocabulary

CPU = torch.device("cpu")


def test_a_corrupt_gguf_is_refused_in_one_line(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUFbroken")
    with pytest.raises(UserError, match="cannot load x"):
        load_model(str(tmp_path / "x.gguf"), CPU, torch.float32)


def test_devices_and_dtypes():
    assert pick_dtype("bfloat16", CPU) is torch.bfloat16
    with pytest.raises(UserError, match="unknown dtype"):
        pick_dtype("int3", CPU)
    with pytest.raises(UserError, match="use auto, cpu or cuda"):
        pick_device("mps")
    assert pick_device("cpu:1") == CPU
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            pick_device("cuda")


def test_a_cuda_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="no device cuda:99: this machine has 2, counted from cuda:0"):
        pick_device("cuda:99")


def test_the_vocabulary_gives_every_token_its_bytes(tiny):
    tokenizer = load_tokenizer(str(tiny))
    vocabulary = read_vocabulary(tokenizer)
    text = "naïve 🙂 \n\t\x00"
    ids = tokenizer(text)["input_ids"]
    assert b"".join(vocabulary.pieces[i] for i in ids) == text.encode()
    assert vocabulary.special == {0, 1, 2}


def test_a_folder_a_gguf_file_and_a_hub_name(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "x.gguf"
    weights.touch()
    assert model_place(str(tmp_path)) == tmp_path
    assert model_place(str(weights)) == weights
    assert model_place("owner/name") is None
    assert head_place(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("./none", "no model at ./none"),
        ("/none/at/all", "no model at"),
        ("a/b/c", "no model at"),
        ("none.gguf", "no such file"),
        (".", "has no config.json"),
    ],
)
def test_what_is_no_model(target, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=why):
        model_place(target)
