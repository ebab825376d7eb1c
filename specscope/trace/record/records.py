"""The one data model: what an engine step leaves behind.

Everything else (spans, metrics, screens, captures, replay, comparison) is derived from the stream of StepRecords
and from nothing else. Records hold token ids, never text: a Vocabulary turns ids into bytes elsewhere. What is text and
what a token id, and so left out where that is asked for, a field's type says (privacy.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.equal import ArrayEq
from specscope.trace.record.flight import Flight
from specscope.trace.record.form import FormNotes
from specscope.trace.record.limits import kept_labels
from specscope.trace.record.logprobs import Logprobs
from specscope.trace.record.method import MethodNotes
from specscope.trace.record.notes import DraftNotes as DraftNotes
from specscope.trace.record.notes import ParentNotes as ParentNotes
from specscope.trace.record.params import SamplingParams, kept_params
from specscope.trace.record.privacy import IDS, Privacy, TokenId, TokenIds, Withheld, Written, marked
from specscope.trace.record.rules import MATCH, STANDARD, is_lossy, looks_ahead
from specscope.trace.record.trace_sampling import LeftOut, Sampled
from specscope.trace.record.tree import Doubles, DraftTree, Floats, Ints
from specscope.trace.record.vocabulary import Vocabulary, stop_begins

# How far a model's probabilities move when a batch has another shape, by dtype. Measured: the largest change of any p
# over 160 contexts of SmolLM2-135M-Instruct, alone and in a batch of four, was 8.6e-6 in float32 and 0.049 in bfloat16.
ROUNDING = {"float32": 1e-5, "float16": 8e-3, "bfloat16": 5e-2}

# The same for the norms of a target's hidden states (DraftNotes.fed_norms), relative to the norm.
NORM_ROUNDING = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


class Outcome(IntEnum):
    """What became of a node."""

    UNTRIED = 0  # an ancestor was rejected, or an earlier sibling was accepted
    ACCEPTED = 1
    REJECTED = 2


class FinalKind(StrEnum):
    """Where a step's final token came from."""

    BONUS = "bonus"  # the path ended at an accepted leaf: drawn from the target at that leaf
    RECOVERED = "recovered"  # every child was rejected: drawn from the residual
    TARGET = "target"  # nothing was drafted


class Origin(StrEnum):
    """Where an output token came from: accepted, or one of the kinds of final token."""

    ACCEPTED = "accepted"
    BONUS = "bonus"
    RECOVERED = "recovered"
    TARGET = "target"


class FinishReason(StrEnum):
    """Why a request ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Preceded(StrEnum):
    """What came before a request's decode step: some faults show only after one of these."""

    PREFILL = "prefill"  # it is the first one
    PREEMPTION = "preemption"  # the request's KV was computed again
    FULL = "full"  # the step before accepted down to a leaf
    PARTIAL = "partial"  # it accepted some of a path
    NOTHING = "nothing"  # it accepted no node
    NO_DRAFT = "no draft"  # it had none


