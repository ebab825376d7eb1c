"""The node inspector: the judged tree with a node picked in it, and all that is known of that node."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import numpy as np
from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container

from specscope.trace.records import Outcome, RequestStep, Verdict
from specscope.trace.tree import ROOT, Drawn
from specscope.tui.look import Look
from specscope.tui.screens.over import Over
from specscope.tui.text import Ink, Line, clean, cut, fit, left, probability, show_token
from specscope.tui.widgets.lines import Sheet
from specscope.tui.widgets.panel import Panel
from specscope.tui.widgets.tree_lines import INKS, nodes, tree_lines

TAIL = 24  # tokens of the context that are shown
LABEL = 11


class NodesPanel(Panel):
    """The tree, a line a node; the band is on the picked one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "screen.pick(-1)", "Node above", show=False),
        Binding("down", "screen.pick(1)", "Node below", show=False),
        Binding("enter", "screen.distributions", "Distributions", show=False),
    ]

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.picked = 0  # the line, counted over the nodes
        self.order: list[int] = []  # the node of each line; the number of nodes stands for the final token

    def key(self, look: Look) -> Hashable:
        """The step, and what is picked in it."""
        return look.chosen, look.at, self.picked

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The tree panel's lines."""
        title: Line = [("Step", "strong")]
        if look.part is None:
            return Sheet([[("no step of a request is shown", "faint")]], title)
        step, record = look.part[1], look.history.steps[look.at]
        names: Line = [(f"{clean(step.request)}@{step.index}", "strong"), (f" · step {record.step:,}", "text")]
        title = fit([(0, names), (1, [("↑↓ node · Enter p and q · Esc", "faint")])], width - 2, " · ")
        if step.verdict is None:
            self.order = []
            return Sheet([[("a prefill: nothing was judged", "faint")]], title)
        head, lines, _ = tree_lines(step, step.verdict, look.vocabulary, width, look.history.near_ties(step))
        self.order = [row.node for row in nodes(step, step.verdict, look.vocabulary)]
        self.picked = min(self.picked, len(lines) - 1)
        return Sheet([head, *lines], title, cursor=self.picked + 1, keep=self.picked + 1, head=1)

    def on_click(self, event: events.Click) -> None:
        """Pick the node under the pointer."""
        at = self.line_at(event.get_content_offset_capture(self).y) - 1
        if isinstance(self.screen, StepScreen) and 0 <= at < len(self.order):
            self.screen.action_pick(at - self.picked)


class NodePanel(Panel):
    """Why the picked node was kept or not, its siblings, where it stands; and its distributions once asked for."""

    def __init__(self, picker: NodesPanel, id: str | None = None) -> None:
        super().__init__(id=id)
        self._picker = picker
        self.about: Hashable = None  # the step and node that the debugger was asked about last
        self.answer: list[str] = []  # what it said

    def key(self, look: Look) -> Hashable:
        """The step, the node, and what was answered."""
        return self._picker.key(look), tuple(self.answer)

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """Facts a line, then the answer."""
        if look.part is None or look.part[1].verdict is None or not self._picker.order:
            return Sheet([], [("Node", "strong")])
        step, node = look.part[1], self._picker.order[self._picker.picked]
        verdict = look.part[1].verdict
        assert verdict is not None
        final = node == len(step.tree)
        name: Line = [("Final token" if final else f"Node {node}", "strong")]
        facts = (
            _final(look, verdict, node in look.history.near_ties(step)) if final else _facts(look, step, verdict, node)
        )
        lines = [*_wrapped(facts, width), [], *_context(look, step, node, width)]
        if self.answer and self.about == self._picker.key(look):
            lines += [[], *(line for text in self.answer for line in _folded(text, width))]
        return Sheet(lines, name)


Fact = tuple[str, str, Ink]


def _final(look: Look, verdict: Verdict, near: bool) -> list[Fact]:
    kind: Ink = verdict.kind.value
    why = {
        "bonus": "every node of the path was accepted: drawn from the target at its end",
        "recovered": "all children were rejected: drawn from what is left of the target, renormalised",
        "target": "nothing was drafted: drawn from the target",
    }[verdict.kind.value]
    return [
        ("token", f"{show_token(look.vocabulary, verdict.token)}  #{verdict.token}", kind),
        ("kind", f"{verdict.kind.value}: {why}", kind),
        ("p", f"{verdict.final_p:.6g} where it was drawn", "text"),
        ("coin", f"{verdict.final_coin:.6g} of the cumulative sum", "text"),
        *_margin(verdict.final_margin, near),
    ]


def _facts(look: Look, step: RequestStep, verdict: Verdict, node: int) -> list[Fact]:
    """What the evidence says of a node."""
    tree, outcome = step.tree, Outcome(int(verdict.outcome[node]))
    ink = INKS[outcome]
    parent = int(tree.parent[node])
    above = "the root" if parent == ROOT else f"node {parent} {show_token(look.vocabulary, int(tree.token[parent]))}"
    facts: list[Fact] = [
        ("token", f"{show_token(look.vocabulary, int(tree.token[node]))}  #{int(tree.token[node])}", ink),
        ("place", f"depth {int(tree.depth[node])}, below {above}", "text"),
        ("drawn", Drawn(int(tree.drawn[node])).name.lower().replace("_", " "), "text"),
        ("target", f"p {probability(float(verdict.p[node]))} before any trial", "text"),
    ]
    if np.any(tree.drawn != Drawn.DETERMINISTIC):
        facts.append(("drafter", f"q {probability(float(tree.q[node]))} as drawn", "text"))
    if step.notes is not None:
        prob, score = float(step.notes.prob[node]), float(step.notes.score[node])
        facts.append(("drafter", f"gave it {probability(prob)}; log of the whole path {score:.3f}", "text"))
    facts += _trial(verdict, node, outcome, ink)
    if outcome is not Outcome.UNTRIED:
        facts += _margin(float(verdict.margin[node]), node in look.history.near_ties(step))
    for other in tree.children(parent):
        if other != node:
            facts.append(("sibling", _sibling(look, step, verdict, other), INKS[Outcome(int(verdict.outcome[other]))]))
    return facts


