"""Several captures for report, verify and diagnose: each is judged by itself and named; report pools the figures."""

import json
from pathlib import Path

import pytest

from tests.support.commands import run_here
from tests.support.samples import EAGLE, NGRAM, SAMPLED


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A capture without a decode step: nothing can be judged."""
    path = tmp_path_factory.mktemp("several") / "head.jsonl"
    path.write_text(Path(NGRAM).read_text().splitlines(keepends=True)[0])
    return str(path)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """A capture with one coin that is not the seed's."""
    path = tmp_path_factory.mktemp("several") / "wrong.jsonl"
    found = Path(SAMPLED).read_text()
    coin = found.index('"doubleValue":', found.index("specscope.final.coin")) + len('"doubleValue":')
    path.write_text(found[:coin] + "0.125" + found[found.index("}", coin) :])
    return str(path)


@pytest.mark.parametrize("verb", ["verify", "diagnose"])
def test_each_is_judged_by_itself_and_named(verb, wrong):
    more = ["--no-audit"] * (verb == "diagnose")
    code, out, _ = run_here([verb, EAGLE, wrong, *more])
    assert code == 1
    for file, alone in ((EAGLE, 0), (wrong, 1)):
        own, text, _ = run_here([verb, file, *more])
        assert own == alone
        assert text in out
        assert file in text.splitlines()[0]
    assert out.splitlines()[-1] == f"2 captures: 1 consistent ({EAGLE}); 1 not consistent ({wrong})"


def test_what_is_wrong_beats_what_cannot_be_judged_and_that_beats_what_is_right(head, wrong):
    for files, code in (([EAGLE, SAMPLED], 0), ([EAGLE, head], 2), ([head, wrong, EAGLE], 1)):
        found, out, _ = run_here(["verify", *files, "--json"])
        read = json.loads(out)
        assert (found, read["exit"]) == (code, code)
        assert [one["exit"] for one in read["captures"]] == [run_here(["verify", file])[0] for file in files]


def test_one_that_cannot_be_read_is_told_and_the_others_are_judged(tmp_path, wrong):
    none = str(tmp_path / "none.jsonl")
    code, out, err = run_here(["verify", EAGLE, none, "--json"])
    assert code == 2
    assert err == f"specscope: error: cannot read {none}: No such file or directory\n"
    assert json.loads(out)["captures"][1] == {
        "source": none,
        "exit": 2,
        "warnings": [],
        "error": f"cannot read {none}: No such file or directory",
    }
    assert run_here(["verify", none, wrong])[0] == 1
    assert run_here(["report", EAGLE, none])[0] == 2  # its figures would not be those of all


def test_report_pools_and_keeps_requests_apart():
    """The ids of both captures are r0, r1 and r2."""
    read = json.loads(run_here(["report", EAGLE, SAMPLED, "--json"])[1])
    each = [one["pooled"] for one in read["captures"]]
    for name in ("drafts", "accepted", "drafted", "steps", "emitted"):
        assert read["pooled"][name] == sum(one[name] for one in each), name
    accepted, drafts = (sum(one[name] for one in each) for name in ("accepted", "drafts"))
    assert read["pooled"]["mean_acceptance_length"] == 1 + accepted / drafts
    taus = [request["acceptance"]["mean_acceptance_length"] for one in read["captures"] for request in one["requests"]]
    assert len(taus) == read["request_count"] == 6
    assert read["per_request_mean"]["mean_acceptance_length"] == pytest.approx(sum(taus) / 6)
    assert read["positions"][0]["proposed"] == sum(one["positions"][0]["proposed"] for one in read["captures"])
    out = run_here(["report", EAGLE, SAMPLED])[1]
    assert "! pooled figures mix captures with different settings: drafter eagle, draft_model" in out
    assert any("different settings" in line for line in read["warnings"])
    pooled = next(line.split() for line in out.splitlines() if line.startswith("pooled "))
    assert pooled[1:4] == ["6", str(drafts), f"{1 + accepted / drafts:.2f}"]
    for file in (EAGLE, SAMPLED):
        assert run_here(["report", file])[1] in out


def test_the_same_file_under_another_name_is_refused(tmp_path):
    link = tmp_path / "link.jsonl"
    link.symlink_to(EAGLE)
    code, _, err = run_here(["verify", EAGLE, str(link)])
    assert code == 2
    assert f"{EAGLE} and {link} are the same file" in err
