"""`python -m benchmarks traces`: bytes and spans a step, by level of evidence and by the share that is kept.

Sizes are of what goes over the wire: OTLP in protobuf, in the batches in which the exporter sends it. They do not
depend on the machine's load.
"""

from __future__ import annotations

import dataclasses
import gzip
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import cast

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from rich.table import Table

from benchmarks.paired import write_figures
from specscope.engine.config import EngineConfig
from specscope.engine.engine import Engine
from specscope.measure.prompts import COPYING, PLAIN
from specscope.terminal import text_console
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import RunInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.sending import Sender, SpanSink
from specscope.trace.wire.spans import SpanLevel

REQUESTS, TOKENS = 24, 64
RATIOS = (1.0, 0.1, 0.01)
KEPT = 120  # requests that a row rests on, at least: the run is sent as often as that takes, each time as another run
LEVELS = (("full", SpanLevel.TREES), ("lean", SpanLevel.TREES), ("lean", SpanLevel.STEPS), ("lean", SpanLevel.REQUESTS))
LENGTH = 3  # bytes before a span that say how long it is


class WireSize:
    """Counts what an OTLP exporter would send."""

    def __init__(self) -> None:
        self.spans = self.bytes = self.zipped = self.exports = 0
        self.lost = Counter[str]()

    def put(self, spans: Sequence[ReadableSpan]) -> None:
        """One export, encoded as the real exporters do."""
        body = encode_spans(spans).SerializeToString()
        self.spans += len(spans)
        self.exports += 1
        self.bytes += len(body)
        self.zipped += len(gzip.compress(body, 6))

    def close(self) -> None:
        """Nothing is kept back."""


