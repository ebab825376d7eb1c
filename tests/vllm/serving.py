"""Runs in vLLM's own environment: `python serving.py JOB OUT`. Answers prompts one after the other until none are left.

Not a test. tests/vllm/test_real_debug.py starts it with SPECSCOPE_DEBUG_SOCKET. A prompt is run when its file appears.
"""

import json
import sys
import time
from pathlib import Path

from offline import mend  # beside this file


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    mend()  # in this process alone: where the worker is another, the prompts are greedy
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["model"],
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        enforce_eager=True,
        speculative_config=job["speculation"],
        **job.get("engine", {}),
    )
    outputs = []
    for prompt in job["prompts"]:
        while not Path(job["go"]).exists():
            time.sleep(0.05)
        params = SamplingParams(ignore_eos=True, **job["params"])
        outputs.append(list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids))
    Path(sys.argv[2]).write_text(json.dumps(outputs))


if __name__ == "__main__":
    main()
