"""`bench scale` in small: every point beside a peer, over its bytes, in JSON; and its sides."""

import json
import sys
import textwrap

import pytest
import torch
from click.testing import CliRunner

from benchmarks import scale
from benchmarks.__main__ import bench
from benchmarks.peers import vllm_process
from benchmarks.scale_sides import OwnDecoding, PaddedDecoding
from specscope.engine.config import EngineConfig
from specscope.engine.engine import Engine
from specscope.errors import UserError
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
    words = ["scale", "--target", model, "--dtype", "float32", "--rounds", "2"]
    result = CliRunner().invoke(bench, [*words, "--json", str(figures)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(figures.read_text())["points"]
    names = ["1 x 20", "3 x 20", "1 x 16", "1 x 60", "7 x 20 + 60"]  # 4,096 are more than the model takes
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert {side: len(rates) for side, rates in row["rates"].items()} == {"specscope": 2, "transformers": 2}
        assert min(min(rates) for rates in row["rates"].values()) > 0
        width = 2 * 2 * 12 * 3 * 4  # keys and values, heads, size, layers, bytes
        assert row["reading_ms"] == pytest.approx(sum(row["lengths"]) * width / 1e6)
        assert row["context_over_its_bytes"] == pytest.approx(row["context_ms"] / row["reading_ms"])
        assert row["context_ms"] >= 0
        assert row["name"].split(" ")[0] in result.output


def test_vllm_is_asked_for_every_point(model, small, tmp_path):
    """A stand-in answers as peer_vllm does."""
    python = tmp_path / "python"
    python.write_text(
        textwrap.dedent(f"""\
            #!{sys.executable}
            import json, sys
            batches = json.loads(sys.stdin.readline())["batches"]
            print("ready", flush=True)
            for line in sys.stdin:
                print(1000 * int(line) + len(batches[int(line)]), flush=True)
            """)
    )
    python.chmod(0o755)
    figures = tmp_path / "scale.json"
    config = EngineConfig(target=model, dtype="float32", drafter="none")
    scale.run_scale(config, 1, str(figures), vllm=str(python))
    rows = json.loads(figures.read_text())["points"]
    assert [row["rates"]["vLLM"] for row in rows] == [[1.0], [1003.0], [2001.0], [3001.0], [4008.0]]
    with pytest.raises(UserError, match="there is no Python to run"):
        scale.run_scale(config, 1, None, vllm=str(tmp_path / "none"))


def test_vllm_is_given_batches_that_no_argument_could_hold(model, tmp_path):
    python = tmp_path / "python"
    answer = "sum(map(sum, json.loads(sys.stdin.readline())['batches'][0]))"
    python.write_text(f"#!{sys.executable}\nimport json, sys\nfound = {answer}\nprint('ready')\nprint(found)\n")
    python.chmod(0o755)
    engine = Engine(target=model, dtype="float32", drafter="none", kv_memory=0.01)
    with vllm_process(str(python), engine, {"batches": [[[7] * 100_000] * 4]}) as ask:
        assert ask("0") == f"{7 * 400_000}\n"


def test_a_vllm_that_ends_at_once_is_one_line(model, tmp_path):
    """Before it has read what it is to do."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    python.chmod(0o755)
    engine = Engine(target=model, dtype="float32", drafter="none", kv_memory=0.01)
    work = {"batches": [[[7] * 100_000] * 4]}
    with pytest.raises(UserError, match="vLLM stopped: no such module"), vllm_process(str(python), engine, work):
        pass


def test_both_sides_decode_what_they_say(model):
    """As many rows a step as requests, over contexts of their lengths; and nothing stays behind."""
    engine = Engine(target=model, dtype="float32", drafter="none", kv_memory=0.01)
    seen = []
    forward = engine.runner.forward_with_features

    def watched(segments):
        seen.append([(s.context, len(s.tokens)) for s in segments])
        return forward(segments)

    engine.runner.forward_with_features = watched
    assert OwnDecoding(engine, [20, 60], 3)() > 0
    assert seen == [[(20 + i, 1), (60 + i, 1)] for i in range(4)]
    assert engine.runner.cache.pool.used == 0
    assert not engine.busy

    calls = []

    class Model:
        device, dtype, config = torch.device("cpu"), torch.float32, engine.runner.loaded.model.config

        def forward(self, input_ids, attention_mask, position_ids, past_key_values, use_cache):
            calls.append((input_ids.shape, attention_mask.sum(1).tolist(), position_ids[:, 0].tolist()))
            shape = type("Out", (), {})
            shape.logits = torch.zeros(len(input_ids), 1, 5)
            return shape

        __call__ = forward

    assert PaddedDecoding(Model(), engine.runner.cache.layers, [20, 60], 3)() > 0
    assert calls == [((2, 1), [21 + i, 61 + i], [20 + i, 60 + i]) for i in range(4)]
