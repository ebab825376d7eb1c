"""Numbers in flags, checked against the same declared types as everywhere else."""

from __future__ import annotations

import re
from typing import Annotated, Any, get_args

import click
from msgspec import Meta

from specscope.trace.checked import checked

_FORMS = {int: r"[+-]?[0-9]{1,40}", float: r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"}


class Number(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click alone
    """A flag's number. Raises UserError that names the flag. Click's own types accept nan, 1_000 and any digits."""

    def __init__(self, kind: Any) -> None:  # noqa: ANN401
        """`kind`: an Annotated int or float with its bounds."""
        self.kind = kind
        self.base: type = get_args(kind)[0]
        self.name = "integer" if self.base is int else "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """The number in a text; a default is checked as it is."""
        if isinstance(value, str) and re.fullmatch(_FORMS[self.base], value):
            value = self.base(value)
        return checked(value, self.kind, param.opts[0] if param is not None else "the number")


def whole_from(smallest: int, largest: int) -> Number:
    """A whole number between two bounds."""
    return Number(Annotated[int, Meta(ge=smallest, le=largest, description=f"between {smallest} and {largest}")])


def real_from(smallest: float, largest: float) -> Number:
    """A number between two bounds."""
    return Number(Annotated[float, Meta(ge=smallest, le=largest, description=f"between {smallest:g} and {largest:g}")])
