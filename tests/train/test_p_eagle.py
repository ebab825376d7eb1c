"""Training a head that drafts in one pass: mask and loss by hand, the choice of positions, and what it learns."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from specscope import Engine, SamplingParams
from specscope.errors import UserError
from specscope.model.heads.head_loader import LoadedHead, load_head, save_head
from specscope.model.heads.head_runner import HeadRunner
from specscope.train import eagle3
from specscope.train.eagle3 import Eagle3Training
from specscope.train.heads import mask_token_of
from specscope.train.p_eagle import Anchors, PEagleRecipe, PEagleTraining, every_anchor, forward, sampled_anchors
from specscope.train.scores import DECAY, Padded
from tests.heads import Reference

RECIPE = PEagleRecipe(draft_vocab=120, depths=3, epochs=5, batch_tokens=256, learning_rate=3e-3)


@pytest.fixture
def training(data, target, tmp_path, monkeypatch):
    """With weights that were not begun alike, so that a mistake shows."""
    monkeypatch.setattr("specscope.train.training.has_bfloat16", lambda: False)
    made = PEagleTraining(target, data, RECIPE, tmp_path / "head")
    torch.manual_seed(5)
    with torch.no_grad():
        for p in made.head.parameters():
            p += 0.1 * torch.randn_like(p)
    return made


def reference(training, folder):
    """The head in plain torch, from its checkpoint; float32 numbers that bfloat16 holds."""
    for p in training.head.parameters():
        p.data = p.data.bfloat16().float()
    save_head(training.head, folder)
    return Reference(folder, training.heads.embedding)


def naive_loss(training, head, batch, pairs):
    """Cross-entropy at (sequence, anchor, depth), each from a pass of its own over true pairs and masks."""
    mask, chosen = training.head.config.parallel.mask_token, training.head.target_tokens()
    by_depth = [[] for _ in range(RECIPE.depths)]
    for row, at, depth in pairs:
        label = at + depth + 1
        if label >= batch.tokens.shape[1] or not (batch.real & batch.learn)[row, label]:
            continue
        tokens = batch.tokens[row, : at + 2].tolist()
        logits = head.one_pass(tokens, batch.features[row], depth + 1, mask)[-1]
        p = (batch.final[row, label] @ training.target.output.weight[chosen].T).softmax(-1)
        by_depth[depth].append(-float((p * logits.log_softmax(-1)).sum()))
    means = [sum(one) / max(len(one), 1) for one in by_depth]
    weights = [DECAY**d for d in range(len(means))]
    return sum(w * x for w, x in zip(weights, means, strict=True)) / sum(weights), list(map(len, by_depth))


@torch.no_grad()
def test_the_loss_is_that_of_every_position_on_its_own(training, tmp_path):
    """All anchors at all depths of two sequences, the shorter one padded."""
    head = reference(training, tmp_path / "saved")
    lengths = sorted(range(len(training.data)), key=training.data.length)
    batch = training.padded([lengths[0], lengths[5]])
    scores = forward(training.head, training.heads, batch, every_anchor(batch, 3))
    size, length = batch.tokens.shape
    pairs = [(row, at, depth) for row in range(size) for at in range(length) for depth in range(3)]
    loss, counts = naive_loss(training, head, batch, pairs)
    assert scores.positions == counts
    assert min(counts) > 10
    assert float(scores.loss) == pytest.approx(loss, rel=1e-4)


@torch.no_grad()
def test_the_loss_of_sampled_anchors_is_that_of_those_positions(training, tmp_path):
    head = reference(training, tmp_path / "saved")
    batch = training.padded([3, 8])
    anchors = Anchors(torch.tensor([[9, 4, 30, 21, 12], [14, 40, 7, 22, 3]]), (5, 2))
    scores = forward(training.head, training.heads, batch, anchors)
    pairs = [(row, at, 0) for row in range(2) for at in range(batch.tokens.shape[1])]
    pairs += [(row, at, 1) for row in range(2) for at in anchors.positions[row].tolist()]
    pairs += [(row, at, 2) for row in range(2) for at in anchors.positions[row, :2].tolist()]
    loss, counts = naive_loss(training, head, batch, pairs)
    assert scores.positions == counts
    assert float(scores.loss) == pytest.approx(loss, rel=1e-4)


@torch.no_grad()
def test_training_is_what_the_drafter_will_do(training, target):
    """The rows of one anchor: the same logits from the paged head, mask rows and all."""
    from specscope.model.batch import Segment
    from specscope.model.kv_cache import BlockTable
    from specscope.speculate.drafters.parallel import with_masks
    from specscope.trace.record.tree import DraftTree

    batch = training.padded([3])
    seen = []
    training.head.lm_head.register_forward_hook(lambda module, given, out: seen.append(out))
    forward(training.head, training.heads, batch, every_anchor(batch, 3))
    counts = [(batch.real & batch.learn)[0, depth + 1 :] for depth in range(3)]
    starts = [0, int(counts[0].sum()), int(counts[0].sum() + counts[1].sum())]
    head, tokens = training.head, batch.tokens[0].tolist()
    runner = HeadRunner(LoadedHead(head, target.embedding, head.lm_head, "here"), 300, 512, 20)
    mask = runner.combine(head.mask_features()).expand(2, -1)
    anchors = [at for at in range(len(tokens) - 4) if all(counts[d][at] for d in range(3))]
    for at in (anchors[0], anchors[7], anchors[20]):
        table = BlockTable()
        runner.cache.reserve(table, at + 3, 0)
        pairs = Segment.of_tree(table, 0, tokens[1 : at + 2], DraftTree.empty(), logits=True)
        segment = with_masks(pairs, 2, head.config.parallel.mask_token)
        hidden = torch.cat([runner.combine(batch.features[0, : at + 1]), mask])
        logits, _ = runner.forward([segment], hidden)
        for depth in range(3):
            row = starts[depth] + int(counts[depth][:at].sum())
            assert torch.allclose(logits[depth], seen[0][row], atol=1e-4)
        runner.cache.truncate(table, 0)


def padded(learn):
    """Sequences of which only `learn` matters: lists of 0 and 1."""
    learn = torch.tensor(learn, dtype=torch.bool)
    empty = torch.zeros(*learn.shape, 0)
    return Padded(torch.zeros(learn.shape, dtype=torch.int64), torch.ones_like(learn), learn, empty, empty)


def test_anchors_have_the_rows_above_and_fewer_of_each_depth():
    batch = padded([[0] * 10 + [1] * 92, [0] * 52 + [1] * 50])
    anchors = sampled_anchors(batch, depths=8, keep=0.5, seed=3)
    assert anchors.sizes == (46, 23, 18, 18, 18, 18, 18)  # 92 * 0.5^d, at least a fifth
    assert anchors.positions.shape == (2, 46)
    for row, first in enumerate((8, 50)):  # the token two further on is learnt
        at = anchors.positions[row].tolist()
        assert len(set(at)) == 46
        assert min(at) >= first
        assert max(at) <= 99
    assert not torch.equal(anchors.positions, sampled_anchors(batch, 8, 0.5, seed=4).positions)
    assert torch.equal(anchors.positions, sampled_anchors(batch, 8, 0.5, seed=3).positions)
    assert sampled_anchors(batch, depths=1, keep=0.5, seed=3).sizes == ()
    assert every_anchor(batch, 3).sizes == (102, 102)


def test_nothing_to_learn_gives_no_nan(training):
    batch = training.padded([0])
    short = Padded(*(getattr(batch, f.name)[:, :2] for f in dataclasses.fields(Padded)))
    for anchors in (every_anchor(short, 4), sampled_anchors(short, 4, 0.7, 1)):
        scores = forward(training.head, training.heads, short, anchors)
        scores.loss.backward()
        assert scores.loss.isfinite()
        assert all(p.grad is None or p.grad.isfinite().all() for p in training.head.parameters())


def test_the_mask_token_is_the_rarest():
    assert mask_token_of(torch.tensor([5, 0, 3, 0, 2])) == 3
    assert mask_token_of(torch.tensor([5, 1, 3])) == 1


def test_training_learns_and_a_resumed_run_is_the_same_run(data, target, tmp_path):
    whole = PEagleTraining(target, data, RECIPE, tmp_path / "whole")
    mask = whole.head.mask_hidden.detach().clone()
    outcomes = list(whole.run())
    losses = [float(outcome.loss.detach()) for outcome in outcomes]
    assert max(losses[-5:]) < math.log(RECIPE.draft_vocab) < min(losses[:5])
    assert float((whole.head.mask_hidden.detach() - mask).norm() / mask.norm()) > 0.01  # it is learnt too
    counts = [sum(o.positions[d] for o in outcomes) for d in range(3)]
    # The share is of a batch's longest sequence: of shorter ones more is kept.
    assert 0.7 <= counts[1] / counts[0] < 0.8
    assert 0.49 <= counts[2] / counts[0] < 0.6

    first = PEagleTraining(target, data, RECIPE, tmp_path / "cut")
    for _ in first.run():
        if first.step == 7:
            first.save()
        if first.step == 9:  # killed: two steps are lost
            break
    second = PEagleTraining(target, data, RECIPE, tmp_path / "cut")
    assert second.step == 7
    assert [float(outcome.loss.detach()) for outcome in second.run()] == losses[7:]
    for a, b in zip(whole.head.parameters(), second.head.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.fixture(scope="module")
def trained(data, target, tmp_path_factory):
    made = PEagleTraining(target, data, dataclasses.replace(RECIPE, epochs=12), tmp_path_factory.mktemp("p"))
    for _ in made.run():
        pass
    made.save()
    return made


def test_a_trained_head_is_right_more_often_than_by_chance(trained):
    figures = trained.evaluate()
    assert len(figures["first"]) == 3
    assert min(figures["first"]) > 3 / 120
    assert min(figures["among"]) > 3 * 4 / 120


def test_a_trained_head_drafts_and_the_tokens_are_the_targets(trained, deep):
    same = {"target": str(deep), "dtype": "float32", "kv_memory": 0.01}
    plain = Engine(drafter="none", **same)
    drafting = Engine(draft_model=str(trained.folder), tree="dynamic:6,depth=3,top=3", **same)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    prompts = ["hello there", "what is it", "one two"]
    a, b = (engine.generate(prompts, params) for engine in (plain, drafting))
    assert [x.token_ids for x in a] == [x.token_ids for x in b]
    accepted, drafted = (sum(getattr(x.acceptance, name) for x in b) for name in ("accepted", "drafted"))
    assert accepted > 3 * drafted / 300  # thrice what is right by chance


def test_the_checkpoint_is_laid_out_as_vllms_speculators_read_it(trained, target):
    """What vLLM 0.33 asks of one (transformers_utils/configs/speculators, models/llama_eagle3.py)."""
    told = json.loads((trained.folder / "config.json").read_text())
    assert told["speculators_model_type"] == "peagle"
    assert told["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert told["speculators_config"]["verifier"]["name_or_path"] == target.name
    assert told["transformer_layer_config"]["model_type"] == "llama"
    assert told["transformer_layer_config"]["num_hidden_layers"] == 1
    assert told["mask_token_id"] == trained.head.config.parallel.mask_token
    assert told["draft_vocab_size"] == 120
    tensors = load_file(trained.folder / "model.safetensors")
    assert tensors["mask_hidden"].shape == (1, 1, 3 * target.width)
    assert {name.split(".")[0] for name in tensors} == {
        "fc", "layers", "norm", "lm_head", "d2t", "t2d", "mask_hidden",
    }  # fmt: skip
    loaded = load_head(str(trained.folder), target).head
    assert loaded.config.parallel == dataclasses.replace(trained.head.config.parallel, verifier="")
    for name, x in trained.head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], x.bfloat16().float() if x.is_floating_point() else x)


def test_an_eagle3_head_is_a_start_and_its_first_depth_is_kept(data, target, tmp_path):
    first = Eagle3Training(target, data, eagle3.Recipe(draft_vocab=120, epochs=3, batch_tokens=256), tmp_path / "e3")
    for _ in first.run():
        pass
    first.save()
    knows = first.evaluate()["first"][0]
    recipe = dataclasses.replace(RECIPE, start=str(tmp_path / "e3"), draft_vocab=150)
    second = PEagleTraining(target, data, recipe, tmp_path / "p")
    assert len(second.head.target_tokens()) == 150
    assert second.evaluate()["first"][0] == pytest.approx(knows, abs=0.03)
    for _ in second.run():
        pass
    second.save()
    third = PEagleTraining(target, data, dataclasses.replace(recipe, start=str(tmp_path / "p")), tmp_path / "again")
    assert third.head.config.parallel == second.head.config.parallel
    assert torch.equal(third.head.mask_hidden, second.head.mask_hidden.bfloat16().float())
    back = Eagle3Training(target, data, eagle3.Recipe(start=str(tmp_path / "p")), tmp_path / "back")
    assert back.head.config.parallel is None
    assert "mask_hidden" not in back.head.state_dict()


def test_the_command_trains_one_and_says_how(deep, tmp_path):
    texts = tmp_path / "texts.jsonl"
    lines = [{"prompt": f"say {i}", "response": f"{i} and once more {i}"} for i in range(60)]
    texts.write_text("\n".join(map(json.dumps, lines)))
    words = ["--target", deep, "--dtype", "float32", "--data", texts, "-o", tmp_path / "head", "--draft-vocab", 80]
    words += ["--epochs", 1, "--depths", 2, "--keep-ratio", 0.5]
    done = subprocess.run(
        [sys.executable, "-m", "specscope", "train", "p-eagle", *map(str, words)],
        stderr=subprocess.PIPE, text=True, timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "acceptance by position" in done.stderr
    card = (tmp_path / "head" / "README.md").read_text()
    assert card.startswith("# P-EAGLE head for deep0")
    assert "specscope train p-eagle --target" in card
    assert "--depths 2 --keep-ratio 0.5" in card
    assert "2 depths in one pass, each at 0.5 of the positions" in card
    assert "| tokens | first, 1 | first, 2 | among four, 1 | among four, 2 |" in card
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 2


def test_a_head_with_an_embedding_of_its_own_cannot_be_gone_on_from(trained, data, target, tmp_path):
    """Published P-EAGLE heads train theirs; training here uses the target's, and would lose it without a word."""
    tensors = load_file(trained.folder / "model.safetensors")
    (tmp_path / "head").mkdir()
    shutil.copy(trained.folder / "config.json", tmp_path / "head")
    save_file({**tensors, "embed_tokens.weight": torch.randn(300, 48)}, tmp_path / "head" / "model.safetensors")
    with pytest.raises(UserError, match="specscope train did not make it"):
        PEagleTraining(target, data, dataclasses.replace(RECIPE, start=str(tmp_path / "head")), tmp_path / "new")
