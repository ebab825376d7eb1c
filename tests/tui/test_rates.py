"""The figures on the screen: the acceptance length with its n, what all steps brought, and why some drafted nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specscope.debug.viewer import Viewer
from specscope.tui.screens.engine_view import EnginePanel
from specscope.tui.widgets.rates import RatesPanel
from tests.analyze.histories import RUN, history, info, record, step

from .sample import running, text_of


def adaptive() -> Viewer:
    """Eight steps: two drafts, five that did not pay, one that was off."""
    run = replace(RUN, drafter="suffix+eagle", costs="66d9d06db774")
    parts = [step(tree="2", path=(0, 1)), step(tree="2")]
    parts += [replace(step(), sizing="no draft pays")] * 5
    records = [record(at, [replace(part, index=at)]) for at, part in enumerate(parts)]
    records[0] = replace(records[0], admitted=(info("a"),))
    last = record(7, [replace(step(), index=7)], speculation=False, speculation_off="set to off")
    return Viewer(history=history([*records, last], run))


@pytest.mark.parametrize("size", [(120, 40), (200, 60)], ids=["120x40", "200x60"])
async def test_a_stranger_sees_that_most_steps_drafted_nothing_and_why(size):
    async with running(adaptive(), size, title="x") as (app, pilot):
        await pilot.press("end")
        await pilot.pause()
        shown = text_of(app.screen.query_one(RatesPanel))
        assert "τ 2.00 of 2 drafts  1.25 tok/step" in shown
        assert "no draft in 6 of 8 steps  adaptive" in shown
        assert "83% no draft would pay" in shown
        assert "17% drafting was off" in shown
        if size[1] == 60:
            assert "recovered 12%  bonus 12%  target 75%" in shown
        await pilot.press("v")
        await pilot.pause()
        engine = text_of(app.screen.query_one(EnginePanel))
        assert "no draft in 6 of 8 steps  adaptive" in engine
        assert "83% no draft would pay" in engine
