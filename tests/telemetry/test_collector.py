"""traces/collector.yaml as it is shipped, in the real collector, behind the real exporter of real runs."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from specscope.remote.receiver import Export, Receiver
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.spans import SpanLevel
from tests.processes import free_port
from tests.support.commands import specscope
from tests.telemetry import programs
from tests.telemetry.fleet import IN_PART, Sent, assert_are_those, assert_is_all_of, run_fleet
from tests.waiting import until

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
        assert [line for line in reader.warnings if not line.startswith(IN_PART)] == []
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


@pytest.mark.parametrize(("form", "compression"), [("json", "zstd"), ("proto", '""'), ("proto", "zstd")])
def test_the_file_exporter_s_other_formats_are_read(form, compression, collector, fleet, tmp_path):
    """All of a run, which is decided when the collector ends: record by record as it was sent."""
    sent, files = fleet[0], tmp_path / "files"
    settings = [f"yaml:exporters::file::format: {form}", f"yaml:exporters::file::compression: {compression}"]
    with Receiver(lambda spans: None) as jaeger:
        environment = variables(files, jaeger, 10**6, 100)
        with programs.running(collector, [CONFIG, *settings], tmp_path / "log", environment) as here:
            sent.send(f"http://{environment['COLLECTOR_GRPC']}")
            here.stop()
    assert here.complaints() == []
    (path,) = files.iterdir()
    assert_is_all_of(path, sent)
