"""/metrics: counters and histograms from records, and what the server refused, in the text format asked for."""

from __future__ import annotations

from prometheus_client import Counter

from specscope.trace.metrics import Metrics
from specscope.trace.record.records import RunInfo, StepRecord

REASONS = {  # by the status of the answer
    403: "other_site",
    408: "too_slow",
    413: "too_large",
    415: "content_type",
    429: "queue_full",
    503: "too_busy",
}


class Observed:
    """A sink of records. `page` may be called on any thread.

    It has a `Metrics` of its own, whether or not --metrics-port has another: this page is always there.
    """

    def __init__(self, model: str, run: RunInfo, ratio: float | None) -> None:
        """`model`: its name in labels. `ratio`: the share of requests whose spans are sent; None: of all."""
        self._labels = {"model_name": model, "engine": "0"}
        self._metrics = Metrics(model, run=run, ratio=ratio)
        self._refusals = Counter(
            "vllm:admission_rejections",
            "Requests that were refused before the engine was asked.",
            [*self._labels, "reason"],
            registry=self._metrics.registry,
        )
        self._refusals.labels(**self._labels, reason=REASONS[429])  # so that it is reported from the start

    def refused(self, status: int) -> None:
        """Count a request that was refused, by the status of its answer."""
        self._refusals.labels(**self._labels, reason=REASONS.get(status, "invalid")).inc()

    def __call__(self, record: StepRecord) -> None:
        """Count one step."""
        self._metrics(record)
        ended = {end.info.id for end in record.finished}
        self._metrics.totals.running -= sum(part.request in ended for part in record.requests)  # after the step

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """The text and its content type, for a request with this Accept header (Metrics.page)."""
        return self._metrics.page(accept)

    def close(self) -> None:
        """End what was started."""
        self._metrics.close()
