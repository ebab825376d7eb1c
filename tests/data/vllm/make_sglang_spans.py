"""Makes sglang_spans.jsonl: one request as SGLang 0.5.23 tells of it, after its srt/observability/trace.py.

Written from reading the code, not recorded from SGLang. Names, attributes, nesting, service and scope are the code's;
the times are made up. python make_sglang_spans.py > sglang_spans.jsonl
"""

import sys

from opentelemetry.exporter.otlp.json.file import FileSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

START, MS = 1_795_400_000_000_000_000, 1_000_000
HOST = "8d3fe27c91b04a6f8f1f0d6a5b7c2e90"
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4750-00f067aa0ba902b7-01"


class Numbered(IdGenerator):
    """The same ids each time."""

    def __init__(self):
        self.last = 0x5A00

    def generate_span_id(self):
        self.last += 1
        return self.last

    def generate_trace_id(self):
        return self.generate_span_id()


def main():
    provider = TracerProvider(resource=Resource({"service.name": "sglang"}), id_generator=Numbered())
    provider.add_span_processor(SimpleSpanProcessor(FileSpanExporter(stream=sys.stdout)))
    tracer = provider.get_tracer("sglang server")

    def begin(name, above, at, attributes=None):
        return tracer.start_span(name, above, start_time=START + int(at * MS), attributes=attributes)

    def stage(name, above, at, end, attributes=None):
        begin(name, set_span_in_context(above), at, attributes).end(START + int(end * MS))

    caller = TraceContextTextMapPropagator().extract({"traceparent": TRACEPARENT})
    rid = "5e0f1a2b9c8d4e7fa6b5c4d3e2f10987"
    root = begin(f" Req {rid[:8]}", caller, 0, {"rid": rid, "module": "sglang::request"})
    inside = set_span_in_context(root)

    about = {"host_id": HOST, "pid": 4101, "thread_label": "Tokenizer"}
    tokenizer = begin(f"Tokenizer(host:{HOST[:8]} | pid:4101)", inside, 0, about)
    stage("tokenize", tokenizer, 0, 1.4)
    stage("api_server_dispatch", tokenizer, 1.4, 2.1)
    tokenizer.end(START + int(2.1 * MS))

    about = {"tp_rank": 0, "pp_rank": 0, "host_id": HOST, "pid": 4177, "thread_label": "Scheduler"}
    scheduler = begin(f"Scheduler [TP 0]  [PP 0] (host:{HOST[:8]} | pid:4177)", inside, 2.6, about)
    stage("request_process", scheduler, 2.6, 3.0)
    stage("prefill_waiting", scheduler, 3.0, 4.2)
    stage("prefill_forward", scheduler, 4.2, 31.5)
    decode = begin("decode_forward", set_span_in_context(scheduler), 31.5)
    for count in range(5):
        at = 31.5 + 12 * count
        stage("spec_draft", decode, at + 0.2, at + 0.7)  # its n-gram worker alone tells of drafting
        stage("decode_loop", decode, at, at + 12, {"decode_ct": count})
    decode.end(START + int(91.5 * MS))
    scheduler.end(START + int(91.9 * MS))

    root.set_attributes(
        {
            "gen_ai.usage.completion_tokens": 12,
            "gen_ai.usage.prompt_tokens": 34,
            "gen_ai.usage.cached_tokens": 0,
            "gen_ai.request.id": rid,
            "gen_ai.request.max_tokens": 16,
            "gen_ai.request.temperature": 0.8,
            "gen_ai.response.model": "smollm2",
            "gen_ai.response.finish_reasons": '["stop"]',
            "gen_ai.latency.time_to_first_token": 0.0324,
            "gen_ai.latency.e2e": 0.0931,
            "gen_ai.latency.time_in_model_decode": 0.0607,
            "gen_ai.latency.time_in_model_inference": 0.091,
            "gen_ai.latency.time_in_model_prefill": 0.0303,
        }
    )
    root.end(START + int(93.1 * MS))


if __name__ == "__main__":
    main()
