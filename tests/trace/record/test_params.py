"""Sampling parameters and forms of outputs: what is out of range is refused by name, and what is not comes back."""

import json

import pytest

from specscope.errors import UserError
from specscope.trace.record.params import SamplingParams, StructuredOutputs

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


def test_a_schema_as_a_mapping_is_kept_as_text_in_its_order():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert StructuredOutputs(json=schema).json == json.dumps(schema)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object; given: none"),
        ({"json": "[" * 2000 + "]" * 2000}, "json is not valid JSON"),
        ({"json": '{"a":' * 65 + "1" + "}" * 65}, "nested more than 64 deep"),
        ({"json": {"a": float("nan")}}, "cannot be written as JSON"),
        ({"json": {"a": "\ud800"}}, "json"),
        ({"json": " " * 65537 + "{}"}, "at most 64 KiB"),
        ({"regex": "a" * 8193}, "at most 8 KiB"),
        ({"regex": "a\0"}, "NUL"),
        ({"regex": "\ud800"}, "regex must be"),
        ({"choice": ("a\0",)}, "NUL"),
        ({"choice": ("a",) * 1001}, "1 to 1000"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(form, why):
    with pytest.raises(UserError, match=why) as caught:
        StructuredOutputs(**form)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_one_form_has_one_kind_and_one_text():
    assert StructuredOutputs(json='{"a":' * 64 + "1" + "}" * 64).kind == "json"  # so many levels are allowed
    assert (StructuredOutputs(json="true").kind, StructuredOutputs(regex="[0-9]{3}").kind) == ("json", "regex")
    assert StructuredOutputs(choice=("a", 'b"')).text == '["a", "b\\""]'
    assert StructuredOutputs(json_object=True).text == ""
