"""JSON of requests and of engines to aggregates.

Recognised: a response of vLLM's server or the last event of a stream (`metrics.speculative_decoding`), an output's
`spec_decode_metrics`, `llm.get_metrics()`, SGLang's responses (`return_spec_tokens_details`, or `meta_info`),
llama.cpp's (`timings`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import Struct

from specscope.trace.record.aggregate import Aggregate
from specscope.watch.counts import MOST, Histogram, ToldInterval, UnreadableError, count, declared, declared_object
from specscope.watch.llamacpp import ChunkDrafts, Timings, of_llamacpp
from specscope.watch.metrics import Reading, difference
from specscope.watch.names import VLLM
from specscope.watch.sglang import of_sglang, sglang_detail
from specscope.watch.vllm import METRICS, Detail, of_vllm


class Metric(Struct, frozen=True):
    """One of `llm.get_metrics()`: a counter or gauge has a value, a vector values."""

    name: str
    labels: dict[str, str] = {}
    value: float | None = None
    values: Histogram = []


def read_json(value: Any, time_ns: int) -> list[ToldInterval]:  # noqa: ANN401
    """The intervals in a JSON value of any kind above, or in a list of these. Raises UnreadableError."""
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        return _metrics(value, time_ns)
    values = value if isinstance(value, list) else [value]
    return [interval for item in values for interval in _outputs(item, time_ns)]


def _outputs(value: Any, time_ns: int) -> Iterator[ToldInterval]:  # noqa: ANN401
    """The intervals in one response or output."""
    if not isinstance(value, dict):
        raise UnreadableError("a JSON value that is no response")
    if "error" in value:
        raise UnreadableError("the response is an error of the server")
    if isinstance(value.get("outputs"), list):  # a RequestOutput of vLLM
        for output in value["outputs"]:
            yield from _outputs({"request_id": value.get("request_id"), **declared_object(output)}, time_ns)
        return
    created = value.get("created")
    time = int(created * 1e9) if isinstance(created, int | float) and 0 < created < 2**33 else time_ns
    model = value["model"][:1000] if isinstance(value.get("model"), str) else ""
    aggregates = list(_aggregates(value))
    if not aggregates and "timings" in value:
        raise UnreadableError("an answer of llama.cpp in which nothing was drafted: is speculation on in the server?")
    if not aggregates:
        raise UnreadableError("a response without speculation figures: are they switched on in the server?")
    name = next((value[key] for key in ("id", "request_id") if isinstance(value.get(key), str)), "")[:1000]
    for index, aggregate in enumerate(aggregates):
        about = f"{name} {index}".strip() if len(aggregates) > 1 else name
        emitted = aggregate.emitted if aggregate.emitted is not None else _emitted(value, len(aggregates))
        yield ToldInterval(model, time, time, replace(aggregate, request=about, emitted=emitted))


def _aggregates(value: Mapping[str, Any]) -> Iterator[Aggregate]:
    metrics, extension = value.get("metrics"), value.get("sglext")
    if isinstance(metrics, dict) and metrics.get("speculative_decoding") is not None:
        yield of_vllm(declared(metrics["speculative_decoding"], Detail))
    elif value.get("spec_decode_metrics") is not None:
        yield of_vllm(declared(value["spec_decode_metrics"], Detail))
    elif "num_draft_tokens" in value:
        yield of_vllm(declared(value, Detail))
    elif isinstance(extension, dict) and extension.get("spec_tokens_details") is not None:
        details = extension["spec_tokens_details"]
        for detail in details if isinstance(details, list) else [details]:
            yield of_sglang(sglang_detail(detail))
    elif "spec_verify_ct" in (meta := declared_object(value.get("meta_info") or value)):
        yield of_sglang(sglang_detail(meta))
    elif isinstance(timings := value.get("timings"), dict) and "draft_n" in timings:
        yield of_llamacpp(declared(timings, Timings))
    else:
        choices = value.get("choices")  # each of SGLang's may have its figures
        for choice in choices if isinstance(choices, list) else ():
            choice_meta = choice.get("meta_info") if isinstance(choice, dict) else None
            if isinstance(choice_meta, dict) and "spec_verify_ct" in choice_meta:
                yield of_sglang(sglang_detail(choice_meta))


def _emitted(value: Mapping[str, Any], sequences: int) -> int | None:
    """Output tokens, where the response is of one sequence and reports them."""
    usage, meta = value.get("usage"), value.get("meta_info")
    holder = usage if isinstance(usage, dict) else meta if isinstance(meta, dict) else {}
    tokens = holder.get("completion_tokens")
    ids = value.get("token_ids")
    if tokens is None and isinstance(ids, list):
        return len(ids)
    return tokens if isinstance(tokens, int) and 0 <= tokens < MOST and sequences == 1 else None


def _metrics(values: Sequence[Any], time_ns: int) -> list[ToldInterval]:
    """`llm.get_metrics()`: counters since the engine began, each engine by its labels."""
    by_engine: dict[tuple[str, str], Reading] = {}
    for value in values:
        if not str(value.get("name", "")).startswith("vllm:"):
            continue
        if not {value["name"], f"{value['name']}_total"} & {*VLLM.counters, *VLLM.gauges, VLLM.accepted_at}:
            continue
        metric = declared(value, Metric)
        key = (metric.labels.get("engine", ""), metric.labels.get("model_name", ""))
        reading = by_engine.setdefault(key, Reading(METRICS, *key, time_ns=time_ns))
        counter = VLLM.counters.get(f"{metric.name}_total")
        if counter is not None and metric.value is not None:
            reading.counters[counter] = reading.counters.get(counter, 0) + count(metric.value, metric.name)
        elif metric.name in VLLM.gauges and metric.value is not None:
            reading.gauges[VLLM.gauges[metric.name]] = metric.value
        elif metric.values:
            reading.accepted_at = dict(enumerate(metric.values))
    readings = [reading for reading in by_engine.values() if reading.speculates]
    if not readings:
        raise UnreadableError("no speculation metrics among these: is speculation on?")
    return [difference(None, reading) for reading in readings]


class Chunks:
    """The chunks of a llama.cpp stream: its figures are those of the last, its drafts the differences."""

    def __init__(self) -> None:
        self._drafts = ChunkDrafts()
        self._last: dict[str, Any] | None = None

    def take(self, value: Any) -> list[ToldInterval]:  # noqa: ANN401
        """The next chunk, which ends no request. Raises UnreadableError."""
        if isinstance(value, dict) and isinstance(value.get("timings"), dict):
            self._drafts.take(declared(value["timings"], Timings))
            self._last = value
        return []

    def end(self, time_ns: int) -> list[ToldInterval]:
        """The request that ends here; none where no chunk had figures. Raises UnreadableError."""
        last, drafts = self._last, self._drafts
        self._last, self._drafts = None, ChunkDrafts()
        if last is None:
            return []
        counts = of_llamacpp(declared(last["timings"], Timings), drafts) if "draft_n" in last["timings"] else None
        return [
            replace(interval, aggregate=replace(counts or interval.aggregate, request=interval.aggregate.request))
            for interval in read_json(last, time_ns)
        ]
