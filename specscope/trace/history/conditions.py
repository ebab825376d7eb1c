"""Conditions over the evidence: `depth == 1 and p < 0.1`. Checked when they are set, then evaluated by Python.

The language is Python's comparisons, arithmetic, `and`, `or`, `not`, `in`, `a if b else c`, and a few functions:
nothing that can take long. All else is refused when the condition is set, with its column.

Conditions on figures, as `compare --fail-if` takes them (`tau drops > 2%`), are a language of their own:

FIGURE (<|>) X[%]                    the figure itself, of side B
FIGURE (drops|rises|differs) > X[%]  its change, from A to B

Several are joined by `or`. FIGURE is a figure by its name: tau, rate, depth N rate, a count, and what the verb adds to
these. X% of a change is of the older figure, and of a rate its share; X alone is in the figure's own unit.
"""

from __future__ import annotations

import ast
import difflib
import re
import warnings
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from specscope.errors import UserError
from specscope.trace.checked import short

LONGEST = 500  # characters
FUNCTIONS: dict[str, Callable[..., object]] = {"abs": abs, "min": min, "max": max, "len": len}
OPERATORS = (
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub, ast.UAdd),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Not),
)
_NO_BUILTINS: dict[str, object] = {"__builtins__": {}}
_NUMBERS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_SHAPES = (ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Load)


class ExpressionError(UserError):
    """A condition that cannot be used; the message shows the column."""

    def __init__(self, text: str, column: int, why: str, help: str = "") -> None:
        self.column = column
        super().__init__(f"{why}, at column {column + 1}: {text[:column]}»{text[column:]}{help}")


class Expression:
    """A condition. `names`: the fields it can use, each with the type of its values."""

    def __init__(self, text: str, names: Mapping[str, type]) -> None:
        self.text = " ".join(text.splitlines()).strip()
        if not self.text:
            raise ExpressionError("", 0, "give a condition, such as depth == 1 and p < 0.1")
        if len(self.text) > LONGEST:
            raise ExpressionError(self.text[:20] + "…", 0, f"the condition is longer than {LONGEST} characters")
        try:
            self.text.encode()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python's own remarks on the text are not for this user
                tree = ast.parse(self.text, mode="eval")
                _Check(self.text, names).visit(tree)
                self._code = compile(tree, "<condition>", "eval")
        except SyntaxError as error:
            column = error.offset - 1 if error.offset else len(self.text)  # 0: at the end
            hint = " (to compare, write ==)" if self.text[column : column + 1] == "=" else ""
            raise ExpressionError(self.text, column, f"invalid condition{hint}") from None
        except UnicodeEncodeError:
            raise ExpressionError(ascii(self.text)[1:21] + "…", 0, "the condition is not valid Unicode text") from None
        except (RecursionError, MemoryError, ValueError):
            raise ExpressionError(self.text[:20] + "…", 0, "the condition is nested too deeply") from None

    def __call__(self, values: Mapping[str, object]) -> bool:
        """Whether it holds for these values. A division by zero, or an unknown value (None), does not hold."""
        return bool(self.value(values))

    def value(self, values: Mapping[str, object]) -> object:
        try:
            # Only what _Check lets through; a function's name is never asked of the values
            return eval(self._code, _NO_BUILTINS, ChainMap(FUNCTIONS, values))  # type: ignore[arg-type]
        except (ZeroDivisionError, TypeError, OverflowError, ValueError, RecursionError):
            return None


class _Check(ast.NodeVisitor):
    def __init__(self, text: str, names: Mapping[str, type]) -> None:
        self.text = text
        self.names = names

    def _refuse(self, node: ast.AST, why: str, help: str = "") -> ExpressionError:
        before = self.text.encode()[: getattr(node, "col_offset", 0)]
        return ExpressionError(self.text, len(before.decode(errors="ignore")), why, help)

    def generic_visit(self, node: ast.AST) -> None:
        """Anything without a method of its own must be a known shape or operator."""
        if not isinstance(node, _SHAPES) and type(node) not in OPERATORS:
            raise self._refuse(node, f"{_say(node)} cannot be used in a condition")
        super().generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Arithmetic is for numbers only: multiplied text or tokens could grow without bound."""
        if not isinstance(node.op, _NUMBERS):
            raise self._refuse(node, f"{_say(node.op)} cannot be used in a condition")
        for side in (node.left, node.right):
            if self._is_no_number(side):
                raise self._refuse(side, "arithmetic needs numbers")
        self.generic_visit(node)

    def _is_no_number(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str)
        if isinstance(node, ast.IfExp):
            return self._is_no_number(node.body) or self._is_no_number(node.orelse)
        if isinstance(node, ast.BoolOp):
            return any(map(self._is_no_number, node.values))
        if isinstance(node, ast.Call):
            return any(map(self._is_no_number, node.args)) and getattr(node.func, "id", "") != "len"
        return isinstance(node, ast.Name) and self.names.get(node.id) in (str, tuple)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Text is not compared with numbers: that never holds."""
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        for left, right, way in zip(sides, sides[1:], node.ops, strict=False):
            first, second = self._kind(left), self._kind(right)
            within = isinstance(way, ast.In | ast.NotIn)
            if (within and (second is float or (first, second) == (float, str))) or (
                not within and None not in (first, second) and first is not second
            ):
                names: dict[type | None, str] = {str: "text", float: "a number", tuple: "a list", None: "a value"}
                raise self._refuse(left, f"{names[first]} {'in' if within else 'beside'} {names[second]} never holds")

    def _kind(self, node: ast.expr) -> type | None:
        """str, float or tuple; None where it is not known."""
        if isinstance(node, ast.Constant):
            return str if isinstance(node.value, str) else None if node.value is None else float
        kind = self.names.get(node.id) if isinstance(node, ast.Name) else None
        return kind if kind in (None, str, tuple) else float

    def visit_Name(self, node: ast.Name) -> None:
        if node.id not in self.names:
            close = difflib.get_close_matches(node.id, self.names, 1)
            help = f" (did you mean {close[0]}?)" if close else f" (the fields are: {', '.join(sorted(self.names))})"
            raise self._refuse(node, f"there is no field {node.id} here", help)

    def visit_Call(self, node: ast.Call) -> None:
        if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
            raise self._refuse(node, f"only {', '.join(FUNCTIONS)} can be called")
        if node.keywords or not node.args or any(isinstance(arg, ast.Starred) for arg in node.args):
            raise self._refuse(node, f"{node.func.id} takes one or more values, without names")
        for arg in node.args:
            self.visit(arg)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, int | float | str | None):
            raise self._refuse(node, "only numbers and text can be used")


