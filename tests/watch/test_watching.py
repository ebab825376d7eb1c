"""Sources on threads: order, several engines, what waits to be shown, and what fails."""

import gc
import io

from rich.console import Console

from specscope.cli.watch import IntervalRows
from specscope.debug.viewer import Viewer
from specscope.trace.record.records import StepRecord
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.outputs import OutputOptions, Outputs
from specscope.trace.wire.spans import SpanLevel
from specscope.watch.source import File, Server
from specscope.watch.watching import WAITING, Watch, Watched
from tests.waiting import until
from tests.watch.samples import DATA, Looks, Page, text


def outputs(folder=None):
    """Opens captures 0.jsonl, 1.jsonl, ... in a folder, or nothing."""

    def open_outputs(run, bus, engine, number):
        path = None if folder is None else str(folder / f"{number}.jsonl")
        options = OutputOptions(path, None, None, SpanLevel.TREES, None)
        return Outputs(options, bus, run, Vocabulary(), None, engine=engine)

    return open_outputs


def long_log(folder, count):
    """A log of so many intervals of 4 drafts each."""
    (folder / "long.log").write_text((text("log.txt").splitlines()[1] + "\n") * count)
    return File(str(folder / "long.log"), follow=False)


def taken(watch):
    return [news[1] for news in watch.take() if not isinstance(news, str)]


def test_nothing_is_lost_when_a_table_is_slower_than_a_file(tmp_path):
    watch = Watch([long_log(tmp_path, WAITING + 500)], outputs())
    stop = watch._stop = Looks()
    watch.start()
    until(lambda: len(watch.news) >= WAITING)
    stop.again()
    assert len(watch.news) <= WAITING + 1
    records = []
    until(lambda: watch.done and not watch.news, lambda: records.extend(taken(watch)))
    records += taken(watch)
    watch.stop()
    assert [record.step for record in records] == list(range(WAITING + 500))


def test_a_table_keeps_sums_and_no_records(tmp_path):
    watch, printed = Watch([long_log(tmp_path, 300)], outputs()), io.StringIO()
    rows, before = IntervalRows(Console(file=printed, width=200)), alive()
    watch.start()
    until(lambda: watch.done)
    rows.take(watch)
    until(lambda: alive() <= before + 1)  # its outputs take theirs in time, and hold the last one
    rows.totals()
    watch.stop()
    assert "300 intervals" in printed.getvalue()
    assert "1,200" in printed.getvalue()  # 4 drafts each


def alive():
    """Records that somebody holds, of whatever test."""
    gc.collect()
    return sum(type(one) is StepRecord for one in gc.get_objects())


def test_one_source_that_fails_leaves_the_others(tmp_path):
    (tmp_path / "odd.log").write_text("nothing\n")
    watch = Watch([File(str(path), follow=False) for path in (tmp_path / "odd.log", DATA / "log.txt")], outputs())
    watch.start()
    until(lambda: watch.done)
    watch.stop()
    assert len([news for news in watch.take() if not isinstance(news, str)]) == 5
    assert "odd.log holds nothing that watch recognises" in str(watch.errors[0])
    watch = Watch([File(str(DATA / "log.txt"), follow=False)], outputs(tmp_path / "none"))
    watch.start()
    until(lambda: watch.done)
    watch.stop()
    assert "cannot write" in str(watch.errors[0])


def test_a_screen_watches_for_as_long_as_it_was_told_and_cannot_pause_it():
    with Page(text("metrics_before.txt")) as page:
        server = Server(page.url, 0.05)
        server.open()
        watch = Watch([server], outputs())
        control = Watched(watch, 0.2)
        viewer = control.viewer = Viewer(control=control)
        assert control.status == "loading"
        watch.start()
        until(lambda: control.status != "loading", viewer.poll)
        viewer.toggle_pause()
        viewer.poll()
        assert "cannot be" in viewer.news[-1].text or "not controlled" in viewer.news[-1].text
        until(lambda: control.status == "ended", viewer.poll)
        assert (control.error, viewer.history.counts_only, bool(viewer.history.steps)) == ("", True, True)
        watch.stop()
