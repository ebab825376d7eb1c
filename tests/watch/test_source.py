"""Servers, files and pipes: seen from the content, on threads, and what goes wrong is said in one line."""

import base64
import contextlib
import gc
import io
import json
import os
import re
import threading

import pytest
from rich.console import Console

from specscope.cli.watch import IntervalRows
from specscope.debug.viewer import Viewer
from specscope.errors import UserError
from specscope.trace.record.records import StepRecord
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.outputs import OutputOptions, Outputs
from specscope.trace.wire.spans import SpanLevel
from specscope.watch.source import File, Server, metrics_url
from specscope.watch.watching import WAITING, Watch, Watched
from tests.remote.store import Raw
from tests.waiting import HANG_SECONDS, ends, until
from tests.watch.samples import DATA, Looks, Page, changed, read, text


def aggregates(path, **more):
    source, told = read(path, **more)
    return source, [one.aggregate for one in told]


FILES = {
    "vllm/log.txt": ("vLLM's log", [4, 4, 106, 45, 22]),
    "vllm/chat_greedy.json": ("vLLM response", [(4, 12, 3, 8)]),
    "vllm/chat_stream.txt": ("vLLM response", [23]),
    "vllm/completion_greedy.json": ("vLLM response", [30]),
    "vllm/get_metrics.json": ("vLLM get_metrics()", [(233, 699, 98, 336)]),
    "vllm/spec_decode_metrics.json": ("vLLM response", [4, 2, 1, 3, 8, 5]),
    "vllm/metrics_after.txt": ("vLLM /metrics, engine 0", [155]),
    "people/llamacpp/chat.json": ("llama.cpp response", [(None, 95, 95, 120)]),
    "people/llamacpp/completion.json": ("llama.cpp response", [(None, 47, 47, 60)]),
    "people/llamacpp_resp.json": ("llama.cpp response", [(None, 514, 365, 42)]),
    "people/llamacpp/stream.txt": ("llama.cpp response", [(None, 136, 64, 100)]),
}


@pytest.mark.parametrize("name", FILES)
def test_what_a_file_holds_is_recognised(name):
    (source, told), (what, figures) = aggregates(DATA.parent / name), FILES[name]
    assert source.recognised == what
    whole = [(one.drafts, one.drafted, one.accepted, one.emitted) for one in told]
    assert figures == [each if isinstance(figures[0], tuple) else each[0] for each in whole]
    assert source.faults.total == 0


def test_several_responses_and_what_is_damaged_among_them(tmp_path):
    path = tmp_path / "responses.jsonl"
    good = text("chat_greedy.json")
    path.write_text(good + text("chat_n2.json") + good[: len(good) // 2] + "\n" + text("completion_greedy.json"))
    source, told = aggregates(path)
    assert [one.drafts for one in told] == [4, 30]
    assert source.faults.total == 2
    assert "line 2: no figures of acceptance" in source.faults.lines()[0]
    assert "line 3: not JSON" in source.faults.lines()[1]
    path.write_text(f"[{good}, {text('chat_n2.json')}, {good}]")
    source, told = aggregates(path)
    assert [one.drafts for one in told] == [4, 4]
    assert "item 1: no figures of acceptance" in source.faults.lines()[0]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "is empty"),
        ("hello\n", "holds nothing that watch recognises"),
        ("{\n", "line 1: not JSON"),
        ("[]", "holds nothing that watch recognises"),
        ("# HELP x y\n# TYPE x gauge\nx 1\n", "has no speculation metrics"),
        ("# HELP x y\nvllm:{{{", "is not Prometheus text"),
        (
            "SpecDecoding metrics: Mean acceptance length: 1.",
            "no speculation figures; left out 1×: .*without its acc",
        ),
        ("INFO 02-06 03:05:53 metrics.py:475] Speculative metrics: Number of accepted tokens: 1", "vLLM V0's figures"),
        (
            "vllm:spec_decode_num_emitted_tokens_total 5.0\nvllm:spec_decode_num_draft_tokens_total 9.0\n",
            "vLLM V0's fig",
        ),
        ("[2026-11-25 10:11:12] Decode batch, accept len: 1.", "no speculation figures; left out 1×: .*is cut off"),
    ],
)
def test_a_file_with_nothing_in_it_says_why(tmp_path, content, why):
    (tmp_path / "file").write_text(content)
    with pytest.raises(UserError, match=why):
        aggregates(tmp_path / "file")


class Running:
    """A source on a thread, and what it has told."""

    def __init__(self, source):
        self.told, self.stop = [], Looks()
        self._thread = threading.Thread(target=lambda: [self.told.append(one) for one in source.run(self.stop)])
        self._thread.start()

    def wait(self, count):
        until(lambda: len(self.drafts) >= count)
        return self.drafts

    @property
    def drafts(self):
        return [one.aggregate.drafts for one in self.told if not isinstance(one, str)]

    @property
    def notices(self):
        return [one for one in self.told if isinstance(one, str)]

    def close(self):
        self.stop.set()
        self._thread.join(HANG_SECONDS)
        assert not self._thread.is_alive()


