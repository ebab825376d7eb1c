"""What a notebook has: the tables that export writes, the terminal's words, nothing that a capture wrote as HTML."""

import re

import pyarrow.parquet as pq
import pytest

import specscope
from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.side import from_history
from specscope.analyze.export.exporting import export
from specscope.errors import UserError
from specscope.page.load import LoadedRun
from specscope.page.write import PageRun, write_page
from specscope.trace.history.history import History
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.words import branches, draw_tree
from tests.page.html import Page
from tests.support.samples import EAGLE, EVIDENCE, PLANTED, SAMPLED
from tests.trace import test_damaged as damaged

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
            assert row["entropy"] == notes.entropy[place]
            assert row["top"] == notes.top[place].tolist()
            looked = bool((notes.draft_top_p[place] > 0).any())
            assert row["draft_top"] == (notes.draft_top[place].tolist() if looked else None)
            assert row["choice_rank"] == (notes.choice_rank[place] if looked else None)
    assert next(rows, None) is None
