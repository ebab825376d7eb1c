"""The hooks in transformers' assisted generation: three functions are wrapped, and the generator of each request.

They are there while something is recorded, and gone after. In another version than those that are known, or where a
signature differs, nothing is wrapped, and recording is refused with the reason. What they call is transformers' own,
once; they draw nothing, and change no tensor. A request belongs to the thread that generates it, and may begin inside
of another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from specscope.errors import UserError
from specscope.trace.inside.hooking import ErrorGuard, Functions, HookedCall, differing, wrap, wrapped
from specscope.transformers.evidence import NotedDraws, Round
from specscope.transformers.run_info import CandidateSource
from specscope.transformers.witness import Arguments, RequestWitness

DECODING, GENERATOR, SAMPLING = "_assisted_decoding", "_get_candidate_generator", "_speculative_sampling"

WRAPPED: Functions = {
    f"GenerationMixin.{DECODING}": (
        "self input_ids logits_processor stopping_criteria generation_config synced_gpus streamer inputs_tensor "
        "assistant_model assistant_tokenizer tokenizer **model_kwargs"
    ),
    f"GenerationMixin.{GENERATOR}": (
        "self generation_config input_ids inputs_tensor logits_processor model_kwargs assistant_model "
        "target_tokenizer assistant_tokenizer"
    ),
    SAMPLING: "candidate_input_ids candidate_logits candidate_length new_logits assistant_ensemble_weight",
}
VERSIONS = ("5.20", "5.21", "5.22", "5.23", "5.24")  # each with its patch releases


def check_version(version: str) -> None:
    """Raises UserError where the hooks were not written for it."""
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        raise UserError(
            f"transformers {version} is unknown to specscope: {VERSIONS[0]} to {VERSIONS[-1]} can be recorded"
        )


def check_signatures(utils: ModuleType, version: str) -> None:
    """`utils`: transformers.generation.utils. Raises UserError that names what differs."""
    for line in differing(utils, WRAPPED):
        raise UserError(f"transformers {version} differs from the known versions: {line}")


# Makes the witness of a request, of its candidate generator too; None where it is not recorded
Begins = Callable[[Arguments, CandidateSource, Any], RequestWitness | None]


class _Running:
    """One call of _assisted_decoding: its witness is known when its generator is."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.witness: RequestWitness | None = None
        self.draws: NotedDraws | None = None  # while it is entered

    @property
    def round(self) -> Round | None:
        """The round that is judged; None while its drafter is at work, too."""
        return None if self.witness is None or self.witness.drafts else self.witness.round

    def stop_noting(self) -> None:
        """What was noted belongs to its round."""
        draws, self.draws = self.draws, None
        if draws is not None:
            draws.__exit__(None, None, None)
            if self.round is not None:
                self.round.draws = draws


class Hooks:
    """`begin` makes the witness of each request."""

    def __init__(self, utils: ModuleType, begin: Begins, guard: ErrorGuard) -> None:
        self._utils, self._begin, self._guard = utils, begin, guard
        self._threads = threading.local()
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def install(self) -> None:
        """Wrap the functions."""
        mixin = self._utils.GenerationMixin
        for owner, name, hook in (
            (mixin, DECODING, self._decoding),
            (mixin, GENERATOR, self._generator),
            (self._utils, SAMPLING, self._sampling),
        ):
            original = getattr(owner, name)
            self._undo.append((owner, name, original, wrapped(original, hook)))
            setattr(*self._undo[-1][:2], self._undo[-1][3])

    def remove(self) -> None:
        """Put the functions back. A wrapper that somebody else put around ours stays, and ours does nothing then."""
        self._guard.is_off = True
        for owner, name, original, ours in self._undo:
            if getattr(owner, name) is ours:
                setattr(owner, name, original)
        self._undo.clear()

    @property
    def _stack(self) -> list[_Running]:
        """The requests of this thread, the inner ones last."""
        stack: list[_Running] = self._threads.__dict__.setdefault("stack", [])
        return stack

    def _decoding(self, call: HookedCall) -> Any:
        if self._guard.is_off or any(outer.witness and outer.witness.drafts for outer in self._stack):
            return call()
        arguments = self._guard.safely(lambda: Arguments.of(call.given))
        if arguments is None:
            return call()
        running = _Running(arguments)
        self._stack.append(running)
        handle = arguments.model.register_forward_hook(lambda _, __, outputs: self._heard(running, outputs))
        error: BaseException | None = None
        try:
            return call()
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._stack.pop()
            running.stop_noting()
            if running.witness is not None:
                self._guard.safely(running.witness.end, error)
            handle.remove()

    def _heard(self, running: _Running, outputs: Any) -> None:
        """A pass of a target has ended: of the request that this thread generates, or of one around it. The round's own
        is its first: rules may run the target again (guidance_scale).
        """
        is_inner = running in self._stack[-1:]
        if not is_inner or running.witness is None or running.round is None or running.round.forward_ns:
            return
        self._guard.safely(running.witness.forwarded, outputs)
        if running.arguments.config.do_sample and running.round.given is None:
            running.draws = NotedDraws()  # the loop itself draws the tokens that a chain without q is compared with
            running.draws.__enter__()

    def _generator(self, call: HookedCall) -> Any:
        generator = call()
        running = self._stack[-1] if self._stack else None
        if running is not None and running.witness is None:
            self._guard.safely(self._watch, running, generator)
        return generator

    def _watch(self, running: _Running, generator: Any) -> None:
        """Replace two methods of this one generator."""
        source = CandidateSource.of(generator)
        witness = running.witness = self._begin(running.arguments, source, generator)
        if witness is None:
            return

        def get_candidates(call: HookedCall) -> Any:
            self._guard.safely(witness.begin_round, call.given["input_ids"])
            try:
                made = call()
            finally:
                witness.drafts = False
            if witness.round is not None:
                self._guard.safely(witness.drafted, *made)
            return made

        def update_candidate_strategy(call: HookedCall) -> Any:
            running.stop_noting()
            if witness.round is not None:
                self._guard.safely(witness.end_round, call.given["input_ids"], call.given["scores"])
            return call()

        # a generator of the user's own may call its parameters otherwise: they are given by position
        wrap(generator, "get_candidates", get_candidates, ("input_ids",))
        wrap(generator, "update_candidate_strategy", update_candidate_strategy, ("input_ids", "scores", "num_matches"))

    def _sampling(self, call: HookedCall) -> Any:
        running = self._stack[-1] if self._stack else None
        if running is None or running.witness is None or running.round is None or self._guard.is_off:
            return call()
        with NotedDraws() as draws:
            made = call()
        self._guard.safely(running.witness.judged, *made, draws)
        return made
