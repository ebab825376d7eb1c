"""Over: a screen of panels over the main one, fed with the same looks, with its keys at the foot. Esc closes it."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.screen import ModalScreen
from textual.widget import Widget

from specscope.tui.keys import MOVING, Key, bound
from specscope.tui.look import Look
from specscope.tui.text import fit
from specscope.tui.widgets.lines import Panel, Sheet
from specscope.tui.widgets.listing import ItemPicked


def close(rank: int, keys: str = "escape,q", word: str = "close") -> Key:
    """The key that closes a screen, with its rank at the foot."""
    return Key(keys, "screen.dismiss", "Close", "Esc", word, rank)


class Over(ModalScreen[None]):
    """Subclasses compose the panels; the app shows each look to all of them.

    Its own keys, as many as there is room for, stand at its foot.
    """

    KEYS: ClassVar[tuple[Key, ...]] = ()
    FIRST: ClassVar[type[Widget] | None] = None  # the panel that has the focus at first
    BINDINGS = bound((close(-1), *MOVING))

    def __init_subclass__(cls, **how: Any) -> None:  # noqa: ANN401
        cls.BINDINGS = bound(cls.KEYS)
        super().__init_subclass__(**how)

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.last = look

    def compose(self) -> ComposeResult:
        """The subclass's panels, and the keys below them."""
        yield from self.parts()
        yield Hints(self.at_foot, "hints")

    @property
    def at_foot(self) -> Iterable[Key]:
        """The keys that may stand at the foot."""
        return self.KEYS

    def parts(self) -> ComposeResult:
        raise NotImplementedError

    def on_mount(self) -> None:
        """Show the current look once the panels have their sizes."""
        self.call_after_refresh(self.show, self.last)
        if self.FIRST is not None:
            self.query(self.FIRST).first().focus()

    def show(self, look: Look) -> None:
        self.last = look
        for panel in self.query(Panel):
            panel.show(look)

    def on_item_picked(self, event: ItemPicked) -> None:
        self.show(self.last)


class Hints(Panel, can_focus=False):
    OF = attrgetter("look.viewer.live", "look.viewer.paused", "look.playing", "shown")

    def __init__(self, keys: Iterable[Key], id: str | None = None) -> None:
        super().__init__(id=id)
        self._keys = [key for key in keys if key.rank >= 0]

    @property
    def shown(self) -> list[Key]:
        """Those that do anything here."""
        return [key for key in self._keys if self.look is not None and _works(key, self.look)]

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """Keys and words, and where each begins and ends for the mouse."""
        space = (
            ("resume" if look.viewer.paused else "pause") if look.viewer.live else "stop" if look.playing else "play"
        )
        keys = self.shown
        line = fit([(key.rank, [(key.label, "key"), (f" {key.word or space}", "dim")]) for key in keys], width - 2)
        spots, cell, by_label = [], 1, {key.label: key.action for key in keys}
        for (text, ink), (word, _) in zip(line, [*line[1:], ("", "dim")], strict=True):
            if ink == "key":
                spots.append((cell, cell + len(text + word), by_label[text]))
            cell += len(text)
        return Sheet([[(" ", "text"), *line]], actions={0: spots})


def _works(key: Key, look: Look) -> bool:
    """Whether the key does anything here."""
    control, counts_only = look.viewer.control, look.history.counts_only
    match key.when:
        case "forked":
            return control is not None and control.forked is not None
        case "trees":
            return not counts_only
        case "counts":
            return counts_only
        case "several":
            return counts_only and hasattr(control, "next_engine")
    return key.when == "always" or look.asks