@dataclass(frozen=True, eq=False)
class Verdict(ArrayEq):
    """What verification decided about one tree, with every number behind it. Filled by speculate/verify.py.

    Arrays are over the nodes of the tree. A node that was not tried has 0 in p_trial, q_trial, accept_prob and
    residual_mass; `outcome` is what says so. DESIGN: with p_i, q_i at trial i, a node is accepted when
    coin < min(1, p_i / q_i); after a rejection residual_mass is the sum of max(p_i - q_i, 0) over the vocabulary.

    The rule says how to read it. Under block and traversal (speculate/verify/traversal.py) a node is also accepted
    where one below it is: `judged` names those whose own coin spoke, and accept_prob of the others is the ratio of
    their path. Under match all children of a parent have one coin, which draws the parent's token.
    """

    outcome: NDArray[np.uint8]  # [n] an Outcome each
    p: Floats  # [n] the target's probability of the node's token at its parent
    p_trial: Floats  # [n] p_i: its probability in what was left of p when it was tried
    q_trial: Floats  # [n] q_i: likewise of q; 1 for deterministic nodes
    accept_prob: Doubles  # [n] min(1, p_i / q_i)
    coin: Doubles  # [n] the uniform number in (0, 1) that decides; 0 where an engine tosses none
    residual_mass: Doubles  # [n] mass of the residual before it was renormalised, where rejected
    path: Ints  # [a] accepted nodes from the root down
    token: TokenId  # the final token, drawn after the accepted path
    kind: FinalKind
    final_p: float  # its probability in the distribution that it was drawn from
    final_coin: float  # the uniform number that drew it; 0 where it was not drawn with one
    # How far the target's probabilities would have to move for another final token; 1 where none other has mass, and
    # where it is not known.
    final_margin: float = 1.0
    # Nodes whose outcome was forced and not judged, and n where the final token was: such a run is not lossless.
    forced: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    rule: str = STANDARD  # the rule of verification; lossy:NAME where it is not lossless

    @property
    def judged(self) -> NDArray[np.bool_]:
        """[n] nodes whose own coin decided: of an accepted path that was found from its end, only the last."""
        tried: NDArray[np.bool_] = self.outcome != Outcome.UNTRIED
        if looks_ahead(self.rule):
            tried[self.path[:-1]] = False
        return tried

    @property
    def tells_p(self) -> bool:
        """Whether p was recorded: another engine may tell outcomes alone."""
        return self.final_p != 0 or len(self.outcome) in self.forced

    @property
    def is_greedy(self) -> bool:
        """Whether nothing was left to chance: all of p lay on one token wherever it was looked at; no coin decided."""
        tried = self.p_trial[self.outcome != Outcome.UNTRIED]
        certain = self.final_p in (0.0, 1.0) and bool(((tried == 0) | (tried == 1)).all())
        return certain and self.tells_p

    @property
    def accepted(self) -> int:
        """How many drafted tokens were accepted."""
        return len(self.path)

    @property
    def margin(self) -> Doubles:
        """[n] how far the target's p would have to move for another outcome: |p_i - coin q_i|; 1 where nothing could.

        Nothing could where no coin was tossed for the node or its outcome was forced, and where p was exactly 0 or 1.
        Under block and traversal it is |a - coin|, and a counts; under match `final_margin` is the least of all draws.
        """
        ahead, p = looks_ahead(self.rule), self.p_trial.astype(np.float64)
        sure = self.accept_prob if ahead else p
        fixed = ~self.judged | (sure == 0) | (sure == 1)
        fixed[self.forced[self.forced < len(p)]] = True
        if self.rule == MATCH:
            return np.ones(len(p))
        with np.errstate(invalid="ignore"):  # of numbers that are none there is no distance
            away = np.abs(self.accept_prob - self.coin if ahead else p - self.coin * self.q_trial)
        return np.where(fixed, 1.0, away)

    def near_ties(self, dtype: str) -> list[int]:
        """The decisions that rounding in this dtype could flip: nodes, and n for the draw of the final token.

        There the same coins may give other tokens in a batch of another shape, on another processor or another build.
        """
        least = ROUNDING.get(dtype, 0.0)
        return np.flatnonzero(np.append(self.margin, self.final_margin) < least).tolist()

    def origins(self) -> list[Origin]:
        """The origin of each token that the step committed: accepted ones, then the final one."""
        return [Origin.ACCEPTED] * len(self.path) + [Origin(self.kind.value)]


def followed_by(verdict: Verdict) -> Preceded:
    """What this verdict is to the request's next step."""
    if not len(verdict.outcome):
        return Preceded.NO_DRAFT
    if not verdict.accepted:
        return Preceded.NOTHING
    return Preceded.FULL if verdict.kind is FinalKind.BONUS else Preceded.PARTIAL


