"""Captures of what is gone (tests/data/before_deletion): every verb says of them what it said when they were made.

`expected.json.xz` there holds that: `python -m tests.test_old_captures` wrote it, with the code that made them; its
sentences have the words of today.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.faults.rows import RENAMED
from benchmarks.freeze.results import differences, results_of, run_here
from benchmarks.freeze.run import ENVIRONMENT
from specscope.debug.viewer import Viewer
from specscope.engine.config import DEFAULT_TREES
from specscope.trace.wire.reading import CaptureReader
from specscope.tui.app import ScopeApp
from specscope.tui.widgets.lines import Panel
from tests.faults.fault import in_every_engine
from tests.faults.models import DRAFT, HEAD, TARGET
from tests.faults.planted import FAULTS

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
SOON = ("combined_fault", "adaptive_combined", "prefix_cache")  # the others are like these, or quick to name
# "Delete first" asks for these: `diagnose --against` and `--no-adaptive` are gone.
LISTED = re.compile(
    r"captures\[0\]\.beside: \[\] -> nothing|tune.* -> .*Record with --tree dynamic:32"
    # `why` says once what it said of each rejection: that ranks in the drafter are not known
    r"|why\.json\.notes: \[\] -> \[\"the drafter's likeliest tokens are not recorded, so its rank of [^\"]*\"\]$"
    r"|no coin decides.*\" -> \".*greedy decoding takes the (target's )?top token.*\"$"  # in plain words
    r"|wanted a token whose rank in the drafter is not known\.\" -> .* the target wanted another token\.\"$"
    r"|file: watch\.said\[0\]: .* is a capture, not a log, .* -> .* is a capture, not a log, "  # and results
    r"|diagnose\[8\]: : \[(\"audit: [^\"]*\"(, )?)+\] -> \[\]$"  # what a name explains is not unexplained
    r"|diagnose\.json\.captures\[0\]\.(builds|when|would_see|.*\.(grade|explained|of|spoiled)): nothing -> "
    r"|diagnose\.json\.captures\[0\]\.(suspects|remarks)\[\d\]\.(score|about|look): "
    r"|checks\[\d+\]\.(least_bias: |note: \"would have seen )"  # fewer checks share the level
    r"|checks\[\d+\]\.unit: \"draft\" -> \"drafted token\"$"  # that is what is counted
    r"|verify\.json\.captures\[0\]\.groups\[4\]\.checks\[6\]\.tested: "  # the drafter's cache before its first draft
    r"|checks\[5\]\.note: \"the capture (records|tells of) no features (that )?fed (to )?a head\" -> \"\"$"  # it tells
    r"|diagnose\.json\.captures\[0\]\.notes: nothing -> "
    # A cause is told in the words of the check that shows it; of a rerun, where requests first differ
    r"|suspects\[\d\]\.for\[\d\]: \".* -> \"[a-z' -]+: .*, and so in [\d,]+ of [\d,]+ [a-z ]+\"$"
    r"|suspects\[\d\]\.for\[\d\]: \".* -> \".*, where \d+ requests? first differs?\"$"
    r"|diagnose\[0\]\[0\]: : \"rotary_positions, True, r0@1\" -> \"rotary_positions, True, r2@1\"$"
    # A few steps are walked where nothing is wrong
    r"|diagnose\[3\]: : \[\"capture\", \"verify\", \"audit\"\] -> \[\"capture\", \"verify\", \"audit\", \"locate\"\]$"
    r"|diagnose\[7\]: : \[\] -> \[\"the (drafter|target|sampling|verdict)"
    r"|locate\[6\]: : .* -> \[.*, \"audit: head's features\"\]$"  # zeros were fed: audit says so
    # near, unlikely and nonsense, groups that other tables have, and the report's timeline are gone
    r"|report\.json\.captures\[0\]\.(timeline|answers\.rejections\.(groups|misses|tokens\[\d+\]\.\w+)): .* -> nothing$"
    r"|(report\.json\.captures\[0\]|compare\.json)\.levels: nothing -> "  # they are new
    r"|file: tune\.json\.(trees|notes)"  # no tree deeper than the record
    # Of sampled drafts `tune` cannot tell what other trees would have drawn: it refuses them in one line
    r"|^kept: file: tune\.(json\.)?(exit: 0 -> 2|\w+: .* -> (nothing|\[\]))$"
    r"|file: tune\.json\.error: .* -> \"the (trees are from a text and a model|drafts were sampled): tune cannot tell "
    # `compare`: a setting names the stage where it enters, evidence its own; intervals are of logarithms; sentences
    r"|compare\.json\.(differences\[\d+\]\.enters|fields\[\d+\]\.stage): nothing -> "
    r"|compare\.json\.figures\[\d+\]\.(low|high|p_value|visible|standard_error): "
    r"|compare\.json\.figures\[9\]\.significant: false -> true$"  # 21.6 to 61.3 %, in six requests
    r"|compare\.json\.(headline|summary|reasons(\[\d\])?): "
    r"|compare\.json\.fields\[\d\]\.explained: .* -> .*\"draft revision\""
    r"|compare\.json\.pairs\[\d\]\.parting\.[ab]\.decisions\[\d\]\.(draft_p|raw_p): null -> 0\.\d+$"
    # Questions by group and by position, and evidence's own places, are gone; an own rule and other kinds are counted
    r"|report\.json\.captures\[0\]\.answers\.(conditions|missed): .* -> nothing$"
    r"|compare\.json\.fields\[\d+\]\.(where|judged|tolerance): .* -> nothing$"
    # The table of least useful nodes, further columns of the tokens, and calibration are gone
    r"|report\.json\.captures\[0\]\.answers\.tree: .* -> nothing$"
    r"|report\.json\.captures\[0\]\.answers\.calibration: .* -> nothing$"
    r"|report\.json\.captures\[0\]\.answers\.rejections\.(tokens\[\d+\]\.)?rejected\.interval: .* -> nothing$"
    r"|report\.json\.captures\[0\]\.answers\.rejections\.notes: \[\"raw p, ranks, [^\"]*\"\] -> \[\]$"
    r"|report\.json\.captures\[0\]\.(engine\.overlap_s|adaptive): .* -> nothing$"
    r"|compare\.json\.calibration: .* -> nothing$"
    # Counts that are compared have an interval
    r"|compare\.json\.note: \"One side or both hold counts only: no .* -> \"One side or both hold counts only, so no "
    r"|compare\.json\.missing\[\d\]: .*: neither they nor calibration are compared\" -> .*: they are not compared\"$"
    r"|compare\.json\.(missing(\[\d\])?|unpaired): .*(one of B|\.\.\. \(\d+ characters, \w+\)).* -> "
    r"|(report|compare)\.json\.schema: |verify\.json\.captures\[0\]\.own_rule: nothing -> |why.*\.more: nothing -> "
)
# Checks that were added: they convict only what has a fault
SINCE = ("log-probabilities", "head's features", "acceptance by place")
# What became one of these, and what is skipped now where every coin is computed again
BEFORE = ("acceptance by depth", "acceptance by sibling", "acceptance by size", "coins uniform", "coins in series")
# What follows from other evidence, which compare lists no more
FOLLOWED = ("outcome", "draft tree, not judged", "accepted tokens", "final token", "target entropy", "drafter entropy")
FOLLOWED = (*FOLLOWED, "requests in step", "prefill tokens", "cached tokens")
LOOPS = ("output in loops", "tau without loops")  # which the report of each side tells
BY_SOURCE = ("rate from ", "accepted nodes by source: ")  # of combined drafters: export tells it
SHARED = "suffix_shared"  # what searched other requests' texts again is gone too
JUDGED = [name for name in DRAFTERS if name != SHARED]
MODELS = [pytest.param(name, marks=() if name in SOON else pytest.mark.slow) for name in JUDGED]


def by_file(name):
    """What the verbs give that need no models. The next capture is the one that it is compared with."""
    following = NAMES[(NAMES.index(name) + 1) % len(NAMES)]
    return _without_new(results_of(f"{name}.jsonl.gz", f"{following}.jsonl.gz"), name)


def _without_new(told, name):
    """Without the checks of SINCE, which fail nowhere but in a capture with a fault."""
    if isinstance(told, dict):
        return {key: _without_new(value, name) for key, value in told.items()}
    if not isinstance(told, list | tuple):
        return told
    new = [one for one in told if isinstance(one, dict) and one.get("name") in (*SINCE, *BEFORE)]
    assert name.endswith("_fault") or all(one["result"] != "failed" for one in new), new
    return [_without_new(one, name) for one in told if one not in new]


def _without_gone(report, compared):
    """Rows that report and compare no longer have, taken out of what they gave."""
    for told in (report, *report.get("captures", ())):
        if "warnings" in told:
            told["warnings"] = [line for line in told["warnings"] if BY_SOURCE[1] not in line]
    if "fields" in compared:
        compared["fields"] = [one for one in compared["fields"] if one["name"] not in FOLLOWED]
        figures = [one for one in compared["figures"] if one["name"] not in LOOPS]
        compared["figures"] = [one for one in figures if not one["name"].startswith(BY_SOURCE[0])]


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
    kept = _without_new(told["findings"], name)
    findings = [f"{one['name']}: {one['result']}, of {one['tested']}, {one['failed'] > 0}" for one in kept]
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
    text = lzma.decompress(EXPECTED.read_bytes()).decode()
    text = re.sub(r'(?<=")(\w+)(?=(, True, [^"]*)?")', lambda match: RENAMED.get(match[1], match[1]), text)
    expected = json.loads(text)
    if verb == "file":
        _without_gone(*(expected[name][verb][of].get("json", {}) for of in ("report", "compare")))
    lines = differences(_without_new(expected[name][verb], name), json.loads(json.dumps(got)), name, verb)
    return [line for line in lines if not LISTED.search(line)]


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(FOLDER)
    monkeypatch.setitem(DEFAULT_TREES, "eagle", "dynamic:4,depth=2,top=4")  # the default then, which tune names
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", NAMES)
def test_every_verb_says_of_the_file_what_it_said(name):
    assert same(name, "file", by_file(name)) == []


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("verb", [audit, diagnose])
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
async def test_a_replay_shows_it(name):
    reader = CaptureReader(f"{name}.jsonl.gz")
    app = ScopeApp(Viewer.over(reader), title=name)
    async with app.run_test(size=(120, 40)) as pilot:
        for key in ("end", "left", "d", "escape", "t", "escape", "home", "right"):
            await pilot.press(key)
            await pilot.pause()
            drawn = [text for panel in app.query(Panel) for line in panel.sheet.lines for text, _ in line]
            assert drawn
            assert not [text for text in drawn if "cannot draw this" in text]
        assert app.lost == ""


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
