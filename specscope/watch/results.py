"""What engines say of a request and tools leave of a run, as files or as the last lines that they print, to intervals.

`names.py` has what each of them calls its figures. What has means alone is kept as averages. As JSON come a response of
vLLM's server or the last event of a stream (`metrics.speculative_decoding`), an output's `spec_decode_metrics`,
`llm.get_metrics()`, SGLang's responses (`return_spec_tokens_details`, or `meta_info`) and its export of requests,
llama.cpp's (`timings`), what Prometheus answers to a query, and the results of tools.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise, takewhile
from typing import Annotated, Any

from msgspec import Meta

from specscope.trace.checked import short
from specscope.trace.record.aggregate import Aggregate, full_chains
from specscope.trace.record.declared import Share, Sum
from specscope.watch.counts import NAME, POSITIONS, Count, ToldInterval, UnreadableError, Value, declared
from specscope.watch.logs import LogReader
from specscope.watch.names import BEGAN, EMITTED, ENDED, MODEL, PHASE, PRINTED, PRINTED_AT, REQUEST, TOOLS, Tool
from specscope.watch.pages import Reading, read_get_metrics, read_prometheus, saved

SETTINGS = {"batch_size": "batch", "steps": "steps", "topk": "topk", "num_draft_tokens": "draft tokens"}  # SpecForge's
LENGTHS = re.compile(r"(?:mean|avg|average)?[ _]*(?:accept(?:ed|ance)?|acc)[ _]*(?:len|lengths?|tokens)(?:[ _]?mean)?")


def read_results(value: Mapping[str, Any], time_ns: int) -> Iterator[ToldInterval]:
    """The intervals in an answer or a result; none where it is of no kind that is known. Raises UnreadableError."""
    for engine, part in _parts(value):
        for tool, place in ((each, place) for each in TOOLS for place in each.places):
            if found := [each for each in _leaves(part, place) if _leaves(each, tool.known_by)]:
                if _first(part, PHASE) == "warmup":
                    raise UnreadableError("a request of the warm-up")
                yield from _intervals(tool, engine, part, found, time_ns)
                break


def _parts(value: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A result itself; of SpecForge, what it measured of each benchmark with each setting, under their names."""
    for name, runs in value.items():
        for run in runs if isinstance(runs, list) else ():
            for figures in run["metrics"] if isinstance(run, dict) and isinstance(run.get("metrics"), list) else ():
                if isinstance(figures, dict) and figures.get("accept_length") is not None:
                    settings = (f"{word} {run[key]}" for key, word in SETTINGS.items() if key in run)
                    about = ", ".join([name, *settings])[:NAME]
                    yield about, {**figures, "specforge": True, "model": value.get("model")}
    yield "", value


def _leaves(value: Any, path: str) -> list[Any]:  # noqa: ANN401
    """What stands at the first of the paths where anything does, through the items of lists; without what is null."""
    for each in path.split("|"):
        found = [value]
        for key in filter(None, each.split(".")):
            found = [item[key] for item in _flat(found) if isinstance(item, dict) and key in item]
        if leaves := [leaf for leaf in _flat(found) if leaf is not None]:
            return leaves
    return []


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from _flat(value) if isinstance(value, list) else (value,)


def _first(value: Any, path: str) -> Any:  # noqa: ANN401
    return next(iter(_leaves(value, path)), None)


def _told(value: Any, path: str, kind: Any) -> Any:  # noqa: ANN401
    """What stands at a path, all of one kind. Raises UnreadableError that names it."""
    found = _leaves(value, path) if path else []
    try:
        return declared([int(n) if isinstance(n, float) and n.is_integer() else n for n in found], list[kind])
    except UnreadableError as error:
        raise UnreadableError(f"{_word(path)}: {str(error).partition(' - at ')[0]}") from None


def _word(path: str) -> str:
    return path.partition("|")[0].rpartition(".")[2]


