"""What the plugin costs real vLLM: on and off in turn, in one process. Not a test.

    SPECSCOPE_CAPTURE=/tmp/run.jsonl /path/to/vllm/bin/python -P tests/vllm/overhead.py MODEL HEAD [ROUNDS [OUT]]

Off means that vLLM's own functions are put back, which the plugin's wrappers keep. Prints the ratio of tokens per
second, on over off: the median of the rounds' ratios, and the middle half of them; and writes to OUT, as JSON, the
processor time that a token took, [on, off] in milliseconds.
"""

import json
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from inside import started  # beside this file; it sets what vLLM reads

PROMPTS = [
    *("The capital of France is", "def fibonacci(n):\n    if n <", "Once upon a time there was a"),
    *("Water boils at a temperature of", "List: one, two, three, one, two, three, one,", "The best way to learn is"),
]


def wrapped():
    """(owner, name, the plugin's wrapper) of everything that it wraps."""
    import vllm.v1.core.sched.scheduler as scheduler
    import vllm.v1.sample.rejection_sampler as rejection
    import vllm.v1.sample.sampler as plain
    import vllm.v1.worker.gpu_model_runner as runner

    owners = (scheduler.Scheduler, rejection, rejection.RejectionSampler, plain.Sampler, runner.GPUModelRunner)
    found = [(owner, name, value) for owner in owners for name, value in list(vars(owner).items())]
    return [(owner, name, value) for owner, name, value in found if hasattr(value, "__specscope__")]


def main():
    model, head = sys.argv[1:3]
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    head = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    quiet = {"max_num_seqs": 8, "disable_log_stats": True, "per_request_spec_decode_metrics": "none"}
    llm = started({"model": model, "speculation": head, "engine": quiet, "runs": []})
    from vllm import SamplingParams

    hooks = wrapped()
    print(f"{len(hooks)} functions wrapped")

    figures = {}  # by what is run: processor time that a token takes, in ms, on and off
    for batch, temperature in ((1, 0.0), (6, 0.0), (6, 0.8)):
        own = {"max_tokens": 48, "ignore_eos": True, "seed": 7 if temperature else None}
        params = SamplingParams(temperature=temperature, **own)
        taken = {True: [], False: []}  # of each side's runs: tokens, seconds, processor seconds

        def run(on, prompts=PROMPTS[:batch], params=params, taken=taken):
            for owner, name, value in hooks:
                setattr(owner, name, value if on else value.__wrapped__)
            began, before = time.perf_counter(), time.process_time()
            tokens = sum(len(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False))
            taken[on].append((tokens, time.perf_counter() - began, time.process_time() - before))

        for at in range(4 * rounds + 1):
            for on in (True, False) if at % 2 else (False, True):
                run(on)
        rates = {on: [tokens / seconds for tokens, seconds, _ in runs[1:]] for on, runs in taken.items()}
        ratios = [on / off for on, off in zip(rates[True], rates[False], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"batch {batch}, temperature {temperature}: {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)
        sums = [[sum(column) for column in zip(*taken[on][1:], strict=True)] for on in (True, False)]
        figures[f"vLLM, batch {batch}, temperature {temperature}"] = [1000 * used / made for made, _, used in sums]
    if len(sys.argv) > 4:
        with open(sys.argv[4], "w") as file:
            json.dump(figures, file)


if __name__ == "__main__":
    main()
