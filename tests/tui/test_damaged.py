"""A damaged capture on the real screen: what was left out is said, the rest can be looked at."""

from __future__ import annotations

import pytest

from specscope.debug.viewer import Viewer
from specscope.trace.wire.reading import CaptureReader
from specscope.tui.app import ScopeApp
from specscope.tui.widgets.lines import Panel
from tests.trace.damage import damaged, small

from .sample import until


@pytest.mark.parametrize("seed", [5, 11, 13])
async def test_a_replay_says_what_was_left_out(tmp_path, seed):
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(damaged(small("planted"), seed))
    app = ScopeApp(Viewer.over(CaptureReader(path)), title=path.name)
    said = []
    notify = app.notify
    app.notify = lambda text, **how: (said.append(text), notify(text, **how))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: said)
        assert any("left out" in text for text in said)
        for key in ("left", "right", "d", "down", "escape", "t", "escape", "v", "escape", "end", "home"):
            await pilot.press(key)
            drawn = [text for panel in app.query(Panel) for line in panel.sheet.lines for text, _ in line]
            assert drawn
            assert not [text for text in drawn if "cannot draw this" in text]
        assert app.lost == ""
        assert len(app.viewer.history.steps) > 2
