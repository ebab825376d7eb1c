"""Each candidate generator recorded in several versions of transformers: the table of docs/transformers.md.

`python -m tests.transformers.versions FOLDER...`; `pip install --no-deps --target FOLDER transformers==X` makes one.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
TEST = "test_recording.py::test_output_and_random_state_are_as_without_and_verify_passes"


def cells(folder):
    """By case what its test makes of the transformers in a folder: `untouched`, or why not."""
    path = os.pathsep.join([str(Path(folder).resolve()), str(ROOT)])
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "out.xml"
        command = [sys.executable, "-P", "-m", "pytest", "-q", f"--junitxml={out}", str(Path(__file__).parent / TEST)]
        variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, check=False)
        tests = ElementTree.parse(out).findall(".//testcase")
    whys = {test.get("name").partition("[")[2][:-1]: [found.get("message") for found in test] for test in tests}
    return {name: why[0] if why else "untouched" for name, why in whys.items()}


def table(versions):
    """Markdown: a row a generator, with its greedy and sampled case in a cell; what cannot be built is told below."""
    names = dict.fromkeys(name.partition(",")[0] for cells in versions.values() for name in cells)
    lines = [["", *versions], ["---"] * (len(versions) + 1)]
    lines += [[name, *(_of(cells, name) for cells in versions.values())] for name in names]
    why = {text for cells in versions.values() for text in cells.values() if text != "untouched"}
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", *sorted(why)])


def _of(found, name):
    texts = {text.partition(":")[0] for case, text in found.items() if case.partition(",")[0] == name}
    return "; ".join(sorted(texts))


if __name__ == "__main__":
    of_folder = {folder: next(Path(folder).glob("transformers-*.dist-info")).name for folder in sys.argv[1:]}
    print(table({name.split("-")[1].removesuffix(".dist"): cells(folder) for folder, name in of_folder.items()}))
