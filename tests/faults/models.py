"""Tiny trained models: a target, a draft model and an EAGLE-3 head that agree often, so that a fault costs acceptance.

Random weights accept next to nothing, and then no fault shows. These were trained for a minute on sentences of a small
grammar, byte by byte, by what stands in this file at bd18674d (the DFlash head and the modules: at a4929eaa). They are
kept beside it in bfloat16.
"""

import json
import random
import shutil
import tempfile
from functools import cache
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

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
