"""Service: turns requests into calls on the engine, and counts them for /metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import Counter
from starlette.datastructures import Headers

from specscope.engine.prompts import Encoded, Prompt
from specscope.errors import UserError
from specscope.remote.http import Limits
from specscope.serve.calls import Call, OutputChoice, Router, TextStream
from specscope.serve.engine_thread import EngineThread
from specscope.serve.errors import ApiError, cannot_run, full, stopping
from specscope.serve.forms import Form
from specscope.serve.requests import ChatRequest, CompletionRequest, ResponseFormat, Sampling
from specscope.trace.metrics import Metrics
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import TEMPLATE, RunInfo, StepRecord

if TYPE_CHECKING:
    from specscope.engine.engine import Engine

DEFAULT_TOKENS = 16  # of a completion, as OpenAI's
SAME = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "min_tokens")


def prompts_of(asked: Sampling) -> list[Prompt]:
    """The prompts, in the form that the engine reads. Raises ApiError."""
    if isinstance(asked, ChatRequest):
        return [[message.plain() for message in asked.messages]]
    assert isinstance(asked, CompletionRequest)
    prompt: Any = asked.prompt
    kinds = {type(item) for item in prompt} if isinstance(prompt, list) else {str}
    if len(kinds) > 1:
        raise ApiError(400, "prompt: give text, token ids, or a list of one of these", "prompt")
    if isinstance(prompt, str) or kinds == {int}:
        return [prompt]
    if len(prompt) > 1024:
        raise ApiError(400, "prompt: give at most 1024 prompts", "prompt")
    return list(prompt)


def params_of(asked: Sampling, seed: int, room: int) -> SamplingParams:
    """A request's sampling parameters. `seed`: used where it gives none; `room`: tokens that a chat may make.

    Raises ApiError that names the field.
    """
    _check_together(asked)
    values: dict[str, Any] = {name: getattr(asked, name) for name in SAME}
    values["temperature"] = 1.0 if asked.temperature is None else asked.temperature
    values["top_k"] = None if asked.top_k is None else max(asked.top_k, 0)
    values["seed"] = seed if asked.seed is None else asked.seed % 2**63
    values["stop"] = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    values["stop_token_ids"] = tuple(asked.stop_token_ids or ())
    values["logit_bias"] = asked.logit_bias
    values["max_tokens"], values["logprobs"] = _by_kind(asked, room)
    values["structured_outputs"] = structured_of(asked)
    try:
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})
    except UserError as error:
        raise cannot_run(error) from None


def _check_together(asked: Sampling) -> None:
    """Refuse fields that need or exclude another one. Raises ApiError."""
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    if isinstance(asked, ChatRequest) and asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")


def _by_kind(asked: Sampling, room: int) -> tuple[int, int | None]:
    """(max_tokens, logprobs), which the two kinds of request give in their own ways."""
    if isinstance(asked, ChatRequest):
        given = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        return given or max(room, 1), (asked.top_logprobs or 0) if asked.logprobs else None
    assert isinstance(asked, CompletionRequest)
    return asked.max_tokens or DEFAULT_TOKENS, asked.logprobs


def structured_of(asked: Sampling) -> dict[str, Any] | None:
    """The form of the output, by vLLM's names; response_format is one more, as in vLLM. Raises ApiError."""
    form = _of_format(asked.response_format)
    if asked.structured_outputs is None:
        return form
    given = msgspec.structs.asdict(asked.structured_outputs) | (form or {})
    values = {name: value for name, value in given.items() if value is not None}
    return values | ({"choice": tuple(values["choice"])} if "choice" in values else {})


def _of_format(form: ResponseFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"json_object": True}
    if form.json_schema is None or form.json_schema.schema is None:
        raise ApiError(400, "response_format: json_schema needs a schema", "response_format")
    return {"json": form.json_schema.schema}


def caller_of(headers: Headers) -> tuple[str, dict[str, str]]:
    """(traceparent, labels that keep its tracestate); ("", {}) where the client sent none that is valid."""
    given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
    context = get_current_span(TraceContextTextMapPropagator().extract(given)).get_span_context()
    if not context.is_valid:
        return "", {}
    labels = {"tracestate": context.trace_state.to_header()} if context.trace_state else {}
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}", labels


@dataclass(frozen=True)
class ServeOptions:
    """How to serve. Filled from flags."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    name: str | None = None  # of the model; None: the target's own
    max_queue: int = 256  # requests that may wait in addition to the --max-batch that run
    shutdown_seconds: float = 2.0
    seed: int = 0
    debug_socket: str | None = None
    privacy: Privacy = Privacy.EVERYTHING  # what is withheld from a debugger
    ratio: float | None = None  # of requests whose spans are sent; None: of all
    limits: Limits = field(default_factory=Limits)


REASONS = {  # by the status of the answer
    403: "other_site",
    408: "too_slow",
    413: "too_large",
    415: "content_type",
    429: "queue_full",
    503: "too_busy",
}


class Observed:
    """/metrics: a sink of records, which also counts what the server refused. `page` may be called on any thread.

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
        self._metrics.close()


