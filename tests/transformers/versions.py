"""Each candidate generator recorded in several versions of transformers: the table of docs/transformers.md.

`python -m tests.transformers.versions FOLDER...`; `pip install --no-deps --target FOLDER transformers==X` makes one.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEEDS = range(2)


def cell(name):
    """What came of a case here: `untouched`, or what is wrong."""
    import specscope
    from specscope.trace.wire.reading import read_capture
    from tests.transformers.generators import ALL, generate, models, recounted, steps

    case = ALL[name]
    try:
        models(case.models)
    except ValueError as error:
        return f"cannot be built: {error}"
    generate(case, tokens=2)  # transformers prunes the head of a universal assistant once, and draws for it
    without = [generate(case, seed) for seed in SEEDS]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        with specscope.record(path) as recording:
            recorded = [generate(case, seed) for seed in SEEDS]
        parts = steps(read_capture(path).history)
    drawn = [part for part in parts if part.rule != "match" and case.arguments["do_sample"]]
    made = [token for out, _ in without for token in out[12:]]
    wrong = {
        "other output": [out for out, _ in recorded] != [out for out, _ in without],
        "other random state": recorded != without,
        "; ".join(recording.losses): bool(recording.losses),
        "other tokens in the capture": made != [token for part in parts for token in part.output()],
        "accepted counts that its coins do not give": any(part.verdict.accepted != recounted(part) for part in drawn),
        "nothing drafted": not any(len(part.tree) for part in parts),
    }
    return next((words for words, is_so in wrong.items() if is_so), "untouched")


def cells():
    """By the case's name, and the version."""
    import transformers

    from tests.transformers.generators import ALL

    return {"version": transformers.__version__, "cells": {name: cell(name) for name in ALL}}


def run(folder):
    """The same in a process that finds transformers in a folder."""
    path = os.pathsep.join([str(Path(folder).resolve()), str(ROOT)])
    command = [sys.executable, "-P", "-m", "tests.transformers.versions"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def table(versions):
    """Markdown: a row a generator, with its greedy and sampled case in a cell; what cannot be built is told below."""
    names = list(dict.fromkeys(name.partition(",")[0] for name in versions[0]["cells"]))
    lines = [["", *(version["version"] for version in versions)], ["---"] * (len(versions) + 1)]
    lines += [[name, *(_of(version["cells"], name) for version in versions)] for name in names]
    why = {text for version in versions for text in version["cells"].values() if text.startswith("cannot be built: ")}
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", *sorted(why)])


def _of(found, name):
    texts = {text.partition(":")[0] for case, text in found.items() if case.partition(",")[0] == name}
    return "; ".join(sorted(texts))


if __name__ == "__main__":
    if folders := sys.argv[1:]:
        print(table([run(folder) for folder in folders]))
    else:
        json.dump(cells(), sys.stdout)
