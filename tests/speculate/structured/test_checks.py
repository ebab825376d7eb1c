"""What xgrammar would silently drop is refused, in one line that names it; what it holds to is let through."""

import json

import pytest

from specscope.errors import UserError
from specscope.speculate.structured.compiler import check_form
from specscope.trace.record.params import StructuredOutputs

DROPPED = [
    ({"type": "integer", "multipleOf": 5}, "multipleOf"),
    ({"not": {"type": "integer"}}, "not cannot be enforced"),
    ({"allOf": [{"type": "integer"}, {"minimum": 3, "type": "integer"}]}, "allOf of several"),
    ({"anyOf": [{"type": "integer"}], "type": "string"}, "beside anyOf"),
    ({"$ref": "#/$defs/x", "minLength": 3, "$defs": {"x": {"type": "string"}}}, "beside \\$ref"),
    ({"type": "string", "format": "bogus"}, "format 'bogus'"),
    ({"type": "string", "pattern": "^ab$", "maxLength": 1}, "together"),
    ({"type": "string", "pattern": "^(?=a)b$"}, "pattern: .*cannot be enforced"),
    ({"minimum": 3}, "without a type"),
    ({"type": "object", "required": ["z"], "properties": {"a": {}}}, "required names 'z'"),
    ({"type": "object", "properties": {"a": {}}, "patternProperties": {"^b": {}}}, "patternProperties"),
    ({"$defs": {"x": {"type": "integer", "multipleOf": 2}}, "$ref": "#/$defs/x"}, "at #/\\$defs/x"),
]
HELD = [
    True,
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
    {"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "x", "default": None},
    {"enum": [1, {"not": 3}], "description": "data is not looked into"},
    {"type": "object", "properties": {"not": {"type": "string"}, "if": {"type": "integer"}}},
    {"type": "string", "pattern": "^[a-z]{2}\\d$"},
]


@pytest.mark.parametrize(("schema", "why"), DROPPED)
def test_schema_features_that_would_be_dropped_are_refused(schema, why):
    with pytest.raises(UserError, match=why) as caught:
        check_form(StructuredOutputs(json=schema))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("schema", HELD)
def test_what_is_held_to_is_let_through(schema):
    check_form(StructuredOutputs(json=json.dumps(schema)))


@pytest.mark.parametrize("regex", ["a^b", "a$b", "(^a|b$)", "^a|b$|c$d", "\\Aa\\Z", "\\qa"])
def test_anchors_in_the_middle_and_unknown_escapes_of_a_regex_are_refused(regex):
    with pytest.raises(UserError, match="regex"):
        check_form(StructuredOutputs(regex=regex))


@pytest.mark.parametrize("regex", ["^ab$", "a\\$b\\^", "[$^]a", "[^a]", "(?:a|b)+", "\\d+\\.\\d", "\\\\A", "[\\]$]x"])
def test_other_regexes_are_let_through(regex):
    check_form(StructuredOutputs(regex=regex))
