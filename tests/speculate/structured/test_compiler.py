"""Grammars are compiled and kept within limits; what one allows follows from the tokens alone; what xgrammar would
silently drop is refused."""

import itertools
import json
import random
import sys

import numpy as np
import pytest

from specscope.errors import UserError
from specscope.speculate.allowed import unpacked
from specscope.speculate.structured import compiler
from specscope.speculate.structured.compiler import Grammars, check_form
from specscope.trace.record.params import StructuredOutputs
from specscope.trace.record.vocabulary import Vocabulary

pytest.importorskip("xgrammar")
EOS, SPECIAL, BYTES = 2, 1, 3
SIZE = BYTES + 256 + 45  # with padding rows, and not a multiple of 32
VOCABULARY = Vocabulary(
    {0: b"<unk>", 1: b"<|im_start|>", 2: b"</s>"} | {i + BYTES: bytes([i]) for i in range(256)}, {0, 1, 2}
)


@pytest.fixture(scope="module")
def grammars():
    return Grammars(VOCABULARY, SIZE, (EOS,))


@pytest.fixture(scope="module")
def long_tokens():
    """Of many more tokens, each of four letters."""
    words = ("".join(word).encode() for word in itertools.product("abcdefghijklmnopqrstuvwxyzäöüß", repeat=4))
    pieces = VOCABULARY.pieces | dict(enumerate(words, BYTES))
    return Grammars(Vocabulary(pieces, {0, 1, 2}), max(pieces) + 1, (EOS,))


def ids(text):
    return [byte + BYTES for byte in text.encode()]


def state(grammars, stops=(), **form):
    return grammars.state(grammars.compile(StructuredOutputs(**form)), stops)


def allowed(row):
    return np.flatnonzero(unpacked(row[None], SIZE)[0]).tolist()


def matches(grammars, text, **form):
    here = state(grammars, **form)
    here.follow(ids(text))
    return not here.refused and EOS in allowed(here.row(()))


@pytest.mark.parametrize(
    ("form", "yes", "no"),
    [
        ({"regex": "[0-9]{3}|yes"}, ["123", "yes"], ["12", "ye", "1234", "x"]),
        ({"choice": ('a"b', "c\\d", "e\nf", "é")}, ['a"b', "c\\d", "e\nf", "é"], ["a", "c", "ef"]),
        ({"grammar": 'root ::= "a" x\nx ::= "b" | "c"'}, ["ab", "ac"], ["a", "abc"]),
        ({"json_object": True}, ['{"a": [1, null]}', "{}"], ["[]", "1", "{"]),
        ({"json": "true"}, ["1", "[1]"], ["x"]),
        ({"json": '{"type": "integer", "minimum": 3}'}, ["3", "77"], ["2", '"a"']),
    ],
)
def test_each_form_allows_what_it_says(grammars, form, yes, no):
    assert [text for text in yes if not matches(grammars, text, **form)] == []
    assert [text for text in no if matches(grammars, text, **form)] == []


