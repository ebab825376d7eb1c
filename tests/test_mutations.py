"""The mistakes of tests/mutations.py are of text that is there, and what measures with them and coverage is right."""

import json

import pytest

from tests import coverage, mutations


@pytest.mark.parametrize("row", mutations.rows(), ids=lambda row: row["file"])
def test_a_mistake_is_of_text_that_is_there_once_and_names_a_test(row):
    assert (mutations.ROOT / row["file"]).read_text().count(row["text"]) == 1, "update the row in tests/mutations.toml"
    place, _, name = row["test"].split()[0].partition("::")
    assert f"def {name}" in (mutations.ROOT / place).read_text(), "update the row in tests/mutations.toml"


def test_a_mistake_that_no_test_sees_is_not_caught(tmp_path, monkeypatch):
    (tmp_path / "made.py").write_text("ONE = 1\n")
    (tmp_path / "test_made.py").write_text("import made\n\ndef test_it():\n    assert made.ONE\n")
    made = {"file": "made.py", "text": "ONE = 1", "mistake": "ONE = 2", "test": "test_made.py"}
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # whose imports take seconds
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "rows", lambda: [made, made | {"mistake": "ONE = 0"}, made | {"text": "TWO"}])
    assert mutations.run([], tmp_path / "found.json") == 2
    found = [one["result"] for one in json.loads((tmp_path / "found.json").read_text())["mutations"]]
    assert found == ["not caught", "caught", "the text is not there once: update the row"]


def test_coverage_is_summed_by_folder_and_what_fell_is_marked():
    counts = {"num_statements": 4, "covered_lines": 3, "num_branches": 2, "covered_branches": 1}
    now = coverage.by_folder({"a/x.py": {"summary": counts}, "a/y.py": {"summary": counts | {"covered_lines": 1}}})
    assert now["a"] == now["all"] == {"statements": 8, "lines %": 50.0, "branches": 4, "branches %": 50.0}
    lines = list(coverage.table(now, {"a": now["a"] | {"lines %": 60.0}, "all": now["all"]}))
    assert [line.endswith("fell") for line in lines[2:]] == [True, False]
