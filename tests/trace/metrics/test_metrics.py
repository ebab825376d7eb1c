"""Metrics, through Prometheus' and OpenMetrics' own parsers; and the Grafana dashboard, whose queries are answered."""

import itertools
import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from specscope.errors import UserError
from specscope.trace.metrics import GAUGES, OPENMETRICS, PLAIN, Metrics, Totals, series_of
from specscope.trace.record.aggregate import Reason
from specscope.trace.record.records import FinishReason, Phase
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.sampling import ratio_keeps
from specscope.trace.wire.spans import own_trace
from tests.counting import lines_run
from tests.support import records as made
from tests.support.prometheus import prometheus
from tests.trace.strategies import RUN
from tests.waiting import HANG_SECONDS

MS = made.MS
LENGTH = "specscope:request_acceptance_length"


def part(drafted, accepted, request="a", **more):
    """A chain of `drafted` tokens of which the first `accepted` were accepted."""
    outcome = made.outcomes(drafted, range(accepted), range(accepted, min(accepted + 1, drafted)))
    tree, path = made.chain(range(drafted)), range(accepted)
    judged = made.verdict(outcome, path, kind=made.kind_of(tree.parent.tolist(), path))
    return made.part(request, tree, judged, context=10, **more)


def record(step, parts, start_ms=None, **change):
    """A step of 50 ms; one begins every 100 ms."""
    start = (step * 100 if start_ms is None else start_ms) * MS
    during = (Phase("schedule", start, start + MS), Phase("commit", start + MS, start + 50 * MS))
    return made.record(step, parts, during, **{"blocks_used": 30, "blocks_free": 70} | change)


def asked(name, prompt=12, **more):
    return made.info(name, tokens=[0] * prompt, arrived=100 * MS, admitted=150 * MS, **more)


def end(name, reason):
    return made.end(asked(name), reason=reason)


def life(info, steps, reason=FinishReason.LENGTH):
    """A request's steps, 100 ms and 20 ms long each: (drafted, accepted)."""
    parts = [part(drafted, accepted, info.id, index=1) for drafted, accepted in steps]
    ends = (made.end(info, [0] * sum(one.emitted for one in parts), reason),)
    return [
        made.record(
            number, [one], admitted=(info,) if number == 1 else (), finished=ends if number == len(parts) else ()
        )
        for number, one in enumerate(parts, 1)
    ]


def filled(records, **options):
    metrics = Metrics("m", **options)
    for one in records:
        metrics(one)
    return metrics


def histograms(*records, ratio=None):
    return filled(records, run=RUN, ratio=ratio)


def samples(metrics):
    """What a scraper that takes OpenMetrics reads."""
    page, kind = metrics.page(OPENMETRICS)
    assert kind.startswith(OPENMETRICS)
    return [sample for family in openmetrics_families(page.decode()) for sample in family.samples]


def value(metrics, name, **labels):
    [sample] = [one for one in samples(metrics) if one.name == name and labels.items() <= one.labels.items()]
    assert sample.labels.items() >= {"model_name": "m", "engine": "0"}.items()
    return sample.value


RECORDS = [
    record(0, [part(0, 0), part(0, 0, "b")], admitted=(asked("a"), asked("b", 5)), waiting=4),
    record(1, [part(3, 3), part(3, 1, "b")]),
    record(2, [part(2, 0), part(3, 2, "b", emitted=1)], preempted=("c",), waiting=3),
    record(3, [part(1, 1)], finished=(end("b", FinishReason.EOS), end("c", FinishReason.CANCELLED)), blocks_used=60),
    record(4, [], finished=(end("a", FinishReason.STOP),), waiting=1, blocks_used=60, blocks_free=40),
]
COUNTERS = {
    "spec_decode_num_drafts": {(): 5},
    "spec_decode_num_draft_tokens": {(): 12},
    "spec_decode_num_accepted_tokens": {(): 7},
    "spec_decode_num_accepted_tokens_per_pos": {("0",): 4, ("1",): 2, ("2",): 1},
    "prompt_tokens": {(): 17},
    "generation_tokens": {(): 12},
    "num_preemptions": {(): 1},
    "request_success": {("stop",): 2, ("length",): 0, ("abort",): 1, ("error",): 0},
}
LEVELS = {"num_requests_running": 0, "num_requests_waiting": 1, "kv_cache_usage_perc": 0.6}


def test_the_prometheus_text_has_vllms_names():
    text = filled(RECORDS, lost=lambda: 2).page()[0].decode()
    want = {f"vllm:{name}_total": values for name, values in COUNTERS.items()}
    want |= {f"vllm:{name}": {(): pytest.approx(value)} for name, value in LEVELS.items()}
    want["specscope:lost_records_total"] = {(): 2}
    assert parsed(text) == want
    assert "# TYPE vllm:spec_decode_num_drafts_total counter\n" in text
    assert "# TYPE vllm:kv_cache_usage_perc gauge\n" in text