def _say(node: ast.AST) -> str:
    return {ast.Attribute: "an attribute", ast.Subscript: "an index", ast.Pow: "**", ast.Lambda: "a function"}.get(
        type(node), type(node).__name__.lower()
    )


TAU, RATE = "tau", "rate"
# Counts, by their names in conditions and in code
COUNTED: Mapping[str, str] = {
    "drafts": "drafts",
    "drafted": "drafted",
    "accepted": "accepted",
    "output tokens": "emitted",
    "requests": "requests",
}
LARGEST = 1e10
LONGEST_OF_FIGURE = 400  # characters of a condition


def depth_rate(depth: int) -> str:
    return f"depth {depth} rate"


class Way(StrEnum):
    BELOW = "<"
    ABOVE = ">"
    DROPS = "drops"
    RISES = "rises"
    DIFFERS = "differs"


@dataclass(frozen=True)
class Threshold:
    figure: str  # tau, rate, `depth 3 rate`, drafts, `tau where label kind is code`
    way: Way
    size: float  # a share where `percent`
    percent: bool

    def __str__(self) -> str:
        size = f"{self.size * 100:.10g}%" if self.percent else f"{self.size:.10g}"
        return f"{self.figure} {self.way}{' >' if self.of_change else ''} {size}"

    @property
    def of_change(self) -> bool:
        return self.way not in (Way.BELOW, Way.ABOVE)

    def passed_by(self, value: float) -> bool:
        return value < self.size if self.way is Way.BELOW else value > self.size

    def passed_by_change(self, before: float, low: float, high: float) -> bool:
        """Whether all changes from `low` to `high` are beyond the limit."""
        least = self.size * abs(before) if self.percent else self.size
        drop, rise = -high > least, low > least
        return {Way.DROPS: drop, Way.RISES: rise, Way.DIFFERS: drop or rise}[self.way]


_NUMBER = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_CONDITION = re.compile(
    rf"(?P<figure>\S.*?)(?: +(?P<way>drops|rises|differs) *>| *(?P<sign>[<>])) *(?P<size>{_NUMBER}) *(?P<percent>%?)",
    re.ASCII,
)
# A condition ends with its number, so that a label's value may hold the word `or`.
_NEXT = re.compile(r"([<>] *[0-9.]+ *%?) *\bor\b", re.ASCII)
_DEPTH = re.compile(r"depth ([1-9][0-9]{0,2})( rate)?", re.ASCII)


def parse_thresholds(text: str, figures: Collection[str], *, grouped: str) -> list[Threshold]:
    """Raises UserError. `figures`: the verb's, besides rates by depth; `grouped`: a pattern of further names."""
    parts = _NEXT.sub(r"\1\n", text.replace("\n", " ")).split("\n")
    try:
        return [_parse(part.strip(), figures, grouped) for part in parts]
    except UserError as error:
        raise UserError(f"--fail-if {short(text)}: {error}") from None


def _parse(part: str, figures: Collection[str], grouped: str) -> Threshold:
    parsed = _CONDITION.fullmatch(part) if len(part) < LONGEST_OF_FIGURE else None
    if parsed is None:
        raise UserError(
            'write FIGURE (drops|rises|differs) > X[%] or FIGURE (<|>) X[%], such as "tau drops > 2%", '
            '"depth 1 rate < 0.5"'
        )
    figure = " ".join(parsed["figure"].split())
    if match := _DEPTH.fullmatch(figure):
        figure = depth_rate(int(match[1]))
    elif figure not in figures and not re.fullmatch(grouped, figure):
        names = list(figures)
        names.insert(2, "depth N rate")
        raise UserError(f"there is no figure {short(figure)}; use {', '.join(names)} or tau where GROUP is VALUE")
    size, way, percent = float(parsed["size"]), Way(parsed["way"] or parsed["sign"]), bool(parsed["percent"])
    if size > LARGEST:
        raise UserError(f"{parsed['size'][:40]} is too large")
    if percent and not parsed["way"] and (figure.startswith((TAU, "tokens")) or figure in COUNTED):
        raise UserError(f"{figure} is a number, not a share")
    return Threshold(figure, way, size / 100 if percent else size, percent)
