"""A server under load: its address, the requests to it, and its counters."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import httpx2
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from specscope.bench.datasets import LoadRequest
from specscope.bench.stream import StreamedAnswer, ask
from specscope.errors import UserError, first_line
from specscope.trace.checked import checked_url, decoded, short, without_login
from specscope.trace.record.aggregate import Aggregate
from specscope.watch.counts import UnreadableError
from specscope.watch.metrics import Reading, difference, read_metrics

TOKENS = 128  # of output, where neither flags nor dataset say
PATIENCE = 10.0  # seconds for the pages that are read in addition to the load
KEEP = 2.0  # seconds that an idle connection is kept: servers close theirs after 5
LARGEST_PAGE = 64 * 2**20  # bytes
# Tried in turn: the count of tokens in each chunk, in the last one, not at all
STREAM_OPTIONS: tuple[Mapping[str, Any], ...] = (
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": {"include_usage": True}},
    {},
)
CACHE = {"vllm:prefix_cache_queries_total": "queries", "vllm:prefix_cache_hits_total": "hits"}


@dataclass(frozen=True)
class RequestOptions:
    """What every request of a bench has besides its prompt."""

    chat: bool = True
    max_tokens: int | None = None  # takes precedence over the dataset
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    timeout: float = 600.0  # seconds for a whole answer


@dataclass
class Page:
    """A server's counters at one time."""

    engines: dict[tuple[str, str, str], Reading] = field(default_factory=dict)
    cache: Counter[str] = field(default_factory=Counter)  # tokens of prompts, by CACHE


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Endpoint:
    """One OpenAI-compatible server. Use it with `async with`."""

    def __init__(self, url: str, request: RequestOptions, *, name: str = "", key: str | None = None) -> None:
        self.url = base_url(url)
        self.name = name or self.url
        self.request = request
        self.model = ""
        self._options = STREAM_OPTIONS[0]
        self.path = "/v1/chat/completions" if request.chat else "/v1/completions"
        self._client = httpx2.AsyncClient(
            headers={"User-Agent": "specscope", **({"Authorization": f"Bearer {key}"} if key else {})},
            timeout=None,  # asyncio counts the seconds of a whole answer
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP),
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:  # noqa: ANN401
        await self._client.__aexit__(*error)

    async def open(self, model: str | None, first: LoadRequest) -> None:
        """Find the model, and send a request that is not counted, to see that it answers. Raises UserError."""
        self.model = model or await self._first_model()
        for options in STREAM_OPTIONS:
            self._options = options
            answer = await self.send(first, 0)
            if not answer.error.startswith(("HTTP 400", "HTTP 422")):
                break
        if answer.error:
            advice = ": set the variable that --api-key-env names" if answer.error.startswith("HTTP 401") else ""
            raise UserError(f"{self.url} does not answer a first request: {answer.error}{advice}")

    async def send(self, asked: LoadRequest, number: int) -> StreamedAnswer:
        """One request; `number` makes its seed."""
        return await ask(self._client, self.url + self.path, self.body(asked, number), self.request.timeout)

    def body(self, asked: LoadRequest, number: int) -> dict[str, Any]:
        """The JSON of a request."""
        common, prompt = self.request, {"messages": asked.chat()} if self.request.chat else {"prompt": asked.text()}
        return {
            "model": self.model,
            **prompt,
            "stream": True,
            **self._options,
            "temperature": common.temperature,
            **({"seed": (common.seed + number) % 2**63} if common.temperature else {}),
            **({"ignore_eos": True} if common.ignore_eos else {}),
            **asked.params,
            "max_tokens": common.max_tokens or asked.tokens or TOKENS,
        }

    async def page(self) -> Page | None:
        """Its /metrics; None where it has none."""
        try:
            text = await self._get("/metrics")
            page = Page({(r.source, r.engine, r.model): r for r in read_metrics(text, time.time_ns())})
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name in CACHE:
                        page.cache[CACHE[sample.name]] += int(sample.value)
        except (UserError, UnreadableError, ValueError, OverflowError):
            return None
        return page

    async def _get(self, path: str) -> str:
        """A page. Raises UserError."""
        data = b""
        try:
            async with asyncio.timeout(PATIENCE), self._client.stream("GET", self.url + path) as response:
                if response.status_code != 200:
                    raise UserError(f"{self.url}{path}: the server answers {response.status_code}")
                async for piece in response.aiter_bytes():
                    data += piece
                    if len(data) > LARGEST_PAGE:
                        raise UserError(f"{self.url}{path} is larger than {LARGEST_PAGE >> 20} MiB")
        except TimeoutError:
            raise UserError(f"{self.url}{path}: no answer after {PATIENCE:g} s") from None
        except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            raise UserError(f"{self.url} cannot be reached: {first_line(error)}") from None
        return data.decode("utf-8", "replace")

    async def _first_model(self) -> str:
        """The first model that the server lists. Raises UserError."""
        text = await self._get("/v1/models")
        with suppress(ValueError):
            listed = decoded(text, _Models).data
            if listed:
                return listed[0].id
        raise UserError(f"{self.url}/v1/models lists no model: give --model")


def grown(before: Page | None, after: Page | None) -> tuple[list[Aggregate], float | None]:
    """What happened between two pages: sums of each engine, and the share of prompt tokens found in prefix caches."""
    if before is None or after is None:
        return [], None
    aggregates = [difference(before.engines.get(key), reading).aggregate for key, reading in after.engines.items()]
    cache = {name: after.cache[name] - before.cache[name] for name in CACHE.values()}
    known = cache["queries"] > 0 and cache["hits"] >= 0
    return aggregates, cache["hits"] / cache["queries"] if known else None


ADVICE = "{} is no address of a server: write http://HOST:PORT"


def base_url(text: str) -> str:
    """http://HOST:PORT, without /v1 at its end. Raises UserError."""
    parts = checked_url(text, ADVICE)
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise UserError(ADVICE.format(short(without_login(text))))
    return text.rstrip("/").removesuffix("/v1").rstrip("/")
