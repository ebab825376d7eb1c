"""A real Prometheus scrapes `specscope serve`: its log, its exemplars, and each query of docs/queries.md."""

import json
import math
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from specscope.trace.history.stats import measure
from specscope.trace.wire.reading import read_capture
from tests.serve.command import BODY, Command
from tests.serve.running import http
from tests.serve.test_metrics import DASHBOARD
from tests.support.prometheus import binary, prometheus
from tests.waiting import HANG_SECONDS, until

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[2] / "docs/queries.md").read_text()
QUERIES = [
    query
    for block in re.findall(r"```promql\n(.*?)```", PAGE, re.S)
    for query in re.split(r"\n(?![ ])", re.sub(r"^(#.*|)\n", "", block, flags=re.M).strip())
]
REQUESTS = 12  # a round
LENGTH = "specscope:request_acceptance_length_bucket"
CALLER = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def scraped(tiny, tmp_path_factory):
    """(a Prometheus that has seen the requests of a server, the server's capture)."""
    binary()
    folder = tmp_path_factory.mktemp("prometheus")
    server = Command(folder / "run.jsonl", model=tiny)
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    config = yaml.safe_load(text.replace("127.0.0.1:8000", server.url.removeprefix("http://")))
    try:
        with prometheus(config, folder) as started:
            started.until("up", 1)
            for done in (1, 2):  # a rate needs two samples, and a position is there when a draft was
                with ThreadPoolExecutor(4) as pool:
                    list(pool.map(lambda number: ask(server, number), range(REQUESTS)))
                started.until("sum(vllm:request_success_total)", done * REQUESTS)
            yield started, folder / "run.jsonl"
    finally:
        server.close()


def ask(server, number):
    """One request; the last one has a caller's span."""
    body = {**BODY, "prompt": "abcabc" * (1 + number), "max_tokens": 8 + 4 * number}
    headers = {"traceparent": f"00-{CALLER}-b7ad6b7169203331-01"} if number == REQUESTS - 1 else {}
    http.post(server.url + "/v1/completions", json=body, headers=headers, timeout=HANG_SECONDS).raise_for_status()


def test_no_query_of_the_page_is_left_out():
    blocks = "".join(re.findall(r"```promql\n(.*?)```", PAGE, re.S))
    lines = [line for line in blocks.splitlines() if line and not line.startswith("#")]
    assert lines == "\n".join(QUERIES).splitlines()
    assert len(QUERIES) > 10


@pytest.mark.parametrize("query", QUERIES)
def test_each_query_of_the_page_gives_data(scraped, query):
    values = scraped[0].values(query)
    assert values
    assert all(math.isfinite(value) for value in values), values


def whole(capture):
    """All requests of the capture, when they have ended there too."""

    def ended():
        requests = read_capture(str(capture)).history.requests.values()
        return requests if sum(one.end is not None for one in requests) == 2 * REQUESTS else None

    return until(ended)


def test_acceptance_is_that_of_the_capture(scraped):
    started, capture = scraped
    requests = whole(capture)
    lengths = [tau for one in requests if (tau := measure(one.steps).tau) is not None]
    [total] = started.values("sum(specscope:request_acceptance_length_sum)")
    assert started.values(LENGTH.replace("bucket", "count")) == [len(lengths)]
    assert total == pytest.approx(sum(lengths))
    [poor] = started.values(LENGTH + '{le="1.5"}')
    assert poor == sum(tau <= 1.5 for tau in lengths)


def test_exemplars_are_stored_and_are_requests_of_the_capture(scraped):
    started, capture = scraped
    now = time.time()
    groups = started.ask("query_exemplars", query='{__name__=~".+_bucket"}', start=now - 3600, end=now)
    named = {group["seriesLabels"]["__name__"] for group in groups}
    assert {LENGTH, "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"} <= named
    ids = Counter(one["labels"]["trace_id"] for group in groups for one in group["exemplars"])
    assert whole(capture)
    lines = capture.read_text("utf-8").splitlines()
    resources = [one for line in lines for one in json.loads(line)["resourceSpans"]]
    spans = [span for one in resources for scope in one["scopeSpans"] for span in scope["spans"]]
    traces = {span["traceId"] for span in spans if span["name"] == "decode_step"}
    assert CALLER in ids
    assert set(ids) <= traces


def test_the_dashboards_names_and_labels_are_stored(scraped):
    for name, labels in DASHBOARD.items():
        stored = scraped[0].ask("query", query=name)["result"]
        assert stored, name
        for series in stored:
            assert set(series["metric"]) == labels | {"job", "instance", "__name__"}


def test_no_warning_and_no_error(scraped):
    started, _ = scraped
    assert [line for line in started.log() if line["level"] != "info"] == []
    [target] = started.ask("targets")["activeTargets"]
    assert (target["labels"]["job"], target["health"], target["lastError"]) == ("specscope", "up", "")
    assert started.values("min_over_time(up[1h])") == [1]
