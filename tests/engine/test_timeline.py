"""Time travel: rewound to any step and run again, an engine makes the same tokens, verdicts and evidence."""

import pytest

from specscope import Engine, SamplingParams
from specscope.errors import UserError
from tests.engines import DRAFTERS, PROMPTS, fresh
from tests.heads import head_tensors, write_head, write_parallel_head


def test_what_is_not_known_is_refused(engines):
    engine = engines["none"]
    fresh(engine, 60)
    engine.add("abc", SamplingParams(max_tokens=3))
    engine.step()
    with pytest.raises(UserError, match="cannot go back to"):
        engine.rewind(7)
    assert engine.steps == 1
    engine.timeline = None
    with pytest.raises(UserError, match="no timeline"):
        engine.rewind(0)


BY_MODELS = ("draft tree", "eagle", "eagle dynamic", "p-eagle dynamic")


@pytest.mark.parametrize("name", BY_MODELS)
def test_going_back_and_on_begins_no_branch(deep, tmp_path, name):
    """To the last bit, in bfloat16 too: what a request still holds is not computed again with other shapes."""
    how = DRAFTERS[name]
    heads = {"eagle": lambda: write_head(tmp_path, head_tensors()), "p-eagle": lambda: write_parallel_head(tmp_path)}
    kind = name.split()[0]
    extra = {"draft_model": str(heads[kind]())} if kind in heads else {}
    engine = Engine(target=str(deep), dtype="bfloat16", kv_memory=0.01, max_batch=3, max_step_tokens=24, **how, **extra)
    engine.keep_timeline()
    for seed, prompt in enumerate(PROMPTS[:3]):
        engine.add(prompt, SamplingParams(max_tokens=60, temperature=0.9, seed=seed, ignore_eos=True))
    records = [engine.step() for _ in range(8)]
    for step in (5, 2, 0, 3):
        engine.rewind(step)
        for wanted in records[step:]:
            record = engine.step()
            assert record == wanted
            assert record is wanted or record.branch == 0
            assert bits(engine.last.record(notes=False)) == bits(wanted)


def bits(record):
    """What was computed of each request in a step."""
    parts = [part for part in record.requests if part.verdict is not None]
    return [
        [getattr(part.verdict, field).tolist() for field in ("p", "p_trial", "q_trial", "accept_prob", "residual_mass")]
        + ([] if part.notes is None else [part.notes.score.tolist(), part.notes.fed_norms.tolist()])
        for part in parts
    ]
