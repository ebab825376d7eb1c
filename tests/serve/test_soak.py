"""Many customers at once, of every kind: nobody is forgotten, nothing is lost, nothing grows."""

import asyncio
import contextlib
import random
import signal
import threading
import time
from collections import Counter

import psutil
import pytest

from specscope.trace.wire.reading import read_capture
from tests.processes import ended
from tests.serve.command import Command
from tests.serve.customers import shop
from tests.support.commands import said
from tests.tiny import write_tiny_model
from tests.waiting import HANG_SECONDS, wait_for

pytest.importorskip("xgrammar")
CUSTOMERS = 10
HOW = ["--max-batch", "6", "--max-queue", "4", "--async-scheduling", "--shutdown-timeout", "60"]
REAL = ["--kv-memory", "0.02"]
SMALL = ["--kv-memory", "0.001", "--draft-model", "self:2", "--tree", "3", "--target"]
LEAVE_SECONDS = HANG_SECONDS  # what a request may go on for when its customer has left
FLAT = 1.1  # of the memory at the first third


@pytest.fixture(params=["tiny", "real"])
def server(request, tmp_path):
    """A tiny model, each of whose tokens has a text, so that texts can be compared; or the default one."""
    is_tiny = request.param == "tiny"
    model = [*SMALL, write_tiny_model(tmp_path / "tiny", vocab=259, layers=10)] if is_tiny else REAL
    made = Command(tmp_path / "soak.jsonl", *HOW, *model, model=None)
    made.asked = (300, 64, 30, 100.0) if is_tiny else (600, 64, 20_000, 1200.0)
    yield made
    made.close()


def watched(process, memory):
    """Its memory, second by second."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid)
        while not ended(process, 0.5):
            memory.append(sum(one.memory_info().rss for one in (family, *family.children(recursive=True))))


@pytest.mark.slow
def test_a_soak(server, tmp_path):
    longest, most, requests, seconds = server.asked

    def customers(seed, requests):
        return asyncio.run(shop(server.url, random.Random(seed), longest, most, requests, CUSTOMERS, seconds))

    told, memory = customers(1, 40), []  # each kind once: what it needs is there then
    threading.Thread(target=watched, args=(server.process, memory), daemon=True).start()
    began = time.monotonic()
    told += customers(2, requests)
    assert wait_for(lambda: server.gauge("num_requests_running") == 0)
    assert server.gauge("num_requests_waiting") == 0
    assert server.gauge("kv_cache_usage_perc") == 0, "a KV block is lost"
    preempted, spent = server.gauge("num_preemptions_total"), time.monotonic() - began
    assert server.end(signal.SIGTERM) == 0, server.lines
    assert not [line for line in server.lines if "failed" in line or "lost" in line], server.lines
    capture = tmp_path / "soak.jsonl"
    reader = read_capture(capture)
    assert not reader.warnings
    kinds = judge(told, reader.history)
    said(["verify", str(capture)])
    third = len(memory) // 3
    growth = max(memory[-third:]) / max(memory[:third])
    print(
        f"{len(told)} requests in {spent:.0f} s: {dict(kinds)}; {preempted:.0f} preemptions; memory "
        f"{max(memory[:third]) / 2**20:.0f} MiB in the first third, {max(memory[-third:]) / 2**20:.0f} in the last"
    )
    assert preempted > 0
    assert growth < FLAT
    assert {"answered", "refused", "left", "bad"} <= set(kinds)


def judge(told, history):
    """Every request was answered or refused, and every answer is what the engine made. What became of how many."""
    kinds, ours = Counter(), dict(history.requests)
    for one in told:
        kinds[kind := kind_of(one)] += 1
        names = [one.id] if len(one.ends) == 1 else [f"{one.id}-{index}" for index in sorted(one.ends)]
        if kind == "answered":
            compare(one, [ours.pop(name) for name in names], history.vocabulary)
    for name, request in ours.items():  # of those who left, whose name nobody may have been told
        assert request.end is not None, f"{name} did not end"
    late = {one.id: one.left_ns for one in told if one.left_ns is not None and one.id}
    for name, request in ours.items():
        left = next((at for id_, at in late.items() if name.startswith(id_)), None)
        assert left is None or request.end.finished_ns - left < LEAVE_SECONDS * 1e9
    for request in history.requests.values():
        made = [token for step in request.steps for token in step.output()]
        assert made == request.end.output.tolist(), "a token was lost, or came twice"
    return kinds


def kind_of(one):
    if one.left_ns is not None:
        return "left"
    if one.status == 429:
        return "refused"
    if one.asked.bad:
        assert one.status == 400, one
        assert one.error
        return "bad"
    assert (one.status, one.whole, one.error) == (200, True, ""), one
    return "answered"


def compare(one, requests, vocabulary):
    """An answer beside the engine's record of it."""
    assert len(requests) == one.asked.body.get("n", 1)
    assert one.tokens == sum(len(request.end.output) for request in requests)
    for index, request in enumerate(requests):
        end = request.end
        assert one.ends[index] == {"eos": "stop", "stop": "stop", "length": "length"}[end.reason.value]
        assert one.texts[index] == end.text(end.output.tolist(), vocabulary), one
        if "logprobs" in one.asked.body:
            assert one.logprobs[index] == len(end.output)
        if one.asked.good and one.ends[index] == "stop":
            assert one.asked.good(one.texts[index]), one