def parsed(text):
    """Values by the labels besides vLLM's two, which every series must carry."""
    found = {}
    for sample in (sample for family in plain_families(text) for sample in family.samples):
        labels = dict(sample.labels)
        assert (labels.pop("model_name"), labels.pop("engine")) == ("m", "0")
        found.setdefault(sample.name, {})[tuple(labels.values())] = sample.value
    return found


def test_a_step_of_eight_requests_is_cheap():
    """About 25 us where the trees' depths are known already, of the first record as of the last."""
    records = [record(n, [part(5, 2) for _ in range(8)]) for n in range(200)]
    metrics = Metrics()
    work = [lines_run(metrics, one)[0] for one in records]
    assert max(work) < 2000  # 845 lines of Python each, at most 1,033


# Histograms over requests


def test_acceptance_length_of_each_request():
    lives = (("a", [(0, 0), (3, 3), (3, 0)]), ("b", [(2, 0)]), ("c", [(0, 0)]))
    metrics = histograms(*(record for name, steps in lives for record in life(asked(name), steps)))
    assert value(metrics, LENGTH + "_count") == 2, "c has no drafts"
    assert value(metrics, LENGTH + "_sum") == 2.5 + 1
    assert value(metrics, LENGTH + "_bucket", le="1.0") == 1, "of b, nothing was accepted"
    assert value(metrics, LENGTH + "_bucket", le="2.0") == 1
    assert value(metrics, LENGTH + "_bucket", le="2.5") == 2
    assert not metrics._histograms._running, "what ended is forgotten"


@pytest.mark.parametrize("reason", FinishReason)
def test_a_request_that_fails_has_a_length_of_acceptance_and_no_latency(reason):
    metrics = histograms(*life(asked("a"), [(2, 1), (2, 1)], reason))
    ended = reason not in (FinishReason.CANCELLED, FinishReason.ERROR)
    assert value(metrics, LENGTH + "_count") == 1
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == ended


def test_latencies():
    metrics = histograms(*life(asked("a"), [(3, 1), (3, 1), (3, 0)]))  # each step ends 20 ms after it began
    for name, seconds in {
        "time_to_first_token_seconds": 0.02,  # arrived at 100 ms; the first step ends at 120
        "inter_token_latency_seconds": 0.2,
        "e2e_request_latency_seconds": 0.22,
        "request_queue_time_seconds": 0.05,
    }.items():
        assert value(metrics, f"vllm:{name}_sum") == pytest.approx(seconds), name


ACCEPTS = (  # headers of curl, of Prometheus 2 and 3, and of whom it may concern
    ("*/*", PLAIN),
    ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", PLAIN),
    (f"{OPENMETRICS};version=1.0.0,{OPENMETRICS};version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5", OPENMETRICS),
    (f"{OPENMETRICS};version=1.0.0;escaping=underscores;q=0.5,text/plain;version=1.0.0;q=0.3,*/*;q=0.1", OPENMETRICS),
    ("Application/OpenMetrics-Text", OPENMETRICS),
)


def test_over_http_the_scraper_decides():
    metrics = histograms(*life(asked("a"), [(3, 3), (3, 0)]))
    url = f"http://127.0.0.1:{metrics.serve_prometheus(0)}/metrics"
    try:
        for accept, kind in ACCEPTS:
            request = urllib.request.Request(url, headers={"Accept": accept})
            with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
                assert answer.headers["Content-Type"].startswith(kind)
                text = answer.read().decode()
            assert (" # {" in text) == (kind == OPENMETRICS)
            assert '\nvllm:e2e_request_latency_seconds_count{engine="0",model_name="m"} 1.0\n' in text
        with pytest.raises(UserError, match=url.split("/")[2]):
            Metrics().serve_prometheus(int(url.split(":")[2].removesuffix("/metrics")))
    finally:
        metrics.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=HANG_SECONDS)


def test_a_request_whose_spans_are_not_sent_is_no_exemplar():
    names = [f"r{number}" for number in range(40)]
    kept = {name for name in names if ratio_keeps(own_trace(RUN.run_id, name), "", 0.5) is Reason.RATIO}
    assert 0 < len(kept) < 40
    records = [record for name in names for record in life(asked(name), [(3, 3), (3, 0)])]
    for ratio, chosen in ((0.5, kept), (None, set(names))):
        found = [one for one in samples(histograms(*records, ratio=ratio)) if one.exemplar is not None]
        [newest] = {one.exemplar.labels["trace_id"] for one in found if one.name == f"{LENGTH}_bucket"}
        last = max(chosen, key=names.index)
        assert newest == f"{own_trace(RUN.run_id, last):032x}"


