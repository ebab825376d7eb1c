"""The language of conditions: what it says, what it refuses and where, and that nothing gets out of it."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specscope.errors import UserError
from specscope.trace.history.conditions import LONGEST, Expression, ExpressionError
from specscope.trace.words import NODE

NAMES = {name: field.type for name, field in NODE.items()}
WORDS = "1 0.5 'x' ( ) < == and or not in + - * / // % ** if else , . [ ] abs len max lambda : __class__ 1e308 None"
WORDS = [*WORDS.split(), "True", "9" * 50]
LONG = 10.0  # seconds of processor time, of which the worst text below takes a thousandth
VALUES = {"depth": 1, "p": 0.05, "q": 0.7, "request": "r3", "text": "def f", "tau": None, "node": 2, "accepted": 0}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("depth==1 and p<0.1 and q>0.5", True),
        ("depth == 2 or p >= 0.05", True),
        ('"def" in text', True),
        ('"class" not in text', True),
        ('request=="r3"', True),
        ("not p < 0.1", False),
        ("0.01 < p < 0.1", True),
        ("tau < 1.5", False),  # not known yet: does not hold
        ("p / accepted > 1", False),  # a division by zero does not hold
        ("abs(p - q) > 0.6 if depth == 1 else False", True),
        ("max(p, q) == q", True),
        ("len(text) == 5", True),
        ("node % 2 == 0", True),
    ],
)
def test_what_conditions_say(text, wanted):
    assert Expression(text, NAMES)(VALUES) is wanted


@pytest.mark.parametrize(
    ("text", "column", "why"),
    [
        ("", 0, "give a condition"),
        ("p <", 3, "invalid condition"),
        ("p = 1", 2, "to compare, write =="),
        ("depth==1 and pp<0.1", 13, "there is no field pp here"),
        ("p.real > 0", 0, "an attribute"),
        ("text[0] == 'd'", 0, "an index"),
        ("p ** 2 > 1", 0, r"\*\*"),
        ("open('x')", 0, "only abs, min"),
        ("__import__('os')", 0, "only abs, min"),
        ("().__class__", 0, "an attribute"),
        ("(lambda: 1)()", 0, "only abs, min"),
        ("[x for x in text]", 0, "listcomp"),
        ("'a' * 9 == text", 0, "arithmetic needs numbers"),
        ("text * 999999", 0, "arithmetic needs numbers"),
        ("rejected * 999999", 0, "arithmetic needs numbers"),
        ("'%999999d' % node", 0, "arithmetic needs numbers"),
        ("1 << 999", 0, "lshift"),
        ("b'x' == text", 0, "only numbers and text"),
        ("f'{p}' == text", 0, "joinedstr"),
        ("p := 1", 2, "invalid condition"),
        ("max(*text)", 0, "takes one or more values"),
        ("(" * 300 + "p" + ")" * 300, 0, "longer than"),
        ("p" * (LONGEST + 1), 0, "longer than"),
    ],
)
def test_what_is_refused_is_shown_at_its_column(text, column, why):
    with pytest.raises(ExpressionError, match=why) as caught:
        Expression(text, NAMES)
    assert caught.value.column == column
    assert f"column {column + 1}" in str(caught.value)


@settings(max_examples=300)
@given(st.text(max_size=60) | st.lists(st.sampled_from([*NAMES, *WORDS]), max_size=25).map(" ".join))
@example("((((((((((" * 20)
@example("1e308 * 1e308 // 0.0")
@example("9" * 400)
@example("- " * 200 + "1")
@example("\x00")
@example("round(5, -999999999)")
@example("p" + "\n" + "q")
def test_no_text_crashes_gets_out_or_takes_long(text):
    start = time.process_time()
    try:
        expression = Expression(text, NAMES)
    except UserError:
        assert time.process_time() - start < LONG
        return
    values = {int: 1, float: 0.5, str: "x", bool: True, tuple: (1, 2)}
    assert expression({name: values[kind] for name, kind in NAMES.items()}) in (True, False)
    assert time.process_time() - start < LONG


def test_an_unknown_field_suggests_one_or_lists_them():
    with pytest.raises(
        ExpressionError, match=r"there is no field dept here, at column 1: »dept < 1 \(did you mean depth\?\)"
    ):
        Expression("dept < 1", {"depth": int, "p": float})
    with pytest.raises(ExpressionError, match="no field speed here, at column 11: p < 1 and »speed") as error:
        Expression("p < 1 and speed", {"depth": int, "p": float})
    assert str(error.value).endswith("(the fields are: depth, p)")
