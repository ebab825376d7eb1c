"""One streamed request: what was sent, when each piece of the answer came, and how it ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx2
import msgspec
import orjson
from httpx2 import EventSource

from specscope.errors import first_line
from specscope.trace.checked import decoded
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.vocabulary import printable
from specscope.watch.counts import UnreadableError
from specscope.watch.responses import read_json

LONGEST_REFUSAL = 2**16  # bytes of a refusal that are read
BROKEN = ("abort", "error")  # finish reasons of vLLM that are failures
# A chunk with one of these reports on speculation: vLLM, SGLang, llama.cpp (the sums until then), TensorRT-LLM
FIGURES = ('"speculative_decoding"', '"spec_', '"draft_n"')


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None  # of a completion
    delta: _Delta | None = None  # of a chat
    finish_reason: str | None = None

    @property
    def says(self) -> bool:
        """Whether it has output. The first chunk of a chat has only a role."""
        delta = self.delta or _Delta()
        return bool(self.text or delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass
class StreamedAnswer:
    """The outcome of one request. Times are those of time.perf_counter()."""

    sent: float
    ended: float = 0.0  # the last chunk with a choice
    chunks: list[float] = field(default_factory=list)  # when each chunk with output came
    counts: list[int | None] = field(default_factory=list)  # output tokens by then, where the server counts them
    input_tokens: int | None = None
    cached_tokens: int | None = None  # input tokens in the server's prefix cache, where it reports them
    told_tokens: int | None = None  # of the output, by the server
    drafts: Aggregate | None = None  # acceptance of this request, where the server reports it
    error: str = ""  # why it failed, in one line
    whole: bool = False  # whether the answer is complete

    @property
    def output_tokens(self) -> int:
        """Output tokens as the server counts them, else one for each chunk."""
        return len(self.chunks) if self.told_tokens is None else self.told_tokens

    @property
    def ttft(self) -> float:
        """Seconds to the first chunk with output. vLLM's bench takes the first chunk; with vLLM both come together."""
        return self.chunks[0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds to the end."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds for each output token after the first; None where there is none."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks: with speculation a chunk may hold several tokens."""
        return [after - before for before, after in pairwise(self.chunks)]

    @property
    def token_gaps(self) -> list[float]:
        """Seconds for each output token after the first chunk: a chunk's gap is divided among its tokens.

        Empty where the server does not count tokens chunk by chunk.
        """
        shared: list[float] = []
        for gap, (before, after) in zip(self.gaps, pairwise(self.counts), strict=True):
            if before is None or after is None:
                return []
            tokens = max(after - before, 0)
            shared += [gap / tokens] * tokens if tokens else []
        return shared


async def ask(client: httpx2.AsyncClient, url: str, body: Mapping[str, Any], seconds: float) -> StreamedAnswer:
    """Send a request and read its stream, for at most `seconds`. A failure is recorded in the answer."""
    data = orjson.dumps(body)
    answer = StreamedAnswer(time.perf_counter())
    try:
        async with (
            asyncio.timeout(seconds),
            client.stream("POST", url, content=data, headers={"Content-Type": "application/json"}) as response,
        ):
            if response.status_code == 200:
                await _read(response, answer)
            else:
                answer.error = f"HTTP {response.status_code}: {await _refusal(response)}"
    except TimeoutError:
        late = "not at its end" if answer.chunks else "no answer"
        answer.error = "" if answer.whole else f"{late} after {seconds:g} s"
    except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
        answer.error = "" if answer.whole else _broken(error, answer)
    if not answer.error and not answer.whole:
        answer.error = "the stream ended before the answer did"
    if answer.whole and not answer.chunks:  # nothing but an end token: it counts as the first
        answer.chunks, answer.counts = [answer.ended], [answer.told_tokens]
    return answer


async def _read(response: httpx2.Response, answer: StreamedAnswer) -> None:
    """Read every event of a stream, to its end, so that the connection can be reused."""
    async for event in EventSource(response):
        now = time.perf_counter()
        if event.data.startswith("[DONE]"):
            answer.whole = answer.whole or bool(answer.ended)
            continue
        try:
            chunk = decoded(event.data, _Chunk)
        except ValueError:  # of msgspec, and for text that is not Unicode
            answer.error = "a chunk of the stream is no completion"
            return
        if chunk.error is not None:
            answer.error = f"error in the stream: {_message(chunk.error)}"
            return
        _take(chunk, now, answer)
        if any(mark in event.data for mark in FIGURES):
            answer.drafts = _figures(event.data) or answer.drafts


def _take(chunk: _Chunk, now: float, answer: StreamedAnswer) -> None:
    """Count a chunk."""
    usage = chunk.usage
    count = usage.completion_tokens if usage is not None else None
    if usage is not None:
        answer.input_tokens = usage.prompt_tokens if usage.prompt_tokens is not None else answer.input_tokens
        if usage.prompt_tokens_details is not None:
            answer.cached_tokens = usage.prompt_tokens_details.cached_tokens
    grown = count is not None and count > (answer.told_tokens or 0)
    if count is not None:
        answer.told_tokens = count
    if not chunk.choices:
        return
    answer.ended = now
    if grown or any(choice.says for choice in chunk.choices):  # a token may have no text of its own
        answer.chunks.append(now)
        answer.counts.append(count)
    for choice in chunk.choices:
        if choice.finish_reason in BROKEN:
            answer.error = f"the server ended it: {choice.finish_reason}"
        answer.whole = answer.whole or choice.finish_reason is not None


def _figures(data: str) -> Aggregate | None:
    """The figures of speculation that vLLM and SGLang report on a request; None where there are none."""
    try:
        intervals = read_json(decoded(data), 0)
    except (UnreadableError, orjson.JSONDecodeError):
        return None
    return intervals[0].aggregate if len(intervals) == 1 else None


async def _refusal(response: httpx2.Response) -> str:
    """The reason that a server gives for a refusal."""
    data = b""
    async for piece in response.aiter_bytes():
        data += piece
        if len(data) > LONGEST_REFUSAL:
            break
    try:
        value = decoded(data)
    except orjson.JSONDecodeError:
        return _line(data.decode("utf-8", "replace")) or response.reason_phrase
    return _message(value.get("error", value.get("detail", value)) if isinstance(value, dict) else value)


def _message(error: Any) -> str:  # noqa: ANN401
    """The message of an error, in OpenAI's form or another."""
    detail = error.get("message", error) if isinstance(error, dict) else error
    return _line(detail if isinstance(detail, str) else orjson.dumps(detail).decode())


def _line(text: str) -> str:
    """A text as one short line that is safe to print."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= 200 else f"{line[:199]}…"


def _broken(error: Exception, answer: StreamedAnswer) -> str:
    """Why the connection broke, or could not be made."""
    if isinstance(error, httpx2.ConnectError):
        return f"cannot connect: {_line(first_line(error))}"
    if isinstance(error, httpx2.SSEError):
        return _line(first_line(error))
    when = "in the middle of the stream" if answer.chunks else "before the answer"
    return f"the connection broke {when} ({type(error).__name__})"
