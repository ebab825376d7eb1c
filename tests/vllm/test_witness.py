import dataclasses
import json

import numpy as np

from specscope.analyze.verify.trial import judge
from specscope.trace.history.history import History
from specscope.trace.record.records import FinishReason, Preceded
from tests.vllm.stand import RUN, Engine, params
from tests.vllm.test_device import assert_same


def tokens(record, name):
    part = next(one for one in record.requests if one.request == name)
    return part.tokens()


def test_a_run_with_a_chunked_prompt_is_consistent():
    engine = Engine()
    engine.step({"a": []}, new={"a": ([1] * 8, params(max_tokens=6))}, prompt=4, unfinished=["a"])
    one = engine.step({"a": []}, prompt=2)
    output = [int(one.output[0, 0])]
    while len(output) < 6:
        one = engine.step({"a": [3, 4, 5]}, seed=len(output))
        output += [token for token in one.output[0].tolist() if token >= 0]
    engine.ends("a", "length", output[:6])
    records = engine.rest()
    parts = [record.requests[0] for record in records]
    assert parts[0].verdict is None
    assert (parts[0].prefill_tokens, parts[1].prefill_tokens, parts[1].context_len) == (5, 2, 5)
    assert [part.preceded for part in parts[1:3]] == [Preceded.PREFILL, Preceded.NO_DRAFT]
    assert sum(part.emitted for part in parts) == 6
    assert records[-1].finished[0].reason is FinishReason.LENGTH
    history = History(run=RUN)
    for record in records:
        history.append(record)
    assert judge(history, source="x").failed == []


def test_a_step_is_told_when_the_next_one_begins():
    engine = Engine()
    engine.step({"a": []}, new={"a": ([1, 1], params())})
    assert engine.records == []
    engine.step({"a": [3]})
    assert [record.step for record in engine.records] == [0]
    assert [info.id for info in engine.records[0].admitted] == ["a"]


def test_nothing_is_held_back_while_vllm_has_nothing_to_do():
    """A step without tokens follows the last request's end, and nothing follows that: its server may be killed."""
    engine = Engine(device=True)
    engine.step({"a": []}, new={"a": ([1, 1], params())})
    one = engine.step({"a": [3]})
    engine.ends("a", "length", [token for token in one.output[0].tolist() if token >= 0])
    engine.witness.begin(engine.scheduled({}))
    assert [len(record.requests) for record in engine.records] == [1, 1]
    assert [end.info.id for end in engine.records[-1].finished] == ["a"]


def test_a_request_s_wait_ends_where_its_first_step_begins():
    engine = Engine()
    engine.notes.schedule_ns = (5, 8)
    engine.step({"a": []}, new={"a": ([1, 1], params())})
    (record,) = engine.rest()
    (info,) = record.admitted
    assert info.arrival_ns <= info.admitted_ns == record.start_ns == 5


def test_vllm_s_own_output_settles_what_the_last_step_gave_out():
    """A stop that the plugin does not know of, such as a repetition, may cut it."""
    engine = Engine()
    engine.step({"a": []}, new={"a": ([1, 1], params())})
    first = engine.records
    engine.step({"a": [3]})
    engine.ends("a", "repetition", [7])
    records = engine.rest()
    assert first is records
    assert [record.requests[0].emitted for record in records] == [1, 0]


def test_a_stop_token_ends_the_output_inside_an_accepted_path():
    engine = Engine()
    engine.step({"a": []}, new={"a": ([1, 1], params(stop_token_ids=[4], max_tokens=50))})
    known = engine.witness._requests["a"]  # it has no output until its step is told
    assert known.kept([3, 4, 5], 64) == 2
    assert known.kept([3, 2, 5], 64) == 2  # EOS
    assert known.kept([3, 5, 6], 64) == 3
    engine.witness.finish(None)
    assert known.kept([3, 5, 6], 4) == 1  # the context is full: two of the prompt, one of output


def test_what_comes_after_a_preemption_says_so():
    engine = Engine()
    engine.step({"a": []}, new={"a": ([1, 1], params())})
    engine.step({"a": [3]})
    engine.notes.preempted.append("a")
    engine.lengths["a"] = 0
    engine.step({"a": []}, resumed=["a"], prompt=3)
    records = engine.rest()
    assert [record.preempted for record in records] == [(), (), ("a",)]
    assert records[2].requests[0].preceded is Preceded.PREEMPTION


