"""SGLang's own modules, from its sources, with stubs for what they need besides.

`python -m tests.sglang.wheel FOLDER` gets the sources: FOLDER is what SPECSCOPE_SGLANG_SOURCES is to name.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

from specscope.sglang import hooks as known
from specscope.sglang import plugin
from tests.sglang import kernels, stand
from tests.support.sources import Sources, fetch

VERSIONS = ("0.5.21", "0.5.22", "0.5.23")  # that are known
SPEC_UTILS = "sglang.srt.speculative.spec_utils"
BY_DEVICE = "sglang.kernels.ops.speculative.verify_sampling"  # since 0.5.23
REAL = (known.CHAIN, BY_DEVICE, known.VERIFY, plugin.REGISTRY, known.RESULTS)
SOURCES = sorted(Path(os.environ.get("SPECSCOPE_SGLANG_SOURCES", "/nonexistent")).glob("sglang-*"))


def _greedy(**called):
    """Another spelling of its parameters."""
    return kernels.greedy_tree(**{name.replace("retrive", "retrieve"): value for name, value in called.items()})


def install(monkeypatch, source, spec):
    """The wheel's registry, eagle_sample and chain kernel, and the rest as the stand has it; where it imports them."""
    utils = {"is_cuda": lambda: True, **{f"is_{name}": lambda: False for name in ("cpu", "hip", "xpu", "npu", "musa")}}
    top_p = lambda probs, top_ps: probs  # noqa: E731  the stand asks for no top-p
    context = SimpleNamespace(tp_group=SimpleNamespace(world_size=1))
    stubs = {
        "sglang.srt.utils": utils,
        "sglang.srt.utils.common": utils,
        "sglang.srt.runtime_context": {"get_spec": lambda: spec, "get_parallel": lambda: context},
        "sglang.srt.layers.dp_attention": {"is_dp_attention_enabled": lambda: False},
        SPEC_UTILS: {"SIMULATE_ACC_LEN": 0.0},
        "sglang.kernels.ops.sampling": {"softmax": lambda rows, temperatures: (rows / temperatures).softmax(-1)},
        "sglang.kernels.ops.sampling.renorm": {"top_k_renorm_prob": stand.top_k_renorm, "top_p_renorm_prob": top_p},
        "sgl_kernel": {"top_k_renorm_prob": stand.top_k_renorm, "top_p_renorm_prob": top_p},
        "sglang.kernels.ops.speculative.spec_tree": {"verify_tree_greedy_func": kernels.greedy_tree},
        "sglang.kernels.ops.speculative.tree": {"verify_tree_greedy": _greedy},
        "flashinfer.sampling": {"top_k_renorm_probs": stand.top_k_renorm, "top_p_renorm_probs": top_p},
        known.TREE: {"tree_speculative_sampling_target_only": kernels.target_only},
    }
    own = Sources(source / "sglang", ("sglang", "sgl_kernel", "flashinfer"), REAL, stubs)
    loaded = own.load(monkeypatch, known.CHAIN, known.VERIFY, plugin.REGISTRY, known.RESULTS, SPEC_UTILS)
    results = loaded[3]
    results.get_server_return_hidden_states_mode = lambda: 0
    results.SchedulerBatchResultProcessor._handle_finish_state_updated_req = lambda *_: None  # caches, which are mocks
    return {module.__name__: module for module in loaded}


def processor():
    """SGLang's own SchedulerBatchResultProcessor, over mocks."""
    cls = sys.modules[known.RESULTS].SchedulerBatchResultProcessor
    made = object.__new__(cls)
    mocks = {name: MagicMock(name=name) for name in cls.__dataclass_fields__}
    own = {"is_generation": True, "model_config": stand.Lacking(dtype=torch.float32, context_len=4096)}
    for name, value in (mocks | own).items():
        object.__setattr__(made, name, value)
    return made


def result(**given):
    """What its methods take."""
    made = stand.Lacking(num_non_draft_tokens_per_req=1, num_correct_drafts=0, **given)
    made.get_num_generated_tokens = lambda batch_size: made.num_correct_drafts + batch_size
    return made


class WheelReq(stand.Req):
    """A request with what they read besides; all else is None."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kv, self.time_stats = stand.Lacking(kv_committed_len=len(self.origin_input_ids)), MagicMock()
        self.time_stats.wait_queue_entry_time = self.time_stats.forward_entry_time = 0.0
        self.spec_verify_ct = self.spec_num_correct_drafts = 0

    def update_finish_state(self, new=1):
        super().update_finish_state(new)

    def update_spec_correct_drafts_histogram(self, count):
        """Nothing."""

    __getattr__ = stand.Lacking.__getattr__


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for version in VERSIONS:
        if not (place := folder / f"sglang-{version}").exists():
            fetch(f"sglang=={version}", place, ("sglang/",))
    print(f"export SPECSCOPE_SGLANG_SOURCES={folder.resolve()}")
