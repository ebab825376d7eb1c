"""vLLM as a peer. Run by the interpreter of vLLM's own environment: it must import nothing of specscope.

    python peer_vllm.py

reads a line, {"model": "folder", "dtype": "float32", "ngram": true, "prompts": [[1, 2]], "tokens": 64}, prints "ready",
and then, for each further line, the tokens that one run over the prompts made. With "batches" in place of "prompts", a
list of lists of prompts, a line is the number of a batch, and the answer is how many tokens a second its prompts are
decoded with, all at once: "tokens" of them each, after the prompts are cached.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from statistics import median
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
PAIRS = 3  # of runs, with and without the tokens that are timed
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def main() -> None:
    """Load, say so, and run whenever a line comes."""
    work = json.loads(sys.stdin.readline())  # too long for an argument
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is not an answer
    from vllm import LLM, SamplingParams

    how: dict[str, Any] = {"speculative_config": NGRAM} if work["ngram"] else {}
    batches = work.get("batches", [work.get("prompts", [])])
    most = max(len(prompt) for batch in batches for prompt in batch) + work["tokens"] + 1
    how |= {"max_model_len": max(most, 2048), "max_num_seqs": max(8, *map(len, batches))}
    engine = LLM(model=work["model"], dtype=work["dtype"], **how)

    def made(prompts: list[list[int]], tokens: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(out.outputs[0].token_ids) for out in outs)

    def seconds(prompts: list[list[int]], tokens: int) -> float:
        start = time.perf_counter()
        made(prompts, tokens)
        return time.perf_counter() - start

    def rate(prompts: list[list[int]]) -> float:
        more = int(work["tokens"])
        seconds(prompts, 1)  # fills the prefix cache
        took = median([seconds(prompts, 1 + more) - seconds(prompts, 1) for _ in range(PAIRS)])
        return len(prompts) * more / max(took, 1e-9)

    answers.write("ready\n")
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            if "batches" in work:
                answers.write(f"{rate(batches[int(line)])}\n")
            else:
                answers.write(f"{sum(made([prompt], work['tokens']) for prompt in work['prompts'])}\n")


if __name__ == "__main__":
    main()
