"""Captures of what is gone (tests/data/before_deletion): every verb says of them what it says in `expected.json.xz`.

That began with the code that made them. Where a change is meant, `python -m tests.test_old_captures` writes it anew.
"""

import json
import lzma
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.freeze.results import differences, results_of, run_here
from benchmarks.freeze.run import ENVIRONMENT
from specscope.debug.viewer import Viewer
from specscope.engine.config import DEFAULT_TREES
from specscope.trace.wire.reading import read_capture
from specscope.tui.look import Look
from specscope.tui.screens.engine_view import EnginePanel
from specscope.tui.screens.request_view import TimelinePanel
from specscope.tui.screens.step_view import NodesPanel
from specscope.tui.widgets.intervals import IntervalsPanel
from specscope.tui.widgets.output import OutputPanel
from specscope.tui.widgets.rates import LengthsPanel, RatesPanel
from specscope.tui.widgets.requests import RequestsPanel
from specscope.tui.widgets.tree import TreePanel
from tests.faults.fault import in_every_engine
from tests.faults.models import DRAFT, HEAD, TARGET
from tests.faults.planted import FAULTS
from tests.tui.sample import told

FOLDER = Path(__file__).parent / "data" / "before_deletion"
EXPECTED = FOLDER / "expected.json.xz"
DRAFTERS = {  # by capture: its drafter's model, where it has one
    "combined": HEAD,
    "combined_draft": DRAFT,
    "combined_fault": HEAD,
    "adaptive": HEAD,
    "adaptive_combined": HEAD,
    "adaptive_fault": HEAD,
    "prefix_cache": DRAFT,
    "prefix_fault": DRAFT,
    "kept": DRAFT,
    "phases": HEAD,
    "synthetic": None,
    "suffix_shared": None,
}
FIGURE, AGAIN = re.compile(r"\d[\d,.]*"), re.compile("passes over|rows at the borders")
WALKED = re.compile(", (recomputed|run again), ")  # the walk's own rules and verdicts, which were not there then
NAMES = sorted([*DRAFTERS, "counts"])
SOON = {"audit": ("adaptive_combined", "prefix_cache"), "diagnose": ()}  # the others are like these
SHARED = "suffix_shared"  # what searched other requests' texts again is gone too
COUNTS = (IntervalsPanel, RatesPanel, LengthsPanel, EnginePanel)  # on the screen, of counts only
PANELS = (RequestsPanel, TimelinePanel, TreePanel, RatesPanel, LengthsPanel, OutputPanel, NodesPanel, EnginePanel)
JUDGED = [name for name in DRAFTERS if name != SHARED]


def by_file(name):
    """What the verbs give that need no models. The next capture is the one that it is compared with."""
    following = NAMES[(NAMES.index(name) + 1) % len(NAMES)]
    return results_of(f"{name}.jsonl.gz", f"{following}.jsonl.gz")


def asked(name, *words):
    """What diagnose gives as JSON that loads the models."""
    draft = [] if DRAFTERS[name] is None else ["--draft-model", str(DRAFTERS[name])]
    code, out, err = run_here(["diagnose", f"{name}.jsonl.gz", "--json", *words, "--target", str(TARGET), *draft])
    assert out, err
    told = json.loads(out)
    assert told["exit"] == code
    return told


def audit(name):
    """What was compared, how often, and whether it agrees: the sizes of differences are the machine's."""
    (found,) = asked(name, "--only", "audit")["captures"]
    told = found["stages"]["audit"] | {"warnings": found["warnings"]}
    findings = [f"{one['name']}: {one['result']}, of {one['tested']}, {one['failed'] > 0}" for one in told["findings"]]
    return [*findings, told["exit"], told["audited"], told["nodes"], told["unjudged"], told["warnings"]]


def diagnose(name):
    """The causes, their examples, what else is wrong, and what was looked at."""
    (told,) = asked(name)["captures"]
    causes = [f"{one['cause']}, {one['is_fault']}, {one['example']}" for one in (*told["suspects"], *told["remarks"])]
    looked = [told[key] for key in ("exit", "steps", "looked_at", "left_out", "warnings")]
    return [causes, *looked, [one["operation"] for one in told["located"]], *_reworded(told)]


