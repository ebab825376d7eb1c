"""The Grafana dashboard: Grafana's own types know every key of it, and a real Prometheus answers its queries."""

import itertools
import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.samples import Sample

from specscope.trace.metrics import GAUGES, Metrics, Totals, series_of
from specscope.trace.wire.reading import read_capture
from tests.processes import free_port
from tests.waiting import until

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
def prometheus(tmp_path_factory):
    """(asks a real one, what was counted): its store holds a sample run, a step each scrape."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("prometheus is absent (apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    history = read_capture(ROOT / "traces" / "eagle.jsonl").history
    metrics, lines = Metrics(history.run.target, run=history.run), {}
    for number, record in enumerate(history.steps):
        metrics(record)
        for family in metrics.registry.collect():
            for sample in family.samples:
                lines.setdefault(sample.name, []).append(_line(sample, START + EVERY * number))
    (folder / "run.om").write_text("".join(itertools.chain(*lines.values())) + "# EOF\n")
    store = ["promtool", "tsdb", "create-blocks-from", "openmetrics", folder / "run.om", folder / "data"]
    subprocess.run(store, check=True, capture_output=True)
    (folder / "empty.yml").write_text("")
    port = free_port()
    flags = [f"--config.file={folder}/empty.yml", f"--storage.tsdb.path={folder}/data"]
    flags += ["--storage.tsdb.retention.time=99y", f"--web.listen-address=127.0.0.1:{port}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(["prometheus", *flags], **quiet)

    def ask(query):
        at = START + EVERY * (len(history.steps) - 1)
        words = urllib.parse.urlencode({"query": query, "time": at})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{words}") as answer:
            return json.load(answer)["data"]["result"]

    def ready():
        try:
            return ask("vector(1)")
        except OSError:
            return None

    try:
        until(ready)
        yield ask, history
    finally:
        server.terminate()
        server.wait()


def _line(sample: Sample, at):
    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
    return f"{sample.name}{{{labels}}} {sample.value} {at}\n"


def over(ask, name, steps):
    """A query of the dashboard over the last steps."""
    return ask(QUERIES[name].replace("$__rate_interval", f"{EVERY * steps}s").replace("$model", ".*"))


@pytest.mark.parametrize("name", QUERIES)
def test_a_real_prometheus_answers(prometheus, name):
    ask, history = prometheus
    answers = over(ask, name, len(history.steps))
    assert answers, "no series"
    assert all(float(answer["value"][1]) >= 0 for answer in answers)
    model = {answer["metric"]["model_name"] for answer in answers}
    assert model == {history.run.target}


def test_the_figures_are_the_reports(prometheus):
    ask, history = prometheus
    steps = len(history.steps) // 2
    first, last = history.acceptance_at(len(history.steps) - 1 - steps, None), history.acceptance
    drafts = last.drafts - first.drafts
    ((_, length),) = [answer["value"] for answer in over(ask, "Acceptance length A", steps)]
    assert float(length) == pytest.approx(1 + (last.accepted - first.accepted) / drafts)
    rates = over(ask, "Acceptance rate by position A", steps)
    found = [float(answer["value"][1]) for answer in sorted(rates, key=lambda one: one["metric"]["position"])]
    counts = zip(first.accepted_at, last.accepted_at, strict=True)
    assert found == pytest.approx([(after - before) / drafts for before, after in counts])
    reasons = over(ask, "Drafts left out, and why A", len(history.steps))
    undrafted = history.totals.undrafted_upto(len(history.steps))
    assert {answer["metric"]["reason"] for answer in reasons} == {reason.value for reason in undrafted} != set()


def test_the_alert_is_of_a_collapse_alone(prometheus):
    ask, history = prometheus
    whole = ALERT.replace("10m", f"{EVERY * len(history.steps)}s")
    assert ask(whole) == []
    (collapsed,) = ask(whole.replace("< 1.2", "< 9"))
    assert collapsed["metric"]["model_name"] == history.run.target
