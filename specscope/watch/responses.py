"""JSON of requests, of engines and of tools to intervals.

Recognised: a response of vLLM's server or the last event of a stream (`metrics.speculative_decoding`), an output's
`spec_decode_metrics`, `llm.get_metrics()`, SGLang's responses (`return_spec_tokens_details`, or `meta_info`) and its
export of requests, llama.cpp's (`timings`), what Prometheus answers to a query, and the results of tools.

An answer of llama.cpp has sums. With `timings_per_token`, each chunk of a stream has the sums until then: every draft
is a difference of two, as long as there is a chunk for each token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specscope.trace.checked import short
from specscope.watch.counts import POSITIONS, Count, Drafts, ToldInterval, UnreadableError, declared, of_drafts
from specscope.watch.pages import Reading, read_get_metrics, read_prometheus, saved
from specscope.watch.results import read_results

NOTHING = "no figures of acceptance in it (spec_decode_..., spec_verify_ct, accept_length, timings.draft_n and others)"


def read_json(value: Any, time_ns: int, since: Sequence[Reading] = ()) -> list[ToldInterval]:  # noqa: ANN401
    """The intervals in a JSON value of any kind above, or in a list of these. Raises UnreadableError."""
    if (readings := json_readings(value, time_ns)) is not None:
        if not readings:
            raise UnreadableError("no metrics of speculation among these")
        return list(saved(readings, since))
    values = value if isinstance(value, list) else [value]
    return [interval for item in values for interval in _outputs(item, time_ns)]


def json_readings(value: Any, time_ns: int) -> list[Reading] | None:  # noqa: ANN401
    """The readings in metrics as JSON; None for JSON of another kind. Raises UnreadableError."""
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        return read_get_metrics(value, time_ns)
    data = value.get("data") if isinstance(value, dict) else None
    return read_prometheus(data["result"], time_ns) if isinstance(data, dict) and "result" in data else None


def _outputs(value: Any, time_ns: int) -> Iterator[ToldInterval]:  # noqa: ANN401
    """The intervals in one response, output or result."""
    if not isinstance(value, dict):
        raise UnreadableError("a JSON value that is no response")
    if value.get("error"):
        raise UnreadableError(f"the response is an error of the server ({short(value['error'])})")
    if isinstance(value.get("outputs"), list):  # a RequestOutput of vLLM
        outputs = declared(value["outputs"], list[dict[str, Any]])
        yield from (told for each in outputs for told in _outputs({**each, "id": value.get("request_id")}, time_ns))
        return
    intervals = list(read_results(value, time_ns))
    if not intervals:
        is_undrafted = isinstance(value.get("timings"), dict)
        raise UnreadableError("an answer of llama.cpp in which nothing was drafted" if is_undrafted else NOTHING)
    yield from intervals


@dataclass
class Chunks:
    """The chunks of a llama.cpp stream: its figures are those of the last, its drafts the differences."""

    drafts: Drafts | None = field(default_factory=Counter)  # None where a chunk holds more than one step
    _sums: tuple[int, ...] = (0, 0, 0)
    _last: dict[str, Any] | None = None

    def take(self, value: Any) -> list[ToldInterval]:  # noqa: ANN401
        """The next chunk, which ends no request. Raises UnreadableError."""
        if isinstance(value, dict) and isinstance(timings := value.get("timings"), dict):
            sums = tuple(
                declared(timings.get(name, 0), Count) for name in ("predicted_n", "draft_n", "draft_n_accepted")
            )
            output, drafted, accepted = (now - before for before, now in zip(self._sums, sums, strict=True))
            if not (0 <= accepted <= drafted <= POSITIONS and 0 <= output <= 1):
                self.drafts = None
            elif drafted and self.drafts is not None:
                self.drafts[accepted, drafted] += 1
            self._sums, self._last = sums, value
        return []

    def end(self, time_ns: int) -> list[ToldInterval]:
        """The request that ends here; none where no chunk had figures. Raises UnreadableError."""
        told = [] if self._last is None else read_json(self._last, time_ns)
        known = {} if self.drafts is None else of_drafts(self.drafts)
        self._last, self.drafts, self._sums = None, Counter(), (0, 0, 0)
        of = told[0].aggregate if told else None
        if of is not None and (known.get("accepted"), known.get("drafted")) == (of.accepted, of.drafted):
            return [replace(told[0], aggregate=replace(of, **known))]
        return told
