"""What a step of the engine reads back from its device: each read is a wait, so there are few and known ones.

Without a GPU the tensors lie on the host, where a read costs nothing; but it is the same calls that would wait.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import specscope
from specscope import SamplingParams
from specscope.speculate import sampling

HOME = str(Path(specscope.__file__).parent)
METHODS = ("cpu", "tolist", "item", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__")
# Operators that cannot run before the host knows how many numbers come out, or that hand a number to it.
OPERATORS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique")
RUNS = {  # a tree and a temperature, by the name of an engine
    "none": (None, 0.9),
    "ngram": ("2x3", 0.9),
    "draft tree": ("[(0,), (1,), (1, 0)]", 0.9),
    "dynamic model": ("dynamic:4,depth=3,top=2", 0.9),
    "eagle dynamic": ("dynamic:3,depth=2,top=2", 0.0),
    "p-eagle dynamic": ("dynamic:3,depth=2,top=2", 0.9),
}
LIKE_ANOTHER = ("none", "dynamic model")  # ngram, and eagle dynamic
PENALISED = {"logit_bias": {60: 2.0}, "repetition_penalty": 1.2, "frequency_penalty": 0.5}
HOST = "tree_batch.__init__"  # fills the buffer on the host that one copy takes to the device
VERDICTS, PASS = "tree_batch.to_host", ("base.top", "distribution.draw_siblings")


class Reads(TorchDispatchMode):
    """The functions of specscope that read, once for each time that one of them is called."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.calls = {}  # by frame: kept, so that no other takes its place in memory
        for name in METHODS:
            monkeypatch.setattr(torch.Tensor, name, self.watched(getattr(torch.Tensor, name)))
        monkeypatch.setattr(torch, "tensor", self.watched(torch.tensor))  # a copy to a device, from pageable memory
        taken = torch.Tensor.__getitem__

        def take(tensor, index):
            if isinstance(index, list):  # likewise
                self.note()
            return taken(tensor, index)

        monkeypatch.setattr(torch.Tensor, "__getitem__", take)

    def watched(self, method):
        def call(tensor, *args, **kwargs):
            self.note()
            return method(tensor, *args, **kwargs)

        return call

    def note(self):
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(HOME):
            frame = frame.f_back
        if frame is not None and "/triton/" not in frame.f_code.co_filename:
            self.calls[id(frame)] = frame, f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in OPERATORS:
            self.note()
        return func(*args, **(kwargs or {}))

    def places(self):
        return Counter(name for _, name in self.calls.values())


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LIKE_ANOTHER else ()) for n in RUNS])
def test_a_step_reads_its_verdicts_and_each_draft_pass_its_tokens(make, monkeypatch, name):
    monkeypatch.setattr(sampling, "argmax", lambda rows: rows.argmax(-1))  # as it is where there is a GPU
    tree, temperature = RUNS[name]
    engine = make(name, tree=tree, backend="triton", device="cpu", evidence="lean")
    for i, prompt in enumerate(("abcabc", "the")):
        more = PENALISED if name in ("none", "ngram") else {}  # a model's tokens are read for each request then
        engine.add(prompt, SamplingParams(max_tokens=5, temperature=temperature, seed=i + 1, ignore_eos=True, **more))
    engine.step()  # whatever a model reads once
    with Reads(monkeypatch) as reads:
        steps = 0
        while engine.requests:
            reads.calls.clear()
            record = engine.step()
            places = reads.places()
            judged = any(part.verdict is not None for part in record.requests)
            assert places.pop(VERDICTS, 0) == judged
            assert sum(places.pop(place, 0) for place in PASS) == len(record.passes)
            assert set(places) <= {HOST}
            steps += judged
    assert steps > 2


def test_what_reads_is_seen(monkeypatch):
    """The watch itself, by what only the host does."""
    row = torch.zeros(1, 600)
    with Reads(monkeypatch) as reads:
        sampling.softmax_(row, SamplingParams(top_p=0.99))
    assert reads.places() == {"sampling._least_on_host": 1}
