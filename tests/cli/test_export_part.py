"""`specscope export FILE#REQUEST`: the part through every verb that reads a capture, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specscope.trace.wire.reading import read_capture
from tests.support.commands import run_here
from tests.support.samples import EAGLE, PLANTED, TRACES


def extracted(folder, *words):
    """The file, and the line that was printed."""
    code, out, err = run_here(["export", *words, "-o", str(folder / "part.jsonl")])
    assert (code, out) == (0, ""), err
    return str(folder / "part.jsonl"), err


def answer(words, code=0):
    """A verb's JSON."""
    found, out, err = run_here([*words, "--json"])
    assert found == code, err
    return json.loads(out)


def test_what_was_written_and_what_was_left_out_is_told_in_a_line(tmp_path, monkeypatch):
    path, told = extracted(tmp_path, f"{EAGLE}#r1@3:9")
    size = Path(path).stat().st_size
    rest = len(read_capture(EAGLE).history.requests["r1"].steps) - 7
    assert told == (
        f"wrote {path}: 7 steps of 1 request, {size:,} bytes; left out: 2 other requests, {rest} other steps of r1, "
        "the engine steps' own spans\n"
    )
    _, told = extracted(tmp_path, f"{EAGLE}#r1", f"{EAGLE}#r0@2", "--no-text")
    assert "of 2 requests" in told
    assert told.endswith(
        "left out: 1 other request, 13 other steps of these requests, the engine steps' own spans, text\n"
    )
    assert "--no-text keeps token ids" in told
    monkeypatch.setenv("SPECSCOPE_NO_TOKENS", "1")
    assert "spans, text and token ids" in extracted(tmp_path, f"{EAGLE}#r1")[1]


@pytest.mark.every(2)
@pytest.mark.parametrize("place", ["r0", "r0@2:8"])
@pytest.mark.parametrize("name", ["eagle", "evidence", "ngram", "sampled"])
def test_every_verb_reads_it(name, place, tmp_path):
    whole = str(TRACES / f"{name}.jsonl")
    path, _ = extracted(tmp_path, f"{whole}#{place}")
    (verified,) = answer(["verify", path])["captures"]
    failed = [c for group in verified["groups"] for c in group["checks"] if c["result"] == "failed"]
    assert not failed
    checks = [check for group in verified["groups"] for check in group["checks"]]
    chances = [check for check in checks if check.get("p_value") is not None]
    assert all("unless this part of the run was chosen" in check["note"] for check in chances)
    (report,) = answer(["report", path])["captures"]
    assert [request["id"] for request in report["requests"]] == ["r0"]
    assert answer(["compare", whole, path])["answer"] != "different"
    assert answer(["compare", path, path])["answer"] != "different"
    assert answer(["why", f"{path}#r0@3"])["sentences"][0] == answer(["why", f"{whole}#r0@3"])["sentences"][0]
    for words in (["diagnose", "--no-audit"], ["tune", "--no-costs", "--nodes", "4"], ["why"]):
        code, _, err = run_here([*words, path])
        if words[0] == "tune" and name in ("evidence", "sampled"):  # as it says of the whole capture
            assert (code, "the drafts were sampled" in err) == (2, True)
        else:
            assert code == 0, err
    assert run_here(["export", path, "-o", str(tmp_path / "tables")])[0] == 0
    (tmp_path / "script").write_text("goto r0@3\nwhere\ntree\nnode 0\ninfo step\ninfo requests\nnext\n")
    code, out, err = run_here(["debug", path, "--commands", str(tmp_path / "script")])
    assert code == 0, err
    assert "and 2 requests of the batch not in this file" in out


@pytest.mark.parametrize("place", ["r0", "r0@3:7", "r0@5:"])
def test_the_planted_bug_is_found_in_the_part_that_has_it(place, tmp_path):
    path, _ = extracted(tmp_path, f"{PLANTED}#{place}")
    (found,) = answer(["diagnose", "--no-audit", path], code=1)["captures"]
    assert found["suspects"][0]["cause"] == "draft_position"


def test_what_an_output_may_replace(tmp_path):
    """Never an input, nor what is none of its own: tests/bad_inputs.py."""
    older = shutil.copy(PLANTED, tmp_path / "part.jsonl")
    code, _, err = run_here(["export", f"{EAGLE}#r0@3", "-o", str(older), "--no-clobber"])
    assert code == 2
    assert "--no-clobber keeps it" in err
    assert Path(older).read_bytes() == Path(PLANTED).read_bytes()
    extracted(tmp_path, f"{EAGLE}#r0@3")
    assert len(read_capture(older).history.requests["r0"].steps) == 1
