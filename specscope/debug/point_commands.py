"""The breakpoint commands of `Commands`: break, watch, delete and commands."""

from __future__ import annotations

from specscope.debug.command_table import find
from specscope.debug.session import Session
from specscope.errors import UserError
from specscope.trace.checked import short, whole


class PointCommands:
    """`commands N` without lines reads the lines that follow, up to `end`; until then `reading` is True."""

    def __init__(self, session: Session, *, many_lines: bool) -> None:
        """`many_lines`: whether `commands N` may read the lines that follow."""
        self.session = session
        self.many_lines = many_lines
        self._draining = False  # whether breakpoints' own commands are being run
        self._for: int | None = None  # the breakpoint whose commands are being read
        self._lines: list[str] = []

    @property
    def reading(self) -> bool:
        """Whether the next lines are commands of a breakpoint, up to `end`."""
        return self._for is not None

    def _note(self, line: str) -> str:
        assert self._for is not None
        if line.strip() == "end":
            self.session.breakpoints.get(self._for).commands = tuple(self._lines)
            self._for, self._lines = None, []
        elif line.strip():
            find(line.split()[0])
            self._lines.append(line.strip())
        return ""

    def do_break(self, text: str) -> str:
        """`EVENT [if EXPR]`."""
        event, _, condition = text.partition(" ")
        condition = condition.strip()
        if condition and not condition.startswith("if "):
            raise UserError(f"write break {event} if {condition}")
        point = self.session.breakpoints.add(event, condition.removeprefix("if ").strip())
        return f"breakpoint {point.number}: {point.describe()}"

    def do_watch(self, text: str) -> str:
        """A condition whose change stops."""
        point = self.session.breakpoints.watch(text.removeprefix("if ").strip())
        return f"breakpoint {point.number}: {point.describe()}"

    def _numbers(self, text: str) -> list[int]:
        numbers: list[int] = []
        for word in text.replace(",", " ").split():
            number = whole(word)
            if number is None:
                raise UserError(f"{short(word)} is not the number of a breakpoint")
            numbers.append(number)
        return numbers

    def do_delete(self, text: str) -> str:
        """Those of the numbers, those at the events, or all."""
        gone = self.session.breakpoints.delete(text.replace(",", " ").split())
        return "\n".join(f"deleted breakpoint {point.number}: {point.describe()}" for point in gone)

    def do_commands(self, text: str) -> str:
        """`N`, then lines up to `end`; or `N line; line`."""
        number, _, rest = text.partition(" ")
        numbers = self._numbers(number)
        if len(numbers) != 1 or not (rest or (self.many_lines and not self._draining)):
            raise UserError("write commands N LINE; LINE, with the number of one breakpoint")
        (point_number,) = numbers
        point = self.session.breakpoints.get(point_number)
        if rest:
            lines = [line.strip() for line in rest.split(";") if line.strip()]
            for line in lines:
                find(line.split()[0])
            point.commands = tuple(lines)
        else:
            self._for, self._lines = point_number, []
        return ""
