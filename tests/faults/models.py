"""Tiny trained models: a target, a draft model and an EAGLE-3 head that agree often, so that a fault costs acceptance.

Random weights accept next to nothing, and then no fault shows. These were trained for a minute on sentences of a small
grammar, byte by byte, and are kept beside this file in bfloat16. `python -m tests.faults.models` makes them again; the
DFlash head and the modules were trained by what stands in this file at a4929eaa.
"""

import json
import random
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specscope.model.loader import load_model
from tests.tiny import write_tiny_model
from tools.train_head.heads import Recipe
from tools.train_head.shards import Sample, Shards, ShardWriter
from tools.train_head.training import Training

FOLDER = Path(__file__).parent / "weights"
TARGET, DRAFT, HEAD, BLOCK = FOLDER / "target", FOLDER / "draft", FOLDER / "head", FOLDER / "block"
MODULES = FOLDER / "modules.safetensors"  # two next-token modules of the target, by the names of its checkpoint
NAMES = ["anna", "bob", "carl", "dora", "emil", "fred", "gina", "hugo"]
VERBS = ["saw", "met", "took", "sold", "liked", "lost", "found", "hid"]
ADJECTIVES = ["red", "old", "big", "wet", "tiny", "loud", "warm", "blue"]
NOUNS = ["cat", "house", "river", "stone", "garden", "boat", "letter", "window"]
PLACES = ["near the sea", "in the yard", "on a hill", "at night", "by the road"]


def sentence(chance: random.Random, names: list[str]) -> str:
    """One of the grammar: who did what to what, where."""
    words = [chance.choice(some) for some in (names, VERBS, ADJECTIVES, NOUNS)]
    where = f" {chance.choice(PLACES)}" if chance.random() < 0.5 else ""
    return f"{words[0]} {words[1]} the {words[2]} {words[3]}{where}"


def story(seed: int, length: int = 400) -> str:
    """Sentences about two people; some are said twice, so that prompt lookup has something to find."""
    chance = random.Random(seed)
    names, text = chance.sample(NAMES, 2), ""
    while len(text) < length:
        one = sentence(chance, names)
        text += f"{one}. " * chance.choice((1, 1, 2))
    return text[:length]


def tokens_of(text: str) -> list[int]:
    """By the tiny models' tokenizer, whose bytes stand in the order of their characters."""
    return list(AutoTokenizer.from_pretrained(TARGET)(text)["input_ids"])


def train_model(folder: Path, layers: int, steps: int, seed: int, **sizes: int) -> LlamaForCausalLM:
    """A Llama of 48 wide, or of other sizes, on the grammar's stories, in float32."""
    write_tiny_model(folder, seed=seed, layers=layers, **sizes)
    encode = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig.from_pretrained(folder)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3, betas=(0.9, 0.95))
    for step in range(steps):
        rate = min((step + 1) / 50, 1.0) * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / steps)))
        optimizer.param_groups[0]["lr"] = 4e-3 * float(rate)
        rows = [encode(story(seed * 10**6 + step * 12 + i, 160 if step % 4 else 320))["input_ids"] for i in range(12)]
        tokens = torch.tensor(rows)
        logits = model(tokens).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(folder)
    return model


def train_head(of: Path = TARGET, to: Path = HEAD) -> None:
    """A head on what the target computes along stories, with specscope's own training."""
    target = load_model(str(of), torch.device("cpu"), torch.float32)
    model = AutoModelForCausalLM.from_pretrained(of, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        writer = ShardWriter(Path(folder) / "data", {})
        for seed in range(300):
            tokens = torch.tensor([tokens_of(story(10**9 + seed, 300))])
            hidden = model(tokens, output_hidden_states=True).hidden_states
            features = torch.cat([hidden[layer][0] for layer in (2, 3, 4)], dim=-1).bfloat16()
            learn = torch.ones(tokens.shape[1], dtype=torch.bool)
            writer.add(Sample(tokens[0].int(), learn, features, hidden[-1][0].bfloat16()))
        writer.flush()
        recipe = Recipe(draft_vocab=27, steps=4, epochs=24, batch_tokens=3072, learning_rate=4e-3)
        with torch.enable_grad():
            training = Training(target, Shards(Path(folder) / "data"), recipe, Path(folder) / "head")
            for _ in training.run():
                pass
        training.save()
        to.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "model.safetensors"):
            (to / name).write_bytes((Path(folder) / "head" / name).read_bytes())


@cache
def with_modules(count: int) -> Path:
    """A folder, as long as this process runs, of the target with the first `count` of its modules."""
    folder = Path(_kept.name) / f"modules-{count}"
    shutil.copytree(TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps({**config, "num_mtp_layers": count}))
    beyond = tuple(f"model.layers.{layers + module}." for module in range(count))
    further = {name: x for name, x in load_file(MODULES).items() if name.startswith(beyond)}
    save_file(load_file(folder / "model.safetensors") | further, folder / "model.safetensors", {"format": "pt"})
    return folder


_kept = tempfile.TemporaryDirectory()

if __name__ == "__main__":
    torch.set_num_threads(1)
    if "head" not in sys.argv:
        train_model(TARGET, layers=7, steps=900, seed=1)
        train_model(DRAFT, layers=2, steps=700, seed=2)
    train_head()
