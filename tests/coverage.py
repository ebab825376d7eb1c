"""What the last `make coverage` ran, by folder: `python -m tests.coverage [OLD.json]`, which also writes coverage.json.

Beside an old one's figures, each folder whose share fell is marked with "fell".
"""

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

import coverage

NOT_COUNTED = "Not counted: what runs in other processes, what Numba compiled, and Triton's kernels."
COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def by_folder(files):
    """Statements, branches and the percentages of both that ran, by the folder of each file (of coverage's JSON)."""
    sums = defaultdict(Counter)
    for name, file in files.items():
        for folder in (str(Path(name).parent), "all"):
            sums[folder].update({name: file["summary"][name] for name in COUNTS})
    return {
        folder: {
            "statements": of["num_statements"],
            "lines %": round(100 * of["covered_lines"] / max(of["num_statements"], 1), 2),
            "branches": of["num_branches"],
            "branches %": round(100 * of["covered_branches"] / max(of["num_branches"], 1), 2),
        }
        for folder, of in sorted(sums.items())
    }


def table(now, before):
    yield NOT_COUNTED
    yield f"{'':<42}{'statements':>11}{'lines %':>9}{'branches':>10}{'branches %':>12}  before: lines %, branches %"
    for folder, of in now.items():
        old = [before.get(folder, {}).get(name, 0) for name in ("lines %", "branches %")]
        fell = "fell" if of["lines %"] < old[0] or of["branches %"] < old[1] else ""
        figures = "{:>11}{:>9.2f}{:>10}{:>12.2f}".format(*of.values())
        yield f"{folder:<42}{figures}  {old[0]:>8.2f}{old[1]:>8.2f} {fell}"


def main():
    data = coverage.Coverage()
    data.load()
    out = Path("coverage.json")
    data.json_report(outfile=str(out), ignore_errors=True)
    now = by_folder(json.loads(out.read_text())["files"])
    before = json.loads(Path(sys.argv[1]).read_text())["folders"] if len(sys.argv) > 1 else {}
    print(*table(now, before), sep="\n")
    out.write_text(json.dumps({"not counted": NOT_COUNTED, "folders": now}, indent=1) + "\n")


if __name__ == "__main__":
    main()
