"""The node inspector: the judged tree with one node picked, and everything known about that node."""

from __future__ import annotations

from collections.abc import Hashable
from operator import attrgetter

from textual import events
from textual.app import ComposeResult
from textual.containers import Container

from specscope.debug.answers import LookRefused
from specscope.debug.views import NodeView
from specscope.trace.history.place import at, ended_by
from specscope.trace.history.wording import acceptance
from specscope.tui.keys import Key, foot, hidden
from specscope.tui.look import Look
from specscope.tui.screens.over import Over, close
from specscope.tui.screens.request_view import TimelinePanel
from specscope.tui.text import Line, clean, fit, folded
from specscope.tui.widgets.decision import likeliest_lines, place_lines
from specscope.tui.widgets.lines import Panel, Sheet
from specscope.tui.widgets.listing import ItemPicked
from specscope.tui.widgets.node_view import node_facts, node_view_lines
from specscope.tui.widgets.tree_lines import tree_lines

REPLAYED = "Whole distributions need a live engine; a capture keeps the likeliest tokens."
ENTER = "Enter shows the whole distributions."

Place = tuple[int, str | None, int | None, int]  # step, request, node (None: final token); times steps were taken back


class NodesPanel(Panel):
    """The tree, a line a node; the band is on the picked one."""

    OF = attrgetter("look.current", "look.at", "picked", "asked")

    BINDINGS = hidden(up="pick(-1)", down="pick(1)", enter="screen.distributions")

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.picked = 0  # the line, counted over the nodes
        self.order: list[int] = []  # the node of each line; the number of nodes stands for the final token
        self._step: Hashable = None  # that the node was picked in
        self.asked: tuple[int, int] | None = None  # (position, node) to be picked when that step is drawn

    def action_pick(self, way: int) -> None:
        self.picked = min(max(self.picked + way, 0), max(len(self.order) - 1, 0))
        self.post_message(ItemPicked())

    @property
    def node(self) -> int | None:
        return self.order[self.picked] if self.order else None

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        self.order = []
        if look.part is None:
            return Sheet([[(look.absence, "dim")]], [("Step", "strong")])
        step, record = look.part[1], look.history.steps[look.at]
        names: Line = [(f"{clean(step.request)}@{step.index}", "strong"), (f" · step {record.step:,}", "text")]
        title = fit([(0, names), (1, [(acceptance(step, short=True), "text")])], width - 2, " · ")
        if step.verdict is None:
            return Sheet([[("a prefill: nothing was judged", "faint")]], title)
        ties = look.history.near_ties(step)
        head, lines, self.order = tree_lines(step, step.verdict, look.vocabulary, width, ties)
        shown = (look.current, look.at, look.history.rewinds, id(look.history))
        keep = self.picked
        if shown != self._step:  # another step opens where its path ended, with the final token where both fit
            self._step = shown
            final = self.order.index(len(step.tree))
            self.picked = self.order.index(ended_by(step))
            keep = final if final - self.picked < height - 1 else self.picked
        if self.asked is not None and self.asked[0] == look.at and self.asked[1] in self.order:
            keep = self.picked = self.order.index(self.asked[1])
            self.asked = None
        return Sheet([head, *lines], title, cursor=self.picked + 1, keep=keep + 1, head=1)

    def on_click(self, event: events.Click) -> None:
        row = self.line_at(event.get_content_offset_capture(self).y) - 1
        if 0 <= row < len(self.order):
            self.action_pick(row - self.picked)


