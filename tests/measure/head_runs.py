"""Captures served by an EAGLE head over the tiny trained target, and heads that are not quite the trained one."""

import json

from safetensors.torch import load_file, save_file

from specscope import Engine, SamplingParams
from specscope.measure.trainer import audit_trainer
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.reading import read_capture
from tests.faults.models import HEAD, TARGET, story


def head_copy(folder, config=(), tensors=None, source=HEAD):
    """The head's folder under another name: keys of its config set, and what `tensors` makes of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {**json.loads((source / "config.json").read_text()), **dict(config)}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))
    weights = load_file(source / "model.safetensors")
    save_file(weights if tensors is None else tensors(weights), folder / "model.safetensors")
    return folder


def recorded(path, texts, params, install=lambda engine: None, **how):
    """A capture of a run of these texts. `install`: what is done to the engine before."""
    engine = Engine(**{"target": str(TARGET), "dtype": "float32", "kv_memory": 0.02, "threads": 1, **how})
    install(engine)
    writer = CaptureWriter(path, engine.run_info, engine.vocabulary)
    engine.subscribe(writer, lossless=True)
    engine.generate(texts, params)
    engine.close()
    writer.close()
    return path


def served(path, head, tokens=30, requests=3, target=TARGET, install=lambda engine: None, **params):
    """A capture of a run with that head."""
    how = {"target": str(target), "drafter": "eagle", "draft_model": str(head), "tree": "3", "max_batch": 3}
    texts = [story(i, 60) for i in range(requests)]
    return recorded(path, texts, SamplingParams(max_tokens=tokens, **params), install, **how)


def compared(path, trainer):
    """What `audit --trainer` makes of a capture."""
    return audit_trainer(read_capture(path).history, str(path), str(trainer), None, None)
