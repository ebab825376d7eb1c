"""A fleet's spans through the real Collector with our file, and in real Jaegers: what is kept, found, and read back."""

import contextlib
import json
import re
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from specscope.remote.receiver import Export, Receiver
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.spans import SpanLevel
from tests.processes import free_port
from tests.support.commands import specscope
from tests.telemetry import programs
from tests.telemetry.fleet import SERVICE, Sent, assert_are_those, assert_is_all_of, damage, run_fleet
from tests.waiting import HANG_SECONDS, until

pytestmark = pytest.mark.slow
CONFIG = str(Path(__file__).parents[2] / "traces" / "collector.yaml")
TAU, DRAFTS = 1.3, 4


@pytest.fixture(scope="module")
def collector() -> Path:
    try:
        return programs.collector()
    except programs.NotHereError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def fleet(tiny, tmp_path_factory) -> list[Sent]:
    return run_fleet(tiny, tmp_path_factory.mktemp("fleet"))


def variables(folder: Path, jaeger: Receiver, slow: int, percent: int) -> dict[str, str]:
    """What the shipped file reads of the environment."""
    return {
        "COLLECTOR_GRPC": f"127.0.0.1:{free_port()}",
        "COLLECTOR_HTTP": f"127.0.0.1:{free_port()}",
        "COLLECTOR_METRICS_PORT": str(free_port()),
        "COLLECTOR_FOLDER": str(folder),
        "COLLECTOR_JAEGER": f"127.0.0.1:{jaeger.grpc_port}",
        "COLLECTOR_TAU": str(TAU),
        "COLLECTOR_DRAFTS": str(DRAFTS),
        "COLLECTOR_SLOW_MS": str(slow),
        "COLLECTOR_PERCENT": str(percent),
    }


def longer(sent: Sent, milliseconds: int) -> set[str]:
    """The requests that took longer."""
    return {name for name, time in sent.milliseconds().items() if time > milliseconds}


def spans_of_file(path: Path) -> dict[str, set[str]]:
    """The ids of the spans of each trace in a file."""
    spans = defaultdict(set)
    for line in path.read_text().splitlines():
        for by_resource in json.loads(line)["resourceSpans"]:
            for by_scope in by_resource["scopeSpans"]:
                for span in by_scope["spans"]:
                    spans[span["traceId"]].add(span["spanId"])
    return dict(spans)


def spans_received(exports: list[Export]) -> dict[str, set[str]]:
    """The same of what a receiver was handed."""
    spans = defaultdict(set)
    for export in list(exports):
        for by_resource in ExportTraceServiceRequest.FromString(bytes(export.body)).resource_spans:
            for span in (span for by_scope in by_resource.scope_spans for span in by_scope.spans):
                spans[span.trace_id.hex()].add(span.span_id.hex())
    return dict(spans)


def test_the_shipped_file_keeps_whole_requests_by_their_outcome(collector, fleet, tmp_path):
    """Those that failed, the poor and the slow ones, a share of the others; nothing to complain of."""
    slow = sorted(time for sent in fleet for time in sent.milliseconds().values())[70]
    wanted = [sent.failed() | sent.poor(TAU, DRAFTS) | longer(sent, slow) for sent in fleet]
    files, behind = tmp_path / "files", []
    with Receiver(behind.append) as jaeger:
        environment = variables(files, jaeger, slow, 20)
        with programs.running(collector, [CONFIG], tmp_path / "log", environment) as here:
            fleet[0].send(f"http://{environment['COLLECTOR_GRPC']}")
            fleet[1].send(f"http://{environment['COLLECTOR_HTTP']}/v1/traces")
            at_once = {  # those with a caller's span above them are decided when the collector ends
                sent.traces()[name]
                for sent, names in zip(fleet, wanted, strict=True)
                for name in names
                if not sent.ends()[name].info.traceparent
            }
            until(lambda: at_once <= set(spans_received(behind)), says=here.text)
            here.stop()
    assert here.complaints() == []
    paths = [files / f"specscope-{sent.run.run_id}.jsonl" for sent in fleet]
    assert set(files.iterdir()) == set(paths)
    assert spans_received(behind) == spans_of_file(paths[0]) | spans_of_file(paths[1])
    for sent, names, path in zip(fleet, wanted, paths, strict=True):
        requests = kept_requests(sent, path)
        assert names < requests < set(sent.traces())  # a share of the others
        reader = read_capture(path)
        assert damage(reader) == []
        assert_are_those(reader.history.steps, requests, sent)
        done = specscope("verify", path)
        assert done.returncode == 0, done.stdout + done.stderr


