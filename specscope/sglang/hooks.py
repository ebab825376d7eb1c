"""The hooks in SGLang's scheduler process, each AROUND one of its functions, by its own registry.

A verification is seen where the worker launches it, and its result where the scheduler takes it, later where steps
overlap: first in, first out, and checked by the requests' ids. What they call is SGLang's own, once, with what it was
called with; nothing before the result is taken waits for the device.

Signatures decide which version is known, and not numbers: 0.5.21 to 0.5.23 are, and another one is used where it fits.
Where it does not, nothing is wrapped, and the plugin says what differs.
"""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from specscope.sglang.verification import Verification, VerifierResult
from specscope.sglang.witness import ResultWitness
from specscope.trace.inside.hooking import ErrorGuard, Functions, HookedCall, differing, log
from specscope.trace.inside.trees import VerificationError
from specscope.trace.record.rules import UNSEEN

VERIFY = "sglang.srt.speculative.eagle_utils"
DRAFT = "sglang.srt.speculative.eagle_worker_v2"
DFLASH = "sglang.srt.speculative.dflash_worker_v2"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor"
TREE = "sglang.kernels.ops.speculative.sampling"
CHAIN = "sglang.kernels.ops.speculative.reject_sampling"
OPTIONAL = (TREE, DFLASH)  # where they cannot be imported, on this device or at all, SGLang does without them

_SAMPLING = (
    "predicts accept_index accept_token_num candidates retrive_index retrive_next_token retrive_next_sibling "
    "uniform_samples uniform_samples_for_final_sampling target_probs draft_probs threshold_single threshold_acc "
    "deterministic"
)
_EAGLE = "verify_input batch logits_output grammar_mask uno_target_max_top_k"
_BLOCK = "self candidates next_token_logits sampling_info draft_input prefix_lens bs"
WRAPPED: Mapping[str, Functions] = {
    VERIFY: {
        "eagle_sample": (_EAGLE, f"{_EAGLE} watermark_state watermark_full_mask"),  # the second since 0.5.22
        "organize_draft_results": "score_list token_list parents_list num_draft_token",
        "_verify_uses_greedy": "is_all_greedy is_cpu is_hip is_xpu use_rejection_sampling",
    },
    DRAFT: {"EagleDraftWorker.draft": "self batch with_topology"},
    DFLASH: {"DFlashWorkerV2._accept_block": (_BLOCK, f"{_BLOCK} target_predict")},  # the second since 0.5.23
    RESULTS: {
        "SchedulerBatchResultProcessor._resolve_spec_v2_tokens": "self result batch",
        "SchedulerBatchResultProcessor.process_batch_result_decode": "self batch result",
        "SchedulerBatchResultProcessor.process_batch_result_prefill": "self batch result",
    },
    TREE: {"tree_speculative_sampling_target_only": _SAMPLING},
    CHAIN: {"chain_speculative_sampling_triton": (_SAMPLING, f"{_SAMPLING} block_verification")},  # since 0.5.22
}
MOST_PENDING = 64  # verifications whose results have not been taken; SGLang overlaps two


# Makes the witness when the first result is taken, of SGLang's SchedulerBatchResultProcessor and the first request
Opens = Callable[[Any, Any], ResultWitness]


