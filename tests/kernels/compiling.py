"""Compiles variants of kernels for devices that are not here: `python -m tests.kernels.compiling`, not interpreted.

Reads a JSON list of [capability, variant] from stdin, writes the bytes of shared memory that each takes.
"""

import importlib
import json
import sys

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction


def shared_memory(capability, variant):
    module, _, name = variant["kernel"].partition(".")
    every = vars(importlib.import_module(f"specscope.kernels.{module}")).values()
    fn = next(x for x in every if isinstance(x, JITFunction) and x.fn.__name__ == name)
    constants = {n: getattr(tl, v) if isinstance(v, str) else v for n, v in variant["constants"]}
    signature, attributes = dict.fromkeys(fn.arg_names, "constexpr"), {}
    for argument, kind in variant["arguments"]:
        if kind == "=1":
            constants[argument] = 1
            continue
        signature[argument], _, multiple = kind.partition(":")
        if multiple:
            attributes[(fn.arg_names.index(argument),)] = [["tt.divisibility", int(multiple)]]
    given = {(fn.arg_names.index(n),): v for n, v in constants.items()}
    source = ASTSource(fn=fn, signature=signature, constexprs=given, attrs=attributes)
    options = {"num_warps": variant["warps"], "num_stages": variant["stages"]}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared


if __name__ == "__main__":
    print(json.dumps([shared_memory(*one) for one in json.load(sys.stdin)]))