def test_a_request_that_was_aborted_while_it_waited_has_an_end():
    engine = Engine()
    engine.ends("never", "abort", [])
    (record,) = engine.rest()
    end = record.finished[0]
    assert (end.info.id, end.info.admitted_ns, end.reason) == ("never", 0, FinishReason.CANCELLED)


def test_a_scheduler_that_tells_nothing_is_enough():
    """Another version may not have what is wrapped: requests then have no known end."""
    engine = Engine()
    one = engine.step({"a": [], "b": []}, new={"a": ([1, 1], params()), "b": ([1, 1], params())})
    engine.witness.finish(None)
    assert [part.request for part in engine.records[0].requests] == ["a", "b"]
    assert one.output.shape == (2, 1)


def test_parameters_are_told_and_unknown_ones_are_labels():
    engine = Engine()
    given = params(temperature=0.5, min_p=0.1, logit_bias={3: 1.0}, min_tokens=4, seed=None, bad_words=["no"])
    engine.step({"a": []}, new={"a": ([1, 1], given)}, temperature={"a": 0.5})
    engine.witness.finish(None)
    info = engine.records[0].admitted[0]
    assert info.params.temperature == 0.5
    assert (info.params.min_p, dict(info.params.logit_bias)) == (0.1, {3: 1.0})
    assert info.params.min_tokens == 4
    assert "min_tokens" not in info.labels
    assert info.labels["bad_words"] == "['no']"
    assert info.labels["seed"] == "none"
    json.dumps(dict(info.labels))


def test_blocks_are_those_the_step_writes_to():
    engine = Engine()
    engine.step({"a": []}, new={"a": (list(range(1, 9)) * 2 + [1], params(max_tokens=40))})
    engine.witness.finish(None)
    assert engine.records[0].requests[0].blocks.tolist() == [0, 1]
    assert engine.records[0].requests[0].blocks.dtype == np.int32


def three_steps(engine):
    """A prompt in two chunks, two steps with drafts, an end."""
    engine.step({"a": [], "b": []}, new={"a": ([1] * 8, params()), "b": ([1] * 9, params())}, unfinished=["b"])
    engine.step({"a": [3], "b": []})
    engine.step({"a": [3, 4], "b": [5]}, seed=3)
    engine.ends("a", "abort", [])


def without_times(record):
    return dataclasses.replace(record, phases=(), admitted=(), finished=())


def test_steps_are_told_in_order_when_their_verdicts_have_come():
    host, late = Engine(), Engine(device=True)
    for engine in (host, late):
        three_steps(engine)
    assert len(host.records) == 2
    assert late.records == []  # none has come
    late.away[1].here = True
    late.witness.begin(late.scheduled({"b": 1}))
    assert late.records == []  # the second waits for the first
    late.away[0].here = True
    late.witness.begin(late.scheduled({"b": 1}))
    assert [record.step for record in late.records] == [0, 1]
    late.rest()
    assert late.witness.bytes == sum(one.bytes for one in late.away) > 0
    for there, here in zip(late.records, host.rest(), strict=True):
        assert_same(without_times(there), without_times(here), f"step {here.step}")


def test_a_host_that_runs_ahead_is_put_right():
    """With asynchronous scheduling it counts every draft of the step before as accepted."""
    engine = Engine(device=True)
    engine.step({"a": []}, new={"a": ([1] * 8, params(max_tokens=50))})
    one = engine.step({"a": [3, 4, 5]})
    accepted = int((one.output[0] >= 0).sum()) - 1
    assert accepted < 3
    engine.lengths["a"] += 3 - accepted
    engine.step({"a": [6]})
    parts = [record.requests[0] for record in engine.rest()]
    assert [part.context_len for part in parts] == [0, 8, 8 + accepted + 1]
    assert parts[2].blocks.tolist() == [0]


def test_the_step_that_runs_can_be_looked_at():
    """A look changes nothing of what is told later."""
    engine = Engine()
    assert engine.witness.standing() is None
    engine.step({"a": []}, new={"a": ([1, 1], params())})
    look = engine.witness.standing()
    assert [part.request for part in look.requests] == ["a"]
    assert without_times(look) == without_times(engine.rest()[0])
