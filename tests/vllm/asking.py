"""Runs in vLLM's own environment: `python asking.py JOB OUT`: what vLLM says to each set of parameters, one by one.

Not a test. tests/vllm/test_real_params.py starts it.
"""

import json
import sys
from pathlib import Path

from offline import engine_options  # beside this file; it sets vLLM's environment


def main():
    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMValidationError

    job, answers = json.loads(Path(sys.argv[1]).read_text()), []
    llm = LLM(model=job["model"], **engine_options(job))
    for params in job["asked"]:
        try:
            if bias := params.get("logit_bias"):
                params["logit_bias"] = {int(token): value for token, value in bias.items()}
            (out,) = llm.generate([job["prompt"]], SamplingParams(ignore_eos=True, **params), use_tqdm=False)
            answers.append([list(one.token_ids) for one in out.outputs])
        except VLLMValidationError as error:
            answers.append(str(error))
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
