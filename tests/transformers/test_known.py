"""What the hooks wrap is as they know it; else recording is refused, with the reason, and nothing is wrapped."""

import os
from pathlib import Path

import pytest
import transformers
from transformers.generation import utils

import specscope
from specscope.errors import UserError
from specscope.transformers import hooks
from tests.support.sources import skeleton

# Folders of unpacked wheels, transformers-5.20.2 and so on, where they are at hand
SOURCES = sorted(Path(os.environ.get("SPECSCOPE_TRANSFORMERS_SOURCES", "/nonexistent")).glob("transformers-*"))


def test_the_installed_version_is_as_it_is_known():
    hooks.check_version(transformers.__version__)
    hooks.check_signatures(utils, transformers.__version__)


@pytest.mark.parametrize("version", ["4.57.1", "5.19.0", "5.25.0", "6.0.0"])
def test_another_version_is_refused_by_a_sentence(version):
    with pytest.raises(UserError, match=rf"transformers {version} .* 5.20 to 5.24 can be recorded"):
        hooks.check_version(version)


def test_a_changed_signature_is_refused_and_nothing_is_wrapped(tmp_path, monkeypatch):
    def _speculative_sampling(candidate_input_ids, candidate_logits, candidate_length, new_logits, is_done): ...

    _speculative_sampling.__module__ = utils.__name__
    monkeypatch.setattr(utils, "_speculative_sampling", _speculative_sampling)
    decoding = utils.GenerationMixin._assisted_decoding
    with pytest.raises(UserError, match=r"_sampling takes .*is_done"), specscope.record(tmp_path / "a.jsonl"):
        pass
    assert utils.GenerationMixin._assisted_decoding is decoding
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_each_known_version_is_as_its_source_has_it(source):
    hooks.check_signatures(skeleton(source / "transformers", utils.__name__), source.name)
