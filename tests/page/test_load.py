"""specscope.load: the tables are those that export writes, and the parents are what the records hold."""

import pyarrow.parquet as pq
import pytest

import specscope
from specscope.analyze.export.exporting import export
from tests.support.samples import EAGLE, EVIDENCE, PLANTED, SAMPLED


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