@dataclass(frozen=True, eq=False)
class RequestStep(ArrayEq):
    """One request's part in one engine step. Filled by the engine at commit."""

    request: str  # the request's id
    index: int  # the request's own step number, from 0; prefill chunks count too
    context_len: int  # tokens whose KV was in the cache when the step began
    prefill_tokens: int  # tokens fed besides the root and the drafts
    drafter: str  # the drafter's name, "none" where nothing could be drafted
    tree: DraftTree  # empty where nothing was drafted
    verdict: Verdict | None  # None for a prefill chunk that did not reach the end of the prompt
    emitted: int  # committed tokens that became output, after EOS, stop and length truncation
    notes: DraftNotes | None = None  # None where the drafter is no model, or nothing was drafted
    sizing: str = ""  # why the tree has this size, where it is adaptive
    preceded: Preceded | None = None  # None for a prefill chunk, and in captures of before
    blocks: Ints = field(default_factory=lambda: np.zeros(0, np.int32))  # of the target's KV, from `context_len` on
    # Accepted nodes whose KV was moved to the slots after the root, where it did not lie there already
    moved: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    parents: ParentNotes | None = None  # None with --evidence lean, and in captures of before
    method: MethodNotes | None = None  # what the drafter's method tells besides; None where it tells nothing
    form: FormNotes | None = None  # what the request's form took away; None where every token was allowed
    logprobs: Logprobs | None = None  # of the emitted tokens, where they were asked for
    found: int = 0  # tokens whose KV it found in the prefix cache, in the step in which it was admitted

    @property
    def rule(self) -> str:
        """The rule of its verdict."""
        return STANDARD if self.verdict is None else self.verdict.rule

    @property
    def lossy(self) -> bool:
        """Whether its rule may emit tokens that are not distributed as the target's own."""
        return is_lossy(self.rule)

    @property
    def is_ranked_with_text(self) -> bool:
        """Whether its nodes are the likeliest of a text's and a model's; not where the model drew alone."""
        return self.method is not None and len(self.method.source) > 0 and not self.tree.is_sampled

    @property
    def position(self) -> int:
        """The root's position in the request: coins follow from it, and its slot."""
        return self.context_len + self.prefill_tokens

    def near_draws(self, dtype: str) -> list[int]:
        """The nodes whose draws rounding in this dtype could make of another token: see Verdict.near_ties."""
        if self.notes is None:
            return []
        return np.flatnonzero(self.notes.draw_margin < ROUNDING.get(dtype, 0.0)).tolist()

    def parts_at_near_draw(self, other: DraftTree, dtype: str) -> bool:
        """Whether the first node at which another tree differs is one of `near_draws`: rounding may be why."""
        pairs = zip(self.tree.token.tolist(), other.token.tolist(), strict=False)
        return next((node for node, (one, two) in enumerate(pairs) if one != two), None) in self.near_draws(dtype)

    @property
    def tokens_shown(self) -> list[int]:
        """Those of the tree, and the final one."""
        return [*self.tree.token.tolist(), *([] if self.verdict is None else [self.verdict.token])]

    def tokens(self) -> list[int]:
        """The tokens the verifier committed: the accepted path, then the final token."""
        if self.verdict is None:
            return []
        return [*self.tree.token[self.verdict.path].tolist(), self.verdict.token]

    def output(self) -> list[int]:
        """Those of them that became output."""
        return self.tokens()[: self.emitted]


TEMPLATE = "chat_template_kwargs"  # the label that holds them, as JSON: thinking on or off


@dataclass(frozen=True, eq=False)
class RequestInfo(ArrayEq):
    """A request as it came in. Filled when it is admitted to the batch for the first time."""

    id: str
    arrival_ns: int  # wall clock
    admitted_ns: int
    prompt: Written  # the text that was tokenised; "" where the request came as ids, or text is off
    prompt_tokens: TokenIds
    params: Annotated[SamplingParams, Withheld(Privacy.NO_TEXT, SamplingParams.kept)]
    # whatever else the prompt line held, `kind` for one; of other engines, what there is no parameter for
    labels: Annotated[Mapping[str, str], Withheld(Privacy.NO_TEXT, kept_labels)] = field(default_factory=dict)
    title: Written = ""  # for lists: the last chat message, where the prompt came as chat
    traceparent: str = ""  # the caller's span, as W3C trace context has it: ours go into its trace; "" for none


