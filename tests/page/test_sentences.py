"""The page's scripts say of every step and node what the terminal says."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from specscope.analyze.why import Typical
from specscope.page.write import PageRun, write_page
from specscope.trace.history.place import at, brief, why, why_step
from specscope.trace.wire.reading import read_capture
from specscope.trace.words import about_likeliest, node_rows

ROOT = Path(__file__).parents[2]
CAPTURES = [*sorted((ROOT / "traces").glob("*.jsonl")), *sorted((ROOT / "tests/data/vllm").glob("w*.jsonl"))]
SCRIPT = Path(__file__).with_name("sentences.mjs")
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no node here")


def said(history):
    typical, shown = Typical(lambda: history), history.vocabulary.show
    for request in history.requests.values():
        for part, position in zip(request.steps, request.engine_steps, strict=True):
            nodes = []
            for number in range(len(part.tree) + 1 if part.is_judged else 0):
                place = at(part, number)
                rows, counted = node_rows(history, place, shown), typical(part, number)
                nodes.append(
                    [
                        why(history, part, number),
                        brief(part, number, history.vocabulary),
                        [list(row) for row in rows],
                        about_likeliest(place, shown),
                        [list(each) for each in place.numbers.items()],
                        counted[0] if number < len(part.tree) and counted else "",
                    ]
                )
            yield [f"{request.id}@{part.index}", why_step(history, history.steps[position], part), nodes]


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda capture: capture.stem)
def test_every_sentence_is_the_terminals(capture, tmp_path):
    history, page = read_capture(capture).history, tmp_path / "run.html"
    write_page(page, [PageRun(capture.name, history, ())], findings="none")
    done = subprocess.run(["node", SCRIPT, page], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for mine, theirs in zip(lines, said(history), strict=True):
        assert mine == json.loads(json.dumps(theirs))
