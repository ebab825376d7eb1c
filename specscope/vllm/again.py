"""`python -m specscope.vllm.again JOB`: vLLM runs the requests of a capture again, offline, for `specscope diagnose`.

In vLLM's own environment; the plugin records by SPECSCOPE_* variables. JOB is a JSON file, made by
specscope/measure/locate/vllm.py: {"v2", "model", "speculation", "engine", "requests": [{"prompt": token
ids, "params": SamplingParams of a capture, "tokens": how many to make, "seeded": whether the seed was given}]}.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specscope.trace.checked import decoded
from specscope.trace.record.params import SamplingParams

# One process, so that a fault put in at run time is in the one that computes
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
SAME = "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty ignore_eos"


def main(arguments: list[str] | None = None) -> None:
    """Run a job."""
    file = Path((sys.argv[1:] if arguments is None else arguments)[0])
    run(decoded(file.read_bytes(), dict[str, Any]))


def run(job: Mapping[str, Any]) -> None:
    """Run a job; what it gives is in the capture and the taps."""
    os.environ.update(ENVIRONMENT)
    import vllm
    from vllm.sampling_params import StructuredOutputsParams

    engine = {"enforce_eager": True, "disable_log_stats": False, **job["engine"]}
    llm = vllm.LLM(model=job["model"], speculative_config=job["speculation"] or None, **engine)
    params = []
    for request in job["requests"]:
        values = arguments_of(request)
        form = values.pop("structured_outputs")
        params.append(vllm.SamplingParams(**values, structured_outputs=form and StructuredOutputsParams(**form)))
    prompts = [{"prompt_token_ids": request["prompt"]} for request in job["requests"]]
    llm.generate(prompts, params, use_tqdm=False)


def arguments_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM's SamplingParams take for a request: run_info.py reads them the other way. It refuses min_p and a
    bias where it speculates.
    """
    params, tokens = SamplingParams.from_dict(request["params"]), request["tokens"]
    values: dict[str, Any] = {name: getattr(params, name) for name in SAME.split()}
    values |= {"max_tokens": tokens, "min_tokens": min(params.min_tokens, tokens)}
    values |= {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}
    bias = {int(token): float(value) for token, value in params.logit_bias.items()}
    values |= {"seed": params.seed if request["seeded"] else None, "logit_bias": bias or None}
    form = None if params.structured_outputs is None else params.structured_outputs.to_dict()
    values["structured_outputs"] = form and {name: value for name, value in form.items() if value not in (None, False)}
    return values


if __name__ == "__main__":
    main()
