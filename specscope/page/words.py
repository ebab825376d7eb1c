"""The words that the page is shipped with: those of the terminal, from where they are declared; and text made safe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

from specscope.trace.history.totals import Undrafted
from specscope.trace.history.wording import SENTENCES
from specscope.trace.record.draft_vocabulary import NOT_TOLD
from specscope.trace.record.notes import SOURCES
from specscope.trace.record.rules import ABOUT as RULES
from specscope.trace.record.vocabulary import printable
from specscope.trace.words import DRAWN, NODE, label
from specscope.tree_shape import MAX_NODES
from specscope.tui.keys import COLOURS, FIGURES, KEYS, MARKS, RATES

ON_PAGE = "full_stop comma pagedown pageup home end g n N slash o O F y j k r d v a t question_mark"
MORE = (  # and those of its panels
    ("↑ ↓", "the node above or below in the tree"),
    ("← →", "the previous or the next step"),
    ("Esc", "close help; empty the filter and leave it"),
)


def words() -> dict[str, Any]:
    """Sentences, names of what is coded, keys and the legend."""
    by_key = {key.keys.split(",")[0]: key for key in KEYS}
    return {
        "sentences": SENTENCES,
        "undrafted": {reason.value: reason.about for reason in Undrafted},
        "rules": RULES,
        "drawn": [DRAWN[kind] for kind in sorted(DRAWN)],
        "sources": SOURCES,
        "untold": NOT_TOLD,
        "widest": MAX_NODES,
        "keys": [(key, by_key[key].label.split()[0]) for key in ON_PAGE.split()],
        "more_keys": MORE,
        "marks": [(mark, text) for mark, _, text in MARKS],
        "colours": [(name, text) for name, _, text in COLOURS],
        "figures": [(label(name), NODE[name].about) for name in FIGURES],
        "labels": {name: label(name) for name in FIGURES},
        "rates": RATES,
    }


def safe(value: Any) -> Any:  # noqa: ANN401
    """Plain values for JSON: in texts what could turn a line or is no character shows as an escape; no infinity."""
    match value:
        case Enum():
            return safe(value.value)
        case str():
            return printable(value, keep="\n\t")
        case Mapping():
            return {printable(str(key)): safe(item) for key, item in value.items()}
        case list() | tuple():
            return [safe(item) for item in value]
        case float():
            return value if math.isfinite(value) else None
    return value