class SpanParts(WireSize):
    """The same, and what the spans of engine steps take of it."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = WireSize()
        self.resources = 0  # bytes of the resources, of which each export has one or two

    def put(self, spans: Sequence[ReadableSpan]) -> None:
        """One export."""
        for service in encode_spans(spans).resource_spans:
            self.resources += service.resource.ByteSize() + LENGTH
            for span in service.scope_spans[0].spans:
                if span.name == "engine_step":
                    self.engine.spans += 1
                    self.engine.bytes += span.ByteSize() + LENGTH
        super().put(spans)


@dataclass(frozen=True)
class TraceRow:
    """What one level and ratio send, over all engine steps, those that are left out among them."""

    evidence: str
    level: str
    ratio: float
    kept: float  # share of requests
    bytes_per_step: float
    zipped_per_step: float
    spans_per_step: float
    expected_per_step: float  # bytes, by the formula
    thread_ms_per_step: float  # processor time of the sink's thread, without compression


@dataclass(frozen=True)
class TraceSizes:
    """What the formula needs, of one level: what a request adds to a step, and what an engine step is by itself.

    An export goes out where requests end, at the latest, and repeats the resources.
    """

    evidence: str
    level: str
    request_bytes: float
    engine_bytes: float
    request_spans: float
    engine_spans: float
    export_bytes: float  # of the resources
    exports: float  # a step, where everything is kept
    ends: float  # requests that end with an export then

    def per_step(self, ratio: float, batch: int) -> tuple[float, float]:
        """(bytes, spans): r B request + (1 - (1 - r)^B) engine: a step goes out if one of its B requests is kept.

        So does an export, if one of the requests is that end with it.
        """
        goes_out: float = 1 - (1 - ratio) ** batch
        exports = self.exports * (1 - (1 - ratio) ** self.ends)
        parts = ratio * batch
        return (
            parts * self.request_bytes + goes_out * self.engine_bytes + exports * self.export_bytes,
            parts * self.request_spans + goes_out * self.engine_spans,
        )


def run_traces(config: EngineConfig, json_file: str | None) -> None:
    """Measure and print."""
    console = text_console()
    rows, sizes = list[TraceRow](), list[TraceSizes]()
    for evidence in ("full", "lean"):
        with console.status(f"running {REQUESTS} requests with {evidence} evidence"):
            run, vocabulary, records = recorded(dataclasses.replace(config, evidence=evidence))
        for level in [level for of, level in LEVELS if of == evidence]:
            with console.status(f"encoding {level} with {evidence} evidence"):
                sizes.append(measured_sizes(run, vocabulary, records, evidence, level))
                rows += [measured(run, vocabulary, records, sizes[-1], ratio) for ratio in RATIOS]
    batch = sum(len(record.requests) for record in records) / len(records)
    console.print(_measured_table(rows, batch))
    told = {"batch": batch, "rows": list(map(asdict, rows)), "sizes": list(map(asdict, sizes))}
    write_figures(json_file, "traces", told)


def recorded(config: EngineConfig) -> tuple[RunInfo, Vocabulary, list[StepRecord]]:
    """A run of requests that come and go in full batches."""
    engine, records = Engine(config), list[StepRecord]()
    engine.subscribe(records.append, lossless=True)
    prompts = [*COPYING, *PLAIN]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    for number in range(REQUESTS):
        engine.add(engine.turn(prompts[number % len(prompts)]), params)
    while engine.busy:
        engine.step()
    engine.close()
    return engine.run_info, engine.vocabulary, records


def measured_sizes(
    run: RunInfo, vocabulary: Vocabulary, records: list[StepRecord], evidence: str, level: SpanLevel
) -> TraceSizes:
    """Of a run of which everything is kept."""
    wire = SpanParts()
    sink = SpanSink(cast("Sender", wire), run, vocabulary, level, ratio=1.0)
    for record in records:
        sink(record)
    sink.close()
    steps, parts = len(records), sum(len(record.requests) for record in records)
    return TraceSizes(
        evidence,
        level.value,
        (wire.bytes - wire.engine.bytes - wire.resources) / parts,
        wire.engine.bytes / steps,
        (wire.spans - wire.engine.spans) / parts,
        wire.engine.spans / steps,
        wire.resources / wire.exports,
        wire.exports / steps,
        sum(len(record.finished) for record in records) / wire.exports,
    )


def measured(
    run: RunInfo, vocabulary: Vocabulary, records: list[StepRecord], sizes: TraceSizes, ratio: float
) -> TraceRow:
    """A row: the run sent often enough, each time with other trace ids."""
    wire, kept, spent = WireSize(), 0, 0.0
    laps = 1 if ratio == 1 else max(1, round(KEPT / ratio / REQUESTS))
    for lap in range(laps):
        named = dataclasses.replace(run, run_id=f"bench traces {lap}")
        sink = SpanSink(cast("Sender", wire), named, vocabulary, SpanLevel(sizes.level), ratio=ratio)
        began = time.thread_time()
        for record in records:
            sink(record)
        sink.close()
        spent += time.thread_time() - began
        kept += 0 if sink.sampler is None else sink.sampler.kept.total()
    steps = laps * len(records)
    return TraceRow(
        sizes.evidence,
        sizes.level,
        ratio,
        kept / (laps * REQUESTS),
        wire.bytes / steps,
        wire.zipped / steps,
        wire.spans / steps,
        sum(sizes.per_step(ratio, len(record.requests))[0] for record in records) / len(records),
        1000 * spent / steps,
    )


def _measured_table(rows: list[TraceRow], batch: float) -> Table:
    table = Table(title=f"measured, {batch:.1f} requests a step", title_justify="left", title_style="dim")
    table.add_column("level, evidence")
    for name in ("ratio", "requests kept", "bytes/step", "expected", "gzip", "spans/step"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.level}, {row.evidence}",
            f"{row.ratio:g}",
            f"{row.kept:.2%}",
            f"{row.bytes_per_step:,.0f}",
            f"{row.expected_per_step:,.0f}",
            f"{row.zipped_per_step:,.0f}",
            f"{row.spans_per_step:.2f}",
        )
    return table
