"""The page as a file: what it holds, what it must not hold, its policy, its sizes; and the bundle."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import zlib

import pytest

from specscope.page import write
from specscope.page.columns import CHUNK
from specscope.tui.keys import KEYS
from tests.page.html import BAD, Page, hostile
from tests.support.commands import run_here
from tests.support.samples import EAGLE, PLANTED, ROOT, SAMPLED, TRACES

SOURCE = ROOT / "specscope" / "page" / "source"


def exported(tmp_path, *words):
    path = tmp_path / "x.html"
    code, _, err = run_here(["export", *words, "-o", str(path)])
    assert code == 0, err
    return Page(path.read_text(encoding="utf-8"))


def head(page):
    return json.loads(page.held["script", "head"])


def columns(page, name):
    data = zlib.decompress(base64.b64decode(page.held["script", f"block-{name}"]), -15)
    return json.loads(data[4 : 4 + int.from_bytes(data[:4], "little")])["columns"]


def test_it_needs_nothing_from_elsewhere_and_its_policy_forbids_it(tmp_path):
    page = exported(tmp_path, SAMPLED)
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv"))
    for kind, tag, name in (("script", "script", "code"), ("style", "style", "code")):
        digest = base64.b64encode(hashlib.sha256(page.held[tag, name].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; ")
    assert {tag for tag, _ in page.tags} <= {"html", "head", "meta", "title", "style", "body", "div", "p", "script"}
    assert not [attrs for _, attrs in page.tags if {"src", "href", "onload"} & set(attrs)]


def test_what_people_and_models_wrote_is_inert(tmp_path):
    """Text that is HTML, script, a closing tag, bidi controls and a lone surrogate stays in JSON and base64."""
    html = b"".join(write.page([hostile()])).decode()
    page = Page(html)
    assert [tag for tag, _ in page.tags].count("script") == [*page.held].__len__() - 1
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert "alert(1)" not in page.held["script", "code"]
    for character in "\u202e\x1b\udcff":
        assert character not in html
    assert r"\u202e" in head(page)["runs"][0]["requests"][0]["title"]
    assert BAD[:40] in head(page)["runs"][0]["requests"][0]["title"]


def test_a_part_holds_one_request(tmp_path):
    whole, part = exported(tmp_path, SAMPLED), exported(tmp_path, f"{SAMPLED}#r1")
    (run,) = head(part)["runs"]
    assert [request["id"] for request in run["requests"]] == ["r1"]
    assert run["steps"] == head(whole)["runs"][0]["requests"][1]["steps"]
    assert any("a part: r1" in line for line in run["warnings"])


@pytest.mark.parametrize(("flag", "tokens"), [("--no-text", True), ("--no-tokens", False)])
def test_what_is_left_out_is_not_in_the_file(flag, tokens, tmp_path):
    page = exported(tmp_path, SAMPLED, flag)
    (run,) = head(page)["runs"]
    assert not run["tells_text"]
    assert run["tells_tokens"] is tokens
    assert "Count from one" not in json.dumps(run)
    assert json.loads(zlib.decompress(base64.b64decode(page.held["script", "block-0-prompts"]), -15)) == [""] * 3
    assert [size for name, _, size, _ in columns(page, "0-vocabulary") if name == "bytes"] == [0]
    if not tokens:
        assert [same for name, _, _, same in columns(page, "0-0") if name == "token"] == [-1]


def test_figures_are_the_reports(tmp_path):
    (run,) = head(exported(tmp_path, EAGLE))["runs"]
    (report,) = json.loads(run_here(["report", EAGLE, "--json"])[1])["captures"]
    assert dict(row[:2] for row in run["figures"])["mean acceptance length τ"] == (
        f"{report['pooled']['mean_acceptance_length']:.2f}"
    )
    assert [row[1] for row in run["by_depth"]] == [each["per_position"] for each in report["positions"]]
    assert run["warnings"] == report["warnings"]
    lines = run_here(["why", EAGLE])[1]
    assert all(sentence in lines for *_, sentence in run["why"]["kinds"])
    assert run["findings"]["verdict"] in run_here(["verify", EAGLE])[1]


@pytest.mark.slow
def test_it_shows_what_diagnose_finds(tmp_path):
    capture = str(ROOT / "tests/data/vllm/why_sampled.jsonl")
    told = head(exported(tmp_path, capture, "--findings", "diagnose"))["runs"][0]["findings"]
    code, printed, _ = run_here(["diagnose", capture])
    assert told["by"] == "diagnose"
    assert told["failed"] == (code == 1)
    assert told["verdict"] in printed
    assert told["lines"]


def test_two_captures_are_compared(tmp_path):
    told = head(exported(tmp_path, SAMPLED, PLANTED))
    compared = json.loads(run_here(["compare", SAMPLED, PLANTED, "--json"])[1])
    assert [run["source"] for run in told["runs"]] == [SAMPLED, PLANTED]
    assert told["comparison"]["summary"] == compared["summary"]
    assert len(told["comparison"]["pairs"]) == len(compared["pairs"])
    assert head(exported(tmp_path, SAMPLED))["comparison"] is None


def test_steps_lie_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("specscope.page.columns.CHUNK", 16)
    page = exported(tmp_path, SAMPLED)
    sizes = [next(size for name, _, size, _ in columns(page, f"0-{i}") if name == "kind") for i in range(3)]
    assert sizes == [16, 16, 9]
    assert CHUNK == 512


def test_the_keys_are_the_screens(tmp_path):
    """By the key itself, whatever it is called inside."""
    told = dict(head(exported(tmp_path, SAMPLED))["words"]["keys"])
    declared = {key.keys.split(",")[0]: key.label.split()[0] for key in KEYS}
    assert told == {key: declared[key] for key in told}
    assert {"n", "y", "slash", "question_mark"} <= set(told)


def test_the_samples_are_small():
    for name in ("sampled", "compared"):
        page = Page((TRACES / f"{name}.html").read_text())
        assert len(head(page)["runs"]) == 1 + (name == "compared")
        assert (TRACES / f"{name}.html").stat().st_size < 300_000


def test_the_bundle_is_made_of_the_sources(tmp_path):
    if shutil.which("npm") is None or not (SOURCE / "node_modules").is_dir():
        pytest.skip("no Node with the page's packages here: cd specscope/page/source && npm ci")
    subprocess.run(["npm", "run", "-s", "build"], cwd=SOURCE, check=True, env=os.environ | {"OUT": str(tmp_path)})
    for name in ("bundle.js", "bundle.css"):
        assert (tmp_path / name).read_text() == (SOURCE.parent / name).read_text(), "run `make page`, and commit it"


def test_the_sources_stay_small_and_write_no_html():
    files = [path for kind in ("js", "jsx", "css") for path in SOURCE.glob(f"*.{kind}")]
    assert sum(len(path.read_text().splitlines()) for path in files) <= 2500
    for path in files:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", path.read_text())