class ServerHooks:
    """`verify`: its module eagle_utils; `records`: whether this rank records."""

    def __init__(
        self,
        verify: ModuleType,
        open_: Opens,
        guard: ErrorGuard,
        *,
        full: bool,
        records: Callable[[], bool] = lambda: True,
    ) -> None:
        self._verify, self._open, self._guard = verify, open_, guard
        self._full, self._records_here = full, cache(records)
        self._running: Verification | None = None  # while its sampling runs
        self._pending: deque[Verification] = deque()  # whose results have not been taken
        self._drafted_ns = (0, 0)  # of the draft that was made last
        self._scores: Tensor | None = None
        self._skipped: list[bool] | None = None  # requests whose results SGLang drops
        self._witness: ResultWitness | None = None
        self.lost = 0  # results of which nothing was seen

    def targets(self) -> Mapping[str, Mapping[str, Callable[[HookedCall], Any]]]:
        """What goes around which function, by module."""
        return {
            VERIFY: {"eagle_sample": self.sample, "organize_draft_results": self.organize},
            DRAFT: {"EagleDraftWorker.draft": self.draft},
            DFLASH: {"DFlashWorkerV2._accept_block": self.accept_block},
            TREE: {"tree_speculative_sampling_target_only": partial(self.sampling, chain=False)},
            CHAIN: {"chain_speculative_sampling_triton": partial(self.sampling, chain=True)},
            RESULTS: {
                "SchedulerBatchResultProcessor._resolve_spec_v2_tokens": self.resolve,
                "SchedulerBatchResultProcessor.process_batch_result_decode": self.decoded,
                "SchedulerBatchResultProcessor.process_batch_result_prefill": self.prefilled,
            },
        }

    # Where the worker drafts and verifies

    def draft(self, call: HookedCall) -> Any:
        """A model drafts."""
        began, self._scores = time.time_ns(), None
        made = call()
        self._drafted_ns = (began, time.time_ns())
        return made

    def organize(self, call: HookedCall) -> Any:
        """The best drafts are chosen by their scores; not where a CUDA graph does it, or is being captured."""
        made = call()
        self._guard.safely(lambda: self._score(call.given["score_list"], made[1]))
        return made

    def _score(self, score_list: Sequence[Tensor], chosen: Tensor) -> None:
        if not (chosen.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._scores = torch.cat(list(score_list), dim=1).flatten(1).gather(1, chosen)

    def sample(self, call: HookedCall) -> Any:
        """eagle_sample: a tree or a chain is verified."""
        return self._around(call, self._begin, lambda _, made: VerifierResult(made[1] - 1, made[2], made[0]))

    def accept_block(self, call: HookedCall) -> Any:
        """DFlash: a chain is verified, outside of a CUDA graph."""
        return self._around(call, self._begin_block, _of_block)

    def _around(
        self,
        call: HookedCall,
        begin: Callable[[Mapping[str, Any]], Verification | None],
        result: Callable[[Verification, Any], VerifierResult],
    ) -> Any:
        seen = self._guard.safely(lambda: begin(call.given) if self._records_here() else None)
        if seen is None:
            return call()
        began, self._running = time.time_ns(), seen
        try:
            made = call()
        finally:
            self._running = None
        seen.drafted_ns, seen.verified_ns, seen.scores = self._drafted_ns, (began, time.time_ns()), self._scores
        self._drafted_ns, self._scores = (0, 0), None
        self._guard.safely(lambda: self._ended(seen, result(seen, made)))
        return made

    def _begin(self, called: Mapping[str, Any]) -> Verification | None:
        verify, batch = called["verify_input"], called["batch"]
        if batch.forward_mode.is_idle():
            return None
        sampling, logits = batch.sampling_info, called["logits_output"].next_token_logits
        changes = ("acc_additive_penalties", "acc_scaling_penalties", "logit_bias")
        written = any(getattr(sampling, name, None) is not None for name in changes)
        written |= called.get("grammar_mask") is not None
        by_uno = called.get("uno_target_max_top_k") is not None  # it draws what is compared
        marked = called.get("watermark_state") is not None and sampling.has_watermark_candidates  # in a copy
        n, is_tree = verify.draft_token_num, verify.tree_topk != 1
        return Verification(
            rids=tuple(req.rid for req in batch.reqs),
            candidates=verify.draft_token.reshape(len(batch.seq_lens), n).to(torch.int64),
            first_child=verify.retrieve_next_token.to(torch.int64) if is_tree else None,
            next_sibling=verify.retrieve_next_sibling.to(torch.int64) if is_tree else None,
            context=batch.seq_lens,
            raw=logits.clone() if (written or marked) and self._full else logits,  # rules are written into them
            logits=logits,
            greedy=sampling.top_ks <= 1,
            full=self._full,
            all_greedy=not marked and (bool(sampling.is_all_greedy) or (not by_uno and self.greedily())),
        )

    def _begin_block(self, called: Mapping[str, Any]) -> Verification | None:
        sampling, logits = called["sampling_info"], called["next_token_logits"]
        greedy = sampling is None or sampling.is_all_greedy or called.get("target_predict") is not None
        candidates = called["candidates"].to(torch.int64)
        tops = torch.ones(len(candidates), device=candidates.device) if sampling is None else sampling.top_ks
        return Verification(
            (), candidates, None, None, called["prefix_lens"], logits, logits, tops <= 1, self._full, greedy
        )

    def greedily(self) -> bool:
        """Whether SGLang decodes every request greedily here, whatever its temperature."""
        verify = self._verify
        flags = {name: getattr(verify, f"_{name}") for name in ("is_cpu", "is_hip", "is_xpu")}
        flags["use_rejection_sampling"] = bool(verify.get_spec().speculative_use_rejection_sampling)
        return bool(verify._verify_uses_greedy(is_all_greedy=False, **flags))

    def _ended(self, seen: Verification, outcome: VerifierResult) -> None:
        if seen.gathered is None and seen.all_greedy and seen.logits is not None:
            seen.chosen(outcome)
        elif seen.gathered is None:
            seen.rule = UNSEEN  # by a kernel that is not known
        seen.ended(outcome)
        self._pending.append(seen)
        if len(self._pending) > MOST_PENDING:
            self._pending.popleft()
            self.lost += 1

    def sampling(self, call: HookedCall, *, chain: bool) -> Any:
        """A kernel that draws from the target alone; `chain`: one that judges chains by p / q."""
        made = call()
        if (seen := self._running) is not None:
            self._guard.safely(lambda: seen.sampled(call.given, chain=chain))
        return made

    # Where the scheduler takes results

    def resolve(self, call: HookedCall) -> Any:
        """The host learns which tokens came out; of requests that have ended meanwhile they are dropped."""
        self._skipped = self._guard.safely(_dropped, call)
        return call()

    def decoded(self, call: HookedCall) -> Any:
        """The result of a decode step is taken."""
        began, self._skipped = time.time_ns(), None
        made = call()
        self._guard.safely(lambda: self._decoded(call.given, began))
        return made

    def _decoded(self, called: Mapping[str, Any], began_ns: int) -> None:
        batch, result, skipped = called["batch"], called["result"], self._skipped
        if not self._records_here() or not batch.reqs:
            return
        if skipped is None and batch.spec_algorithm.is_none():
            self._guard.step_aside("SGLang runs without speculation")
        if skipped is None or (seen := self._take(tuple(req.rid for req in batch.reqs))) is None:
            return
        judged = seen.judged()[: len(batch.reqs)]  # a batch may be padded behind its requests
        counts, theirs = [each.judged.verdict.accepted + 1 for each in judged], result.accept_lens.tolist()
        if counts != theirs[: len(counts)]:
            raise VerificationError(f"{counts} tokens were accepted, but SGLang counts {theirs}")
        self._opened(called["self"], batch).decoded(batch, skipped, judged, seen, began_ns)

    def _take(self, rids: tuple[str, ...]) -> Verification | None:
        """The verification of these requests; those before it, of which no result came, are lost."""
        while self._pending:
            seen = self._pending.popleft()
            if seen.rids == rids or (not seen.rids and len(seen.candidates) == len(rids)):
                return seen
            self.lost += 1
        self.lost += 1
        if self._witness is None or not self._witness.bytes:
            self._guard.step_aside(
                "this algorithm samples where specscope has no hook. `specscope watch` reads its counters"
            )
        return None

    def prefilled(self, call: HookedCall) -> Any:
        """The result of a prefill is taken."""
        began = time.time_ns()
        before = self._guard.safely(lambda: [_before_prefill(req) for req in call.given["batch"].reqs])
        made = call()
        if before:
            self._guard.safely(lambda: self._prefilled(call.given, before, began))
        return made

    def _prefilled(self, called: Mapping[str, Any], before: list[tuple[bool, bool]], began_ns: int) -> None:
        processor, batch = called["self"], called["batch"]
        if self._records_here() and processor.is_generation:
            self._opened(processor, batch).prefilled(batch, before, began_ns)

    def _opened(self, processor: Any, batch: Any) -> ResultWitness:
        self._witness = self._witness or self._open(processor, batch.reqs[0])
        return self._witness


def _of_block(seen: Verification, made: Any) -> VerifierResult:
    """Of what DFlash's worker gives: counts, and the token behind each chain."""
    lens, bonus = made[0].to(torch.int64), made[2].to(torch.int64)
    index = torch.arange(seen.candidates.numel(), device=lens.device).view(seen.candidates.shape)
    predict = seen.candidates.roll(-1, 1).scatter(1, lens[:, None], bonus[:, None])
    return VerifierResult(lens, index, predict.flatten())


def _dropped(call: HookedCall) -> list[bool]:
    return [bool(req.is_retracted or req.finished()) for req in call.given["batch"].reqs]


def _before_prefill(req: Any) -> tuple[bool, bool]:
    """(Whether it has ended or lost its KV, so that what comes is dropped; whether its prompt goes on)."""
    in_prompt = req.inflight_middle_chunks > 0
    return bool(req.is_retracted or (req.finished() and not in_prompt)), in_prompt


def imported() -> Iterator[tuple[str, ModuleType]]:
    """Each of these modules with its name, but for those that this device has not."""
    for name in WRAPPED:
        try:
            yield name, importlib.import_module(name)
        except Exception as error:
            if name not in OPTIONAL:
                raise
            log.warning("specscope: without %s: %r", name, error)


def difference(modules: Iterable[ModuleType]) -> str:
    """What the hooks would wrap in these modules, and is not as they know it, the first one; "" where all is."""
    return next((line for module in modules for line in differing(module, WRAPPED[module.__name__])), "")
