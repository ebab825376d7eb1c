"""`python again_planted.py JOB`: as specscope.vllm.again, in a vLLM that somebody patched. In vLLM's own environment.

Not a test: tests/vllm/test_real_locate.py names it as the program that `locate` starts. PLANTED: {"faults", "mend"} as
JSON. V2's runner needs Triton's interpreter on a CPU.
"""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(__file__))


def main():
    planted = json.loads(os.environ.get("PLANTED", "{}"))
    with open(sys.argv[1]) as file:
        job = json.load(file)
    import inside  # beside this file

    if job["v2"]:
        import interpreted

        interpreted.prepare()
        interpreted.complete()
    if planted.get("mend", True):
        inside.mend()
    import faults

    faults.plant(planted.get("faults", []))
    from specscope.vllm.again import run

    run(job)


if __name__ == "__main__":
    main()
