"""Runs without a fault: no cause is named, with the models at hand and without."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import Exit
from specscope.speculate.drafters import eagle
from tests.faults.fault import Fault, replaced
from tests.faults.healthy import HEALTHY
from tests.faults.judged import diagnosed
from tests.faults.models import HEAD
from tests.faults.settings import DRAFTERS, TREE, WARM, Setting, capture, history
from tests.heads import write_parallel_head

SOME = [
    "none, warm",
    "ngram tree, warm, crowded",
    "early chain, rules",
    "early tree, penalties",
    "eagle dynamic, greedy",
]


def check(setting):
    path = capture(setting)
    alone, found = examine(history(path)), diagnosed(path, setting)
    assert not alone.faults, [(one.cause.label, one.grade, one.for_) for one in alone.faults]
    assert not found.faults, [(one.cause.label, one.grade, one.for_) for one in found.faults]
    assert not found.unexplained, found.unexplained
    assert found.exit is Exit.CONSISTENT


@pytest.mark.every(6)
@pytest.mark.parametrize("name", [*SOME, "dflash chain, warm"])
def test_a_short_healthy_run_names_no_cause(name):
    check(replace(HEALTHY[name], requests=6, tokens=40))


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_no_healthy_run_names_a_cause(name):
    check(HEALTHY[name])


@pytest.fixture
def one_pass(tmp_path, monkeypatch):
    """A drafter: a P-EAGLE head with the weights of the EAGLE-3 head, whose mask rows were never trained."""
    layer = json.loads((HEAD / "config.json").read_text())
    tensors = load_file(HEAD / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    tensors["mask_hidden"] = torch.randn(1, 1, tensors["fc.weight"].shape[1], generator=generator)
    folder = write_parallel_head(tmp_path / "head", tensors, transformer_layer_config=layer)
    monkeypatch.setitem(DRAFTERS, "one pass", {"drafter": "eagle", "draft_model": str(folder), "tree": TREE})
    return "one pass"


@pytest.mark.every(2)
@pytest.mark.parametrize("params", [{}, WARM], ids=["greedy", "warm"])
def test_a_healthy_run_of_a_head_that_drafts_in_one_pass_names_no_cause(one_pass, params):
    """A weak drafter, but nothing is wrong."""
    check(Setting(one_pass, params, tokens=40, requests=3))


def test_a_healthy_run_in_bfloat16_behind_long_prompts_names_no_cause(monkeypatch):
    """Rounding is measured on as many steps as behind short ones."""
    monkeypatch.setitem(DRAFTERS, "rounded", {**DRAFTERS["eagle tree"], "dtype": "bfloat16"})
    params = {"temperature": 1.6, "top_k": 2, "top_p": 0.91, "min_p": 0.157, "repetition_penalty": 1.06}
    check(Setting("rounded", params, tokens=40, requests=6, prompt=120))


def test_mask_rows_at_wrong_positions_are_named(one_pass):
    """Each of them one position too far: the head is asked again with its drafts moved, and agrees."""

    def further(with_masks, segment, count, mask_token):
        found = with_masks(segment, count, mask_token)
        found.positions[len(segment.tokens) :] += 1
        return found

    fault = Fault("further", Cause.ROTARY_POSITIONS, replaced(eagle, "with_masks")(further), "")
    setting = Setting(one_pass, {}, tokens=40, requests=3)
    found = diagnosed(capture(setting, fault), setting)
    assert Cause.ROTARY_POSITIONS in [one.cause for one in found.faults]
