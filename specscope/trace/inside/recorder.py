"""Recorder: makes StepRecords of another engine's steps. Its adapter says what was admitted, judged and ended."""

from __future__ import annotations

import dataclasses
import platform
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from specscope.errors import UserError
from specscope.plans.kinds import BY_NAME
from specscope.plans.model_digest import digest_of_loaded
from specscope.trace.history.wording import title_of
from specscope.trace.inside.chain import NO_INTS, Judged
from specscope.trace.record.notes import MethodNotes
from specscope.trace.record.params import NO_SEED, UNREAD, SamplingParams
from specscope.trace.record.records import (
    Phase,
    Preceded,
    RequestEnd,
    RequestInfo,
    RequestStep,
    RunInfo,
    StepRecord,
    followed_by,
)
from specscope.trace.record.tree import DraftTree, Ints
from specscope.trace.record.vocabulary import Vocabulary, read_vocabulary

LONGEST = 200  # characters of a label
Publish = Callable[[StepRecord], None]
ReadParams = tuple[SamplingParams, dict[str, str]]  # what specscope has a word for, and the others as labels


def label(value: object) -> str:
    """A value as a label, cut where it is long."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def params_of(values: Mapping[str, Any], labels: dict[str, str]) -> ReadParams:
    """An engine's values as parameters; None is what nobody asked for. Those that specscope would refuse are a label,
    and so is a seed that is none of ours: they count from 0.
    """
    given: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}
    if isinstance(stop := given.get("stop"), str):
        given["stop"] = (stop,)
    if (seed := given.get("seed")) is None or seed < 0:
        labels |= [NO_SEED if seed is None else ("seed", str(seed))]
        given["seed"] = None
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None}), labels
    except UserError as error:
        return SamplingParams(), labels | {UNREAD: label(f"{values!r} ({error})")}


def version_of(*distributions: str) -> str:
    """Of the first of them that is installed."""
    for name in distributions:
        with suppress(PackageNotFoundError):
            return version(name)
    return "unknown"


def run_of(backend: str, version: str, name: object, target: str, draft: str, dtype: object, **about: Any) -> RunInfo:  # noqa: ANN401
    """The header of another engine's run. `name`: of the target, as clients know it, where that is not the end of its
    path; `target`, `draft`: the paths, "" for no draft model; `about`: all else, None where it is not known.
    """
    torch: Any = sys.modules["torch"]  # the engine's
    on_gpu = torch.cuda.is_available()
    made: dict[str, Any] = {
        "run_id": uuid.uuid4().hex,
        "target": _last(str(name or target)),
        "draft_model": _last(draft),
        "revision": "",
        "seed": 0,
        "blocks": 0,
        "block_size": 1,
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "dtype": str(dtype).removeprefix("torch."),
        "backend": backend,
        "params": SamplingParams().to_dict(),
        "versions": {backend: version, "torch": torch.__version__, "python": platform.python_version()},
        "target_path": target,
        "target_digest": digest_of_loaded(target),
        "draft_path": draft,
        "draft_digest": digest_of_loaded(draft),
    }
    return RunInfo(**made | {name: value for name, value in about.items() if value is not None})


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


@dataclass
class Known:
    """A request while it is in the engine."""

    info: RequestInfo
    index: int = 0  # its own next step
    emitted: int = 0  # output tokens so far
    committed: int = 0  # and those that the verifier gave: more, where a stop cut its last step
    preceded: Preceded = Preceded.PREFILL  # what came before its next decode step
    stops: frozenset[int] = frozenset()  # tokens that end it
    most: int = 2**31 - 1  # output tokens at most

    @property
    def context(self) -> int:
        """Tokens whose KV is there when it decodes: all but the last."""
        return len(self.info.prompt_tokens) + self.committed - 1

    def kept(self, tokens: list[int], max_context: int) -> int:
        """How many of these committed tokens become output: all up to one that ends the request."""
        length = len(self.info.prompt_tokens) + self.emitted
        for count, token in enumerate(tokens, 1):
            if token in self.stops or self.emitted + count >= self.most or length + count >= max_context:
                return count
        return len(tokens)

    def chunk(self, context: int, fed: int, blocks: Ints = NO_INTS) -> RequestStep:
        """A chunk of its prompt that does not reach the end: `fed` tokens behind `context`."""
        index, self.index = self.index, self.index + 1
        return RequestStep(self.info.id, index, context, fed, "none", DraftTree.empty(), None, 0, blocks=blocks)


def vocabulary_of(load: Callable[[], Any], tell: Callable[[str], object]) -> Vocabulary:
    """The texts of a tokenizer's tokens; `tell` gets why there are none: tokens are then shown by number."""
    try:
        return read_vocabulary(load())
    except Exception as error:
        tell(f"cannot read the tokenizer: {error!r}")
        return Vocabulary()


