"""What a verdict covers: heads with unknown flags, drafters not at hand; captures that are cut, damaged or merged."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Lfm2Config, Lfm2ForCausalLM, cache_utils

import specscope
from specscope.analyze.audit.audit import audit, verdict
from specscope.analyze.audit.options import ModelSource, Options
from specscope.analyze.audit.tally import DRAFTER, EMBEDDING, FED, TARGET, TREE
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import CheckResult, Exit, Finding
from specscope.errors import UserError
from specscope.trace.wire.reading import read_capture
from tests.analyze.audit.runs import RULES, failed, run
from tests.analyze.edits import changed, put, rebuilt, replaced, under
from tests.analyze.histories import write
from tests.engines import PROMPTS
from tests.heads import head_tensors, write_head
from tests.trace.damage import damaged, with_wrong_numbers


@pytest.fixture(scope="module")
def drafted(bench):
    """A run of an EAGLE head."""
    return bench.ran("eagle", "greedy", 8, 2)


def with_config(bench, folder, tensors=None, **more):
    """The head once more, with other keys in its config, and what `tensors` makes of its tensors."""
    shutil.copytree(bench.heads["eagle"], folder)
    (folder / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), **more}))
    if tensors is not None:
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return ModelSource(str(folder), "head")


def judged(bench, history, head):
    return audit(history, "run.jsonl", dataclasses.replace(bench.options(bench.engine("eagle")), draft=head))


def flagged(**config):
    return lambda bench, folder: with_config(bench, folder, **config)


def other(**config):
    return lambda bench, folder: ModelSource(str(write_head(folder, head_tensors(target=64), **config)), "head")


UNKNOWN = {  # what the judge does not know of a head, or misses in it, and the head
    "the head's config has `norm_of_dreams`, which this judge does not know.": flagged(norm_of_dreams=True),
    "the head's config has `gate_bias_scale = 0.5`, which": flagged(gate_bias_scale=0.5),
    "the head's config has `nested_flag`, which": flagged(eagle_config={"nested_flag": True}),
    "`use_last_layernorm = False`": flagged(eagle_config={"use_last_layernorm": False}),
    "`hidden_act = tanh`": flagged(hidden_act="tanh"),
    "`rope_twist = 2`": flagged(rope_scaling={"rope_type": "default", "rope_theta": 5000.0, "rope_twist": 2}),
    "the head has a tensor q_norm.weight, which this judge does not know": flagged(
        tensors=lambda tensors: {**tensors, "q_norm.weight": tensors["norm.weight"].clone()}
    ),
    "head is not a head: it has no tensor fc.weight.": flagged(
        tensors=lambda tensors: {name: x for name, x in tensors.items() if name != "fc.weight"}
    ),
    "cannot load the head head: cannot read ": lambda bench, folder: ModelSource(str(folder / "nothing"), "head"),
    "": other(target_hidden_size=64),  # of another width
}


@pytest.mark.parametrize("said", UNKNOWN)
def test_what_is_unknown_of_a_head_is_named_and_the_target_is_judged(bench, drafted, tmp_path, said):
    found = judged(bench, drafted, UNKNOWN[said](bench, tmp_path / "head"))
    (unjudged,) = found.unjudged
    assert unjudged.startswith("The drafter was not judged: ")
    assert said in unjudged
    assert found.exit is Exit.NOT_JUDGED
    assert failed(found) == set()
    assert found.finding("target p").result is CheckResult.PASSED
    assert found.finding("draft p") is None
    said_in_full = verdict(found.findings, found.audited, found.unjudged)
    fed = "" if said else f"The drafter agrees at {found.finding(FED).tested} steps. "
    assert said_in_full == f"The target agrees at {found.nodes} nodes of {found.audited} steps. {fed}{unjudged}"
    assert found.to_dict()["verdict"] == said_in_full


def test_what_is_off_or_changes_nothing_is_no_reason_to_skip(bench, drafted, tmp_path):
    """An unknown flag that is off; names and versions; and what real heads say of themselves."""
    harmless = {
        "norm_of_dreams": False,
        "another": None,
        "scale": 0,
        "speculators_version": "0.8.0",
        "transformers_version": "9.0",
        "auto_map": {"": "config.Some"},
        "layer_types": ["full_attention"],
        "logit_scale": 1.0,
        "eagle_config": {"use_last_layernorm": True, "use_mtp_layernorm": False},
    }
    found = judged(bench, drafted, with_config(bench, tmp_path / "head", **harmless))
    assert (found.exit, found.unjudged) == (Exit.CONSISTENT, ())
    assert found.finding("draft p").result is CheckResult.PASSED
    assert "The drafter agrees at" in found.to_dict()["verdict"]


def test_a_target_that_differs_beats_a_drafter_that_is_not_at_hand(bench, drafted, tiny):
    target, options = ModelSource(str(tiny), "another"), bench.options(bench.engine("eagle"))
    missing = dataclasses.replace(options, target=target, draft=None, why_no_draft="the head x is not at hand")
    wrong = audit(drafted, "run.jsonl", missing)
    assert wrong.exit is Exit.INCONSISTENT
    assert "The target does not agree: " in wrong.to_dict()["verdict"]
    assert "The drafter was not judged" in wrong.to_dict()["verdict"]


def as_vllm(history, labels=(), **params):
    """The same run, as if vLLM had made it: its requests with other labels, or other parameters."""
    return rebuilt(under(history, dict(labels), **params), versions={"vllm": "0.32.0"})


def test_a_sampled_drafter_of_vllm_has_the_temperature_and_nothing_else(bench):
    engine, history = bench.engine("draft tree"), bench.ran("draft tree", "temperature")
    found = bench.audit(engine, as_vllm(history, top_p=0.6, top_k=3))
    assert "draft p" not in failed(found)
    hot = bench.audit(engine, as_vllm(history, temperature=2.0))
    assert "draft p" in failed(hot)


def test_where_other_requests_texts_were_searched_too_nothing_is_accused(bench):
    """As captures made before --suffix-shared went say."""
    engine = bench.engine("suffix")
    history = rebuilt(bench.ran("suffix", "temperature"), speculation={"suffix_shared": 600})
    found = bench.audit(engine, history)
    check = found.finding("drafter tree")
    assert (check.result, check.tested) == (CheckResult.SKIPPED, 0)
    assert "The drafter was not judged: it also looked in the texts of other requests." in found.unjudged


@pytest.fixture(scope="module")
def biased(bench):
    """A run whose tokens were drawn under a bias that the capture does not tell."""
    history = run(bench.engine("eagle"), {"temperature": 1.0, "logit_bias": {70: 6.0}}, tokens=10, prompts=PROMPTS[:2])
    assert {"target p", "final p"} <= failed(bench.audit(bench.engine("eagle"), as_vllm(history, logit_bias={})))
    return history


LIMITS = ["allowed_token_ids", "bad_words", "min_tokens", "logits_processors", "structured_outputs"]


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_that_is_not_told_is_not_held_against_the_target(bench, biased, limit):
    """A label says that there was one."""
    found = bench.audit(bench.engine("eagle"), as_vllm(biased, {limit: "..."}, logit_bias={}))
    assert not {"target p", "final p", "target raw p"} & failed(found)
    assert found.finding("target p") is None
    said = f"2 requests: the target's p was not compared, because {limit} limit the tokens"
    assert any(note.startswith(said) for note in found.notes)
    raw = found.finding("target raw p")
    assert (raw is None) is (limit == "structured_outputs")  # vLLM notes it behind the mask
    assert ("The target was not judged" in found.to_dict()["verdict"]) is (raw is None)


@pytest.mark.parametrize("name", [*TARGET, *DRAFTER, TREE[0], EMBEDDING[0]])
def test_a_check_accuses_its_own_model(name):
    every = (*TARGET, *DRAFTER)
    findings = [Finding(other, CheckResult.PASSED, "", tested=9, unit="node") for other in every if other != name]
    findings.append(Finding(name, CheckResult.FAILED, "", tested=9, failed=2, unit="node"))
    accused, other = ("target", "drafter") if name in TARGET else ("drafter", "target")
    sentence = verdict(findings, 3, ())
    assert f"The {accused} does not agree: {name} differs at 2 of 9 nodes." in sentence
    assert f"The {other} agrees at 9 nodes of 3 steps." in sentence


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


@pytest.mark.every(2)
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


@pytest.mark.every(3)
@pytest.mark.parametrize("rule", ["greedy", "all"])
@pytest.mark.parametrize("name", ["eagle dynamic", "draft tree", "suffix"])
def test_damage_is_never_an_exception(bench, tmp_path, name, rule):
    path = write(bench.ran(name, rule, 8), tmp_path / "run.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert judge_damaged(lines, bench.options(bench.engine(name), sample=8), path, range(4)) > 2


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
    assert (diagnosis.faults[0].cause.label, diagnosis.left_out) == ("target_kv", ())


def test_an_audit_that_judged_nothing_is_not_among_what_found_no_fault(models, recorded, monkeypatch):
    history = recorded()
    monkeypatch.setattr("specscope.analyze.audit.model.causal.Causal.rows", lambda self, *_: [][0])
    diagnosis = examine(history, "run.jsonl", models[2])
    assert diagnosis.looked_at == ("capture", "verify")
    assert "IndexError" in " ".join(diagnosis.left_out)
