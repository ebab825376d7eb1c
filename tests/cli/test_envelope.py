"""One layout for all JSON, `exit` is what the command exits with; and several captures: judged each, and pooled."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from specscope.cli.main import cli
from specscope.envelope import RAISED
from tests.faults.settings import Setting, record
from tests.support.commands import run_here, said
from tests.support.samples import EAGLE, NGRAM, PLANTED, ROOT, SAMPLED

COUNTS = ROOT / "tests/data/vllm/chat_greedy.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Captures that are cut off, without a decode step, of counts only, and of a model that is small."""
    path = tmp_path_factory.mktemp("envelope")
    lines = Path(NGRAM).read_text().splitlines(keepends=True)
    (path / "head.jsonl").write_text(lines[0])
    (path / "cut.jsonl").write_text("".join(lines)[:-40])
    record(Setting("ngram", requests=2, tokens=20), path / "own.jsonl")
    assert run_here(["watch", str(COUNTS), "--headless", "-o", str(path / "counts.jsonl")])[0] == 0
    return path


def words_of(folder):
    """A run of every verb with --json, by the verb; more than one where the exit code may be another."""
    cut, head, counts = (str(folder / f"{name}.jsonl") for name in ("cut", "head", "counts"))
    return {
        "report": [[EAGLE, SAMPLED], [cut], [head], [counts], [EAGLE, "--fail-if", "tau > 9"]],
        "verify": [[EAGLE], [PLANTED], [head], [EAGLE, cut, PLANTED], [EAGLE, head]],
        "diagnose": [
            *([*files, "--no-audit"] for files in ([EAGLE], [PLANTED], [head], [EAGLE, cut])),
            [str(folder / "own.jsonl"), "--sample", "2", "--only", "audit"],
            [str(folder / "own.jsonl"), "--sample", "2", "--only", "locate", "--stage", "draws"],
        ],
        "compare": [
            [EAGLE, SAMPLED, "--fail-if", "tau drops > 1%"],
            [cut, NGRAM],
            [counts, counts],
            [SAMPLED, NGRAM, "--with", EAGLE, PLANTED],
        ],
        "why": [[EAGLE], [f"{EAGLE}#r2"], [f"{EAGLE}#r2@24"], [f"{EAGLE}#r2@24/0"], [cut]],
        "tune": [[EAGLE, "--no-costs", "--nodes", "4"]],
        "tree": [["3"], ["dynamic:8"], ["--from", "[[0], [1], [0, 0]]"]],
        "doctor": [[]],
    }


def test_every_verb_with_json_is_tried_here(folder):
    with_json = {name for name, verb in cli.commands.items() if any("--json" in one.opts for one in verb.params)}
    assert with_json == set(words_of(folder))


@pytest.fixture(scope="module")
def answers(folder):
    """What a verb answers: (words, exit code, standard output) of each of its runs."""
    runs = words_of(folder)

    @cache
    def of(verb):
        return [(words, *run_here([verb, *words, "--json"])[:2]) for words in runs[verb]]

    return of


def test_the_page_names_every_verb_and_only_keys_that_there_are(folder, answers):
    page = (ROOT / "docs" / "json.md").read_text()
    rows = {row[0].strip(" `"): row[1:] for line in page.splitlines() if len(row := line.strip("|").split("|")) == 3}
    for verb in words_of(folder):
        both = [json.loads(out) for _, _, out in answers(verb)]
        known = {key for found in both for key in found}
        inside = {key for found in both for one in found.get("captures", ()) for key in one}
        stages = [
            told for found in both for one in found.get("captures", ()) for told in one.get("stages", {}).values()
        ]
        nested = {"checks", "source"}.union(*(told for told in stages if told is not None))
        assert set(re.findall(r"`(\w+)`", rows[verb][0])) <= known | nested, verb
        assert set(re.findall(r"`(\w+)`", rows[verb][1])) <= inside | nested, verb


@pytest.mark.parametrize("verb", ["report", "verify", "diagnose", "compare", "why", "tune", "tree", "doctor"])
def test_the_envelope(verb, answers):
    for words, code, out in answers(verb):
        found = json.loads(out)
        assert list(found)[:4] == ["schema", "source", "exit", "warnings"], words
        assert re.fullmatch(rf"specscope\.{verb}/[1-9][0-9]*", found["schema"])
        assert found["exit"] == code
        files = [file for word in words if (file := word.partition("#")[0]).endswith(".jsonl")]
        assert found["source"] == files
        assert all(isinstance(line, str) for line in found["warnings"])
        if verb in ("report", "verify", "diagnose"):
            assert [one["source"] for one in found["captures"]] == files
            for one in found["captures"]:
                assert list(one)[:3] == ["source", "exit", "warnings"]
            exits = {one["exit"] for one in found["captures"]}
            assert found["exit"] == next(one for one in (1, 2, 0) if one in exits)
        assert (any("cut" in file for file in files)) <= bool(found["warnings"]), words


def test_what_is_refused_is_an_envelope_too(folder):
    for verb, words in words_of(folder).items():
        if verb not in ("tree", "doctor"):
            code, out, err = run_here([verb, str(folder / "none.jsonl"), *words[0][1:], "--json"])
            found = json.loads(out)
            assert (code, found["exit"], found["schema"]) == (2, 2, f"specscope.{verb}/{RAISED.get(verb, 1)}")
            assert str(folder / "none.jsonl") in found["source"] or verb == "compare"
            errors = [one["error"] for one in found.get("captures", [found])]
            assert err == f"specscope: error: {errors[0]}\n"


def test_text_of_a_capture_is_exact_and_moves_no_cursor(tmp_path):
    label = "\u202eabc\x9b\x7f\U000e0041 ü漢"
    lines = Path(NGRAM).read_text().replace(r"\"kind\": \"chat", r"\"kind\": \"" + label)
    (tmp_path / "x.jsonl").write_text(lines)
    out = said(["report", str(tmp_path / "x.jsonl"), "--json"])[0]
    assert all(c.isprintable() or c == "\n" for c in out)
    assert any(group["value"] == label for group in json.loads(out)["captures"][0]["groups"]["kind"])
    assert "ü漢" in out


def test_a_file_whose_name_is_not_text(tmp_path):
    odd = tmp_path / "odd\udcff.jsonl"
    odd.write_bytes(Path(NGRAM).read_bytes())
    for words in (["report"], ["verify"], ["diagnose", "--no-audit"]):
        out = said([words[0], str(odd), *words[1:], "--json"])[0]
        assert json.loads(out)["source"][0].endswith(".jsonl")


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
    out = said([verb, EAGLE, wrong, *more], code=1)[0]
    for file, alone in ((EAGLE, 0), (wrong, 1)):
        own, text, _ = run_here([verb, file, *more])
        assert own == alone
        assert text in out
        assert file in text.splitlines()[0]
    assert out.splitlines()[-1] == f"2 captures: 1 consistent ({EAGLE}); 1 not consistent ({wrong})"


def test_one_that_cannot_be_read_is_told_and_the_others_are_judged(tmp_path, wrong):
    none = str(tmp_path / "none.jsonl")
    out, err = said(["verify", EAGLE, none, "--json"], code=2)
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
    err = said(["verify", EAGLE, str(link)], code=2)[1]
    assert f"{EAGLE} and {link} are the same file" in err