def _trial(verdict: Verdict, node: int, outcome: Outcome, ink: Ink) -> list[Fact]:
    """How the coin fell, and against what."""
    if outcome is Outcome.UNTRIED:
        return [("verdict", "untried: an ancestor was rejected, or an elder sibling accepted", ink)]
    p, q, a, coin = (float(x[node]) for x in (verdict.p_trial, verdict.q_trial, verdict.accept_prob, verdict.coin))
    sign = "<" if coin < a else "≥"
    facts: list[Fact] = [
        ("tried", f"p {p:.6g} over q {q:.6g}: a = {a:.6g}", "text"),
        ("verdict", f"{outcome.name.lower()}: coin {coin:.6g} {sign} {a:.6g}", ink),
    ]
    if node in verdict.forced.tolist():
        facts.append(("forced", "by the user: this step is not lossless", "warn"))
    if outcome is Outcome.REJECTED:
        facts.append(("residual", f"{float(verdict.residual_mass[node]):.6g} of the target is left after it", "text"))
    return facts


def _margin(margin: float, near: bool) -> list[Fact]:
    """How far the decision is from another one; nothing where no rounding could make it another."""
    if near:
        return [("margin", f"{margin:.1e}: a near tie: rounding could flip it", "warn")]
    return [("margin", f"{margin:.2g} of probability from the other outcome", "text")] if margin < 1 else []


def _sibling(look: Look, step: RequestStep, verdict: Verdict, node: int) -> str:
    outcome = Outcome(int(verdict.outcome[node]))
    text = f"node {node} {show_token(look.vocabulary, int(step.tree.token[node]))}: {outcome.name.lower()}"
    if outcome is Outcome.UNTRIED:
        return text
    return f"{text}, p {probability(float(verdict.p_trial[node]))}, a {probability(float(verdict.accept_prob[node]))}"


def _wrapped(facts: list[Fact], width: int) -> list[Line]:
    """Label and text; what is too long goes on below, under the text."""
    lines: list[Line] = []
    room = max(width - LABEL, 10)
    for label, text, ink in facts:
        rest = text
        while True:
            at = len(rest) if len(rest) <= room else max(rest.rfind(" ", 0, room + 1), 0) or room
            lines.append([(left(label, LABEL), "dim"), (cut(rest[:at], room), ink)])
            label, rest = "", rest[at:].lstrip()
            if not rest:
                break
    return lines


def _folded(text: str, width: int) -> list[Line]:
    """A line of the debugger's, broken at spaces where it is too long."""
    text, lines = clean(text), []
    while text:
        at = len(text) if cell_len(text) <= width else max(text.rfind(" ", 0, width), 0) or width
        lines.append(text[:at])
        text = text[at:].lstrip()
    return [[(cut(line, width), "text")] for line in lines]


def _context(look: Look, step: RequestStep, node: int, width: int) -> list[Line]:
    """The last tokens before the node's own: prompt, output, and the drafted path."""
    assert look.request is not None
    assert look.part is not None
    ahead = step.tree.path_to(node)[:-1] if node < len(step.tree) else _accepted(step)
    path = [int(token) for token in step.tree.token[ahead]]
    text = "".join(show_token(look.vocabulary, token) for token in look.request.before(look.part[0], TAIL))
    drafted = "".join(show_token(look.vocabulary, token) for token in path)
    room = max(width - LABEL - cell_len(drafted) - 1, 8)
    shown = text if cell_len(text) <= room else "…" + cut(text[::-1], room - 1).rstrip("…")[::-1]
    return [[(left("context", LABEL), "dim"), (shown, "text"), (drafted, "accent")]]


def _accepted(step: RequestStep) -> list[int]:
    return [] if step.verdict is None else [int(node) for node in step.verdict.path]


class StepScreen(Over):
    """The chosen request's step: its nodes, and one of them in full."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("d", "dismiss", "Close", show=False)]
    awaits = False  # an answer of the debugger's about a node

    def compose(self) -> ComposeResult:
        """Nodes beside, or above, the one that is picked."""
        panel = NodesPanel("nodes")
        with Container(id="of-step"):
            yield panel
            yield NodePanel(panel, "node")

    def on_mount(self) -> None:
        """Arrows pick a node."""
        super().on_mount()
        self.query_one(NodesPanel).focus()

    def action_pick(self, way: int) -> None:
        """Another node."""
        panel = self.query_one(NodesPanel)
        panel.picked = min(max(panel.picked + way, 0), max(len(panel.order) - 1, 0))
        self.show(self.last)

    def action_distributions(self) -> None:
        """Ask the debugger for the whole distributions at the node."""
        panel = self.query_one(NodesPanel)
        if self.last.part is None or not panel.order or panel.order[panel.picked] >= len(self.last.part[1].tree):
            return
        self.query_one(NodePanel).answer = ["asking the debugger …"]
        self.query_one(NodePanel).about = panel.key(self.last)
        self.show(self.last)
        self.run_worker(self.app.run_action(f"ask_node({panel.order[panel.picked]})"))

    def hear(self, text: str) -> None:
        """What the debugger said of it."""
        self.awaits = False
        lines = text.splitlines()
        table = next((at for at, line in enumerate(lines) if line.startswith("target, raw")), 0)
        self.query_one(NodePanel).answer = lines[table:]  # what is above it stands on the panel already
        self.show(self.last)
