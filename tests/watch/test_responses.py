"""Figures of requests, and of an engine as JSON: as recorded, and where they contradict each other."""

import copy
import json

import pytest

from specscope.trace.history.stats import measure
from specscope.watch.counts import UnreadableError
from specscope.watch.results import read_json
from tests.watch.samples import SGLANG_RESPONSE, text

CHAT = json.loads(text("chat_greedy.json"))


def only(value):
    (told,) = read_json(value, 7)
    return told


def test_a_recorded_response():
    told = only(CHAT)
    one = told.aggregate
    assert (told.model, told.end_ns, one.request) == ("smollm2", CHAT["created"] * 10**9, "chatcmpl-8c7946b0c7c72083")
    assert (one.source, one.drafts, one.drafted, one.accepted, one.emitted) == ("vLLM response", 4, 12, 3, 8)
    assert (one.accepted_at, one.proposed_at) == ((3, 0, 0), (4, 4, 4))
    figures = CHAT["metrics"]["speculative_decoding"]
    sums = measure([one])
    assert sums.tau == figures["mean_acceptance_length"]
    assert sums.rate == figures["draft_acceptance_rate"]


def test_drafts_of_several_lengths_are_counted_by_step():
    """n-gram: the recorded figures of six requests, one a line."""
    lines = [json.loads(line) for line in text("spec_decode_metrics.json").splitlines()]
    told = [only(line).aggregate for line in lines]
    first = told[0]
    assert (first.drafts, first.drafted, first.accepted) == (4, 17, 11)
    assert first.accepted_at == (3, 2, 2, 2, 2)
    assert first.proposed_at == (4, 4, 4, 3, 2)
    assert [one.accepted for one in told] == [sum(line["per_step_accepted"]) for line in lines]
    together = measure(told)
    assert together.proposed_at == [sum(one.proposed_at[d] for one in told) for d in range(5)]
    assert together.per_position_corrected[4] == together.accepted_at[4] / together.proposed_at[4]
    assert together.conditional == [None] * 5  # of some steps it is not told at which depth they ended


def test_without_the_steps_the_histogram_is_enough():
    value = copy.deepcopy(CHAT)
    del value["metrics"]["speculative_decoding"]["per_step_accepted"]
    del value["metrics"]["speculative_decoding"]["per_step_drafted"]
    assert only(value) == only(CHAT)


def test_an_output_of_the_python_interface():
    detail = json.loads(text("spec_decode_metrics.json").splitlines()[0])
    output = {"request_id": "r7", "outputs": [{"index": 0, "token_ids": [1, 2, 3], "spec_decode_metrics": detail}]}
    one = only(output).aggregate
    assert (one.request, one.drafts, one.emitted) == ("r7", 4, 3)


def test_get_metrics_as_recorded():
    told = only(json.loads(text("get_metrics.json")))
    one = told.aggregate
    assert one.source == "vLLM get_metrics()"
    assert (one.drafts, one.drafted, one.accepted, one.accepted_at) == (233, 699, 98, (73, 18, 7))
    assert one.emitted == 336
    assert one.running == 0
    assert measure([one]).tau == pytest.approx(1 + 98 / 233)


def test_a_response_of_sglang():
    one = only(SGLANG_RESPONSE).aggregate
    assert (one.source, one.drafts, one.drafted, one.accepted, one.emitted) == ("SGLang response", 10, 30, 13, 23)
    assert one.accepted_at == (7, 4, 2)
    assert one.proposed_at == ()  # its drafts may be trees
    assert one.averages == {"spec_accept_length": 2.3, "spec_accept_rate": 0.4333}
    two = copy.deepcopy(SGLANG_RESPONSE)
    two["sglext"]["spec_tokens_details"] = [two["sglext"]["spec_tokens_details"]] * 2
    assert [one.aggregate.request for one in read_json(two, 7)] == ["f00d 0", "f00d 1"]
    assert [one.aggregate.emitted for one in read_json(two, 7)] == [None, None]


def broken(**changes):
    value = copy.deepcopy(CHAT)
    value["metrics"]["speculative_decoding"] |= changes
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (json.loads(text("chat_n2.json")), "no figures of acceptance in it"),
        (json.loads(text("chat_minp.json")), "an error of the server"),
        (broken(per_step_accepted=[0, 1, 1]), "acceptance_histogram is not that of per_step_accepted"),
        (broken(per_step_accepted=[0, 1, 1, 2]), "not that of per_step_accepted"),
        (broken(per_step_drafted=[3, 3, 0, 6]), "more than was drafted|do not fit together"),
        (broken(per_step_drafted=[3, 3, 3, 9]), "do not fit together"),
        (broken(acceptance_histogram=[]), "do not fit together"),
        (broken(num_draft_tokens=-1), "num_draft_tokens: Expected `int` >= 0"),
        (broken(acceptance_histogram="many"), "acceptance_histogram: Expected `int`, got `str`"),
        ([1, 2], "no response"),
        ("text", "no response"),
        ({"outputs": [3]}, "Expected `object`, got `int`"),
        ([{"name": "vllm:num_requests_running", "value": 1.0}], "no metrics of speculation among these"),
        ([{"name": "vllm:spec_decode_num_drafts", "value": 0.5}], "is no count"),
    ],
)
def test_what_cannot_be_read_says_why(value, why):
    with pytest.raises(UnreadableError, match=why):
        read_json(value, 7)
