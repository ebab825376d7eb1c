"""Scripts that know nothing of specscope, in processes of their own: torch finds specscope's entry point there."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[2]
# Says what it was called with, generates, and ends as it is told
SCRIPT = """
import sys
from tests.transformers.generators import CASES, generate
print(sys.argv, __name__, __file__)
print(generate(CASES["assistant, sampled"]), flush=True)
if "raises" in sys.argv:
    raise RuntimeError("enough")
if "forks" in sys.argv:
    import os
    if not os.fork():
        print(generate(CASES["assistant, sampled"]))
        sys.exit(0)
    os.wait()
while "waits" in sys.argv:
    generate(CASES["assistant, sampled"])
sys.exit(3 if "exits" in sys.argv else 0)
"""
DIES = 'import torch\nraise OSError("my/model does not appear to have a file named config.json")\n'
PLAIN = """
from tests.transformers.models import prompt, tiny_llama
tiny_llama(0).generate(prompt(), max_new_tokens=2, pad_token_id=0)
"""


def installed(folder):
    """A folder that makes this tree's entry points those of an installed package, when it is on PYTHONPATH."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in of.items()) for group, of in points.items()]
    made = folder / "specscope-0.1.0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: specscope\nVersion: 0.1.0\n")
    (made / "entry_points.txt").write_text("".join(lines))
    return folder


def environment(folder, **variables):
    """Of a process that has specscope installed, and no variable of it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECSCOPE_")}
    path = os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | variables


def run(words, folder, installation, **variables):
    """subprocess.run's result of `python WORDS` in a folder."""
    command, own = [sys.executable, *map(str, words)], environment(installation, **variables)
    kept = {"capture_output": True, "text": True, "check": False}
    return subprocess.run(command, cwd=folder, env=own, timeout=HANG_SECONDS * 2, **kept)


def without_ours(text):
    """Standard error but for the lines that are specscope's."""
    return [line for line in text.splitlines() if not line.startswith(("specscope: ", "[transformers]"))]
