"""The lean start: less is imported, and everything computes the same."""

import json
import os
import subprocess
import sys

import pytest

from specscope import Engine, SamplingParams

HEAVY = ["torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor", "scipy.optimize"]
START = """
import json, sys
from specscope.engine import lean
if sys.argv[2] == "another version":
    lean.UNUSED = ("is_there_no_such_function",)
from specscope.engine.config import EngineConfig
from specscope.live.start import start_engine
engine = start_engine(EngineConfig(target=sys.argv[1], dtype="float32", kv_memory=0.01, threads=1), lambda _: None)
from specscope import SamplingParams
(result,) = engine.generate(["abcabc"], SamplingParams(max_tokens=12, ignore_eos=True))
heavy = [name for name in sys.argv[3:] if name in sys.modules]
import torch, torch._dynamo
assert torch.compiler.disable.__module__ == "torch.compiler", "what was replaced is put back"
assert torch._dynamo.OptimizedModule, "the real one"
from transformers.utils import is_torch_distributed_available
assert is_torch_distributed_available() == torch.distributed.is_available()
print(json.dumps([heavy, result.token_ids]))
"""


def run(*words):
    how = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run([sys.executable, *map(str, words)], **how)


@pytest.mark.parametrize("version", ["this version", pytest.param("another version", marks=pytest.mark.slow)])
def test_a_lean_start_gives_the_same_tokens(tiny, version):
    engine = Engine(target=str(tiny), dtype="float32", kv_memory=0.01, threads=1)
    (wanted,) = engine.generate(["abcabc"], SamplingParams(max_tokens=12, ignore_eos=True))
    engine.close()
    done = run("-c", START, tiny, version, *HEAVY)
    assert done.returncode == 0, done.stderr
    heavy, tokens = json.loads(done.stdout)
    assert tokens == wanted.token_ids
    assert version == "another version" or heavy == []


@pytest.mark.slow
def test_every_architecture_works_after_a_lean_start():
    code = (
        "import sys, pytest; from specscope.engine.lean import import_transformers; import_transformers(); "
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/model/test_architectures.py']))"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stdout
