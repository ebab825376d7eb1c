"""A judge never dies: of wrong values that are read, and of targets with a running state, judged in order."""

import dataclasses
import json

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, cache_utils

import specscope
from specscope.analyze.audit.audit import audit
from specscope.analyze.audit.options import ModelSource, Options
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import CheckResult, Exit
from specscope.errors import UserError
from specscope.trace.wire.reading import read_capture
from tests.analyze.audit.runs import RULES, failed, run
from tests.analyze.edits import changed, put, rebuilt, replaced
from tests.analyze.histories import write
from tests.engines import PROMPTS
from tests.trace.damage import damaged, with_wrong_numbers


@pytest.mark.parametrize("name", ["eagle", "p-eagle", "draft tree"])
def test_outputs_that_are_swapped_between_requests_are_judged(bench, name):
    """The steps of two requests change places: no step of theirs follows from what was committed."""
    engine = bench.engine(name)
    history = run(engine, RULES["greedy"], tokens=10, prompts=[*PROMPTS[:2], PROMPTS[3]])
    first, second = list(history.requests)[:2]
    other = {first: second, second: first}

    def swap(record):
        parts = (replaced(part, request=other.get(part.request, part.request)) for part in record.requests)
        return dataclasses.replace(record, requests=tuple(parts))

    swapped = rebuilt(history, swap)
    found = bench.audit(engine, swapped)
    assert found.exit is Exit.INCONSISTENT
    assert found.finding("context").failed
    assert "contradict what was committed before" in found.to_dict()["verdict"]
    assert found.finding("target p").result is CheckResult.PASSED  # the third request is as it was
    assert not any("Error" in sentence for sentence in found.unjudged)


def test_where_no_step_can_be_judged_the_context_is_wrong(bench):
    engine = bench.engine("eagle")
    moved = changed(bench.ran("eagle", "greedy", 6, 1), lambda part: replaced(part, context_len=part.context_len + 50))
    found = bench.audit(engine, moved)
    assert (found.exit, found.audited) == (Exit.INCONSISTENT, 0)


DAMAGE = {  # by what is damaged: the drafter, the array, its first values, and the check that fails
    **{
        f"token {token} of {name}": (name, "tree", "token", [token], "context")
        for token, name in ((-1, "eagle"), (300, "draft tree"), (2**31 - 1, "ngram"))
    },
    **{f"p {p}": ("draft tree", "verdict", "p", [p], "target p") for p in (float("nan"), -0.5, 2.0, float("inf"))},
    "likeliest tokens": ("draft tree", "parents", "top", [99_999] * 4, "target top tokens"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_one_damaged_value_is_a_difference(bench, what):
    name, where, array, values, check = DAMAGE[what]
    engine, history = bench.engine(name), bench.ran(name, "temperature")
    step = next(p for r in history.steps for p in r.requests if len(p.tree) and p.index > 2 and p.parents.node.size > 0)
    right = getattr(getattr(step, where), array)
    spoilt = put(right.ravel(), slice(len(values)), values).reshape(right.shape)
    bad = changed(history, lambda part: replaced(step, **{f"{where}__{array}": spoilt}) if part is step else None)
    found = bench.audit(engine, bad)
    assert found.exit is Exit.INCONSISTENT
    wrong = found.finding(check)
    assert wrong.failed == 1 or check == "context"
    if check == "context":
        assert f"{what.split(' of ')[0]} is outside the model's vocabulary of 300" in wrong.detail or wrong.failed > 1
        assert found.finding("final p").result is CheckResult.PASSED
    assert not any("Error" in sentence for sentence in found.unjudged)


def judge_damaged(lines, options, path, seeds):
    """How many of them could be read and judged. Whatever was done, nothing but UserError is raised."""
    judged = 0
    for seed in seeds:
        path.write_bytes(damaged(lines, seed) if seed % 2 else with_wrong_numbers(lines, seed, 0.01))
        try:
            found = audit(read_capture(path).history, path.name, options)
        except UserError:
            continue
        assert not any("Error:" in sentence for sentence in found.unjudged), (seed, found.unjudged)
        json.dumps(found.to_dict())
        judged += 1
    return judged


@pytest.mark.every(2)
@pytest.mark.parametrize("rule", ["greedy", "all"])
@pytest.mark.parametrize("name", ["eagle dynamic", "draft tree", "suffix"])
def test_damage_is_never_an_exception(bench, tmp_path, name, rule):
    path = write(bench.ran(name, rule, 8), tmp_path / "run.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert judge_damaged(lines, bench.options(bench.engine(name), sample=8), path, range(6)) > 3


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target whose layers are convolutions and attention by turns, and a draft model that is nearly the same."""
    folder = tmp_path_factory.mktemp("hybrid")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = Lfm2Config(**sizes, **tokens, block_multiple_of=8, layer_types=["conv", "full_attention"] * 2)
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
    history = recorded(length=1, calls=5)
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