ROOT = Path(__file__).parents[3]
GRAFANA = ROOT / "traces" / "grafana"
DASHBOARD = json.loads((GRAFANA / "speculative-decoding.json").read_text())
ALERT = re.search(r"expr: >-\n(.*)", (GRAFANA / "alerts.yaml").read_text(), re.S)[1]
EVERY = 15  # seconds between two scrapes
START = 1_700_000_000
TARGETS = [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel["targets"]]
QUERIES = {f"{title} {target['refId']}": target["expr"] for title, target in TARGETS}


def lost(given, kept, place=""):
    """The places of what was given and is not kept."""
    if isinstance(given, dict | list) and type(given) is type(kept) and len(given) == len(kept):
        keys = given if isinstance(given, dict) else range(len(given))
        found = kept if isinstance(kept, list) else {key: kept.get(key) for key in given}
        return [each for key in keys for each in lost(given[key], found[key], f"{place}/{key}")]
    if isinstance(given, dict) and isinstance(kept, dict):
        return [each for key in given for each in lost(given[key], kept.get(key), f"{place}/{key}")]
    return [] if given == kept else [place]


def test_grafanas_types_know_every_key():
    """Of grafana-foundation-sdk, which is made of Grafana's published schema."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="no grafana-foundation-sdk")
    from grafana_foundation_sdk.cog import encoder, plugins

    plugins.register_default_plugins()
    written = json.loads(encoder.JSONEncoder(sort_keys=True).encode(models.Dashboard.from_json(DASHBOARD)))
    assert lost(DASHBOARD, written) == []
    assert lost({"panels": [{"titel": 1}]}, {"panels": [{}]}) == ["/panels/0/titel"]


def test_it_asks_for_metrics_that_there_are():
    known = {name if name in GAUGES else f"{name}_total" for name, *_ in series_of(Totals())}
    known |= {f"specscope:request_acceptance_length_{what}" for what in ("bucket", "count")}
    for query in [*QUERIES.values(), ALERT]:
        assert {*re.findall(r"(?:vllm|specscope):\w+", query)} <= known


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """(a real Prometheus, what was counted): its store holds a sample run, a step each scrape."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("prometheus is absent (apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    history = read_capture(ROOT / "traces" / "eagle.jsonl").history
    metrics, lines = Metrics(history.run.target, run=history.run), {}
    for number, record in enumerate(history.steps):
        metrics(record)
        for sample in (sample for family in metrics.registry.collect() for sample in family.samples):
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            line = f"{sample.name}{{{labels}}} {sample.value} {START + EVERY * number}\n"
            lines.setdefault(sample.name, []).append(line)
    (folder / "run.om").write_text("".join(itertools.chain(*lines.values())) + "# EOF\n")
    store = ["promtool", "tsdb", "create-blocks-from", "openmetrics", folder / "run.om", folder / "data"]
    subprocess.run(store, check=True, capture_output=True)
    with prometheus({}, folder) as started:
        started.until("vector(1)", 1)
        yield started, history


def over(scraped, query, steps=None):
    """What a query of the dashboard answers at the end of the run, over its last steps or all of them."""
    started, history = scraped
    seconds = f"{EVERY * (steps or len(history.steps))}s"
    for name, value in (("$__rate_interval", seconds), ("10m", seconds), ("$model", ".*")):
        query = query.replace(name, value)
    return started.ask("query", query=query, time=START + EVERY * (len(history.steps) - 1))["result"]


@pytest.mark.parametrize("name", QUERIES)
def test_a_real_prometheus_answers(scraped, name):
    answers = over(scraped, QUERIES[name])
    assert answers, "no series"
    assert all(float(answer["value"][1]) >= 0 for answer in answers)
    assert {answer["metric"]["model_name"] for answer in answers} == {scraped[1].run.target}


def test_the_figures_are_the_reports(scraped):
    history = scraped[1]
    steps = len(history.steps) // 2
    first, last = history.acceptance_at(len(history.steps) - 1 - steps, None), history.acceptance
    drafts = last.drafts - first.drafts
    ((_, length),) = [answer["value"] for answer in over(scraped, QUERIES["Acceptance length A"], steps)]
    assert float(length) == pytest.approx(1 + (last.accepted - first.accepted) / drafts)
    rates = over(scraped, QUERIES["Acceptance rate by position A"], steps)
    found = [float(answer["value"][1]) for answer in sorted(rates, key=lambda one: one["metric"]["position"])]
    counts = zip(first.accepted_at, last.accepted_at, strict=True)
    assert found == pytest.approx([(after - before) / drafts for before, after in counts])
    reasons = over(scraped, QUERIES["Drafts left out, and why A"])
    undrafted = history.totals.undrafted_upto(len(history.steps))
    assert {answer["metric"]["reason"] for answer in reasons} == {reason.value for reason in undrafted} != set()


def test_the_alert_is_of_a_collapse_alone(scraped):
    assert over(scraped, ALERT) == []
    (collapsed,) = over(scraped, ALERT.replace("< 1.2", "< 9"))
    assert collapsed["metric"]["model_name"] == scraped[1].run.target
