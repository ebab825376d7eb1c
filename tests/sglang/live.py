"""Runs the real SGLang: `SGLANG_PYTHON -P live.py JOB.json OUT.json`, in an environment of its own, on a GPU or a CPU.

SGLang's processes are spawned, and each of them imports this file: so a fault named in the job is planted into all.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
DEVICE = {}
if not Path("/dev/nvidiactl").exists():
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "2", "TORCHDYNAMO_DISABLE": "1"}
    DEVICE = {"device": "cpu", "prefill_attention_backend": "intel_amx", "decode_attention_backend": "intel_amx"}
SIZES = {"max_total_tokens": 4096, "max_running_requests": 4, "context_length": 1024}
QUIET = {"disable_cuda_graph": True, "grammar_backend": "none", "skip_server_warmup": True, "log_level": "error"}
COMMON = SIZES | QUIET | {"dtype": "float32", "random_seed": 7}


def other_layers():
    """A head is given what enters its layers, not what leaves them."""
    from sglang.srt.models.llama import LlamaForCausalLM

    right = LlamaForCausalLM.set_eagle3_layers_to_capture
    LlamaForCausalLM.set_eagle3_layers_to_capture = lambda self, layers=None: right(self, [n - 1 for n in layers])


def _head(change):
    """What a head is given: `change` takes (token ids, positions, spec, whether the features are the target's)."""
    from sglang.srt.models.llama_eagle3 import LlamaModel

    right = LlamaModel.forward

    def forward(self, input_ids, positions, forward_batch, *args, **kwargs):
        spec = forward_batch.spec_info
        of_target = spec.hidden_states.shape[-1] != self.embed_tokens.weight.shape[-1]  # of several layers
        input_ids, positions = change(input_ids, positions, spec, of_target)
        return right(self, input_ids, positions, forward_batch, *args, **kwargs)

    LlamaModel.forward = forward


def row_before():
    """A token goes with the features of the row before its own in the batch."""

    def change(input_ids, positions, spec, of_target):
        if of_target:
            spec.hidden_states = spec.hidden_states.roll(1, 0)
        return input_ids, positions

    _head(change)


def positions_high():
    """Drafted nodes are one position too far."""
    _head(lambda input_ids, positions, spec, of_target: (input_ids, positions if of_target else positions + 1))


def kv_not_moved():
    """After a tree the KV of the accepted path stays where it was written."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    MHATokenToKVPool.move_kv_cache = lambda self, tgt_loc, src_loc: None


if fault := os.environ.get("SPECSCOPE_TEST_FAULT"):
    globals()[fault]()


def main():
    import sglang

    job = json.loads(Path(sys.argv[1]).read_text())
    engine = sglang.Engine(model_path=job["model"], **DEVICE, **COMMON, **job["speculation"])
    made = engine.generate(input_ids=job["prompts"], sampling_params=job["sampling"])
    Path(sys.argv[2]).write_text(json.dumps(made, default=str))
    engine.shutdown()


if __name__ == "__main__":
    main()