def test_a_log_that_grows_is_followed(tmp_path):
    """Half a line is none."""
    path, lines = tmp_path / "v.log", text("log.txt").splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[3])
    with contextlib.closing(Running(File(str(path), follow=True))) as running, path.open("a") as file:
        assert running.wait(1) == [4]
        file.write(lines[4][:150])
        file.flush()
        running.stop.again()
        assert len(running.drafts) == 1
        file.write(lines[4][150:])
        file.flush()
        assert running.wait(2) == [4, 4]


@pytest.mark.parametrize("indent", [None, 2])
def test_json_that_is_followed_needs_no_newline_and_has_the_time_of_its_file(indent, tmp_path):
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(json.loads(text("get_metrics.json")), indent=indent))
    os.utime(path, (10**9, 10**9))
    with contextlib.closing(Running(File(str(path), follow=True))) as running:
        running.wait(1)
        (interval,) = [one for one in running.told if not isinstance(one, str)]
        assert interval.end_ns == 10**18


def test_a_pipe_is_read_as_it_is_written(tmp_path):
    path, lines = tmp_path / "pipe", text("log.txt").splitlines(keepends=True)
    os.mkfifo(path)
    with contextlib.closing(Running(File(str(path), follow=False))) as running:
        with path.open("w") as pipe:
            pipe.write(lines[1])
            pipe.flush()
            assert running.wait(1) == [4]
            pipe.write(lines[6])
        assert running.wait(2) == [4, 106]


def test_a_server_that_goes_away_and_comes_back_restarted():
    with Page(text("metrics_after.txt")) as page:
        source = Server(page.url, 0.05)
        source.open()
        with contextlib.closing(Running(source)) as running:
            running.wait(1)
            page.status = 503
            until(lambda: running.notices)
            assert "the server answered 503" in running.notices[0]
            page.pages = [changed(text("metrics_before.txt"), created=2e9)]
            page.status = 200
            before = len(running.drafts)
            running.wait(before + 1)
            assert any("answers again" in notice for notice in running.notices)
            (restarted,) = [one for one in running.told if not isinstance(one, str) and one.aggregate.reset]
            assert restarted.aggregate.drafts == 12
            assert len([notice for notice in running.notices if "503" in notice]) == 1  # said once, not each time


def test_a_server_that_cannot_be_reached():
    with Page("") as page:
        gone = page.url
        page.status = 500
        with pytest.raises(UserError, match=r"the server answered 500 Internal Server Error$"):
            Server(gone, 1).open()
        page.status = 200
        with pytest.raises(UserError, match="answered 404 Not Found: is the path right"):
            Server(gone.replace("metrics", "metrix"), 1).open()


DRIPS = [
    b"",
    b"HTTP/1.1 200 OK\r\nX-A: ",
    b"HTTP/1.1 200 OK\r\n\r\n# HELP ",
    b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
]


@pytest.mark.parametrize("start", DRIPS, ids=range(len(DRIPS)))
def test_a_page_that_drips_is_given_up(start):
    with Raw(start, drips=True) as server, pytest.raises(UserError, match=r"its page did not arrive within 0\.3 s"):
        ends(Server(server.url, 1, patience=0.3).open)


def test_a_password_is_sent_and_never_shown():
    with Raw(DRIPS[2], drips=True) as server:
        source = Server(server.url.replace("//", "//me:se%63ret@"), 1, patience=0.3)
        with pytest.raises(UserError) as caught:
            ends(source.open)
    assert f"Authorization: Basic {base64.b64encode(b'me:secret').decode()}".encode() in server.asked[0]
    shown = f"{source.url} {source.name} {caught.value}"
    assert not any(part in shown for part in ("se%63ret", "secret", "me:", "@"))
    assert source.name == server.url.split("/")[2]


BAD = ["http://me:secret@h:99999/", "ftp://me:secret@h/", "http://me:sec/ret@h", "x://a@secret@"]


@pytest.mark.parametrize("url", [*BAD, "http://", "http://a b/", "http://[::1", "file:///etc"])
def test_a_password_in_a_bad_address_is_not_shown_either(url):
    with pytest.raises(UserError, match="write http://HOST:PORT/metrics") as caught:
        metrics_url(url)
    assert "sec" not in str(caught.value).replace("write http", "")
    assert metrics_url("http://h:8000") == metrics_url("http://h:8000/") == "http://h:8000/metrics"
    assert metrics_url("https://h/v1/metrics") == "https://h/v1/metrics"


def outputs(folder=None):
    """Opens captures 0.jsonl, 1.jsonl, ... in a folder, or nothing."""

    def open_outputs(run, bus, engine, number):
        path = None if folder is None else str(folder / f"{number}.jsonl")
        options = OutputOptions(path, None, None, SpanLevel.TREES, None)
        return Outputs(options, bus, run, Vocabulary(), None, engine=engine)

    return open_outputs


def long_log(folder, count):
    """A log of so many intervals of 4 drafts each."""
    line = text("log.txt").splitlines()[1]
    lines = (re.sub(r"\d\d:\d\d:\d\d", f"{at // 60:02}:{at % 60:02}:17", line, count=1) for at in range(count))
    (folder / "long.log").write_text("".join(f"{line}\n" for line in lines))
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
