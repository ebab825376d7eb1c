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


def test_devices_and_dtypes(monkeypatch):
    assert pick_dtype("bfloat16", CPU) is torch.bfloat16
    with pytest.raises(UserError, match="unknown dtype"):
        pick_dtype("int3", CPU)
    with pytest.raises(UserError, match="use auto, cpu or cuda"):
        pick_device("mps")
    assert pick_device("cpu:1") == CPU
    for there, why in ((False, "no CUDA device"), (True, "no device cuda:99: this machine has 2, counted from cuda:0")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        with pytest.raises(UserError, match=why):
            pick_device("cuda:99")


def test_the_vocabulary_gives_every_token_its_bytes(tiny):
    tokenizer = load_tokenizer(str(tiny))
    vocabulary = read_vocabulary(tokenizer)
    text = "naïve 🙂 \n\t\x00"
    ids = tokenizer(text)["input_ids"]
    assert b"".join(vocabulary.pieces[i] for i in ids) == text.encode()
    assert vocabulary.special == {0, 1, 2}


def test_what_is_a_model_and_what_is_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (weights := tmp_path / "x.gguf").touch()
    assert model_place(str(tmp_path)) == head_place(str(tmp_path)) == tmp_path
    assert model_place(str(weights)) == weights
    assert model_place("owner/name") is None
    (tmp_path / "empty").mkdir()
    nowhere = dict.fromkeys(("./none", "/none/at/all", "a/b/c"), "no model at")
    for target, why in {**nowhere, "none.gguf": "no such file", str(tmp_path / "empty"): "has no config.json"}.items():
        with pytest.raises(UserError, match=why):
            model_place(target)
