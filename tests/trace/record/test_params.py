"""SamplingParams refuse what is out of range, naming the field."""

import json

import msgspec
import pytest
from hypothesis import given

from specscope.errors import UserError
from specscope.trace.record.params import SamplingParams
from tests.trace.strategies import params


@given(params)
def test_round_trip(given_params):
    text = json.dumps(given_params.to_dict())
    assert SamplingParams.from_dict(json.loads(text)) == given_params
    assert msgspec.json.decode(text, type=SamplingParams) == given_params  # as a capture is read


OUT_OF_RANGE = {
    "temperature": (-0.1, float("nan"), "hot"),
    "top_k": (-1, 1.5),
    "top_p": (0, 1.1),
    "min_p": (1,),
    "repetition_penalty": (0,),
    "presence_penalty": (2.5,),
    "frequency_penalty": (-3,),
    "seed": (-1, 2**63),
    "max_tokens": (0,),
    "stop": (("",), (3,)),
    "logit_bias": ({"a": 1}, {-1: 1}, {1: float("inf")}, 3),
    "ignore_eos": (1,),
    "min_tokens": (-1, 129),  # above max_tokens
    "logprobs": (21, True),
    "stop_token_ids": ((-1,), None),
    "structured_outputs": (3, {"regexp": "a"}),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_out_of_range_is_refused_by_name(name):
    for value in OUT_OF_RANGE[name]:
        with pytest.raises(UserError, match=name):
            SamplingParams(**{name: value})


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"'temprature'.*temperature"):
        SamplingParams.from_dict({"temprature": 1})


def test_a_single_stop_string_is_taken_as_one():
    assert SamplingParams(stop="end").stop == ("end",)
