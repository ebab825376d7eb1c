"""vLLM's V2 runner on a CPU: Triton's interpreter runs its kernels. In vLLM's environment, before vLLM is imported.

Not a test. vLLM takes Triton only where it has a backend of its platform, and Triton's packages have none for a CPU.
"""

import functools
import os
import types


def prepare():
    """Let Triton run on this CPU, and vLLM find that it does."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    import triton.backends

    driver = type("Driver", (), {"is_active": staticmethod(lambda: True)})
    triton.backends.backends.setdefault("cpu", types.SimpleNamespace(driver=driver, compiler=None))
    take_integer_masks()


def take_integer_masks():
    """Masks made by arithmetic are integers, which the interpreter's loads and stores do not take."""
    import numpy as np
    import triton.runtime.interpreter as interpreter

    builder = interpreter.InterpreterBuilder

    def with_boolean_masks(function, place):
        def called(self, *args, **kwargs):
            mask = args[place]
            if mask.data.dtype != np.bool_:
                mask.data = mask.data.astype(np.bool_)
            return function(self, *args, **kwargs)

        return called

    builder.create_masked_load = with_boolean_masks(builder.create_masked_load, 1)
    builder.create_masked_store = with_boolean_masks(builder.create_masked_store, 2)


def complete():
    """What the interpreter lacks or cannot run of vLLM's kernels. When vLLM is there."""
    import triton.language as tl
    import vllm.v1.sample.ops.topk_topp_sampler as cuts
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils as kernels

    kernels.tldevice = types.SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))
    cuts.apply_top_k_top_p_triton = functools.partial(cuts.apply_top_k_top_p_pytorch, allow_cpu_sync=True)
