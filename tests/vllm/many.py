"""Runs in vLLM's own environment: `python many.py JOBS FOLDER`. One engine, and a forked process for each run of it.

Not a test: tests/vllm/record.py starts it, with SPECSCOPE_CAPTURE set, which each run's capture is moved away from. An
engine takes longer to start than to run. The processes have one thread: those of a pool would be missing in a fork.

JOBS: {"model", "speculation", "engine", "runs": [{"name", "faults", "prompts", "params": [one for each prompt]}]}.
"""

import atexit
import json
import os
import sys
import traceback
from functools import partial

os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
sys.path.insert(0, os.path.dirname(__file__))

from offline import engine_options, mend  # beside this file; it sets what vLLM reads


def kept(ends, function, *_):
    """In the place of atexit.register."""
    ends.append(function)
    return function


def run(llm, told, folder):
    """One run, in a process of its own."""
    import faults
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    torch.manual_seed(20_011)  # no request's own seed: those begin the same numbers
    faults.ON.update(told["faults"])
    params = []
    for one in told["params"]:
        form = one.pop("structured_outputs", None)
        params.append(SamplingParams(**one, structured_outputs=form and StructuredOutputsParams(**form)))
    outputs = llm.generate(told["prompts"], params, use_tqdm=False)
    with open(f"{folder}/{told['name']}.out.json", "w") as file:
        json.dump([list(one.outputs[0].token_ids) for one in outputs], file)


def main():
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    mend()
    import faults

    import specscope.vllm.v1.runner as runner

    faults.plant()
    runner.wrap_loaded = lambda *_: None  # each run makes its own witness, in its own process
    from vllm import LLM

    llm = LLM(model=jobs["model"], **engine_options(jobs))
    capture, folder = os.environ["SPECSCOPE_CAPTURE"], sys.argv[2]
    for told in jobs["runs"]:
        if not (child := os.fork()):
            ends, code = [], 1  # what was to run at exit before is of the parent, whose threads are not here
            atexit.register = partial(kept, ends)
            try:
                run(llm, told, folder)
                for end in ends:
                    end()
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        if os.path.exists(capture):
            os.replace(capture, f"{folder}/{told['name']}.jsonl")
        print(f"ran {told['name']}: {status}", flush=True)


if __name__ == "__main__":
    main()
