"""One layout for all JSON: every verb with --json, and `exit` is what the command really exits with."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from specscope.cli.main import cli
from specscope.envelope import RAISED
from tests.faults.settings import Setting, record
from tests.support.commands import run_here
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
    code, out, _ = run_here(["report", str(tmp_path / "x.jsonl"), "--json"])
    assert code == 0
    assert all(c.isprintable() or c == "\n" for c in out)
    assert any(group["value"] == label for group in json.loads(out)["captures"][0]["groups"]["kind"])
    assert "ü漢" in out


def test_a_file_whose_name_is_not_text(tmp_path):
    odd = tmp_path / "odd\udcff.jsonl"
    odd.write_bytes(Path(NGRAM).read_bytes())
    for words in (["report"], ["verify"], ["diagnose", "--no-audit"]):
        code, out, _ = run_here([words[0], str(odd), *words[1:], "--json"])
        assert code == 0
        assert json.loads(out)["source"][0].endswith(".jsonl")
