"""bench adaptive, end to end on a tiny model."""

import json

import numpy as np
import pytest

from benchmarks import adaptive
from benchmarks.adaptive import ADAPTIVE, PLAIN, Found, Mix, best_rate, rate, run_adaptive
from specscope.engine.config import EngineConfig
from specscope.errors import UserError
from specscope.measure.lanes import Timed
from tests.engines import COSTS
from tests.heads import head_tensors, write_head


@pytest.fixture
def config(deep, tmp_path):
    head = write_head(tmp_path / "h", head_tensors())
    return EngineConfig(
        target=str(deep), dtype="float32", kv_memory=0.05, drafter="eagle", draft_model=str(head), costs=COSTS
    )


def test_every_side_of_every_mix_is_measured(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(adaptive, "MIXES", (Mix("code", 1, 0.0), Mix("", 2, 1.0)))
    monkeypatch.setattr(adaptive, "SPAN", 10)
    run_adaptive(config, 24, str(tmp_path / "x.json"))
    assert "plain" in capsys.readouterr().out
    found = json.loads((tmp_path / "x.json").read_text())
    assert [mix["mix"] for mix in found["mixes"]] == ["code, batch 1, T = 0", "all kinds, batch 2, T = 1"]
    for mix in found["mixes"]:
        assert set(mix["tokens_s"]) == {PLAIN, ADAPTIVE, *adaptive.TREES}
        assert all(rate > 0 for rate in mix["tokens_s"].values())
        assert mix["worst_span"] > 0


def test_the_goals_are_of_plain_decoding_and_of_the_best_tree():
    mix = Mix("code", 1, 0.0)
    rates = {PLAIN: 10.0, ADAPTIVE: 14.0, "3": 14.4, "1": 12.0}
    assert Found(mix, rates, 0.99, 14.4).good
    assert Found(mix, rates, 0.99, 14.4).best == "3"
    assert not Found(mix, rates, 0.97, 14.4).good
    assert not Found(mix, rates, 0.99, 14.5).good


def test_the_best_side_is_chosen_by_other_steps_than_it_is_rated_by():
    def steps(*tokens):
        return [Timed(seconds=1.0, drafting=0.0, rows=1, tokens=one, drafts=0, nodes=0, accepted=0) for one in tokens]

    assert best_rate({"a": steps(4, 1, 4, 1), "b": steps(1, 4, 1, 4)}) == 1  # each is best only where it was chosen
    assert best_rate({"a": steps(3, 3, 3, 3), "b": steps(2, 2, 2, 2)}) == 3
    highest, fair = [], []
    for seed in range(50):
        rng = np.random.default_rng(seed)
        alike = {str(side): steps(*rng.integers(1, 4, 40)) for side in range(8)}  # all make 2 tokens a second
        highest.append(max(map(rate, alike.values())))
        fair.append(best_rate(alike))
    assert np.mean(highest) > 2.1
    assert np.mean(fair) == pytest.approx(2.0, abs=0.05)


def test_pinned_trees_are_refused(deep):
    with pytest.raises(UserError, match="without --tree"):
        run_adaptive(EngineConfig(target=str(deep), dtype="float32", kv_memory=0.05, drafter="none"), 24, None)


def test_a_side_without_a_full_batch_has_no_rate():
    """With many requests at once a side that is slow may never decode all of them in one step."""
    assert rate([]) == 0.0
