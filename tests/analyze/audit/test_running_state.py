"""Targets with a running state, as of short convolutions: the text is judged in order, branches by a copied cache."""

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, cache_utils

import specscope
from specscope.analyze.audit.audit import audit
from specscope.analyze.audit.options import ModelSource, Options
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import Exit
from specscope.trace.wire.reading import read_capture
from tests.analyze.audit.runs import failed


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target whose layers are convolutions and attention by turns, and a draft model that is nearly the same."""
    folder = tmp_path_factory.mktemp("hybrid")
    config = Lfm2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        block_multiple_of=8,
        layer_types=["conv", "full_attention"] * 2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    target = Lfm2ForCausalLM(config).eval()
    draft = Lfm2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter, other in zip(target.parameters(), draft.parameters(), strict=True):
            parameter.mul_(6 if parameter.dim() > 1 else 1)  # sharper than random
            other.copy_(parameter)
            if parameter.dim() > 1:
                other.add_(0.08 * parameter.std() * torch.randn_like(parameter))
    for model, name in ((target, "target"), (draft, "draft")):
        model.save_pretrained(folder / name)
        model.config._name_or_path = model.name_or_path = str(folder / name)
    return target, draft, Options(*(ModelSource(str(folder / name), name) for name in ("target", "draft")))


@pytest.fixture
def recorded(models, tmp_path):
    """The history of some greedy calls."""
    target, draft, _ = models

    def record(length=3, calls=3):
        draft.generation_config.num_assistant_tokens = length
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        with specscope.record(tmp_path / "run.jsonl"):
            for seed in range(calls):
                prompt = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(seed))
                more = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 63, "max_new_tokens": 40}
                target.generate(prompt, assistant_model=draft, **more)
        return read_capture(tmp_path / "run.jsonl").history

    return record


def test_a_healthy_run_agrees_at_every_row(models, recorded):
    history = recorded()
    found = audit(history, "run.jsonl", models[2])
    assert (failed(found), found.unjudged, found.exit) == (set(), (), Exit.CONSISTENT)
    for name in ("target p", "draft p", "drafter tokens"):
        assert found.finding(name).tested == found.nodes > 60
    assert any(len(part.tree) > 1 for record in history.steps for part in record.requests)


def test_what_a_rejected_draft_left_in_the_state_is_found_where_it_begins(models, recorded, monkeypatch):
    kept = cache_utils.LinearAttentionCacheLayerMixin
    right = kept.crop
    monkeypatch.setattr(kept, "crop", lambda self, remove: right(self, 0))
    history = recorded(length=1, calls=6)
    found = audit(history, "run.jsonl", models[2])
    tops = found.finding("target top tokens")
    assert tops.failed > 20
    assert "drafted tokens rejected earlier >= 1, at 0 of" in tops.sentence
    monkeypatch.undo()
    diagnosis = examine(history, "run.jsonl", models[2])
    assert diagnosis.faults[0].cause.label == "target_kv"
    assert diagnosis.left_out == ()


def test_an_audit_that_judged_nothing_is_not_among_what_found_no_fault(models, recorded, monkeypatch):
    history = recorded()
    monkeypatch.setattr("specscope.analyze.audit.model.causal.Causal.rows", lambda self, *_: [][0])
    diagnosis = examine(history, "run.jsonl", models[2])
    assert diagnosis.looked_at == ("capture", "verify")
    assert "IndexError" in " ".join(diagnosis.left_out)
