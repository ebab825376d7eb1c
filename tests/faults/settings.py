"""The runs that faults are planted into: an engine over the tiny trained models, prompts and sampling parameters."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from specscope import SamplingParams
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.reading import read_capture
from tests.engines import tiny_engine
from tests.faults.fault import now_and_then
from tests.faults.models import BLOCK, DRAFT, HEAD, TARGET, story, tokens_of, with_modules

TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"
FEW = 10  # steps: with more of them a rare fault is at work in every second step from the first on
EVERY = 7  # engine steps from one in which a rare fault is at work to the next
WARM = {"temperature": 0.8}
STOP = tokens_of(".")[0]
RULES = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.3}
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram", "tree": "5", "ngram_min": 2},
    "ngram tree": {"drafter": "ngram", "tree": "3x4", "ngram_min": 1},
    "model chain": {"drafter": "draft_model", "draft_model": str(DRAFT), "tree": "4"},
    "model tree": {"drafter": "draft_model", "draft_model": str(DRAFT), "tree": TREE},
    "early chain": {"drafter": "draft_model", "draft_model": "self:4", "tree": "3"},
    "early tree": {"drafter": "draft_model", "draft_model": "self:4", "tree": TREE},
    "model dynamic": {"drafter": "draft_model", "draft_model": str(DRAFT), "tree": "dynamic:8,depth=4,top=3"},
    "eagle chain": {"drafter": "eagle", "draft_model": str(HEAD), "tree": "4"},
    "eagle tree": {"drafter": "eagle", "draft_model": str(HEAD), "tree": TREE},
    "eagle dynamic": {"drafter": "eagle", "draft_model": str(HEAD), "tree": "dynamic:8,depth=4,top=3"},
    "suffix": {"drafter": "suffix", "tree": "dynamic:12,depth=6"},
    "mtp tree": {"drafter": "mtp", "tree": TREE, "modules": 1},  # of the target
    "mtp chain": {"drafter": "mtp", "tree": "2", "modules": 2},
    "eagle wide": {"drafter": "eagle", "draft_model": str(HEAD), "tree": "dynamic:24,depth=5,top=4"},
    "dflash chain": {"drafter": "dflash", "draft_model": str(BLOCK)},
}


@dataclass(frozen=True)
class Setting:
    """One run: a drafter by name, sampling, and how crowded it is."""

    drafter: str
    params: Mapping[str, Any] = field(default_factory=dict)  # of SamplingParams; none: greedy
    requests: int = 18
    tokens: int = 90  # of output, at most
    batch: int = 3
    blocks: int | None = None  # KV blocks of the target; few of them, and requests are preempted
    step_tokens: int = 512  # few of them, and prompts come in chunks
    prompt: int = 70  # bytes of a prompt

    @property
    def target(self):
        """The target's folder."""
        modules = DRAFTERS[self.drafter].get("modules")
        return TARGET if modules is None else with_modules(modules)

    def engine(self):
        """A new one."""
        how = {key: value for key, value in DRAFTERS[self.drafter].items() if key != "modules"}
        sizes = {"max_batch": self.batch, "max_step_tokens": self.step_tokens}
        engine = tiny_engine(self.target, kv_memory=0.02, **sizes, **how)
        if self.blocks is not None:
            engine.runner.cache.pool.__init__(self.blocks)  # type: ignore[misc]
        return engine


SETTINGS = {
    "ngram": Setting("ngram"),
    "ngram tree warm": Setting("ngram tree", WARM),
    "model chain": Setting("model chain"),
    "model chain warm": Setting("model chain", WARM),
    "early chain warm": Setting("early chain", WARM),
    "early chain hot": Setting("early chain", {"temperature": 1.2}, requests=24),
    "early tree warm": Setting("early tree", WARM),
    "model chain presence": Setting("model chain", {"temperature": 0.9, "presence_penalty": 0.6}),
    "model chain long": Setting("model chain", tokens=200, requests=9),
    "model chain crowded": Setting("model chain", blocks=18),
    "model chain chunks": Setting("model chain", step_tokens=32, prompt=150, tokens=60),
    "model tree": Setting("model tree"),
    "model tree warm": Setting("model tree", WARM, requests=24),
    "model tree rules": Setting("model tree", RULES),
    "model tree top-p": Setting("model tree", {"temperature": 1.2, "top_p": 0.8}),
    "eagle chain": Setting("eagle chain"),
    "eagle chain warm": Setting("eagle chain", WARM),
    "eagle chain long": Setting("eagle chain", tokens=200, requests=9),
    "model chain stops": Setting("model chain", {"stop_token_ids": (STOP,)}, tokens=60),
    "model chain repeats": Setting("model chain", RULES),
    "eagle chain chunks": Setting("eagle chain", step_tokens=32, prompt=150, tokens=40),
    "eagle tree": Setting("eagle tree"),
    "eagle tree warm": Setting("eagle tree", WARM, requests=24),
    "eagle tree top-k": Setting("eagle tree", {"temperature": 1.2, "top_k": 4}),
    "eagle dynamic": Setting("eagle dynamic"),
    "eagle wide": Setting("eagle wide"),
    "mtp tree": Setting("mtp tree"),
    "mtp chain": Setting("mtp chain"),
    "mtp chain hot": Setting("mtp chain", {"temperature": 1.4}, requests=24),
    "dflash chain": Setting("dflash chain"),
    "dflash chain warm": Setting("dflash chain", WARM),
}


def short(name, **change):
    """One of these with four short requests, or other fields."""
    return replace(SETTINGS[name], **{"requests": 4, "tokens": 40, **change})


def prompts(setting, seed=0):
    """Beginnings of stories, of about the same length."""
    return [story(seed * 1000 + i, setting.prompt + 7 * (i % 4)) for i in range(setting.requests)]


def plant(patch, engine, fault, *, rarely=False):
    """Put a fault into an engine. `rarely`: into some of its steps alone, where it can be."""
    every, install = EVERY if fault.rare <= FEW else 2, fault.install
    if rarely and fault.rare:
        install = now_and_then(install, lambda step: step % every == 0 and every <= step <= every * fault.rare)
    install(patch, engine)


def record(setting, path, fault=None, seed=0, *, rarely=False):
    """Run it, with a fault or without, and write the capture. `rarely`: with it in some of the steps alone."""
    engine = setting.engine()
    numbers = range(seed * 1000, seed * 1000 + setting.requests)
    params = [SamplingParams(**{"max_tokens": setting.tokens, "seed": i, **setting.params}) for i in numbers]
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            plant(patch, engine, fault, rarely=rarely)
        return recorded(path, engine, prompts(setting, seed), params)


_kept = tempfile.TemporaryDirectory()
_captures: dict[tuple, Path] = {}


def capture(setting, fault=None, *, rarely=False):
    """The capture of such a run, made when a test first asks for it: none may change the file."""
    key = repr((setting, DRAFTERS[setting.drafter])), fault, rarely
    if key not in _captures:
        _captures[key] = record(setting, Path(_kept.name) / f"{len(_captures)}.jsonl", fault, rarely=rarely)
    return _captures[key]


def recorded(path, engine, texts, params):
    """The capture of what an engine makes of these texts; it is closed behind it."""
    writer = CaptureWriter(path, engine.run_info, engine.vocabulary)
    engine.subscribe(writer, lossless=True)
    engine.generate(texts, params)
    engine.close()
    writer.close()
    return path


def history(path):
    """A capture as it is read back."""
    return read_capture(path).history