class Service:
    """Lives on the event loop; the engine lives on its thread."""

    def __init__(
        self, engine: Engine, thread: EngineThread, router: Router, observed: Observed, options: ServeOptions
    ) -> None:
        self.engine, self.thread, self.router, self.observed, self.options = engine, thread, router, observed, options
        self.model = options.name or engine.run_info.target
        self.created = int(time.time())
        self.draining = False
        self._seed = options.seed  # of the next choice for which a request gives none
        self._compilers = ThreadPoolExecutor(2, "specscope-grammars")  # they wait for a process
        self._tokenizer = ThreadPoolExecutor(1, "specscope-tokenizer")  # one: tokenizers are not made for several

    @property
    def healthy(self) -> bool:
        """Whether new requests are accepted."""
        return not (self.draining or self.thread.stopping)

    async def start(self, asked: Sampling, headers: Headers) -> Form:
        """A call on the engine. Raises ApiError where the request cannot run, or there is no room for it."""
        self._check_model(asked.model)
        prompts, n = prompts_of(asked), asked.n or 1
        self._check_room(len(prompts) * n)
        template = (asked.chat_template_kwargs or {}) if isinstance(asked, ChatRequest) else {}
        encoded = [await self._encode(prompt, template) for prompt in prompts]
        self._check_room(len(prompts) * n)  # others may have come meanwhile
        room = self.engine.scheduler.room.longest - max(len(prompt.tokens) for prompt in encoded)
        params = params_of(asked, self._seed % 2**63, room)
        self._seed += len(prompts) * n * (asked.seed is None)
        await self._compile(params)
        call = self._call(asked, encoded, params, n)
        await self._add(call, params, headers, template)
        tokens, chat = sum(len(prompt.tokens) for prompt in encoded), isinstance(asked, ChatRequest)
        return Form(call, self.model, tokens, chat=chat, logprobs=params.logprobs is not None)

    def _check_model(self, name: str | None) -> None:
        if name and name != self.model:
            raise ApiError(404, f"the model {name[:200]!r} does not exist: use {self.model!r}", "model")

    def _check_room(self, wanted: int) -> None:
        if not self.healthy:
            raise stopping()
        limit = self.engine.config.max_batch + self.options.max_queue
        if wanted > limit:
            raise ApiError(
                400, f"n times the prompts is {wanted} requests; this server runs and queues at most {limit}", "n"
            )
        if len(self.router) + wanted > limit:
            self.observed.refused(429)
            raise full()

    async def _encode(self, prompt: Prompt, template: Mapping[str, Any]) -> Encoded:
        """The prompt's tokens, computed off the event loop. Raises ApiError."""
        limit = self.engine.max_context
        loop = asyncio.get_running_loop()
        try:
            done = await loop.run_in_executor(self._tokenizer, self.engine.encode, prompt, template)
        except UserError as error:
            raise ApiError(400, str(error), TEMPLATE if str(error).startswith(TEMPLATE) else "prompt") from None
        if len(done.tokens) >= limit:
            text = (
                f"This model's maximum context length is {limit} tokens; the prompt has {len(done.tokens)}: shorten it"
            )
            raise ApiError(400, text, "prompt")
        return done

    async def _compile(self, params: SamplingParams) -> None:
        """Compile the output's grammar off the event loop and the engine, so that others go on. Raises ApiError."""
        form = params.structured_outputs
        if form is None:
            return
        compiled = self.engine.forms.grammars.compile
        try:
            await asyncio.get_running_loop().run_in_executor(self._compilers, compiled, form)
        except UserError as error:
            raise ApiError(400, str(error), "structured_outputs") from None

    def _call(self, asked: Sampling, prompts: Sequence[Encoded], params: SamplingParams, n: int) -> Call:
        name = f"{'chatcmpl' if isinstance(asked, ChatRequest) else 'cmpl'}-{uuid4().hex}"
        many = len(prompts) * n > 1
        choices = [
            OutputChoice(
                f"{name}-{index}" if many else name,
                index,
                prompt,
                TextStream(self.engine.vocabulary, params.stop, keep_stop=bool(asked.include_stop_str_in_output)),
            )
            for index, prompt in enumerate(encoded for encoded in prompts for _ in range(n))
        ]
        return Call(name, choices, self._cancel)

    def _cancel(self, name: str) -> None:
        if not self.thread.stopping:
            self.thread.call(lambda: self.engine.cancel(name))

    async def _add(self, call: Call, params: SamplingParams, headers: Headers, template: Mapping[str, Any]) -> None:
        """Queue the call's requests, all or none. Raises ApiError."""
        traceparent, labels = caller_of(headers)

        def add() -> None:
            added: list[str] = []
            try:
                for choice in call.choices:
                    choice_params = replace(params, seed=(params.seed + choice.index) % 2**63)
                    about: dict[str, Any] = {"labels": labels, "traceparent": traceparent, "template": template}
                    self.engine.add(choice.prompt, choice_params, name=choice.name, served=True, **about)
                    added.append(choice.name)
            except UserError:
                for name in added:
                    self.engine.cancel(name)
                raise

        self.router.add(call)
        added = asyncio.wrap_future(self.thread.call(add))
        added.add_done_callback(lambda done: self._drop_refused(call, done))
        try:
            await asyncio.shield(added)
        except UserError as error:
            if self.thread.stopping:
                raise stopping() from None
            raise cannot_run(error) from None
        except asyncio.CancelledError:
            call.close()  # the client disconnected while the engine was busy
            raise

    def _drop_refused(self, call: Call, added: asyncio.Future[None]) -> None:
        if added.cancelled() or added.exception() is not None:
            self.router.drop([choice.name for choice in call.choices])

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._tokenizer.shutdown(wait=False, cancel_futures=True)
