"""`python -m benchmarks attach`: what it waits for is what its key opens."""

from benchmarks.attach import ANSWER, CLOSE, KEY
from specscope.tui.app import ScopeApp
from tests.tui.sample import replay


async def test_the_key_opens_what_is_waited_for():
    app = ScopeApp(replay(5))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert ANSWER.decode() not in app.export_screenshot().replace("&#160;", " ")
        await pilot.press(KEY)
        await pilot.pause()
        assert ANSWER.decode() in app.export_screenshot().replace("&#160;", " ")
        await pilot.press({"\x1b": "escape"}[CLOSE])
