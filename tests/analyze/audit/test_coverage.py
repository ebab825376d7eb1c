"""What a verdict covers: heads with unknown flags, drafters not at hand, rules that a capture does not tell."""

import dataclasses
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from specscope.analyze.audit.audit import audit, verdict
from specscope.analyze.audit.options import ModelSource
from specscope.analyze.audit.tally import DRAFTER, EMBEDDING, FED, TARGET, TREE
from specscope.analyze.findings import CheckResult, Exit, Finding
from tests.analyze.audit.runs import failed, run
from tests.analyze.edits import rebuilt, under
from tests.engines import PROMPTS
from tests.heads import head_tensors, write_head


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
