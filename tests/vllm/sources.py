"""A few of vLLM's own modules without vLLM: from its sources alone, with stand-ins for all that they import.

`python -m tests.vllm.sources FOLDER [VERSION]` gets the sources (336 MB are downloaded, and 10 kept): FOLDER/vllm is
what SPECSCOPE_VLLM_SOURCE is to name.
"""

import sys
import types
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from tests.support.sources import Sources, fetch

GPU = "vllm.v1.worker.gpu"
REJECTION = f"{GPU}.spec_decode.rejection_sampler"
KERNELS = (f"{GPU}.spec_decode.rejection_sampler_utils", f"{GPU}.sample.gumbel", f"{GPU}.input_batch")
REAL = (REJECTION, *KERNELS, "vllm.v1.spec_decode.fly")


def to_device(array: Any, *, out: Any = None, **others: Any) -> Any:
    """vLLM's async_tensor_h2d."""
    tensor = torch.as_tensor(array)
    return tensor if out is None else out[: len(tensor)].copy_(tensor)


NO_LIBDEVICE = types.SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))  # the interpreter has none
GIVEN: dict[str, dict[str, Any]] = {
    "vllm.triton_utils": {"triton": triton, "tl": tl, "tldevice": NO_LIBDEVICE},
    "vllm.utils.torch_utils": {"async_tensor_h2d": to_device},
    "vllm.v1.worker.gpu.sample.output": {"SamplerOutput": types.SimpleNamespace},
    "vllm.v1.spec_decode.utils": {"unconditional_to_conditional_rates": list},
}


def sources(root: Path) -> Sources:
    """Of a folder named vllm."""
    return Sources(root, ("vllm",), REAL, GIVEN)


if __name__ == "__main__":
    folder, version = Path(sys.argv[1]), (sys.argv[2:] or ["0.33.0"])[0]
    fetch(f"vllm=={version}", folder, ("vllm/v1/", "vllm/config/"))
    print(f"export SPECSCOPE_VLLM_SOURCE={folder.resolve() / 'vllm'}")
