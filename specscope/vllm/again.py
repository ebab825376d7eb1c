"""`python -m specscope.vllm.again JOB`: vLLM runs the requests of a capture again, offline, for `specscope locate`.

In vLLM's own environment; the plugin records by SPECSCOPE_* variables. JOB is a JSON file, made by
specscope/measure/locate/vllm.py: {"model", "speculation", "engine", "prompts": token ids of each, "params": of each}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# One process, so that a fault put in at run time is in the one that computes
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def main(arguments: list[str] | None = None) -> None:
    """Run a job."""
    with open((sys.argv[1:] if arguments is None else arguments)[0], encoding="utf-8") as file:
        run(json.load(file))


def run(job: dict[str, Any]) -> None:
    """Run a job; what it gives is in the capture and the taps."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    engine = {"enforce_eager": True, "disable_log_stats": False, **job["engine"]}
    llm = LLM(model=job["model"], speculative_config=job["speculation"] or None, **engine)
    params = []
    for values in job["params"]:
        form = values.pop("structured_outputs", None)
        params.append(SamplingParams(**values, structured_outputs=form and StructuredOutputsParams(**form)))
    llm.generate([{"prompt_token_ids": tokens} for tokens in job["prompts"]], params, use_tqdm=False)


if __name__ == "__main__":
    main()
