"""The branches of a run that was edited: where each begins, and Enter to look at one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from specscope.trace.history.history import Branch
from specscope.tui.look import Look
from specscope.tui.screens.over import Hint, Over
from specscope.tui.text import Ink, Line, cut, fit, left, right
from specscope.tui.widgets.lines import Sheet
from specscope.tui.widgets.listing import PickPanel

NUMBER, STEPS = 8, 8


class BranchesPanel(PickPanel):
    """A line a branch; the band is on the picked one."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("branch", "steps", "begins")

    def key(self, look: Look) -> Hashable:
        """The branches, the one that is shown, and which is picked."""
        return tuple(look.history.branches.items()), look.history.branch, look.steps, self.picked, self.order

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The table."""
        history = look.history
        sizes = history.branch_sizes()

        def value(branch: Branch, column: str) -> float | str:
            return {"branch": branch.number, "steps": sizes[branch.number]}.get(column, branch.first)

        self.shown = self.arranged(list(history.branches.values()), value, lambda branch: str(branch.number))
        self.rows = list(range(len(self.shown)))
        self.picked = max(min(self.picked, len(self.shown) - 1), 0)
        title = fit([(0, [("Branches", "strong")]), (1, [(f"{len(self.shown)}", "dim")]), (2, self.said())], width - 2)
        heads = (
            ("branch", right("branch", NUMBER)),
            ("steps", right("steps", STEPS - 2)),
            ("begins", left("begins", 10)),
        )
        lines: list[Line] = [self.head(heads)]
        for branch in self.shown:
            here = branch.number == history.branch
            ink: Ink = "strong" if here else "text"
            line: list[tuple[str, Ink]] = [(right(("▸ " if here else "") + str(branch.number), NUMBER), ink)]
            line += [(right(f"{sizes[branch.number]:,}", STEPS), "dim"), (cut("  " + branch.begins(), width - 16), ink)]
            lines.append(line)
        if len(history.branches) == 1:
            lines += [
                [],
                [(cut("A branch begins where a run went back and was then changed.", width), "dim")],
            ]
        return Sheet(lines, title, cursor=1 + self.picked, keep=1 + self.picked, head=1)


class BranchesScreen(Over):
    """The tree that an edited run is."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("B,upper_b", "dismiss", "Close", show=False)]

    HINTS = (
        Hint(0, "⏎", "show it", "screen.go"),
        Hint(1, "o", "sort", "app.sort(1)"),
        Hint(2, "?", "help", "app.help"),
        Hint(3, "Esc", "close", "screen.dismiss"),
    )

    def parts(self) -> ComposeResult:
        """One panel."""
        yield BranchesPanel("branches")

    def action_pick(self, way: int) -> None:
        """Pick another branch."""
        self.query_one(BranchesPanel).pick(way)

    def action_go(self) -> None:
        """Close, and show the picked branch at its end."""
        if branch := self.query_one(BranchesPanel).item:
            self.last.viewer.show_branch(branch.number)
        self.dismiss()
