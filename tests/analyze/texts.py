"""What verbs print, as it is kept in tests/data/texts: `python -m tests.analyze.texts` writes it anew."""

import io
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.failif import parse
from specscope.analyze.compare.tables import render_text as render_comparison
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Diagnosis, Suspect, render_diagnosis
from specscope.analyze.locate.located import Proof
from specscope.analyze.locate.text import render_location
from specscope.analyze.report import build_report
from specscope.analyze.text import render_text
from specscope.analyze.tune.text import render_tuning
from specscope.analyze.tune.tuning import recorded, tune
from specscope.analyze.verify.trial import judge, render_trial
from specscope.plans.plan import parse_plan
from specscope.trace.history.history import History
from tests.analyze.compare.runs import side
from tests.analyze.edits import edited, of, sample
from tests.analyze.histories import small
from tests.analyze.locate.locations import unplaced, wrong

KEPT = Path(__file__).parents[1] / "data" / "texts"


def page(render, *given, width=100, **options):
    """What a verb's `render` writes into a console."""
    out = io.StringIO()
    render(*given, Console(file=out, width=width, **options))
    return out.getvalue()


def shown(render, *given, **options):
    """The same with each stretch of white space as one space."""
    return " ".join(page(render, *given, **options).split())


def comparison():
    """One coin and one p planted."""
    planted = {("r3", 10): "coin", ("r4", 0): "p"}
    return compare(side(seed=1, evidence=True), side(seed=1, evidence=True, plant=planted), parse("tau drops > 50%"))


def diagnosis():
    (located,) = wrong().located
    faults = Suspect(Cause.MASK_SIBLINGS, Proof.ROWS, ("evidence",)), Suspect(Cause.COINS, Proof.SUM, ("z = 5",))
    weak = Suspect(Cause.WEAK_DRAFTER, Proof.SUM, ("few are accepted",))
    more = {"remarks": (weak,), "unexplained": ("verify, something: odd",), "left_out": ("audit: [b]no[/b] model",)}
    return Diagnosis(faults, located=(located,), steps=3, **more)


WRONG = lambda: edited(sample("sampled"), of(verdict__final_p=0.0))  # noqa: E731
TEXTS = {
    "report": lambda: page(render_text, build_report(small(), source="run.jsonl")),
    "report as JSON": lambda: json.dumps(build_report(small(), source="run.jsonl").to_dict(), indent=1, sort_keys=True),
    "report of nothing": lambda: page(render_text, build_report(History(), source="empty.jsonl")),
    "verify": lambda: page(render_trial, judge(WRONG(), source="run.jsonl", warnings=("a [warning]",))),
    "compare": lambda: page(render_comparison, comparison()),
    "diagnose": lambda: page(render_diagnosis, diagnosis(), "run.jsonl"),
    "diagnose nothing": lambda: page(render_diagnosis, replace(diagnosis(), suspects=(), located=()), "run.jsonl"),
    "locate": lambda: page(render_location, wrong()),
    "locate nothing": lambda: page(render_location, unplaced()),
    "tune": lambda: page(
        render_tuning, tune(recorded(["a.jsonl"], [sample("eagle")]), {"default": parse_plan("3")}, 8, None)
    ),
}

if __name__ == "__main__":
    KEPT.mkdir(exist_ok=True)
    for name, text in TEXTS.items():
        (KEPT / f"{name}.txt").write_text(text())
