"""vLLM as a peer. Run by the interpreter of vLLM's own environment: it must import nothing of specscope.

    python peer_vllm.py '{"model": "folder", "dtype": "float32", "ngram": true, "prompts": [[1, 2]], "tokens": 64}'

prints "ready", and then, for each line that it reads, the tokens that one run over the prompts made.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
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
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def main() -> None:
    """Load, say so, and run whenever a line comes."""
    work = json.loads(sys.argv[1])
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is not an answer
    from vllm import LLM, SamplingParams

    how: dict[str, Any] = {"speculative_config": NGRAM} if work["ngram"] else {}
    engine = LLM(model=work["model"], dtype=work["dtype"], max_model_len=2048, max_num_seqs=8, **how)
    params = SamplingParams(temperature=0, max_tokens=work["tokens"], ignore_eos=True)
    answers.write("ready\n")
    with contextlib.suppress(KeyboardInterrupt):
        for _ in sys.stdin:
            made = 0
            for prompt in work["prompts"]:
                (out,) = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
                made += len(out.outputs[0].token_ids)
            answers.write(f"{made}\n")


if __name__ == "__main__":
    main()
