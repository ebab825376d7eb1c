"""Many customers at once, of every kind: nobody is forgotten, nothing is lost, nothing grows."""

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import threading
import time
from collections import Counter

import httpx2
import psutil
import pytest

from specscope.trace.wire.reading import read_capture
from tests.processes import ENV, SPECSCOPE, ended
from tests.serve.customers import shop
from tests.tiny import write_tiny_model
from tests.waiting import HANG_SECONDS, wait_for

pytest.importorskip("xgrammar")
CUSTOMERS = 10
HOW = (
    *("--dtype", "float32", "--max-batch", "6", "--max-queue", "4", "--port", "0"),
    *("--async-scheduling", "--shutdown-timeout", "60"),
)
REAL = ["--kv-memory", "0.02"]
SMALL = ["--kv-memory", "0.001", "--draft-model", "self:2", "--tree", "3", "--target"]
LEAVE_SECONDS = HANG_SECONDS  # what a request may go on for when its customer has left
FLAT = 1.1  # of the memory at the first third


class Server:
    """`specscope serve`, and its memory second by second."""

    def __init__(self, capture, model):
        self.capture, self.memory = capture, []
        command = list(map(str, [*SPECSCOPE, "serve", *HOW, *model, "-o", capture]))
        self.process = subprocess.Popen(command, env=ENV, stderr=subprocess.PIPE, text=True)
        self.said = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert wait_for(lambda: self.url or self.process.poll() is not None), self.said
        assert self.url, self.said
        self._watch = threading.Thread(target=self._measure, daemon=True)
        self._watch.start()

    @property
    def url(self):
        return next((line.split(" on ")[1].split()[0] for line in self.said if " on http://" in line), None)

    def _read(self):
        self.said.extend(self.process.stderr)

    def _measure(self):
        process = psutil.Process(self.process.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            while not ended(self.process, 0.5):
                self.memory.append(sum(one.memory_info().rss for one in (process, *process.children(recursive=True))))

    def gauge(self, name):
        text = httpx2.get(self.url + "/metrics", timeout=HANG_SECONDS).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))

    def shop(self, seed, longest, most, requests, seconds):
        return asyncio.run(shop(self.url, random.Random(seed), longest, most, requests, CUSTOMERS, seconds))

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(HANG_SECONDS)
        self._reader.join(HANG_SECONDS)
        return code

    def close(self):
        self.process.kill()
        self.process.wait(HANG_SECONDS)
        self._reader.join(HANG_SECONDS)


@pytest.fixture(params=["tiny", pytest.param("real", marks=pytest.mark.slow)])
def server(request, tmp_path):
    """A tiny model, each of whose tokens has a text, so that texts can be compared; or the default one."""
    is_tiny = request.param == "tiny"
    model = [*SMALL, write_tiny_model(tmp_path / "tiny", vocab=259, layers=10)] if is_tiny else REAL
    made = Server(tmp_path / "soak.jsonl", model)
    made.asked = (300, 64, 100, 100.0) if is_tiny else (600, 64, 20_000, 1200.0)
    yield made
    made.close()


def test_a_soak(server):
    longest, most, requests, seconds = server.asked
    told = server.shop(1, longest, most, 40, seconds)  # each kind once: what it needs is there then
    server.memory.clear()
    began = time.monotonic()
    told += server.shop(2, longest, most, requests, seconds)
    assert wait_for(lambda: server.gauge("num_requests_running") == 0)
    assert server.gauge("num_requests_waiting") == 0
    assert server.gauge("kv_cache_usage_perc") == 0, "a KV block is lost"
    preempted, memory = server.gauge("num_preemptions_total"), list(server.memory)
    spent = time.monotonic() - began
    assert server.end() == 0, server.said
    assert not [line for line in server.said if "failed" in line or "lost" in line], server.said
    reader = read_capture(str(server.capture))
    assert not reader.warnings
    kinds = judge(told, reader.history)
    spans_are_whole(server.capture, reader.history)
    found = subprocess.run([*SPECSCOPE, "verify", server.capture], env=ENV, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
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


def spans_are_whole(path, history):
    """Each span has an end, and a parent that is there; each request has one root."""
    spans = [
        span
        for line in path.read_text("utf-8").splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    known = {span["spanId"] for span in spans}
    assert len(known) == len(spans), "two spans have one name"
    for span in spans:
        assert int(span["endTimeUnixNano"]) >= int(span["startTimeUnixNano"]) > 0
        assert not span.get("parentSpanId") or span["parentSpanId"] in known
    assert sum(span["name"].startswith(("text_completion", "chat")) for span in spans) == len(history.requests)
