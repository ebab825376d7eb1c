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
from specscope.model.features import published_aux_layers
from specscope.model.heads.head_loader import load_head
from specscope.model.runner import ModelRunner
from tests.waiting import until
from tools.train_head import synthesise
from tools.train_head.eagle3 import forward
from tools.train_head.heads import Recipe
from tools.train_head.shards import Sample, Shards, ShardWriter
from tools.train_head.synthesise import Synthesiser, Turns
from tools.train_head.training import Training, batches_of

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


def test_greedy_answers_are_the_targets_own(deep, target, tmp_path):
    """With temperature 0 everywhere, every learnt token is the argmax after the tokens before it."""
    runner = ModelRunner(target, 100, (*published_aux_layers(7), "final"))
    writer = Synthesiser(runner, AutoTokenizer.from_pretrained(deep), rows=3, longest=100, seed=2)
    writer.turns = Turns(writer.turns.opening, [], (2,))  # no template: it simply goes on
    writer.random.choice = lambda options: 0.0 if isinstance(options[0], float) else options[0]
    writer.random.random = lambda: 1.0
    writer.write(100, ShardWriter(tmp_path, {}), lambda n: None)
    sample = Shards(tmp_path)[0]
    model = AutoModelForCausalLM.from_pretrained(deep)
    best = model(sample.tokens.long()[None]).logits[0].argmax(-1)
    start = int(sample.learn.nonzero()[0])
    assert sample.tokens[start:].tolist() == best[start - 1 : -1].tolist()


def test_a_long_instruction_is_cut_and_answered(deep, target, tmp_path, monkeypatch):
    monkeypatch.setattr(synthesise, "LONGEST_INSTRUCTION", 12)
    runner = ModelRunner(target, 100, (*published_aux_layers(7), "final"))
    writer = Synthesiser(runner, AutoTokenizer.from_pretrained(deep), rows=3, longest=100, seed=2)
    writer.write(300, ShardWriter(tmp_path, {}), lambda n: None)
    opening, answer = writer.turns.opening, writer.turns.answer
    longest = 0
    for sample in (shards := Shards(tmp_path))[0], shards[1], shards[2]:
        tokens = sample.tokens.tolist()[len(opening) :]
        at = next(i for i in range(len(tokens)) if tokens[i : i + len(answer)] == answer)
        longest = max(longest, at)
        assert at <= 12 or not sample.learn[len(opening) + at - 1]  # an opener alone may be longer
    assert longest >= 12


def test_training_time_test_is_what_the_drafter_will_do(data, target, tmp_path):
    """Step k at index t is the k-th token of a greedy chain drafted from t: the same logits, from the paged head."""
    from specscope.model.batch import Segment
    from specscope.model.heads.head_loader import LoadedHead
    from specscope.model.heads.head_runner import HeadRunner
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
    runner = HeadRunner(LoadedHead(training.head, target.embedding, training.head.lm_head, "here"), 300, 512, 20)
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


def test_batches_hold_every_sample_once_and_their_size(data):
    batches = batches_of(data, range(len(data)), 256, seed=3)
    assert sorted(i for batch in batches for i in batch) == list(range(len(data)))
    assert all(max(map(data.length, batch)) * len(batch) <= 256 for batch in batches if len(batch) > 1)
    assert batches != batches_of(data, range(len(data)), 256, seed=4)


def test_shards_hold_what_was_added_across_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.train_head.shards.SHARD_TOKENS", 20)
    writer = ShardWriter(tmp_path, {"a": 1})
    samples = [
        Sample(
            torch.arange(n, dtype=torch.int32),
            torch.arange(n) > 1,
            torch.randn(n, 6).bfloat16(),
            torch.ones(n, 2).bfloat16(),
        )
        for n in (3, 9, 15, 1, 4)
    ]
    for sample in samples:
        writer.add(sample)
    writer.flush()
    (tmp_path / "shard-00007.part").write_bytes(b"a killed run left this")
    shards = Shards(tmp_path)
    assert len(shards.files) == 2
    for index, sample in enumerate(samples):
        for name in ("tokens", "learn", "features", "final"):
            assert torch.equal(getattr(shards[index], name), getattr(sample, name))
    counts = shards.counts(20, range(5))
    assert counts.tolist() == [sum(i < n for n in (3, 9, 15, 1, 4)) if i > 1 else 0 for i in range(20)]
    with pytest.raises(UserError, match="made with other settings"):
        ShardWriter(tmp_path, {"a": 2})


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


def test_too_little_room_is_refused_at_once(deep, target):
    runner = ModelRunner(target, 20, (*published_aux_layers(7), "final"))
    with pytest.raises(UserError, match="raise it"):
        Synthesiser(runner, AutoTokenizer.from_pretrained(deep), rows=1, longest=40, seed=0)


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


@pytest.mark.parametrize("size", [200, 10_000])  # 10,000: all 300 tokens of the target
def test_a_head_to_go_on_from_can_learn_more_tokens(data, target, tmp_path, size):
    """Its own tokens keep their rows; the others that the data has most often join, with the target's rows."""
    first = Training(target, data, RECIPE, tmp_path / "first")
    first.save()
    recipe = dataclasses.replace(RECIPE, start=str(tmp_path / "first"), draft_vocab=size)
    second = Training(target, data, recipe, tmp_path / "second")
    counts = data.counts(target.vocab_size, second.samples).tolist()
    had = first.head.target_tokens().tolist()
    others = sorted((t for t in range(300) if t not in had), key=lambda t: (-counts[t], t))[: min(size, 300) - len(had)]
    tokens = sorted(had + others)
    rows = second.head.lm_head.weight
    assert len(rows) == len(tokens) == min(size, 300)
    for row, token in enumerate(tokens):
        expected = (
            first.head.lm_head.weight[had.index(token)].bfloat16() if token in had else target.output.weight[token]
        )
        assert torch.equal(rows[row], expected.float())
    assert torch.equal(second.heads.rows, target.output.weight[tokens])
    assert torch.equal(second.head.fc.weight, first.head.fc.weight.bfloat16().float())
    next(second.run())  # it trains
    second.save()
    loaded = load_head(str(tmp_path / "second"), target).head
    if size == 200:
        assert loaded.target_tokens().tolist() == tokens
        assert loaded.t2d.nonzero()[:, 0].tolist() == tokens
    else:
        assert loaded.target_tokens() is None


def test_products_are_in_bfloat16_where_the_processor_has_it_and_nowhere_else(data, target, tmp_path, monkeypatch):
    """Weights, gradients and what is learnt stay float32, and the loss is the same to bfloat16's accuracy."""
    losses, dtypes = {}, {}
    for has in (False, True):
        monkeypatch.setattr("tools.train_head.training.has_bfloat16", lambda has=has: has)
        training = Training(target, data, RECIPE, tmp_path / str(has))
        seen = []
        training.head.fc.register_forward_hook(lambda module, given, out, seen=seen: seen.append(out.dtype))
        losses[has] = float(next(training.run()).loss.detach())
        dtypes[has] = seen[0]
        assert {p.dtype for p in training.head.parameters()} == {torch.float32}
        training.evaluate()
        assert seen[-1] is torch.float32  # held-out figures are not rounded
    assert dtypes == {False: torch.float32, True: torch.bfloat16}
    assert losses[True] == pytest.approx(losses[False], rel=0.01)


def test_only_a_head_of_this_kind_can_be_gone_on_from(data, target, tmp_path):
    with pytest.raises(UserError):
        Training(target, data, dataclasses.replace(RECIPE, start=str(tmp_path)), tmp_path / "new")
