"""SGLang's own modules, from the sources that `fetch` unpacks, with stubs for what they need besides."""

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch

from specscope.sglang import hooks as known
from tests.sglang import kernels, stand

SOURCES = sorted(Path(os.environ.get("SPECSCOPE_SGLANG_SOURCES", "/nonexistent")).glob("sglang-*"))


class Stub(ModuleType):
    """A module that has whatever is asked of it; torch's are told from it by its name."""

    def __init__(self, name, **members):
        super().__init__(name)
        self.__path__, self.__all__ = [], []
        vars(self).update(members)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class Finder:
    """Finds a stub for every module of sglang's that is not there yet."""

    def find_spec(self, name, path=None, target=None):
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ("sglang", "sgl_kernel") else None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        """Nothing."""


def loaded(source, name, monkeypatch):
    """One of SGLang's modules, itself."""
    path = source.joinpath(*name.split(".")).with_suffix(".py")
    spec = spec_from_file_location(name, path if path.exists() else path.with_suffix("") / "__init__.py")
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def _greedy(*, retrive_index, retrive_next_token, retrive_next_sibling, **called):
    kernels.greedy_tree(
        retrieve_index=retrive_index,
        retrieve_next_token=retrive_next_token,
        retrieve_next_sibling=retrive_next_sibling,
        **called,
    )


def install(monkeypatch, source, spec):
    """The wheel's registry, eagle_sample and chain kernel, and the rest as the stand has it; where it imports them."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("sglang", "sgl_kernel")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    utils = {"is_cuda": lambda: True, **{f"is_{name}": lambda: False for name in ("cpu", "hip", "xpu", "npu", "musa")}}
    top_p = lambda probs, top_ps: probs  # noqa: E731  the stand asks for no top-p
    context = SimpleNamespace(tp_group=SimpleNamespace(world_size=1))
    stubs = {
        "sglang.srt.utils": utils,
        "sglang.srt.utils.common": utils,
        "sglang.srt.runtime_context": {"get_spec": lambda: spec, "get_parallel": lambda: context},
        "sglang.srt.layers.dp_attention": {"is_dp_attention_enabled": lambda: False},
        "sglang.srt.speculative.spec_utils": {"SIMULATE_ACC_LEN": 0.0},
        "sglang.kernels.ops.sampling": {"softmax": lambda rows, temperatures: (rows / temperatures).softmax(-1)},
        "sglang.kernels.ops.sampling.renorm": {"top_k_renorm_prob": stand.top_k_renorm, "top_p_renorm_prob": top_p},
        "sgl_kernel": {"top_k_renorm_prob": stand.top_k_renorm, "top_p_renorm_prob": top_p},
        "sglang.kernels.ops.speculative.spec_tree": {"verify_tree_greedy_func": kernels.greedy_tree},
        "sglang.kernels.ops.speculative.tree": {"verify_tree_greedy": _greedy},
        "flashinfer": {},
        "flashinfer.sampling": {"top_k_renorm_probs": stand.top_k_renorm, "top_p_renorm_probs": top_p},
        known.TREE: {"tree_speculative_sampling_target_only": kernels.target_only},
    }
    for name, members in stubs.items():
        monkeypatch.setitem(sys.modules, name, Stub(name, **members))
    chain = loaded(source, known.CHAIN, monkeypatch)
    by_device = "sglang.kernels.ops.speculative.verify_sampling"  # since 0.5.23
    if source.joinpath(*by_device.split(".")).with_suffix(".py").exists():
        loaded(source, by_device, monkeypatch)
    verify = loaded(source, known.VERIFY, monkeypatch)
    registry = loaded(source, "sglang.srt.plugins.hook_registry", monkeypatch)
    results = loaded(source, known.RESULTS, monkeypatch)
    results.get_server_return_hidden_states_mode = lambda: 0
    results.SchedulerBatchResultProcessor._handle_finish_state_updated_req = lambda *_: None  # caches, which are mocks
    made = {"eagle_utils": verify, "hook_registry": registry, "reject_sampling": chain}
    return made | {"batch_result_processor": results, "spec_utils": sys.modules["sglang.srt.speculative.spec_utils"]}


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

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