class Recorder:
    """Numbers the records of a run and publishes them. `publish` must not wait; records may come on any thread."""

    def __init__(self, run: RunInfo, vocabulary: Vocabulary, publish: Publish) -> None:
        self.run, self.vocabulary = run, vocabulary
        self.steps = 0  # that were published
        self._publish, self._lock = publish, threading.Lock()

    def info(
        self,
        name: str,
        prompt: Sequence[int],
        params: ReadParams,
        *,
        arrival_ns: int,
        admitted_ns: int,
        traceparent: str = "",
        chat: bool = False,
        served: bool = False,
    ) -> RequestInfo:
        """A request, whose `prompt` are tokens."""
        text = self.vocabulary.text(prompt)
        return RequestInfo(
            id=name,
            arrival_ns=arrival_ns,
            admitted_ns=admitted_ns,
            prompt=text,
            prompt_tokens=np.array(prompt, np.int32),
            params=params[0],
            labels=params[1],
            title=title_of(text),
            traceparent=traceparent,
            chat=chat,
            served=served,
        )

    def decoded(
        self,
        request: Known,
        judged: Judged,
        emitted: int,
        *,
        context: int,
        prefill: int = 0,
        rule: str = "",
        method: MethodNotes | None = None,
        sizing: str = "",
        blocks: Ints = NO_INTS,
    ) -> RequestStep:
        """A request's part in a step that verified drafts: by which rule, and what the drafter tells besides."""
        tree, verdict = judged.tree, judged.verdict
        kind = BY_NAME.get(self.run.drafter)
        if len(tree) and ((kind is not None and kind.one_pass) or self.run.speculation.get("parallel_drafting")):
            method = dataclasses.replace(method or MethodNotes(), one_pass=True)
        part = RequestStep(
            request=request.info.id,
            index=request.index,
            context_len=context,
            prefill_tokens=prefill,
            drafter=self.run.drafter if len(tree) else "none",
            tree=tree,
            verdict=dataclasses.replace(verdict, rule=rule) if rule else verdict,
            emitted=emitted,
            notes=judged.notes,
            preceded=request.preceded,
            parents=judged.parents,
            method=None if method == MethodNotes() else method,
            sizing=sizing,
            blocks=blocks,
        )
        request.index += 1
        request.emitted += emitted
        request.committed += verdict.accepted + 1
        request.preceded = followed_by(verdict.kind, len(tree), verdict.accepted)
        return part

    def record(
        self,
        phases: Sequence[Phase],
        parts: Sequence[RequestStep],
        *,
        running: int,
        waiting: int = 0,
        blocks_used: int = 0,
        blocks_free: int = 0,
        admitted: Sequence[RequestInfo] = (),
        preempted: tuple[str, ...] = (),
        finished: tuple[RequestEnd, ...] = (),
        budget: int | None = None,
    ) -> StepRecord:
        """A step, to be numbered when it is published."""
        now = time.time_ns()
        return StepRecord(
            step=self.steps,
            phases=tuple(phases) or (Phase("schedule", now, now),),
            running=running,
            waiting=waiting,
            blocks_used=blocks_used,
            blocks_free=blocks_free,
            speculation=bool(self.run.speculation),
            speculation_off="" if self.run.speculation else f"{self.run.backend} runs without a speculative config",
            admitted=tuple(admitted),
            requests=tuple(parts),
            preempted=preempted,
            finished=finished,
            budget=budget,
        )

    def publish(self, record: StepRecord) -> None:
        """Number a record and pass it on."""
        with self._lock:
            number, self.steps = self.steps, self.steps + 1
            self._publish(record if record.step == number else dataclasses.replace(record, step=number))