def test_one_span_a_request_is_enough(collector, fleet, tmp_path):
    """At level `requests`, and without a share of the others: what is kept is just what these spans tell to keep."""
    sent, files = fleet[0], tmp_path / "files"
    slow = sorted(sent.milliseconds().values())[-4]
    with Receiver(lambda spans: None) as jaeger:
        environment = variables(files, jaeger, slow, 0)
        with programs.running(collector, [CONFIG], tmp_path / "log", environment) as here:
            sent.send(f"http://{environment['COLLECTOR_GRPC']}", SpanLevel.REQUESTS)
            here.stop()
    assert here.complaints() == []
    (path,) = files.iterdir()
    wanted = sent.failed() | sent.poor(TAU, DRAFTS) | longer(sent, slow)
    kept = spans_of_file(path)
    assert set(kept) == {sent.traces()[name] for name in wanted}
    assert {len(spans) for spans in kept.values()} == {1}
    done = specscope("report", path)
    assert done.returncode == 0, done.stderr
    assert f"{len(wanted)} requests" in done.stdout


def kept_requests(sent: Sent, path: Path) -> set[str]:
    """The requests of a run that are in a file, whose traces it must hold whole, and a share of the engine steps."""
    kept, whole = spans_of_file(path), defaultdict(set)
    for span in sent.spans():
        whole[f"{span.trace:032x}"].add(f"{span.id:016x}")
    assert kept == {trace: whole[trace] for trace in kept}
    by_trace = {trace: name for name, trace in sent.traces().items()}
    requests = {by_trace[trace] for trace in kept if trace in by_trace}
    assert 0 < len(kept) - len(requests) < len(whole) - len(by_trace)
    return requests


JAEGER_CONFIG = str(Path(__file__).parent / "jaeger.yaml")
QUERIES = Path(__file__).parents[2] / "docs" / "queries.md"
ENGINE = f"{SERVICE} engine"
MANY = 100_000  # more traces than there are


@dataclass(frozen=True)
class Jaeger:
    """A Jaeger that has the fleet's spans."""

    address: str
    fleet: list[Sent]

    def get(self, path: str, **query: str) -> Any:
        """What its API answers; None where it says that there is nothing."""
        url = f"{self.address}{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            with urllib.request.urlopen(url, timeout=HANG_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def trace(self, trace: str) -> Any:
        """A trace by API v3."""
        return self.get(f"/api/v3/traces/{trace}")

    def search(self, service: str) -> Any:
        """All traces that have spans of a service, by API v3."""
        starts = [record.start_ns / 1e9 for sent in self.fleet for record in sent.records]
        first, last = (datetime.fromtimestamp(time, UTC) for time in (min(starts) - 60, max(starts) + 60))
        times = {"start_time_min": first.isoformat(), "start_time_max": last.isoformat()}
        asked = {"service_name": service, "num_traces": str(MANY), **times}
        return self.get("/api/v3/traces", **{f"query.{key}": value for key, value in asked.items()})

    def find(self, **attributes: str) -> set[str]:
        """The traces of requests with a span that has these attributes.

        By the API of its page: this version's API v3 takes no attributes.
        """
        answer = self.get("/api/traces", service=SERVICE, tags=json.dumps(attributes), limit=str(MANY))
        return {trace["traceID"] for trace in answer["data"]}


