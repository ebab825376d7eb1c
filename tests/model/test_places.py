"""What can be refused before torch is imported: a model, a head or a device that is not one."""

import pytest

from specscope.errors import UserError
from specscope.model.places import head_place, model_place


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
