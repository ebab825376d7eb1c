"""`bench scale` in small: every point beside a peer, over its bytes, in JSON; and its sides."""

import json

import pytest
from click.testing import CliRunner

from benchmarks import scale
from benchmarks.__main__ import bench
from tests.tiny import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("scale") / "model"))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(scale, "BATCHES", (1, 3))
    monkeypatch.setattr(scale, "CONTEXTS", (16, 60, 4096))
    monkeypatch.setattr(scale, "LONGS", (60,))
    monkeypatch.setattr(scale, "SHORT", 20)
    monkeypatch.setattr(scale, "read_bandwidth", lambda device: 1e9)


def test_every_point_is_measured_and_written(model, small, tmp_path):
    figures = tmp_path / "scale.json"
    words = ["scale", "--target", model, "--dtype", "float32", "--rounds", "1"]
    result = CliRunner().invoke(bench, [*words, "--json", str(figures)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(figures.read_text())["points"]
    names = ["1 x 20", "3 x 20", "1 x 16", "1 x 60", "7 x 20 + 60"]  # 4,096 are more than the model takes
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert {side: len(rates) for side, rates in row["rates"].items()} == {"specscope": 1, "transformers": 1}
        assert min(min(rates) for rates in row["rates"].values()) > 0
        width = 2 * 2 * 12 * 3 * 4  # keys and values, heads, size, layers, bytes
        assert row["reading_ms"] == pytest.approx(sum(row["lengths"]) * width / 1e6)
        assert row["context_over_its_bytes"] == pytest.approx(row["context_ms"] / row["reading_ms"])
        assert row["context_ms"] >= 0
        assert row["name"].split(" ")[0] in result.output
