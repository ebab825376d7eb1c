"""A model's digest is of what its files hold, and a file is hashed once."""

import json
import os
import shutil

import pytest

from specscope.plans import model_digest as digests
from specscope.plans.model_digest import model_digest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A cache of its own, and no file too small for it."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(digests, "CHUNK", 64)
    return folder


def write(folder, weights=b"w" * 1000, **config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4, **config}))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_it_is_of_the_contents_and_not_of_the_place(tmp_path):
    here = write(tmp_path / "one")
    (here / "README.md").write_text("about it")
    there = shutil.copytree(here, tmp_path / "another" / "home")
    (there / "README.md").write_text("other words")
    assert len(model_digest(here)) == 32
    assert model_digest(here) == model_digest(there)
    changed = b"w" * 999 + b"x"
    assert model_digest(write(tmp_path / "two", changed)) != model_digest(here)  # as many bytes
    assert model_digest(write(tmp_path / "three", hidden_size=8)) != model_digest(here)
    told = {"transformers_version": "5.9", "_name_or_path": "/home/me", "dtype": "bfloat16", "some_new_key": None}
    assert model_digest(write(tmp_path / "four", **told)) == model_digest(here)  # who wrote the config does not count
    assert model_digest(write(tmp_path / "five", norm_output=True)) != model_digest(here)


def test_shards_and_what_lies_beside_them(tmp_path):
    folder = write(tmp_path / "one")
    (folder / "model.safetensors").unlink()
    for n, data in enumerate((b"a" * 100, b"b" * 100), 1):
        (folder / f"model-0000{n}-of-00002.safetensors").write_bytes(data)
    plain = model_digest(folder)
    (folder / "pytorch_model.bin").write_bytes(b"the same once more, which nobody loads")
    (folder / "training_args.bin").write_bytes(b"not weights")
    assert model_digest(folder) == plain
    first, second = (folder / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    assert model_digest(folder) != plain


def test_a_file_that_changed_is_hashed_anew_whatever_its_time_says(tmp_path):
    folder = write(tmp_path / "one")
    before, file = model_digest(folder), folder / "model.safetensors"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(b"v" * 1000)
    os.utime(file, ns=times)
    assert model_digest(folder) != before


def test_a_file_is_hashed_once(tmp_path, cache, monkeypatch):
    folder = write(tmp_path / "one")
    before = model_digest(folder)
    assert len(list((cache / "specscope" / "digests").iterdir())) == 1

    def read(file):
        raise AssertionError(f"{file} is hashed again")

    monkeypatch.setattr(digests, "_contents", read)
    assert model_digest(folder) == before
    assert model_digest(folder, limit=0) == before  # it is known
    kept = next((cache / "specscope" / "digests").iterdir())
    kept.write_text('{"stamp": "nonsense"}')
    with pytest.raises(AssertionError, match="hashed again"):
        model_digest(folder)


def test_what_is_no_model_has_none(tmp_path):
    assert (model_digest(tmp_path / "nowhere"), model_digest(tmp_path)) == ("", "")
    broken = write(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    assert model_digest(broken) == ""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"g" * 300)
    assert len(model_digest(file)) == 32