@dataclass(frozen=True, eq=False)
class RequestEnd(ArrayEq):
    """The end of a request. Filled by the engine in the step in which it ended."""

    info: RequestInfo
    finished_ns: int
    reason: FinishReason
    stop: Annotated[str, Withheld(Privacy.NO_TEXT, marked)]  # the stop string that matched, "" otherwise
    output: TokenIds  # all output tokens
    # what went wrong, where reason is ERROR: it may quote the request
    error: Annotated[str, Withheld(Privacy.NO_TEXT, marked)] = ""
    sampled: Sampled | None = None  # why its spans were kept, where not all requests' are

    def text(self, tokens: Sequence[int], vocabulary: Vocabulary) -> str:
        """The text of its output tokens up to the stop string that ended it, which is no part of it."""
        text = vocabulary.text(tokens)
        if self.reason is not FinishReason.STOP or not self.stop:
            return text
        return text[: stop_begins(text, len(vocabulary.text(tokens[:-1])), self.stop)]

    @property
    def stop_token(self) -> int | None:
        """The stop token that ended it; None where something else did."""
        stopped = self.reason is FinishReason.STOP and not self.stop and len(self.output) > 0
        return int(self.output[-1]) if stopped else None


@dataclass(frozen=True)
class Phase:
    """One phase of a step. Wall-clock nanoseconds."""

    name: str  # schedule, draft, forward, verify, commit
    start_ns: int
    end_ns: int


@dataclass(frozen=True, eq=False)
class StepRecord(ArrayEq):
    """One engine step, whole. Immutable; published once by the engine."""

    step: int  # stable and quotable, from 0; unique over all branches, and rising
    phases: tuple[Phase, ...]
    running: int  # requests in the batch or holding KV
    waiting: int
    blocks_used: int  # KV blocks of the target
    blocks_free: int
    speculation: bool  # whether drafting was on
    speculation_off: str  # why not, "" where it was on
    admitted: tuple[RequestInfo, ...]
    requests: tuple[RequestStep, ...]
    preempted: tuple[str, ...]  # ids of requests that lost their KV to make room
    finished: tuple[RequestEnd, ...]
    passes: tuple[Phase, ...] = ()  # the drafter's own passes, inside the phase `draft`
    device_ns: tuple[int, ...] = ()  # on a GPU: what the phases of the step before took there, read one step late
    branch: int = 0  # a branch begins where the engine went back and something was then different
    after: int | None = None  # on the first step of a branch: the step that it follows, -1 for none; else None
    rewound: bool = False  # the engine went back since the step before: KV that it computed again may lie elsewhere
    aggregate: Aggregate | None = None  # of an engine that tells counts: the step is an interval, and has no requests
    budget: int | None = None  # drafts that it might verify at most, over all requests; None where there is no limit
    flight: Flight | None = None  # None where steps run one after another
    left_out: LeftOut | None = None  # what trace sampling took out of it; None where it is whole
    queried: int = 0  # with a prefix cache: tokens of the requests that were admitted and looked for theirs in it
    blocks_cached: int = 0  # free blocks in which a later request may find its KV

    @property
    def counted(self) -> tuple[RequestStep | Aggregate, ...]:
        """All that Acceptance counts."""
        return self.requests if self.aggregate is None else (*self.requests, self.aggregate)

    @property
    def batch(self) -> int:
        """Requests that took part, those that trace sampling left out among them."""
        return len(self.requests) + (0 if self.left_out is None else self.left_out.requests)

    @property
    def before(self) -> int:
        """The step that this one follows; -1 for none."""
        if self.after is not None:
            return self.after
        return self.step - 1 - (0 if self.left_out is None else self.left_out.steps)

    @property
    def start_ns(self) -> int:
        """When the step began."""
        return self.phases[0].start_ns

    @property
    def end_ns(self) -> int:
        """When the step ended."""
        return self.phases[-1].end_ns


