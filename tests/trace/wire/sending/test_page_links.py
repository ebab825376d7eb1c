"""A decode_step that is sent tells its place in the run's page; a capture does not."""

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from specscope.errors import UserError
from specscope.remote.receiver import Receiver
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.sending import PAGE_URL, Sender, SpanSink
from specscope.trace.wire.spans import SpanLevel
from tests.processes import free_port
from tests.trace.samples import records, written
from tests.trace.strategies import RUN


def sent(level):
    """(name, page, request, step) of each span of the sample run that arrives."""
    found, port = [], free_port()

    def take(export):
        for resource in ExportTraceServiceRequest.FromString(bytes(export.body)).resource_spans:
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                told = {each.key: each.value for each in span.attributes}
                page = told["specscope.page"].string_value if "specscope.page" in told else None
                place = told.get("specscope.request.id"), told.get("specscope.request.step")
                found.append((span.name, page, *place))

    with Receiver(take, grpc_port=port, http_port=None):
        sink = SpanSink(Sender(f"127.0.0.1:{port}", "grpc"), RUN, Vocabulary(), level)
        for record in records():
            sink(record)
        sink.close()
    return found


@pytest.mark.parametrize("level", [SpanLevel.STEPS, SpanLevel.TREES])
def test_each_decode_step_links_to_its_place(level, monkeypatch, tmp_path):
    monkeypatch.setenv(PAGE_URL, "https://host/pages/{run}.html?x=1")
    spans = sent(level)
    assert {name for name, page, *_ in spans if page} == {"decode_step"} < {name for name, *_ in spans}
    for name, page, request, step in spans:
        if name == "decode_step":
            place = f"{request.string_value}@{step.int_value}"
            assert page == f"https://host/pages/{RUN.run_id}.html?x=1#{place}"
    assert "specscope.page" not in written(tmp_path / "run.jsonl").read_text()


def test_without_it_there_is_no_link(monkeypatch):
    monkeypatch.delenv(PAGE_URL, raising=False)
    assert {page for _, page, *_ in sent(SpanLevel.TREES)} == {None}


@pytest.mark.parametrize(
    ("template", "says"),
    [("https://host/run.html", "write {run} where the run's id stands"), ("host/{run}", "write an address, such as")],
)
def test_a_template_that_leads_nowhere_is_refused(template, says, monkeypatch):
    monkeypatch.setenv(PAGE_URL, template)
    with pytest.raises(UserError, match=says):
        sent(SpanLevel.TREES)
