"""The agent-like workload, and one round of each drafter over it."""

import dataclasses

from specscope.bench import text as bench
from specscope.bench.cpu import encode
from specscope.bench.edits import EDITS, FILE, edit_prompts
from specscope.engine.config import EngineConfig
from specscope.engine.engine import Engine
from specscope.trace.params import SamplingParams
from tests.heads import head_tensors, write_head


def test_every_edit_changes_the_file_and_the_next_prompt_has_it():
    prompts = edit_prompts()
    assert len(prompts) == len(EDITS) == 10
    assert FILE in prompts[0]
    for edit, before, after in zip(EDITS, prompts, prompts[1:], strict=False):
        assert edit.old in before
        assert edit.new in after
        assert edit.ask in before
    compile(prompts[-1].split("```python\n")[1].split("```")[0], "the file", "exec")


def test_a_round_measures_every_drafter_on_both_workloads(deep, tmp_path, monkeypatch):
    head = write_head(tmp_path / "head", head_tensors())
    config = EngineConfig(
        target=str(deep), drafter="suffix+eagle", draft_model=str(head), dtype="float32", kv_memory=0.01
    )
    monkeypatch.setattr(bench, "EDIT_TOKENS", 8)
    monkeypatch.setattr(bench, "UNSEEN_TOKENS", 4)
    monkeypatch.setattr(bench, "UNSEEN", 2)
    monkeypatch.setattr(bench, "edit_prompts", lambda: [one[-80:] for one in edit_prompts()[:2]])
    written = []
    monkeypatch.setattr(bench, "write_figures", lambda path, bench, data: written.append(data))
    bench.run_text(config, 1, None)
    rows = written[0]["text"]
    assert {row["workload"] for row in rows} == {"ten edits of a file", "unseen prompts"}
    assert {row["a"] for row in rows} == set(bench.DRAFTERS)
    assert all(row["length"] >= 1 for row in rows)


def test_texts_of_one_round_are_not_found_in_the_next(deep, monkeypatch):
    config = EngineConfig(target=str(deep), drafter="suffix", dtype="float32", adaptive=False, kv_memory=0.01)
    prompts = [one[-80:] for one in edit_prompts()[:2]]
    monkeypatch.setattr(bench, "EDIT_TOKENS", 32)
    monkeypatch.setattr(bench, "UNSEEN", 2)
    monkeypatch.setattr(bench, "UNSEEN_TOKENS", 4)
    monkeypatch.setattr(bench, "edit_prompts", lambda: prompts)
    written = []
    monkeypatch.setattr(bench, "write_figures", lambda path, bench, data: written.append(data))
    bench.run_text(config, 1, None)  # and the uncounted round before it
    (length,) = [
        row["length"] for row in written[0]["text"] if row["a"] == "suffix, shared" and "edits" in row["workload"]
    ]

    fresh = Engine(dataclasses.replace(config, suffix_shared=bench.SHARED))
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    once = [fresh.generate([prompt], params)[0] for prompt in encode(fresh, prompts)]
    assert length == sum(len(one.token_ids) for one in once) / sum(len(one.steps) for one in once)