def locate(name):
    """The operations that differ, what agrees and what has no place. Where nothing differs, rounding says where."""
    (found,) = asked(name, "--only", "locate")["captures"]
    told = found["stages"]["locate"] | {"warnings": found["warnings"]}
    walks = [
        [walk["stage"], walk["reference"], step["operation"]]
        for walk in told["walks"]
        for step in walk["operations"]
        if step["differing"]
    ]
    found = [[one["stage"], one["operation"]] for one in told["located"]]
    return [walks, found, told["exit"], told["left_out"], told["warnings"], *_reworded(told)]


def _reworded(told):
    """What is ruled out and what has no place, without figures of the machine or of the engine that ran again."""
    known = [line for line in told["ruled_out"] if not WALKED.search(line)]
    ruled_out = [FIGURE.sub("N", line) if AGAIN.search(line) else line for line in known]
    return [sorted(ruled_out), [line.partition(" differs")[0] for line in told["unexplained"]]]


def same(name, verb, got):
    """A line for each difference from what was said then."""
    expected = json.loads(lzma.decompress(EXPECTED.read_bytes()))[name][verb]
    return list(differences(expected, json.loads(json.dumps(got)), name, verb))


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(FOLDER)
    monkeypatch.setitem(DEFAULT_TREES, "eagle", "dynamic:4,depth=2,top=4")  # the default then, which tune names
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", NAMES)
def test_every_verb_says_of_the_file_what_it_said(name):
    assert same(name, "file", by_file(name)) == []


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        pytest.param(verb, name, marks=() if name in SOON[verb.__name__] else pytest.mark.slow)
        for verb in (audit, diagnose)
        for name in JUDGED
    ],
)
def test_the_models_judge_as_they_did(verb, name):
    assert same(name, verb.__name__, verb(name)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", JUDGED)
def test_the_engine_runs_again_as_it_did(name):
    assert same(name, "locate", locate(name)) == []


def test_lookups_in_other_requests_texts_are_not_judged_and_nothing_is_accused():
    """ "Delete first" asks for it: audit found that they agreed."""
    (told,) = asked(SHARED)["captures"]
    assert (told["exit"], told["suspects"]) == (2, [])
    assert "it also looked in the texts of other requests" in str(told["left_out"])


def located_fault():
    """Of the combined drafter, where the engine that runs again has the fault too."""
    fault = FAULTS["another rotary base"]

    def install(patch, engine):
        drafter = getattr(engine.drafter, "model", engine.drafter)
        fault.install(patch, SimpleNamespace(drafter=drafter))

    with in_every_engine(install):
        return locate("combined_fault")


def test_a_fault_of_a_combined_drafter_is_located():
    told = located_fault()
    assert told[1] == [["drafter", "midlayer.self_attn.query"]]
    assert same("combined_fault", "planted", told) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_shows_it(name):
    viewer = Viewer(read_capture(f"{name}.jsonl.gz").history)
    last, request = len(viewer.history.steps) - 1, next(iter(viewer.history.requests), None)
    panels = [kind() for kind in (COUNTS if viewer.history.counts_only else PANELS)]
    for viewer.position in (0, 1, last // 2, last):
        look = Look(viewer, request)
        assert [panel for panel in panels if not told(panel.draw(look, 120, 40).lines)] == []


def main() -> None:
    os.chdir(FOLDER)
    os.environ.update(ENVIRONMENT)
    verbs = (audit, diagnose, locate)
    told = {name: {"file": by_file(name)} for name in NAMES}
    for name in DRAFTERS:
        told[name] |= {verb.__name__: verb(name) for verb in verbs}
        print(name, file=sys.stderr)
    told["combined_fault"]["planted"] = located_fault()
    EXPECTED.write_bytes(lzma.compress(json.dumps(told, sort_keys=True).encode(), preset=9))


if __name__ == "__main__":
    main()