def _intervals(tool: Tool, engine: str, whole: Mapping[str, Any], found: list[Any], now: int) -> Iterator[ToldInterval]:
    end, seconds = _when(_first(whole, ENDED)) or now, _told(whole, "duration", Value) or [0.0]
    start = _when(_first(whole, BEGAN)) or max(end - int(1e9 * seconds[0]), 0)
    model, name = (" ".join(str(_first(whole, path) or "") for path in paths) for paths in ((MODEL,), REQUEST))
    ids = _leaves(whole, "token_ids")
    for index, value in enumerate(found):
        about = f"{name} {index}" if len(found) > 1 else name
        told = replace(_aggregate(tool, value), engine=engine, request=about.strip()[:NAME])
        if told.emitted is None and len(found) == 1:
            told = replace(told, emitted=next(iter(_told(whole, EMITTED, Sum)), len(ids) or None))
        yield ToldInterval(model[:NAME], min(start, end), end, told)


def _when(time: object) -> int | None:
    """A time in nanoseconds: from seconds, nanoseconds, or local time as benches write it; None where it is none."""
    if isinstance(time, int | float) and 0 < time < 2**63:
        return int(time * 1e9) if time < 2**33 else int(time)
    try:
        return int(datetime.strptime(str(time), "%Y%m%d-%H%M%S").timestamp() * 1e9)
    except (ValueError, OverflowError, OSError):
        return None


def _aggregate(tool: Tool, value: Any) -> Aggregate:  # noqa: ANN401
    """The counts of a request or a run. Raises UnreadableError where they contradict each other."""
    told = {name: _told(value, path, Sum) for path, name in tool.counts.items()}
    counts = {name: sum(numbers) for name, numbers in told.items() if numbers}
    if tool.last_steps:
        steps = sum(number + 1 for number in _told(value, tool.last_steps, Count))
        counts |= {"drafts": steps, "accepted": max(counts.get("emitted", 0) - steps, 0)}
    averages = {name: each for path, name in tool.averages.items() for each in _told(value, path, Value)[:1]}
    rates = declared(value.get(tool.rates) or [], Annotated[list[Share | None], Meta(max_length=4096)])
    at_depth = _of_steps(tool, value, counts) or _of_rates(rates, counts.get("drafts"))
    if counts.get("accepted", 0) > counts.get("drafted", 2**53):
        raise UnreadableError("more tokens accepted than drafted")
    if "accepted" not in counts and not averages:
        raise UnreadableError(f"figures of {tool.source} without a count of accepted tokens")
    proposed = () if tool.trees else full_chains(counts.get("drafts"), counts.get("drafted"), len(at_depth))
    if drafted := _told(value, tool.drafted, Count):
        proposed = tuple(sum(each >= depth for each in drafted) for depth in range(1, len(at_depth) + 1))
        steps = _told(value, tool.lengths, Count)
        if len(steps) != len(drafted) or sum(drafted) != counts["drafted"] or max(drafted) > len(at_depth):
            raise UnreadableError(f"{tool.lengths}, {tool.drafted} and the drafted tokens contradict each other")
        if any(accepted > of for accepted, of in zip(steps, drafted, strict=True)):
            raise UnreadableError(f"{tool.lengths} holds more than was drafted")
    return Aggregate(tool.source, **counts, accepted_at=at_depth, proposed_at=proposed, averages=averages)


def _of_steps(tool: Tool, value: Any, counts: dict[str, int]) -> tuple[int, ...]:  # noqa: ANN401
    """`accepted_at`, from steps by their lengths; what it counts joins `counts`. Raises UnreadableError."""
    lengths, told = _told(value, tool.lengths, Count), _leaves(value, tool.histogram) if tool.histogram else []
    if told and isinstance(told[0], dict):
        if not all(name.isdecimal() and len(name) < 9 for name in told[0]):
            raise UnreadableError(f"{_word(tool.histogram)} has invalid lengths")
        steps = Counter({int(length): times for length, times in declared(told[0], dict[str, Count]).items()})
    else:
        steps = Counter(dict(enumerate(_told(value, tool.histogram, Count)))) if told else Counter(lengths)
    if not steps:
        return ()
    if max(steps) - tool.with_final > POSITIONS or min(steps) < tool.with_final:
        raise UnreadableError(f"steps of {min(steps)} to {max(steps)} tokens")
    if told and lengths and +steps != Counter(lengths):
        raise UnreadableError(f"{_word(tool.histogram)} does not match {_word(tool.lengths)}")
    if counts.setdefault("drafts", steps.total()) != steps.total():
        raise UnreadableError(f"{_word(tool.histogram or tool.lengths)} does not count the {counts['drafts']:,} steps")
    histogram = [steps[length] for length in range(tool.with_final, max(steps) + 1)]
    counts.setdefault("accepted", sum(accepted * times for accepted, times in enumerate(histogram)))
    return tuple(sum(histogram[depth:]) for depth in range(1, len(histogram)))


