"""The engine over time: where its steps' time goes, batch, queue and KV, up to the position."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from statistics import median
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from specscope.trace.records import StepRecord
from specscope.trace.wording import plural
from specscope.tui.look import Look
from specscope.tui.screens.over import Over
from specscope.tui.text import LEVELS, Ink, Line, bar, clean, left, percent, right
from specscope.tui.widgets.kv_map import kv_map
from specscope.tui.widgets.lines import Sheet
from specscope.tui.widgets.panel import Panel

NAME, NUMBER = 12, 10
LONGEST = 400  # steps that are looked back at


class EnginePanel(Panel):
    """Phases as a table, and a column a step for what changes from step to step."""

    def key(self, look: Look) -> Hashable:
        """The position."""
        return look.position, look.steps == 0

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """As many steps as the width has columns."""
        room = max(min(width - NAME - NUMBER - 2, LONGEST), 1)
        steps = [s for s in look.history.steps[max(look.position + 1 - room, 0) : look.position + 1] if s.phases]
        title: Line = [("Engine", "strong"), ("  v or Esc closes", "dim")]
        if not steps:
            return Sheet([[("no step has run yet", "faint")]], title)
        lines: list[Line] = [
            [(f"the last {plural(len(steps), 'step')} up to step {steps[-1].step:,}, a column each", "dim")],
            [],
            *_phases(steps, width),
            [],
            *_curve("step", [(s.end_ns - s.start_ns) / 1e6 for s in steps], "{:.1f} ms"),
            *_curve("running", [float(s.running) for s in steps], "{:.0f}"),
            *_curve("waiting", [float(s.waiting) for s in steps], "{:.0f}"),
            *_curve("KV blocks", [float(s.blocks_used) for s in steps], "{:,.0f}"),
            *_curve("tokens", [float(sum(p.emitted for p in s.requests)) for s in steps], "{:.0f}"),
            *_curve("nodes", [float(sum(len(p.tree) for p in s.requests)) for s in steps], "{:.0f}"),
            [],
            [("KV blocks, by request", "dim")],
            *kv_map(steps[-1], look.history.run.block_size if look.history.run else 16, width),
        ]
        preempted = sum(len(s.preempted) for s in steps)
        if preempted:
            lines += [[], [(f"{plural(preempted, 'preemption')} in these steps: those requests lost their KV", "warn")]]
        return Sheet(lines, title)


def _phases(steps: Sequence[StepRecord], width: int) -> list[Line]:
    """A line a phase, the drafter's passes among them: median, and its share of the time."""
    times: dict[str, list[float]] = {}
    inner: set[str] = set()
    for step in steps:
        for phase in step.phases:
            times.setdefault(phase.name, []).append((phase.end_ns - phase.start_ns) / 1e6)
            if phase.name == "draft":
                for own in step.passes:
                    times.setdefault(own.name, []).append((own.end_ns - own.start_ns) / 1e6)
                    inner.add(own.name)
    whole = sum(sum(ms) for name, ms in times.items() if name not in inner) or 1.0
    on_device = _on_device(steps)
    room = max(width - NAME - (3 if on_device else 2) * NUMBER, 4)
    head = left("phase", NAME) + right("median", NUMBER) + (right("on device", NUMBER) if on_device else "")
    lines: list[Line] = [[(head + right("share", NUMBER), "faint")]]
    for name, ms in times.items():
        share, dim = sum(ms) / whole, name in inner
        label = left(("  " if dim else "") + clean(name), NAME)
        numbers = right(f"{median(ms):.2f} ms", NUMBER)
        if on_device:
            numbers += right(f"{on_device[name]:.2f} ms" if name in on_device else "", NUMBER)
        numbers += right(percent(share), NUMBER - 1) + " "
        ink: Ink = "faint" if dim else "text"
        lines.append([(label, ink), (numbers, ink), (bar(share, room), "rail" if dim else "bar")])
    return lines


def _on_device(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Milliseconds of each phase on a GPU, medians; empty where there is none. A record tells of the step before."""
    told = [step for step in steps if len(step.device_ns) == len(step.phases)]
    names = [phase.name for phase in told[0].phases] if told else []
    return {name: median(step.device_ns[i] for step in told) / 1e6 for i, name in enumerate(names)}


def _curve(name: str, values: Sequence[float], form: str) -> list[Line]:
    """One row of columns, with the newest value and the highest."""
    top = max(values)
    marks = "".join(LEVELS[0 if top <= 0 or v <= 0 else max(1, round(v / top * 8))] for v in values)
    said = f"at most {form.format(top)}"
    return [
        [
            (left(name, NAME), "text"),
            (right(form.format(values[-1]), NUMBER), "strong"),
            ("  ", "text"),
            (marks, "bar"),
        ],
        [(" " * (NAME + NUMBER + 2), "text"), (said, "faint")],
    ]


class EngineScreen(Over):
    """The panel over the whole screen."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("v", "dismiss", "Close", show=False)]

    def compose(self) -> ComposeResult:
        """One panel."""
        yield EnginePanel("engine")
