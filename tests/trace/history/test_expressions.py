"""The language of conditions: what it says, what it refuses and where, and that nothing gets out of it."""

import pytest

from specscope.trace.history.conditions import LONGEST, Expression, ExpressionError
from specscope.trace.words import NODE

NAMES = {name: field.type for name, field in NODE.items()}
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
        ("'a' * 9 == text", 0, "arithmetic needs numbers"),
        ("'%999999d' % node", 0, "arithmetic needs numbers"),
        ("b'x' == text", 0, "only numbers and text"),
        ("f'{p}' == text", 0, "joinedstr"),
        ("max(*text)", 0, "takes one or more values"),
        ("p" * (LONGEST + 1), 0, "longer than"),
    ],
)
def test_what_is_refused_is_shown_at_its_column(text, column, why):
    with pytest.raises(ExpressionError, match=why) as caught:
        Expression(text, NAMES)
    assert caught.value.column == column
    assert f"column {column + 1}" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["9" * 400 + " > p", "1e308 * 1e308 // 0.0 > 1", "- " * 200 + "1 < 0", "1" * 99 + " % p < 0"]
)
def test_numbers_of_any_size_hold_or_do_not(text):
    assert Expression(text, NAMES)(VALUES) in (True, False)


def test_an_unknown_field_suggests_one_or_lists_them():
    with pytest.raises(
        ExpressionError, match=r"there is no field dept here, at column 1: »dept < 1 \(did you mean depth\?\)"
    ):
        Expression("dept < 1", {"depth": int, "p": float})
    with pytest.raises(ExpressionError, match="no field speed here, at column 11: p < 1 and »speed") as error:
        Expression("p < 1 and speed", {"depth": int, "p": float})
    assert str(error.value).endswith("(the fields are: depth, p)")
