"""Drafters that are not what they should be, where the capture alone, or the model as it was run, shows nothing."""

import dataclasses
import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from benchmarks.freeze.results import run_here
from specscope.analyze.audit.audit import audit
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.findings import Exit
from specscope.measure.judges import audit_options
from specscope.plans.kinds import IN_SGLANG
from specscope.trace.wire.reading import read_capture
from tests.faults.judged import diagnosed
from tests.faults.models import DRAFT, HEAD, TARGET
from tests.faults.planted import FAULTS
from tests.faults.settings import DRAFTERS, SETTINGS, record


def with_embedding(folder, embedding):
    """The tests' head with an embedding of its own."""
    shutil.copytree(HEAD, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"] = embedding
    save_file(tensors, folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())
    return str(folder)


def judged(monkeypatch, tmp_path, embedding):
    short = dataclasses.replace(SETTINGS["eagle chain"], requests=5, tokens=40)
    monkeypatch.setitem(
        DRAFTERS,
        "eagle chain",
        {"drafter": "eagle", "draft_model": with_embedding(tmp_path / "head", embedding), "tree": "4"},
    )
    return diagnosed(record(short, tmp_path / "run.jsonl"), short)


def targets_own():
    return load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"].float()


def test_a_head_that_tells_one_engine_alone_which_layers_feed_it_is_warned_of(tmp_path):
    short = dataclasses.replace(SETTINGS["eagle chain"], requests=1, tokens=8)
    path, head = record(short, tmp_path / "run.jsonl"), tmp_path / "head"
    shutil.copytree(HEAD, head)
    config = json.loads((head / "config.json").read_text())
    assert config.pop(IN_SGLANG)
    (head / "config.json").write_text(json.dumps(config))
    for folder, warns in ((HEAD, False), (head, True)):
        told = ["diagnose", str(path), "--json", "--target", str(TARGET), "--draft-model", str(folder)]
        (capture,) = json.loads(run_here(told)[1])["captures"]
        assert any("SGLang would not find which layers" in line for line in capture["warnings"]) is warns


def test_a_random_embedding_is_named(monkeypatch, tmp_path):
    """Item 5: it was said to be a weak drafter."""
    found = judged(monkeypatch, tmp_path, torch.randn(targets_own().shape, generator=torch.Generator().manual_seed(0)))
    assert found.exit is Exit.INCONSISTENT
    assert found.faults[0].cause is Cause.HEAD_EMBEDDING
    assert "mean cosine 0.0" in found.faults[0].for_[0] or "mean cosine -0.0" in found.faults[0].for_[0]


def test_an_embedding_that_was_trained_on_is_none(monkeypatch, tmp_path):
    own = targets_own()
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(0))
    found = judged(monkeypatch, tmp_path, own + 0.3 * own.std() * noise)
    assert Cause.HEAD_EMBEDDING not in [fault.cause for fault in found.faults]
    assert found.exit is Exit.CONSISTENT


def test_a_choice_among_the_first_tokens_is_told_by_what_the_drafter_would_choose(tmp_path):
    """Item 19: what is drafted tells nothing; where it differs, the drafter would have chosen a later token."""
    fault = FAULTS["first tokens only"]
    short = dataclasses.replace(SETTINGS[fault.setting], requests=6, tokens=40)
    path = record(short, tmp_path / "run.jsonl", fault)
    history = read_capture(path).history
    options = audit_options(history, str(TARGET), str(DRAFT), 100)
    finding = audit(history, str(path), options).finding("drafter tokens")
    assert finding is not None
    assert finding.failed > 20
    assert "token id that the drafter would choose >= " in finding.sentence
    assert finding.condition is not None
    assert finding.condition.hits_in == finding.condition.total_in
    assert diagnosed(path, short).faults[0].cause is Cause.DRAFT_VOCABULARY