@dataclass(frozen=True)
class Moved:
    """The run now stands after a step that is known: it was rewound there, or that step came out again as before."""

    step: int  # -1: before the first


COUNTS = "counts"  # a run of intervals, without steps
EVIDENCE = ("full", "lean", COUNTS)


@dataclass(frozen=True)
class RunInfo:
    """What a capture says of its run, so that it stands alone. Filled when the engine has loaded."""

    run_id: str  # unique; trace ids follow from it
    target: str  # model name as people know it
    revision: str  # hub revision or content hash of the configuration
    drafter: str
    draft_model: str  # "" where the drafter has none
    tree: str  # tree string, "" where there is none
    device: str
    dtype: str
    backend: str
    seed: int
    eos_tokens: Annotated[tuple[int, ...], IDS]
    max_context: int
    blocks: int  # KV blocks in all
    block_size: int
    # the default SamplingParams as a dict
    params: Annotated[Mapping[str, Any], Withheld(Privacy.NO_TEXT, kept_params)]
    versions: Mapping[str, str]  # specscope, torch, transformers, python, ...
    aux_layers: tuple[str, ...] = ()  # the target's layers that feed an EAGLE head
    draft_vocab: int = 0  # tokens that the drafter knows, where it is a model; 0 where it is none
    # Which tokens those are, where not all of the target's: draft_vocabulary.py reads it
    draft_tokens: Annotated[str, IDS] = ""
    evidence: str = ""  # one of EVIDENCE; "" in captures of before
    # Another engine's own configuration of speculation: method, num_speculative_tokens, ...; of ours, suffix_shared
    speculation: Mapping[str, Any] = field(default_factory=dict)
    rule: str = STANDARD  # of verification, for whole runs
    costs: str = ""  # the digest of the step costs that adaptive trees follow from; "" where trees are not adaptive
    privacy: Privacy = Privacy.EVERYTHING  # what is left out of its records, and of this
    sampling: str = ""  # which requests' spans are kept, as the flags say it; "" where all are
    # Where the models were said to be, as given: "" for the default ones. And what lay there: model_digest.py
    target_path: str = ""
    target_digest: str = ""  # "" where it is not known, and in captures of before
    draft_path: str = ""  # self:N for the target's first N layers
    draft_digest: str = ""

    @property
    def tells_text(self) -> bool:
        """Whether prompts and texts are in its records."""
        return self.privacy < Privacy.NO_TEXT

    @property
    def tells_tokens(self) -> bool:
        """Whether token ids are; else each is NO_TOKEN."""
        return self.privacy < Privacy.NO_TOKENS

    @property
    def by_outcome(self) -> bool:
        """Whether requests were kept for what became of them: such a sample is not a fair one."""
        return "keep " in self.sampling

    @property
    def adaptive(self) -> bool:
        """Whether trees follow step costs: a step drafts what pays, or nothing."""
        return bool(self.costs)

    @property
    def is_ours(self) -> bool:
        """Whether our own engine made it: then its coins follow from seeds and positions."""
        return "specscope" in self.versions and "vllm" not in self.versions

    @property
    def raw_is_masked(self) -> bool:
        """Whether raw p is that after the form's mask: vLLM masks the logits before its sampler is called."""
        return not self.is_ours

    def drafter_params(self, params: SamplingParams) -> SamplingParams:
        """What of a request's parameters shapes the drafter's q: of ours all of them, of vLLM the temperature alone."""
        return params if self.is_ours else SamplingParams(temperature=params.temperature)
