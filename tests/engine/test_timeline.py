"""Time travel: rewound to any step and run again, an engine makes the same tokens, verdicts and evidence."""

import pytest

from specscope import SamplingParams
from tests.engines import PROMPTS


@pytest.mark.parametrize("name", ["draft tree", "eagle", "eagle dynamic", "p-eagle dynamic"])
def test_going_back_and_on_begins_no_branch(make, name):
    """To the last bit, in bfloat16 too: what a request still holds is not computed again with other shapes."""
    engine = make(name, dtype="bfloat16")
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
