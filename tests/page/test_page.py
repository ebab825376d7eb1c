"""The page as a file: what it holds and must not hold, its policy, its sizes, the bundle; and what a notebook has."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import zlib

import pyarrow.parquet as pq
import pytest

import specscope
from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.side import from_history
from specscope.analyze.export.exporting import export
from specscope.errors import UserError
from specscope.page import write
from specscope.page.columns import CHUNK
from specscope.page.load import LoadedRun
from specscope.page.write import PageRun, write_page
from specscope.trace.history.history import History
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.words import branches, draw_tree
from specscope.tui.keys import KEYS
from tests.page.html import BAD, Page, hostile
from tests.support.commands import run_here, said
from tests.support.samples import EAGLE, EVIDENCE, PLANTED, ROOT, SAMPLED, TRACES
from tests.trace import test_damaged as damaged

SOURCE = ROOT / "specscope" / "page" / "source"


def exported(tmp_path, *words):
    path = tmp_path / "x.html"
    said(["export", *words, "-o", str(path)])
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
    assert (told["by"], told["failed"]) == ("diagnose", code == 1)
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


HOSTILE = "</pre></td><script>alert(1)</script><img src=x onerror=alert(1)>\"'&<!--\u202e\ud800\x1b[2J"
TAGS = {"b", "br", "div", "pre", "small", "span", "table", "tbody", "td", "th", "thead", "tr"}


@pytest.fixture(scope="module")
def run():
    return specscope.load(SAMPLED)


def test_every_step_stands_as_in_a_terminal(run):
    """A node's cell holds its line, beside its parent's cell and within its rows."""
    for name, request in run.requests.items():
        for step in request.steps:
            shown = run[f"{name}@{step.index}"]
            tree = draw_tree(step, run.history.vocabulary)
            assert tree in str(shown)
            grid, place = {}, {}
            read = Page(shown.html)
            for row, cells in enumerate(read.rows):
                for span, words in cells:
                    column = next(c for c in range(99) if (row, c) not in grid)
                    grid |= {(r, column): words for r in range(row, row + span)}
                    place[words] = place.get(words, 0) + 1
            flat = re.sub(r"[│├└─\s]+", "", tree)
            assert all(re.sub(r"\s+", "", words) in flat for words in place)
            assert sum(place.values()) == 1 + len(step.tree)
            for (row, column), words in grid.items():
                if column > 1:
                    node = next(n for n in range(len(step.tree)) if _line(tree, n, step) == re.sub(r"\s+", "", words))
                    above = int(step.tree.parent[node])
                    assert _line(tree, above, step) == re.sub(r"\s+", "", grid[row, column - 1])


def _line(tree, node, step):
    place = next(i for i, (other, _) in enumerate(branches(step.tree.parent.tolist())) if other == node)
    return re.sub(r"[│├└─\s]+", "", tree.splitlines()[1 + place])


def test_a_request_shows_its_whole_output_by_origin(run):
    request = next(one for one in run.report.requests if one.id == "r0")
    read = Page(run["r0"].html)
    spans = [given["title"] for tag, given in read.tags if tag == "span"]
    assert len(spans) == len(request.token_ids) + 4  # and the legend
    assert request.output in "".join(read.words)
    assert request.output in str(run["r0"])
    assert Page(run["r0@2/1"].html).tags != Page(run["r0@2"].html).tags  # the node is marked


def test_a_run_and_a_comparison_in_a_terminal_and_in_a_notebook(run):
    assert re.fullmatch(
        r".*sampled.jsonl: SmolLM2.*, draft_model, tree .*; 3 requests, 17 .*, .* length 1.71", repr(run)
    )
    words = "".join(Page(run._repr_html_()).words)
    assert "mean acceptance length τ" in words
    assert "Count from one to ten" in words
    other = specscope.load(EAGLE)
    compared, sides = run.compare(other), [from_history(one.history, one.source) for one in (run, other)]
    summary = compare(*sides).summary
    assert summary in " ".join(str(compared).split())  # which is wrapped
    assert summary in "".join(Page(compared.html).words)
    for reference, says in (("r9", "there is no request"), ("r0@999", "no step 999"), ("r0@2/99", "no node 99")):
        with pytest.raises(UserError, match=says):
            run[reference]


def test_nothing_that_a_capture_wrote_is_read_as_html(monkeypatch):
    monkeypatch.setattr(damaged, "HOSTILE", HOSTILE)
    history = History(run=damaged.hostile(damaged.RUN))
    history.vocabulary = Vocabulary({i: HOSTILE.encode("utf-8", "surrogatepass") for i in range(100)})
    for record in damaged.hostile_records():
        history.append(record)
    run = LoadedRun(HOSTILE, history, [HOSTILE])
    (name,) = history.requests
    steps = [run[f"{name}@{step.index}"] for step in history.requests[name].steps]
    for shown in (run, run[name], *steps, run.compare(run)):
        html = shown._repr_html_()
        read = Page(html)
        assert {tag for tag, _ in read.tags} <= TAGS
        assert {attribute for _, given in read.tags for attribute in given} <= {"style", "title", "rowspan"}
        assert not read.open
        for plain in (html, repr(shown)):
            assert plain.encode()
            assert not re.search("[\u202e\x1b\x07]", plain)


def test_the_page_stands_in_a_frame_whole(run, tmp_path):
    for others in ((), (specscope.load(EAGLE),)):
        shown = run.page(*others, height=500)
        ((tag, given),) = Page(shown.html).tags
        assert (tag, given["sandbox"], "height:500px" in given["style"]) == ("iframe", "allow-scripts", True)
        page = given["srcdoc"].encode()
        written = tmp_path / "run.html"
        write_page(str(written), [PageRun(one.source, one.history, one.warnings) for one in (run, *others)])
        assert page == written.read_bytes()
        assert f"{len(page):,} bytes" in str(shown)


@pytest.mark.parametrize("capture", [EAGLE, SAMPLED, PLANTED, EVIDENCE])
def test_tables_are_those_of_export_and_parents_those_of_the_records(capture, tmp_path):
    run = specscope.load(capture)
    export([capture], str(tmp_path / "tables"))
    for name in ("steps", "nodes", "finals"):
        written = pq.read_table(tmp_path / "tables" / f"{name}.parquet")
        assert written.num_rows
        assert getattr(run, name).to_pylist() == written.to_pylist(), name
    parts = [(record, part) for record in run.history.steps for part in record.requests]
    noted = [(record, part, part.parents) for record, part in parts if part.parents is not None]
    rows = iter(run.parents.to_pylist())
    for record, part, notes in noted:
        for place, node in enumerate(notes.node.tolist()):
            row = next(rows)
            assert (row["step"], row["request"], row["index"]) == (record.step, part.request, part.index)
            assert row["node"] == node
            assert row["depth"] == (part.tree.depth[node] if node >= 0 else 0)
            assert (row["entropy"], row["top"]) == (notes.entropy[place], notes.top[place].tolist())
            looked = bool((notes.draft_top_p[place] > 0).any())
            assert row["draft_top"] == (notes.draft_top[place].tolist() if looked else None)
            assert row["choice_rank"] == (notes.choice_rank[place] if looked else None)
    assert next(rows, None) is None