def test_special_tokens_and_padding_are_never_text(grammars):
    for form in ({"regex": ".*"}, {"json_object": True}):
        here = state(grammars, **form)
        for text in ("", '{"a'):
            here.follow(ids(text))
            row = allowed(here.row(()))
            assert not {0, SPECIAL} & set(row)
            assert max(row) < BYTES + 256
            assert (EOS in row) == ((text == "" and "regex" in form) or "regex" in form)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"json": '{"$ref": "#"}'}, "allows no first token"),
        ({"regex": "(?=a)a"}, "Lookahead is not supported"),
        ({"regex": "["}, "Unclosed"),
        ({"regex": "(" * 4000 + ")" * 4000}, "regex"),
        ({"grammar": "root ::= x"}, '"x" is not defined'),
        ({"grammar": 'root ::= "a'}, "Expect"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line_without_c_plus_plus(grammars, form, why):
    with pytest.raises(UserError, match=why) as caught:
        grammars.compile(StructuredOutputs(**form))
    said = str(caught.value)
    assert "\n" not in said
    assert ".cc" not in said
    assert len(said) < 300


def test_a_hostile_regex_is_ended_by_its_limit_and_others_go_on(grammars, long_tokens):
    """It is hostile to a vocabulary of many long tokens."""
    future = long_tokens.submit(StructuredOutputs(regex="[\\s\\S]{0,100000}"))
    assert not future.done()  # nobody waits for the seconds that it takes
    with pytest.raises(UserError, match="takes more than 5 s or too much memory"):
        future.result(timeout=120)
    assert matches(grammars, "after", choice=("after",))


def test_compiled_grammars_are_kept_and_bounded(grammars, monkeypatch):
    monkeypatch.setattr(compiler, "KEPT", 3)
    forms = [StructuredOutputs(choice=(f"kept {i}",)) for i in range(5)]
    first = [grammars.compile(form) for form in forms]
    assert [grammars.find(form) is one for form, one in zip(forms, first, strict=True)] == [False] * 2 + [True] * 3
    other = Grammars(VOCABULARY, SIZE, (EOS,))
    assert other.find(forms[-1]) is first[-1]  # another engine of the same model
    assert Grammars(VOCABULARY, SIZE + 1, (EOS,)).find(forms[-1]) is None


def test_without_xgrammar_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(UserError, match=r"pip install 'specscope\[serve\]'"):
        Grammars(VOCABULARY, SIZE, (EOS,)).check(StructuredOutputs(regex="a"))


def test_stop_tokens_that_are_text_are_text_to_the_grammar(grammars):
    here = state(grammars, stops=(SPECIAL, *ids("}")), json_object=True)
    here.follow(ids("{"))
    assert ids("}")[0] in allowed(here.row(()))
    here.follow(ids("{}"))
    assert allowed(here.row(())) == [SPECIAL, EOS]


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"regex": "(([a-z]{1,50}){1,50}){1,50}"}, "multiply to 125,000; the limit is 10,000"),
        ({"regex": "x((([ab]{9}|c){0,90})y){200}"}, "multiply to 162,000"),
        ({"json": '{"type": "string", "pattern": "^((a{0,90}){0,90}){0,90}$"}'}, "pattern: .* multiply to 729,000"),
        pytest.param({"regex": "(([a-z]?){40}){40}"}, "takes (over 0.25 s|more than 5 s)", marks=pytest.mark.slow),
    ],
)
def test_a_form_whose_masks_hold_up_every_request_is_refused(long_tokens, form, why):
    with pytest.raises(UserError, match=why):
        long_tokens.compile(StructuredOutputs(**form))


FORMS = [{"regex": "(ab|ba|c)*d?"}, {"json_object": True}, {"choice": ("abab", "abba", "ab")}]


def afresh(grammars, form, output, path):
    here = state(grammars, **form)
    here.follow(output)
    return here.row(path).tolist()


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_a_function_of_output_and_path(grammars, form):
    """Random walks with refused tokens, ends, rollbacks and jumps, beside a matcher made anew for each question."""
    rng, here = random.Random(3), state(grammars, **form)
    output = []
    for _ in range(150):
        if rng.random() < 0.3:
            output = output[: rng.randint(0, len(output))]
        else:
            output = [*output, *rng.choices([*ids('abcd{}"1:'), EOS, 1], k=rng.randint(0, 2))]
        path = rng.choices([*ids('abcd{}"'), EOS, 0], k=rng.randint(0, 3))
        here.follow(output)
        assert here.row(path).tolist() == afresh(grammars, form, output, path)


def test_behind_the_end_nothing_is_allowed_and_nothing_raises(grammars):
    here = state(grammars, regex="ab")
    here.follow([*ids("ab"), EOS])
    assert not here.row(()).any()
    assert not here.row(ids("a")).any()
    here.follow(ids("ab"))  # back over the stop token
    assert allowed(here.row(())) == [EOS]


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
