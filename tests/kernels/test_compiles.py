"""Every kernel compiles for a GPU that is not here: what the interpreter forgives, a compiler may not."""

import os
import subprocess
import sys

import pytest

# Triton takes an integer argument that is 1 for a constant: each kernel is compiled with and without such ones.
SCRIPT = """
import sys
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from specscope.kernels import kv_compact, kv_write, sampling, tree_attention, tree_verify

INTS = {"query_row", "query_head", "rows_stride", "values_at", "n", "table_stride", "mask_stride", "new_stride",
        "width", "p_stride", "q_stride", "vocabulary", "stride", "out_stride"}
FLOATS = {"scale", "cap"}
BY_NAME = {"mask": "*i64", "slots": "*i64", "source": "*i64", "target": "*i64", "first": "*i64", "address": "*i64",
           "widths": "*i64", "choices": "*i64", "p": "*fp32", "q": "*fp32", "parts": "*fp32", "sums": "*fp32",
           "temperatures": "*fp32", "min_ps": "*fp32",
           "sinks": "*bf16", "query": "*bf16", "rows": "*bf16", "out": "*bf16", "new": "*bf16", "logits": "*bf16"}
BY_NAME |= dict.fromkeys(["coin", "kept", "outcome", "p_out", "p_trial", "q_trial", "accept_prob", "residual_mass",
                          "final_token", "final_p", "final_margin", "final_row", "recovered"], "*fp64")

def build(fn, ones=(), **constants):
    signature = {}
    for name in fn.arg_names:
        if name in constants or name in ones:
            signature[name] = "constexpr"
        else:
            kind = "i32" if name in INTS else "fp32" if name in FLOATS else BY_NAME.get(name, "*i32")
            signature[name] = kind
    given = {(fn.arg_names.index(k),): v for k, v in {**constants, **{name: 1 for name in ones}}.items()}
    compile(ASTSource(fn=fn, signature=signature, constexprs=given), target=GPUTarget("cuda", 90, 32))
    print("built", fn.__name__, *ones, flush=True)

HEADS = dict(HEADS=8, FOLD=4, KEY=64, VALUE=64, SOFTCAP=False, SINKS=False, TILE=16, KEYS=64, BLOCK=16, WIDEN=False,
             KEY_WIDE=64, VALUE_WIDE=64)
build(tree_attention._attend, ("n", "table_stride", "mask_stride"), **HEADS, SPLITS=4, WINDOW=0)
build(tree_attention._attend, **{**HEADS, "SINKS": True, "SOFTCAP": True}, SPLITS=1, WINDOW=128)
build(tree_attention._join, ("n",), HEADS=8, VALUE=64, SINKS=True, SPLITS=4, VALUE_WIDE=64)
build(kv_write._kv_write, BLOCK=128)
build(kv_compact._kv_compact, NUMBER=tl.int16, BLOCK=128)
build(tree_verify._verify, BLOCK=1024)
build(sampling._probabilities, BLOCK=1024)
"""


def test_kernels_compile_for_an_h100():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("built") == 7
