"""The default model by plain transformers: no false difference in thousands of nodes, in either dtype."""

import pytest

from specscope import Engine, SamplingParams
from specscope.analyze.audit.audit import audit
from specscope.measure.judges import audit_options
from specscope.measure.prompts import PLAIN
from specscope.trace.history.history import History
from tests.analyze.audit.runs import failed

RULES = [{}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.2}]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_false_difference(dtype):
    engine = Engine(dtype=dtype, tree="dynamic:10,depth=4,top=4", threads=1)
    history = History(engine.run_info, engine.vocabulary)
    for at, prompt in enumerate(PLAIN * 3):
        engine.add(engine.turn(prompt), SamplingParams(max_tokens=32, seed=at, **RULES[at % len(RULES)]))
    while engine.busy:
        history.append(engine.step())
    found = audit(history, "run.jsonl", audit_options(history, None, None, None))
    assert found.nodes > 2000
    assert failed(found) == set(), [(one.sentence, one.examples) for one in found.findings if one.failed]