def _of_rates(rates: list[float | None], drafts: int | None) -> tuple[int, ...]:
    """`accepted_at`, from the rates by position: the nearest counts. None where they are not those of its drafts."""
    at_depth = tuple(round((rate or 0.0) * (drafts or 0)) for rate in takewhile(lambda rate: rate is not None, rates))
    falls = drafts is not None and not any(after > before for before, after in pairwise((drafts, *at_depth)))
    return at_depth if falls else ()


class Printed(LogReader):
    """The last lines that an example or a bench prints: `name: number`. A name that comes again begins another."""

    words, is_log = "a printed result", False
    marks = (*PRINTED, *PRINTED_AT)
    own = re.compile(rf"(?<!, )(?:{'|'.join(map(re.escape, marks))})(?=[ \d]{{0,9}}[:=])")
    _line = re.compile(rf"({own.pattern})(?: \d{{1,3}})?\s*[:=]\s*([0-9]{{1,15}}(?:\.[0-9]{{1,9}})?)\s*$")

    def __init__(self, now: datetime, tail: list[str]) -> None:
        super().__init__(now, tail)
        self._values: dict[str, Any] = {}

    def _take(self, line: str) -> list[ToldInterval]:
        match, ended = self._line.match(line[:200]), []
        if match and match[1] in PRINTED_AT:
            key, one = PRINTED_AT[match[1]]
            self._values.setdefault(key, []).append(min(float(match[2]) / one, 1.0))
        elif match:
            ended = self._rest(last=True) if PRINTED[match[1]] in self._values else []
            self._values[PRINTED[match[1]]] = float(match[2]) if "." in match[2] else int(match[2])
        self.any |= any(_leaves(self._values, tool.known_by) for tool in TOOLS)
        return ended

    def _rest(self, *, last: bool) -> list[ToldInterval]:
        values, self._values = self._values, {}
        return list(read_results(values, int(self.now.timestamp() * 1e9)))


def read_table(text: Iterable[str]) -> dict[str, Any]:
    """A table with a column of lengths, as a result: of steps, where all are whole. Raises UnreadableError."""
    lines = iter(text)
    header = next(lines, "")
    delimiter = max(",;\t", key=header.count)
    names = [name.strip().lower() for name in next(csv.reader([header], delimiter=delimiter), [])]
    column = next((at for at, name in enumerate(names) if LENGTHS.fullmatch(name)), None)
    if column is None:
        raise UnreadableError("a table without a column of lengths")
    cells = [row[column].strip() for row in csv.reader(lines, delimiter=delimiter) if len(row) > column]
    try:
        numbers = [float(cell) for cell in cells if cell]
    except ValueError:
        raise UnreadableError(f"a table whose column {names[column]} does not hold numbers only") from None
    if not numbers or not all(0 <= number <= POSITIONS for number in numbers):
        raise UnreadableError(f"a table whose column {names[column]} holds no lengths")
    if not all(number.is_integer() for number in numbers):
        return {"mean_acceptance_length": sum(numbers) / len(numbers)}
    is_final_in = min(numbers) >= 1 and "tokens" not in names[column]
    return {"accept_lengths" if is_final_in else "accepted_lengths": [int(number) for number in numbers]}


NOTHING = "no figures of acceptance under known names (spec_decode_..., spec_verify_ct, accept_length, draft_n, ...)"


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
    if not isinstance(value, dict):
        raise UnreadableError("a JSON value that is not a response")
    if value.get("error"):
        raise UnreadableError(f"the response is a server error ({short(value['error'])})")
    if isinstance(value.get("outputs"), list):  # a RequestOutput of vLLM
        outputs = declared(value["outputs"], list[dict[str, Any]])
        yield from (told for each in outputs for told in _outputs({**each, "id": value.get("request_id")}, time_ns))
        return
    intervals = list(read_results(value, time_ns))
    if not intervals:
        is_undrafted = isinstance(value.get("timings"), dict)
        raise UnreadableError("a response of llama.cpp in which nothing was drafted" if is_undrafted else NOTHING)
    yield from intervals
