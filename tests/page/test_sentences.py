"""The page's scripts say of every step and node what the terminal says."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from specscope.analyze.why import Typical
from specscope.page.write import PageRun, write_page
from specscope.speculate.verify import host, match, traversal
from specscope.trace.history.history import History
from specscope.trace.history.place import at, brief, why, why_step
from specscope.trace.record.rules import BLOCK
from specscope.trace.record.tree import Drawn
from specscope.trace.wire.reading import read_capture
from specscope.trace.words import about_likeliest, node_rows
from tests.speculate.verify.enumeration import batch_of, random_input
from tests.support import records as made
from tests.trace.samples import record
from tests.trace.strategies import RUN

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


@pytest.mark.every(2)
@pytest.mark.parametrize("capture", CAPTURES, ids=lambda capture: capture.stem)
def test_every_sentence_is_the_terminals(capture, tmp_path):
    assert_same(read_capture(capture).history, tmp_path / "run.html")


def assert_same(history, page):
    write_page(page, [PageRun(page.name, history, ())], findings="none")
    done = subprocess.run(["node", SCRIPT, page], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for mine, theirs in zip(lines, said(history), strict=True):
        assert mine == json.loads(json.dumps(theirs))


RULES = {"standard": host.verify, "match": match.verify, "traversal": traversal.verify}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", [*RULES, BLOCK])
def test_so_is_every_sentence_under_every_rule(name, tmp_path):
    """Over random trees and distributions, whose nodes are drawn in each way. Block verification is of chains."""
    rng, records = np.random.default_rng(7), []
    info = made.info("r0", "x", [1, 2], {}, arrived=1, admitted=1)
    for index in range(60):
        tree, *asked = random_input(rng, list(Drawn)[index % 3], False, 0.0, chain=name == BLOCK)
        batch = batch_of(tree, *asked)
        (found,), _ = traversal.verify(batch, BLOCK) if name == BLOCK else RULES[name](batch)
        assert found.rule == name
        more = {"index": index, "context": 5 + index, "prefill": 0, "drafter": "x", "emitted": found.accepted + 1}
        step = made.part("r0", tree, found, **more)
        records.append(record(index, (step,), admitted=(info,) if index == 0 else ()))
    history = History(RUN)
    for each in records:
        history.append(each)
    assert_same(history, tmp_path / "run.html")