class PlacePanel(Panel):
    """The distributions at the picked node's place, once asked for; before, what the record has of the place."""

    OF = attrgetter("_picker.picked", "_picker.asked", "here", "asked", "refused", "view")

    BINDINGS = hidden(enter="screen.distributions")

    def __init__(self, picker: NodesPanel, id: str | None = None) -> None:
        super().__init__(id=id)
        self._picker = picker
        self.asked: Place | None = None  # the place that the engine was asked about last
        self.refused = ""  # why it did not answer

    @property
    def here(self) -> Place:
        """The picked node's place, which is what an answer is about."""
        look = self.look
        if look is None:
            return -1, None, None, 0
        step = look.history.steps[look.at].step if look.at >= 0 else -1
        final = look.part is not None and self._picker.node == len(look.part[1].tree)
        return step, look.current, None if final else self._picker.node, look.history.rewinds

    @property
    def view(self) -> int:
        """Which answer came last, for comparisons."""
        return 0 if self.look is None else id(self.look.viewer.node_view)

    def answer(self, look: Look) -> NodeView | None:
        """The answer about the picked node, where it was asked for and has come."""
        view = look.viewer.node_view
        if view is None or self.asked is None or self.asked != self.here:
            return None
        return view if (view.step, view.request, view.node) == self.asked[:3] else None

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        view = self.answer(look)
        title: Line = [("Distributions" if view is not None else "At this place", "strong")]
        return Sheet(self.lines(look, width, height), title)

    def lines(self, look: Look, width: int, height: int) -> list[Line]:
        """What the panel shows; the node's panel shows it below its own where there is no room for this one."""
        node = self._picker.node
        if look.part is None or look.part[1].verdict is None or node is None:
            return []
        view = self.answer(look)
        if view is not None:
            return node_view_lines(view, look.vocabulary, width, height)
        if self.asked == self.here:
            hint, ink = self.refused or "asking the engine …", "warn" if self.refused else "accent"
        else:
            hint, ink = (ENTER, "accent") if look.asks else (REPLAYED, "dim")
        step, verdict = look.part[1], look.part[1].verdict
        head: list[Line] = [[(line, ink)] for line in folded(hint, width)]  # type: ignore[list-item]
        tops = likeliest_lines(at(step, node), look.vocabulary, width)
        asked = [*head, []] if self.asked == self.here or not tops else []
        below = [] if asked else head
        return [*asked, *tops, *place_lines(step, verdict, node, look.vocabulary, width), *below]


class NodePanel(Panel):
    """Why the picked node was kept or not, and where it stands."""

    OF = attrgetter(
        *("_picker.picked", "_picker.asked", "_place.display", "_place.here", "_place.asked"),
        *("_place.refused", "_place.view"),
    )

    BINDINGS = hidden(enter="screen.distributions")

    def __init__(self, picker: NodesPanel, place: PlacePanel, id: str | None = None) -> None:
        super().__init__(id=id)
        self._picker, self._place = picker, place

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The decision as a picture, then facts a line."""
        node = self._picker.node
        if look.part is None or look.part[1].verdict is None or node is None:
            return Sheet([], [("Node", "strong")])
        name: Line = [("Final token" if node == len(look.part[1].tree) else f"Node {node}", "strong")]
        room = height if self._place.display else 0
        lines = node_facts(look, look.part[1], look.part[1].verdict, node, width, room)
        if self._place.display:
            return Sheet(lines, name)
        start = len(lines) + 1
        lines = [*lines, [], *self._place.lines(look, width, height)]
        asked = self._place.asked == self._place.here
        return Sheet(lines, name, keep=min(start + height, len(lines)) - 1 if asked else 0)


class StepScreen(Over):
    """The current request's step: its nodes, one of them in full, and the distributions at its place."""

    FIRST = NodesPanel
    KEYS = (
        Key("", "focused.pick(1)", "", "↑↓", "node", 0),
        Key("", "screen.distributions", "", "⏎", "distributions", 1, "asks"),
        *foot(move=3, rejection=4, request=6, debug=5, copy=7, help=8),
        close(2, "escape,q,d"),
    )

    def parts(self) -> ComposeResult:
        nodes_panel = NodesPanel("nodes")
        place = PlacePanel(nodes_panel, "place")
        with Container(id="of-step"):
            yield nodes_panel
            yield place
            yield NodePanel(nodes_panel, place, "node")
            yield TimelinePanel("its-steps")

    def pick_node(self, position: int, node: int) -> None:
        """The node of that number, or the final token, of the step at a position, as soon as it is shown."""
        self.query_one(NodesPanel).asked = position, node
        self.show(self.last)

    def action_distributions(self) -> None:
        """Ask the engine for the whole distributions at the node's place, wherever the engine is."""
        node, place = self.query_one(NodesPanel).node, self.query_one(PlacePanel)
        if self.last.part is None or self.last.current is None or node is None or not self.last.asks:
            return
        place.asked, place.refused = place.here, ""
        final = node == len(self.last.part[1].tree)
        self.last.viewer.view_node(self.last.current, None if final else node)
        self.query_one("#of-step").add_class("-asked")
        self.show(self.last)

    def refuse(self, refused: LookRefused) -> bool:
        """Show why the engine does not answer. False if it was not asked that from here."""
        place = self.query_one(PlacePanel)
        if place.asked is None or place.asked[:3] != (refused.step, refused.request, refused.node):
            return False
        place.refused = refused.why
        self.show(self.last)
        return True
