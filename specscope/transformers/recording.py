"""`specscope.record`: what transformers' assisted generation does meanwhile, as a capture, and on a live screen."""

from __future__ import annotations

import dataclasses
import importlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from specscope.errors import UserError
from specscope.trace.files import CAPTURE, Existing, check_output
from specscope.trace.inside.hooking import ErrorGuard, log
from specscope.trace.inside.recorder import Recorder, vocabulary_of
from specscope.trace.inside.sinks import warn
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.outputs import Bus, OutputOptions, Outputs
from specscope.trace.wire.spans import SpanLevel
from specscope.transformers import UTILS, hooks
from specscope.transformers.hooks import Hooks
from specscope.transformers.run_info import CandidateSource, eos_tokens, run_info
from specscope.transformers.witness import Arguments, RequestWitness

_LOCK = threading.Lock()  # one recording at a time: the hooks are the process's
_ACTIVE: list[Recording] = []


def _forget() -> None:
    """In a child that was forked: the threads that write are its parent's, and so are the files."""
    for recording in _ACTIVE:
        recording.forget()


os.register_at_fork(after_in_child=_forget)


def record(
    capture: str | Path | None,
    *,
    endpoint: str | None = None,
    tokenizer: Any = None,
    evidence: str = "full",
    no_text: bool = False,
    no_tokens: bool = False,
) -> Recording:
    """Record every `generate()` with an assistant inside of a `with` statement, on whatever thread.

    `capture`: a file; a run with another target, drafter or end of sequence gets a file of its own, run.2.jsonl.
    `endpoint`: where spans are sent, as --otlp-endpoint. `tokenizer`: tells tokens as text; None looks for the one
    beside the model, and never on the network. `evidence`: full, or lean. Output and random state are as without.
    Entering raises UserError where the version of transformers is not known, something is recorded already, or the file
    cannot be written. The file's name is of the folder that the script is in at this call, whatever it changes to.
    """
    if evidence not in ("full", "lean"):
        raise UserError(f"evidence is {evidence!r}: use full or lean")
    options = options_of(capture, endpoint, privacy=Privacy.of(no_text=no_text, no_tokens=no_tokens))
    return Recording(options, evidence, tokenizer)


def options_of(capture: str | Path | None, endpoint: str | None, **more: Any) -> OutputOptions:
    """Where records go. A script may change its folder: the capture's name is of the one that it is in now."""
    kept = None if capture is None else os.path.abspath(capture)
    given = {"otlp_protocol": None, "level": SpanLevel.TREES, **more}
    return OutputOptions(capture=kept, otlp_endpoint=endpoint, metrics_port=None, drops=True, **given)


@dataclass(frozen=True)
class _Run:
    """The outputs of one target with one drafter and one set of tokens that end an output."""

    outputs: Outputs
    bus: Bus
    recorder: Recorder


class Recording:
    """A context manager; see `record`."""

    def __init__(self, options: OutputOptions, evidence: str, tokenizer: Any = None) -> None:
        """`options`: where the first run goes; a further one gets a file of its own."""
        self.captures: list[str] = []  # the files, as they are opened
        self.losses: list[str] = []  # what they lack, after the end
        self._options, self._evidence, self._tokenizer = options, evidence, tokenizer
        self._guard = ErrorGuard()
        self._runs: dict[tuple[Any, ...], _Run] = {}
        self._models: list[Any] = []  # kept, so that no other gets the id of one
        self._requests, self._lock = count(), threading.Lock()
        self._hooks: Hooks | None = None
        self._version = ""
        self._is_forgotten = False

    def __enter__(self) -> Recording:
        """Wrap transformers' functions."""
        self._version = importlib.import_module("transformers").__version__
        hooks.check_version(self._version)
        utils = importlib.import_module(UTILS)
        if self._options.capture is not None:
            check_output(self._options.capture, "capture", (), CAPTURE, self._options.existing)
        with _LOCK:
            if _ACTIVE:
                raise UserError(
                    "transformers is already being recorded: end that `with specscope.record(...)` first, or run the "
                    "script without SPECSCOPE_CAPTURE and `specscope transformers`"
                )
            hooks.check_signatures(utils, self._version)
            self._hooks = Hooks(utils, self._begin, self._guard)
            self._hooks.install()
            _ACTIVE.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Put them back, and close the capture. Requests that still run are told as cancelled."""
        errors = self._guard.errors
        with _LOCK:
            if self._hooks is not None:
                self._hooks.remove()
            _ACTIVE.clear()
        for run in self._runs.values():
            try:
                self.losses += run.outputs.close()
            except Exception as failed:  # a disk that was full: the user's own work is done
                self.losses.append(str(failed))
        if errors:
            self.losses.append(f"{errors} rounds or requests were not recorded: the log says why")
        if not self._runs and not self._is_forgotten:
            log.warning("specscope: nothing was recorded: no generate() with an assistant ran")
        warn(*self.losses)

    def flush(self) -> None:
        """Wait until everything recorded so far is written, and what is to be sent has been handed on."""
        for run in list(self._runs.values()):
            run.bus.flush()

    def forget(self) -> None:
        """Record nothing more, and close nothing."""
        self._guard.is_off = self._is_forgotten = True
        self._runs.clear()
        self.captures.clear()

    def _begin(self, arguments: Arguments, source: CandidateSource, generator: Any) -> RequestWitness | None:
        if arguments.config.assistant_ensemble_weight is not None:
            log.warning("specscope: a request with assistant_ensemble_weight is not recorded: its rule is not lossless")
            return None
        with self._lock:
            assistant = getattr(generator, "assistant_model", None)  # MTP layers are loaded anew for each request
            key = (id(arguments.model), source.drafter, id(assistant), source.early_exit, eos_tokens(arguments.config))
            if key not in self._runs:
                self._models += [arguments.model, assistant]
                self._runs[key] = self._open(arguments, source)
            name = f"generate-{next(self._requests)}"
        full = self._evidence == "full"
        return RequestWitness(name, arguments, source, generator, self._runs[key].recorder, full)

    def _open(self, arguments: Arguments, source: CandidateSource) -> _Run:
        info = run_info(arguments.model, source, arguments.config, self._version, self._evidence)
        options = dataclasses.replace(self._options, existing=Existing.NEW_NAME) if self._runs else self._options
        vocabulary = Vocabulary() if options.privacy else _vocabulary(arguments.model, self._tokenizer)
        bus = Bus()
        outputs = Outputs(options, bus, info, vocabulary, None, tell=warn)
        if outputs.captured:
            self.captures.append(outputs.captured)
        if outputs.renamed:
            warn(outputs.renamed)
        log.info("specscope: recording %s with %s", info.target, source.settings["method"])
        return _Run(outputs, bus, Recorder(info, vocabulary, bus.publish))


def _vocabulary(model: Any, tokenizer: Any) -> Vocabulary:
    """The given tokenizer's, or that of the one beside the model; empty where there is none: tokens are numbers."""
    path = getattr(model.config, "_name_or_path", "")
    if tokenizer is None and not path:
        return Vocabulary()
    load: Callable[..., Any] = importlib.import_module("transformers").AutoTokenizer.from_pretrained
    return vocabulary_of(lambda: load(path, local_files_only=True) if tokenizer is None else tokenizer, warn)
