"""RequestWitness: one generate() with an assistant, from its beginning to its end, as StepRecords: one a round."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specscope.trace.inside.recorder import Known, Recorder
from specscope.trace.record.notes import MethodNotes
from specscope.trace.record.records import FinishReason, Phase, RequestEnd, RequestInfo, RequestStep, StepRecord
from specscope.transformers.evidence import NotedDraws, Round, evidence
from specscope.transformers.run_info import CandidateSource, eos_tokens, most_drafted, read_params


@dataclass
class Arguments:
    """What _assisted_decoding was called with."""

    model: Any
    input_ids: Tensor  # [1, n]
    config: Any  # GenerationConfig
    processors: Any  # LogitsProcessorList
    cache: Any  # the target's; None where it is not known

    @staticmethod
    def of(given: dict[str, Any]) -> Arguments:
        """`given`: the call's arguments by name."""
        model, ids, config = (given[name] for name in ("self", "input_ids", "generation_config"))
        cache = given.get("cache", given.get("past_key_values"))  # the name since 5.24, and before
        return Arguments(model, ids, config, given.get("logits_processor") or [], cache)


@dataclass
class RequestWitness:
    """One request. A record is held until the next: the last has the end."""

    name: str
    arguments: Arguments
    source: CandidateSource
    generator: Any
    recorder: Recorder
    full: bool
    drafts: bool = False  # whether the generator is at work: what it generates is no request of its own
    round: Round | None = None
    _held: StepRecord | None = None
    _output: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        config, prompt = self.arguments.config, self.arguments.input_ids[0].tolist()
        self._samples = bool(config.do_sample)
        params, now = read_params(config, len(prompt), self.arguments.processors), time.time_ns()
        self._known = Known(self.recorder.info(self.name, prompt, params, arrival_ns=now, admitted_ns=now))
        self._admitted: tuple[RequestInfo, ...] = (self._known.info,)  # until a record has told it

    def begin_round(self, input_ids: Tensor) -> None:
        """The generator is asked for candidates behind these tokens [1, n]."""
        length, cache = int(input_ids.shape[1]), self.arguments.cache
        self.drafts = True
        context = length - 1 if cache is None else int(cache.get_seq_length())
        self.round = Round(context, length, draft_ns=(time.time_ns(), 0), plain=not len(self.arguments.processors))

    @property
    def _judged_round(self) -> Round:
        assert self.round is not None
        return self.round

    def drafted(self, candidates: Tensor, logits: Tensor | None) -> None:
        """`candidates` [1, n + k], `logits` [1, k, V]: what the generator gave."""
        round_ = self._judged_round
        round_.chain = candidates[0, round_.length :].tolist()
        round_.given = logits if round_.chain else None
        round_.draft_ns = (round_.draft_ns[0], time.time_ns())

    def forwarded(self, outputs: Any) -> None:
        """The target's pass has ended. Its logits are copied where rules are about to be written into them."""
        round_ = self._judged_round
        round_.forward_ns = time.time_ns()
        if self.full and not round_.plain:
            round_.raw = outputs.logits[0, -round_.k - 1 :].detach().to(torch.float32, copy=True)

    def judged(self, tokens: Tensor, accepted: Tensor | int, draws: NotedDraws) -> None:
        """The ratio test gave these tokens [1, .], of which so many are the drafter's."""
        self._judged_round.judged, self._judged_round.draws = (tokens[0].tolist(), int(accepted)), draws

    def end_round(self, input_ids: Tensor, scores: Tensor) -> None:
        """`input_ids` [1, n]: with what was kept; `scores` float32 [1, k + 1, V]: the target's logits after rules."""
        round_, self.round = self._judged_round, None
        committed = input_ids[0, round_.length :].tolist()
        if self.full and round_.plain:
            round_.raw = scores[0]
        made = evidence(round_, scores, committed, do_sample=self._samples, full=self.full)
        unsure = made.confidence if self.source.threshold else None
        part = self.recorder.decoded(
            self._known,
            made,
            len(committed),
            context=round_.context,
            prefill=max(round_.length - 1 - round_.context, 0),
            rule=round_.rule(do_sample=self._samples),
            method=None if unsure is None else MethodNotes(confidence=unsure),
            sizing=self._sizing() if round_.k else "",
        )
        self._output += committed
        (begin, end), now = round_.draft_ns, time.time_ns()
        forward = max(round_.forward_ns, end)
        times = (("draft", begin, end), ("forward", end, forward), ("verify", forward, max(now, forward)))
        before, self._held = self._held, self._record(tuple(Phase(*each) for each in times), part)
        if before is not None:
            self.recorder.publish(before)

    def _sizing(self) -> str:
        """What bounds the draft, where that is more than the run's own number of tokens."""
        most = most_drafted(self.generator)
        config = getattr(self.generator, "generation_config", None)
        threshold = getattr(config, "assistant_confidence_threshold", None) if self.source.threshold else None
        if threshold:
            return f"at most {most} drafted, ends after a token with q below {float(threshold):.3g}"
        return "" if most == self.source.settings["num_speculative_tokens"] else f"at most {most} drafted"

    def _record(self, phases: tuple[Phase, ...], *parts: RequestStep) -> StepRecord:
        admitted, self._admitted = self._admitted, ()
        return self.recorder.record(phases, parts, running=1, admitted=admitted)

    def end(self, error: BaseException | None) -> None:
        """generate() is over. Publishes what is held."""
        now = time.time_ns()
        held = self._held or self._record((Phase("draft", now, now),))
        reason, stop, failed = *self._reason(), ""
        if isinstance(error, Exception):
            reason, stop, failed = FinishReason.ERROR, "", f"{type(error).__name__}: {error}".removesuffix(": ")
        elif error is not None:  # Ctrl-C, or a signal that ends the script
            reason, stop = FinishReason.CANCELLED, ""
        end = RequestEnd(self._known.info, now, reason, stop, np.array(self._output, np.int32), failed)
        self._held = None
        self.recorder.publish(dataclasses.replace(held, finished=(end,)))

    def _reason(self) -> tuple[FinishReason, str]:
        """Why it ended: `stop` where a stopping criterion did, and max_time is one."""
        config = self.arguments.config
        if self._output and self._output[-1] in eos_tokens(config):
            return FinishReason.EOS, ""
        if len(self._known.info.prompt_tokens) + len(self._output) >= config.max_length:
            return FinishReason.LENGTH, ""
        text = self.recorder.vocabulary.text(self._output)
        stop = next((string for string in self._known.info.params.stop if string in text), "")
        return FinishReason.STOP, stop
