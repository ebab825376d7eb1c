"""Tiny trained models: a target, a draft model and an EAGLE-3 head that agree often, so that a fault costs acceptance.

Random weights accept next to nothing, and then no fault shows. These were trained for a minute on sentences of a small
grammar, byte by byte, and are kept beside this file in bfloat16. `python -m tests.faults.models` makes them again.
"""

from __future__ import annotations

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
from transformers.modeling_layers import MtpModel

from specscope.model.loader import load_model
from tests.dflash import assistant, dflash_tensors, published, write_dflash
from tests.tiny import write_tiny_model
from tools.train_head.heads import Recipe
from tools.train_head.shards import Sample, Shards, ShardWriter
from tools.train_head.training import Training

FOLDER = Path(__file__).parent / "weights"
TARGET, DRAFT, HEAD, BLOCK = FOLDER / "target", FOLDER / "draft", FOLDER / "head", FOLDER / "block"
UNUSED = 290  # a token that stands for none: the DFlash head's mask token
MODULES = FOLDER / "modules.safetensors"  # two next-token modules of the target, by the names of its checkpoint
NAMES = ["anna", "bob", "carl", "dora", "emil", "fred", "gina", "hugo"]
VERBS = ["saw", "met", "took", "sold", "liked", "lost", "found", "hid"]
ADJECTIVES = ["red", "old", "big", "wet", "tiny", "loud", "warm", "blue"]
NOUNS = ["cat", "house", "river", "stone", "garden", "boat", "letter", "window"]
PLACES = ["near the sea", "in the yard", "on a hill", "at night", "by the road"]


def sentence(chance: random.Random, names: list[str]) -> str:
    """One of the grammar: who did what to what, where."""
    who, verb = chance.choice(names), chance.choice(VERBS)
    thing = f"{chance.choice(ADJECTIVES)} {chance.choice(NOUNS)}"
    where = f" {chance.choice(PLACES)}" if chance.random() < 0.5 else ""
    return f"{who} {verb} the {thing}{where}"


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
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(TARGET)(text)["input_ids"])


def train_model(folder: Path, layers: int, steps: int, seed: int, **sizes: int) -> LlamaForCausalLM:
    """A Llama of 48 wide, or of other sizes, on the grammar's stories, in float32."""
    write_tiny_model(folder, seed=seed, layers=layers, **sizes)
    from transformers import AutoTokenizer

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
        if step % 100 == 0:
            print(f"{folder.name} {step} loss {float(loss):.3f}", file=sys.stderr)
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
            for scores in training.run():
                if training.step % 50 == 0:
                    rates = [round(a / b, 2) for a, b in zip(scores.first, scores.positions, strict=True)]
                    print(f"head {training.step} of {training.total}: {rates}", file=sys.stderr)
        training.save()
        to.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "model.safetensors"):
            (to / name).write_bytes((Path(folder) / "head" / name).read_bytes())


def train_block(of: Path = TARGET, to: Path = BLOCK, steps: int = 1200, rows: int = 6) -> None:
    """A DFlash head on what the target computes along stories, by transformers' model class."""
    model = AutoModelForCausalLM.from_pretrained(of, dtype=torch.float32).requires_grad_(False)
    folder = write_dflash(to, block=rows, leaving=(1, 2, 3), inside={"mask_token_id": UNUSED})
    head = assistant(dflash_tensors(seed=3), rows).train()
    optimizer = torch.optim.AdamW(head.parameters(), 4e-3, betas=(0.9, 0.95))
    chance, encode = random.Random(0), AutoTokenizer.from_pretrained(of)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 4e-3 * min((step + 1) / 50, 1.0) * (1 - step / steps)
        texts = torch.tensor([encode(story(10**8 + step * 24 + i, 200))["input_ids"] for i in range(24)])
        anchor = chance.randrange(20, 200 - rows)
        hidden = model(texts[:, :anchor], output_hidden_states=True).hidden_states
        block = texts[:, anchor : anchor + rows].clone()
        block[:, 1:] = UNUSED
        out = head(
            noise_embeds=model.get_input_embeddings()(block),
            context_hidden_states=torch.cat([hidden[layer] for layer in (2, 3, 4)], dim=-1),
            position_ids=torch.arange(anchor + rows).expand(24, -1),
        ).last_hidden_state
        logits = model.get_output_embeddings()(out[:, 1:])
        due = texts[:, anchor + 1 : anchor + rows]
        loss = functional.cross_entropy(logits.flatten(0, 1), due.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            right = [round(x, 2) for x in (logits.argmax(-1) == due).float().mean(0).tolist()]
            print(f"block {step} loss {float(loss.detach()):.3f} {right}", file=sys.stderr)
    save_file({name: x.bfloat16() for name, x in published(head).items()}, folder / "model.safetensors")


def train_modules(steps: int = 500) -> None:
    """Two next-token modules over the target, each fed the state of the one before; the first also its own."""
    model = AutoModelForCausalLM.from_pretrained(with_modules(2, trained=False), dtype=torch.float32)
    model.requires_grad_(False)
    torch.manual_seed(3)
    mtp = MtpModel(model, 2).requires_grad_(True)
    for name, parameter in mtp.layers.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1 if "eh_proj" in name else 0.08)
    optimizer = torch.optim.AdamW(mtp.layers.parameters(), 4e-3, betas=(0.9, 0.95))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 4e-3 * min((step + 1) / 30, 1.0) * (1 - step / steps)
        tokens = torch.tensor([tokens_of(story(2 * 10**9 + 12 * step + i, 200)) for i in range(12)])
        with torch.no_grad():
            states = model(tokens, output_hidden_states=True).hidden_states[-1]
        made, loss = [states], torch.zeros(())
        for module, before in ((0, 0), (1, 1), (0, 1)):  # the last: the first module once more, over its own states
            fed = tokens[:, 1 + before :]
            places = torch.arange(fed.shape[1])[None]
            made.append(mtp.forward_layer(module, made[before][:, : fed.shape[1]], places, None, input_ids=fed))
            logits = model.lm_head(made[-1][:, :-1])
            loss = loss + functional.cross_entropy(logits.flatten(0, 1), fed[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"modules {step} loss {float(loss.detach()) / 3:.3f}", file=sys.stderr)
    first_layer = model.config.num_hidden_layers
    tensors = {}
    for name, x in mtp.layers.state_dict().items():
        number, _, part = name.partition(".")
        part = part.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        tensors[f"model.layers.{first_layer + int(number)}.{part}"] = x.bfloat16().contiguous()
    save_file(tensors, MODULES, {"format": "pt"})


@cache
def with_modules(count: int, *, trained: bool = True) -> Path:
    """A folder, as long as this process runs, of the target with the first `count` of its modules."""
    folder = Path(_kept.name) / f"modules-{count}-{trained}"
    shutil.copytree(TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps({**config, "num_mtp_layers": count}))
    if trained:
        beyond = tuple(f"model.layers.{layers + module}." for module in range(count))
        further = {name: x for name, x in load_file(MODULES).items() if name.startswith(beyond)}
        save_file(load_file(folder / "model.safetensors") | further, folder / "model.safetensors", {"format": "pt"})
    return folder


_kept = tempfile.TemporaryDirectory()

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, train in (("modules", train_modules), ("block", train_block)):
        if name in sys.argv:
            train()
            sys.exit()
    if "head" not in sys.argv:
        train_model(TARGET, layers=7, steps=900, seed=1)
        train_model(DRAFT, layers=2, steps=700, seed=2)
    train_head()
