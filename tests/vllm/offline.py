"""Runs in vLLM's own environment: `python offline.py JOB OUT`. JOB: what to run; OUT: what vLLM gave, both JSON.

Not a test. tests/vllm/test_real.py starts it, with the plugin on or off by SPECSCOPE_* variables.
"""

import json
import os
import sys

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get("SPECSCOPE_TEST_PROCESSES", "0"),
}


def mend():
    """vllm-cpu 0.32.0 leaves the temperature of drafted rows uninitialised: its C++ operator writes into a copy."""
    import torch
    import vllm.v1.sample.rejection_sampler as module

    def expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        x = torch.where(x == replace_from, torch.as_tensor(replace_to, dtype=x.dtype), x)
        return torch.repeat_interleave(x, counts.long(), output_size=num_tokens)

    module.expand_batch_to_tokens = expand_batch_to_tokens


def engine_options(job):
    """Of vLLM's engine; a job may have its own."""
    options = {
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": job.get("batch", 4),
        "enforce_eager": True,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
        "speculative_config": job["speculation"],
        "per_request_spec_decode_metrics": "detailed",
    }
    return options | job.get("engine", {})


def main():
    with open(sys.argv[1]) as file:
        job = json.load(file)
    if job.get("v2"):
        sys.path.insert(0, os.path.dirname(__file__))
        import interpreted  # beside this file

        interpreted.prepare()
        interpreted.complete()
        if job.get("chunk"):
            import vllm.v1.worker.gpu.spec_decode.rejection_sampler as v2

            v2.get_max_chunk_logits = lambda vocab_size: job["chunk"]
    if job.get("mend", True):
        mend()
    if job.get("faults"):
        sys.path.insert(0, os.path.dirname(__file__))
        import faults  # beside this file

        faults.plant()
        faults.ON.update(job["faults"])
    if job.get("gather"):  # as on a GPU, but that nothing has to come from anywhere
        import specscope.vllm.v1.runner as runner

        runner.judge_here = runner.judge_there
    from vllm import LLM, SamplingParams

    llm = LLM(model=job["model"], **engine_options(job))
    params = [SamplingParams(ignore_eos=True, **(job["params"] | {"seed": seed})) for seed in job["seeds"]]
    outputs = llm.generate(job["prompts"], params, use_tqdm=False)
    told = [getattr(one.outputs[0], "spec_decode_metrics", None) for one in outputs]
    counters = {m.name: getattr(m, "value", None) or getattr(m, "values", None) for m in llm.get_metrics()}
    with open(sys.argv[2], "w") as file:
        json.dump(
            {
                "outputs": [list(one.outputs[0].token_ids) for one in outputs],
                "prompts": [list(one.prompt_token_ids) for one in outputs],
                "steps": [None if m is None else [list(m.per_step_accepted), list(m.per_step_drafted)] for m in told],
                "counters": {name: value for name, value in counters.items() if "spec_decode" in name},
            },
            file,
        )


if __name__ == "__main__":
    main()
