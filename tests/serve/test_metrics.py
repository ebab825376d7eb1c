"""The page at /metrics, over HTTP: its two forms, and what vLLM's dashboard asks of it."""

import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from specscope.trace.metrics import OPENMETRICS
from specscope.trace.wire.outputs import Outputs
from tests.processes import free_port
from tests.serve.running import http, running
from tests.support.commands import run_here
from tests.waiting import until

PLAIN = "text/plain; version=0.0.4; charset=utf-8"

# What vLLM's Grafana dashboard for speculative decoding asks for, beside `job` and `instance`, which the scraper adds:
# examples/observability/dashboards/grafana/vllm_speculative_decoding.json of vLLM, autumn 2026.
DASHBOARD = {
    "vllm:spec_decode_num_drafts_total": {"model_name", "engine"},
    "vllm:spec_decode_num_draft_tokens_total": {"model_name", "engine"},
    "vllm:spec_decode_num_accepted_tokens_total": {"model_name", "engine"},
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": {"model_name", "engine", "position"},
    "vllm:generation_tokens_total": {"model_name", "engine"},
    "vllm:inter_token_latency_seconds_bucket": {"model_name", "engine", "le"},
    "vllm:inter_token_latency_seconds_sum": {"model_name", "engine"},
    "vllm:inter_token_latency_seconds_count": {"model_name", "engine"},
    "vllm:num_requests_running": {"model_name", "engine"},
}


def page(server, accept):
    answer = http.get(server.url + "/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    return answer.text, answer.headers["content-type"]


def samples(server, accept=OPENMETRICS):
    text, kind = page(server, accept)
    families = openmetrics_families if kind.startswith(OPENMETRICS) else plain_families
    return [sample for family in families(text) for sample in family.samples]


def used(server):
    """The server, when its page counts a request of its own."""
    before = ended(server)
    assert server.complete().status_code == 200
    until(lambda: ended(server) > before)
    return server


def ended(server):
    return sum(one.value for one in samples(server) if one.name == "specscope:request_acceptance_length_count")


@pytest.mark.parametrize("accept", [OPENMETRICS, "*/*", ""])
def test_the_dashboard_finds_every_name_and_label_and_exemplars_are_for_a_scraper_that_takes_them(server, accept):
    """By which header it does, tests/trace/metrics/test_metrics.py has."""
    found = {}
    for sample in samples(used(server), accept):
        found.setdefault(sample.name, set()).update(sample.labels)
    assert {name: found.get(name) for name in DASHBOARD} == DASHBOARD
    text, kind = page(server, accept)
    assert kind.startswith(f"{OPENMETRICS}; version=1.0.0; charset=utf-8" if accept == OPENMETRICS else PLAIN)
    assert ((" # {" in text), text.endswith("# EOF\n")) == ((accept == OPENMETRICS),) * 2


def test_the_page_at_the_metrics_port_names_the_model_as_the_server_does(served_engine, monkeypatch):
    asked, port = [], free_port()
    monkeypatch.setattr("specscope.cli.serve._serve", lambda config, *how: asked.extend(how[:2]) or 0)
    assert run_here(["serve", "--served-model-name", "mine", "--metrics-port", str(port)])[0] == 0
    outputs = Outputs(asked[1], served_engine.bus, served_engine.run_info, served_engine.vocabulary, None)
    with running(served_engine, name=asked[0].name) as server:
        pages = [used(server).url, f"http://127.0.0.1:{port}"]
        texts = [http.get(f"{url}/metrics").text for url in pages]
    outputs.close()
    assert [set(re.findall(r'model_name="(.*?)"', text)) for text in texts] == [{"mine"}, {"mine"}]


def test_a_server_that_sends_no_spans_gives_no_exemplars(served_engine, monkeypatch):
    """The command's own --sample is what decides."""
    asked = []
    monkeypatch.setattr("specscope.cli.serve._serve", lambda config, options, *_: asked.append(options) or 0)
    assert run_here(["serve", "--sample", "0", "--otlp-endpoint", "http://127.0.0.1:1"])[0] == 0
    with running(served_engine, ratio=asked[0].ratio) as server:
        assert ended(used(server))
        assert not any(one.exemplar for one in samples(server))
