"""Each question on a capture of 10,000 steps of six requests, full evidence; `pytest -m slow -s` prints the times."""

from __future__ import annotations

import dataclasses
import gc
import time

import pytest

from benchmarks.replay import lengthen
from specscope.analyze.questions.acceptance import by_condition
from specscope.analyze.questions.answers import answer
from specscope.analyze.questions.calibration import calibration
from specscope.analyze.questions.cells import by_cell
from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.missed import missed
from specscope.analyze.questions.rejections import rejections
from specscope.analyze.report import build_report
from specscope.trace.record.tree import Drawn
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.reading import read_capture
from tests.analyze.histories import record
from tests.analyze.synthetic import Synthetic

STEPS, BATCH = 10_000, 6
MOST = 2.0  # seconds
QUESTIONS = (rejections, calibration, by_condition, missed, by_cell)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Requests that run side by side, again and again."""
    folder = tmp_path_factory.mktemp("long")
    made = Synthetic(1, "2x2", Drawn.WITHOUT_REPLACEMENT, vocab=60).run(BATCH, 50)
    parts = list(zip(*(request.steps for request in made.requests.values()), strict=True))
    infos, ends = (tuple(getattr(one, name) for one in made.requests.values()) for name in ("info", "end"))
    with_ends = {0: {"admitted": infos}, len(parts) - 1: {"finished": ends}}
    writer = CaptureWriter(folder / "short.jsonl", made.run, made.vocabulary)
    for number, batch in enumerate(parts):
        writer(record(number, batch, **with_ends.get(number, {})))
    writer.close()
    lengthen(str(folder / "short.jsonl"), folder / "long.jsonl", STEPS)
    history = read_capture(str(folder / "long.jsonl")).history
    gc.freeze()  # as `specscope report` does
    yield history
    gc.unfreeze()


def seconds(what) -> float:
    """CPU time: other processes do not change it."""
    began = time.process_time()
    what()
    return time.process_time() - began


@pytest.mark.slow
def test_each_question_takes_less_than_two_seconds(long):
    assert long.acceptance.drafts == STEPS * BATCH
    for question in QUESTIONS:
        alone = seconds(lambda question=question: question(Evidence.of(long)))
        print(f"{question.__name__:<14} {alone:.2f} s")
        assert alone < MOST
    print(f"all            {seconds(lambda: answer(long)):.2f} s")


@pytest.mark.slow
def test_the_report_waits_for_them_and_little_more(long):
    whole, asked = seconds(lambda: build_report(long, source="x")), seconds(lambda: answer(long))
    print(f"report {whole:.2f} s, of it the questions {asked:.2f} s")
    assert dataclasses.is_dataclass(build_report(long, source="x").answers)
    assert whole < asked + 5
