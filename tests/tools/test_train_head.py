"""How the bundled head was made: the data a target writes, the recipe's arithmetic, resuming, and the command."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specscope import Engine, SamplingParams
from specscope.errors import UserError
from tests.waiting import until
from tools.train_head.eagle3 import forward
from tools.train_head.heads import Recipe
from tools.train_head.synthesise import Turns
from tools.train_head.training import Training

RECIPE = Recipe(draft_vocab=120, steps=3, epochs=5, batch_tokens=256, learning_rate=3e-3)


def test_what_the_target_writes_comes_with_its_true_features(deep, data):
    model = AutoModelForCausalLM.from_pretrained(deep)
    tokenizer = AutoTokenizer.from_pretrained(deep)
    opening = Turns.of(tokenizer, (2,)).opening
    for index in (0, len(data) // 2, len(data) - 1):
        sample = data[index]
        out = model(sample.tokens.long()[None], output_hidden_states=True)
        features = torch.cat([out.hidden_states[aux_layer][0] for aux_layer in (2, 3, 4)], dim=-1)
        assert torch.allclose(sample.features.float(), features, rtol=0.02, atol=0.02)
        assert torch.allclose(sample.final.float(), out.hidden_states[-1][0], rtol=0.02, atol=0.02)
        assert sample.tokens[: len(opening)].tolist() == opening
        assert not sample.learn[: len(opening)].any()
        assert sample.learn.any()


def test_training_time_test_is_what_the_drafter_will_do(data, target, tmp_path):
    """Step k at index t is the k-th token of a greedy chain drafted from t: the same logits, from the paged head."""
    from specscope.model.batch import Segment
    from specscope.model.heads.head_runner import HeadRunner, LoadedHead
    from specscope.model.kv_cache import BlockTable
    from specscope.trace.record.tree import DraftTree

    training = Training(target, data, RECIPE, tmp_path)
    training.head.norm.weight.data.mul_(1.5)  # else the norm hardly shows
    batch = training.padded([3])
    seen = []
    hook = training.head.lm_head.register_forward_hook(lambda module, given, out: seen.append(out[0]))
    with torch.no_grad():
        forward(training.head, training.heads, batch, 3)
    hook.remove()
    runner = HeadRunner(LoadedHead(training.head, target.embedding, training.head.lm_head, "here"), target, 20)
    tokens, features = batch.tokens[0].tolist(), batch.features[0]
    for at in (0, 7, 20):
        table = BlockTable()
        runner.cache.reserve(table, at + 4, 0)
        context = Segment.of_tree(table, 0, tokens[1 : at + 2], DraftTree.empty(), logits=True)
        logits, hidden = runner.forward([context], runner.combine(features[: at + 1]))
        assert torch.allclose(logits[-1], seen[0][at], atol=1e-4)
        for step in (1, 2):
            more = Segment.of_tree(table, at + step, [tokens[at + 1 + step]], DraftTree.empty(), logits=True)
            logits, hidden = runner.forward([more], hidden[-1:])
            assert torch.allclose(logits[-1], seen[step][at], atol=1e-4)
        runner.cache.truncate(table, 0)


def test_the_loss_is_the_papers(data, target, tmp_path):
    """Step 0 by hand: cross-entropy with the target's distribution over the draft vocabulary."""
    training = Training(target, data, RECIPE, tmp_path)
    batch = training.padded([0, 5])
    seen = []
    hook = training.head.lm_head.register_forward_hook(lambda module, given, out: seen.append(out))
    outcome = forward(training.head, training.heads, batch, 1)
    hook.remove()
    chosen = training.head.target_tokens()
    total, count = 0.0, 0
    for row, index in enumerate((0, 5)):
        sample = training.data[index]
        logits = sample.final.float() @ target.output.weight.T
        for t in range(len(sample.tokens) - 1):
            if sample.learn[t + 1]:
                p = logits[t + 1, chosen].softmax(-1)
                total -= float((p * seen[0][row, t].detach().log_softmax(-1)).sum())
                count += 1
    assert outcome.positions == [count]
    assert float(outcome.loss.detach()) == pytest.approx(total / count, rel=1e-4)


def test_training_learns_and_a_resumed_run_is_the_same_run(data, target, tmp_path):
    whole = Training(target, data, RECIPE, tmp_path / "whole")
    losses = [float(outcome.loss.detach()) for outcome in whole.run()]
    assert whole.step == whole.total == len(losses)
    assert (
        max(losses[-5:]) < math.log(RECIPE.draft_vocab) < min(losses[:5])
    )  # from worse than a uniform guess to better

    first = Training(target, data, RECIPE, tmp_path / "cut")
    for _ in first.run():
        if first.step == 7:
            first.save()
        if first.step == 9:  # killed: two steps are lost
            break
    second = Training(target, data, RECIPE, tmp_path / "cut")
    assert second.step == 7
    again = [float(outcome.loss.detach()) for outcome in second.run()]
    assert again == losses[7:]
    for a, b in zip(whole.head.parameters(), second.head.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(UserError, match="other settings or data"):
        Training(target, data, Recipe(), tmp_path / "cut")


def command(*words):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tools.train_head", *map(str, words)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.slow
def test_the_command_survives_a_kill_and_its_head_drafts(deep, tmp_path):
    out = tmp_path / "head"
    how = ["--target", deep, "--dtype", "float32", "--self-synthesise", 5000, "-o", out, "--draft-vocab", 150]
    how += ["--epochs", 6, "--batch-tokens", 128, "--rows", 8, "--longest", 100]
    first = command(*how)
    until(lambda: (out / "data" / "shard-00000.safetensors").exists() or first.poll() is not None)
    first.send_signal(signal.SIGINT)
    error = first.communicate(timeout=60)[1]
    assert first.returncode == 130, error
    assert "goes on from here" in error
    second = command(*how)
    error = second.communicate(timeout=120)[1]
    assert second.returncode == 0, error
    text = (out / "README.md").read_text()
    assert "--self-synthesise 5000" in text
    assert "among four, 3" in text
    lines = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    assert lines[-1]["tokens"] > 10_000
    same = {"target": str(deep), "dtype": "float32", "kv_memory": 0.01}
    plain = Engine(drafter="none", **same)
    eagle = Engine(drafter="eagle", draft_model=str(out), tree="dynamic:8", **same)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (a,), (b,) = (engine.generate("hello there", params) for engine in (plain, eagle))
    assert a.token_ids == b.token_ids
    assert b.acceptance.drafted > 0


def test_a_head_can_be_gone_on_from(data, target, tmp_path):
    """With its vocabulary and its numbers: what it knows is there from the first step on."""
    first = Training(target, data, RECIPE, tmp_path / "first")
    for _ in first.run():
        pass
    first.save()
    knows = first.evaluate()
    recipe = dataclasses.replace(RECIPE, start=str(tmp_path / "first"), draft_vocab=7, seed=9)
    second = Training(target, data, recipe, tmp_path / "second")
    assert second.head.target_tokens().tolist() == first.head.target_tokens().tolist()
    assert second.evaluate()["first"] == pytest.approx(knows["first"], abs=0.02)  # it was saved in bfloat16
    assert second.step == 0
