"""Captures served by an EAGLE head over the tiny trained target, and heads that are not quite the trained one."""

import json

from safetensors.torch import load_file, save_file

from specscope import Engine, SamplingParams
from specscope.measure.trainer import audit_trainer
from specscope.trace.wire.reading import read_capture
from tests.faults import settings
from tests.faults.models import HEAD, TARGET, story


def head_copy(folder, config=(), tensors=None, source=HEAD):
    """The head's folder under another name: keys of its config set, and what `tensors` makes of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {**json.loads((source / "config.json").read_text()), **dict(config)}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))
    weights = load_file(source / "model.safetensors")
    save_file(weights if tensors is None else tensors(weights), folder / "model.safetensors")
    return folder


def recorded(path, texts, params, **how):
    """A capture of a run of these texts."""
    engine = Engine(**{"target": str(TARGET), "dtype": "float32", "kv_memory": 0.02, "threads": 1, **how})
    return settings.recorded(path, engine, texts, params)


def served(path, head, tokens=30, requests=3, **params):
    """A capture of a run with that head."""
    how = {"drafter": "eagle", "draft_model": str(head), "tree": "3", "max_batch": 3}
    texts = [story(i, 60) for i in range(requests)]
    return recorded(path, texts, SamplingParams(max_tokens=tokens, **params), **how)


def compared(path, trainer):
    """What `audit --trainer` makes of a capture."""
    return audit_trainer(read_capture(path).history, str(path), str(trainer), None, None)