def spans_of(answer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(service, span) of an answer of API v3."""
    for by_resource in answer["result"]["resourceSpans"]:
        service = values_of(by_resource["resource"])["service.name"]
        for by_scope in by_resource["scopeSpans"]:
            yield from ((service, span) for span in by_scope["spans"])


def values_of(holder: dict[str, Any]) -> dict[str, Any]:
    """Attributes whose value is one text, number or truth."""
    values = ((each["key"], each["value"]) for each in holder.get("attributes", ()))
    return {key: next(iter(value.values())) for key, value in values if len(value) == 1}


@contextlib.contextmanager
def jaeger_with(fleet: list[Sent], store: str, folder: Path) -> Iterator[Jaeger]:
    """A Jaeger that has all spans of the fleet."""
    try:
        program = programs.jaeger()
    except programs.NotHereError as error:
        pytest.skip(str(error))
    ports = {f"JAEGER_{name}": str(free_port()) for name in ("OTLP", "HTTP", "GRPC")}
    with programs.running(program, [JAEGER_CONFIG], folder / "log", {**ports, "JAEGER_STORE": store}):
        for sent in fleet:
            sent.send(f"http://127.0.0.1:{ports['JAEGER_OTLP']}")
        yield Jaeger(f"http://127.0.0.1:{ports['JAEGER_HTTP']}", fleet)


@pytest.fixture(scope="module")
def jaeger(fleet, tmp_path_factory) -> Iterator[Jaeger]:
    with jaeger_with(fleet, "memory", tmp_path_factory.mktemp("jaeger")) as here:
        yield here


def test_a_request_s_trace_holds_all_of_the_request(jaeger, tmp_path):
    for sent in jaeger.fleet:
        for name, trace in sent.traces().items():
            path = tmp_path / f"{trace}.json"
            path.write_text(json.dumps(jaeger.trace(trace)))
            reader = read_capture(path)
            assert damage(reader) == []
            assert_are_those(reader.history.steps, {name}, sent)


def test_all_traces_of_a_service_are_the_run(tmp_path, jaeger):
    """Requests and engine steps, in whatever order they come back: record by record as they were sent."""
    answers = [jaeger.search(service)["result"]["resourceSpans"] for service in (SERVICE, ENGINE)]
    for sent in jaeger.fleet:
        mine = [
            by_resource
            for answer in answers
            for by_resource in answer
            if values_of(by_resource["resource"])["specscope.run.id"] == sent.run.run_id
        ]
        path = tmp_path / f"{sent.run.run_id}.json"
        path.write_text(json.dumps({"result": {"resourceSpans": mine}}))
        assert_is_all_of(path, sent)


@pytest.mark.parametrize("store", ["memory", "badger"])
def test_the_searches_of_the_docs_find_the_right_requests(store, fleet, tmp_path):
    """docs/queries.md, a search a line. This version's store in memory cannot find errors; the one in files can."""
    (page,) = re.findall(r"```logfmt\n(.*?)```", QUERIES.read_text(), re.S)
    searches = [dict(word.split("=") for word in line.split()) for line in page.splitlines()]
    assert {"error": "true"} in searches
    with jaeger_with(fleet, store, tmp_path) as jaeger:
        for search in searches:
            if store == "badger" or "error" not in search:
                expected = {sent.traces()[name] for sent in fleet for name in matches(sent, search)}
                assert expected, search
                assert jaeger.find(**search) == expected, search
        for kind in ("code", "chat", "form"):
            expected = {sent.traces()[name] for sent in fleet for name in sent.labelled(kind)}
            assert jaeger.find(**{"specscope.label.kind": kind}) == expected


def matches(sent: Sent, search: dict[str, str]) -> set[str]:
    """The requests that a search must find, by their records."""
    names = set(sent.ends())
    for key, value in search.items():
        names &= {
            "error": lambda _: sent.failed(),
            "specscope.tau": lambda value: {name for name, a in sent.acceptance().items() if a.tau == float(value)},
            "specscope.drafts": lambda value: {name for name, a in sent.acceptance().items() if a.drafts == int(value)},
            "specscope.label.kind": sent.labelled,
        }[key](value)
    return names


def test_the_address_of_a_trace_is_read_by_commands(jaeger):
    sent = jaeger.fleet[0]
    name = min(sent.poor(1.3, 4))
    report, verify = (specscope(verb, f"{jaeger.address}/trace/{sent.traces()[name]}") for verb in ("report", "verify"))
    assert (report.returncode, verify.returncode) == (0, 0), report.stderr + verify.stderr
    assert name in report.stdout
