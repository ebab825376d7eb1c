"""The one data model: what an engine step leaves behind.

Everything else (spans, metrics, screens, captures, replay, comparison) is derived from the stream of StepRecords
and from nothing else. Records hold token ids, never text: a Vocabulary turns ids into bytes elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.trace.aggregate import Aggregate
from specscope.trace.equal import ArrayEq
from specscope.trace.method import MethodNotes
from specscope.trace.params import SamplingParams
from specscope.trace.rules import MATCH, STANDARD, is_lossy, looks_ahead
from specscope.trace.tree import Doubles, DraftTree, Floats, Ints

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
    token: int  # the final token, drawn after the accepted path
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
        return np.where(fixed, 1.0, np.abs(self.accept_prob - self.coin if ahead else p - self.coin * self.q_trial))

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
class DraftNotes(ArrayEq):
    """What a drafter that is a model thought of its tree, and what it left out. Filled by tree_builder.py.

    Dropped nodes are those that re-ranking left out (EAGLE-2); they are numbered on after the n nodes of the tree.
    """

    prob: Floats  # [n] the drafter's probability of the node's token at its parent; 0 where only a text has the node
    # [n] its log probability of the whole path down to the node, or the log of the acceptance that a combined drafter
    # expects: what re-ranking goes by
    score: Floats
    dropped_token: Ints  # [d]
    dropped_parent: Ints  # [d] a node, a dropped node (n + its place), or ROOT
    dropped_score: Floats  # [d]
    cached: int = 0  # committed tokens in the drafter's KV cache when the tree was begun
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int32))  # [passes] rows that each of its passes fed
    # With full evidence, what the first pass fed an EAGLE head: its last r rows (of a long prompt, a chunk's).
    # The row at position t is the target's features of position t, with the token at t + 1.
    fed_token: Ints = field(default_factory=lambda: np.zeros(0, np.int32))  # [r]
    fed_position: Ints = field(default_factory=lambda: np.zeros(0, np.int32))  # [r]
    fed_norms: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # [r, aux layers] L2 norm of each


PARENT_ARRAYS: Mapping[str, type[np.generic]] = {
    **dict.fromkeys(("node", "top", "choice", "draft_top", "choice_rank", "rank", "q_rank"), np.int32),
    **dict.fromkeys(("top_p", "choice_p", "entropy", "varentropy", "q_entropy", "q_varentropy"), np.float32),
    **dict.fromkeys(("draft_top_p", "choice_q", "outside", "raw_p"), np.float32),
}


@dataclass(frozen=True, eq=False)
class ParentNotes(ArrayEq):
    """What target and drafter gave at each node whose children were tried. Filled by speculate/verify/parents.py.

    Arrays are over these k parents: the root, then the accepted nodes that have children. `p` and `q` are what is
    sampled from, after temperature and rules; raw is before. Entropy H = sum(-p log p) and varentropy
    sum(p log^2 p) - H^2 are in nats. A drafter that is no model has no distribution of its own: m is 0 then, and
    what says so is 0.
    """

    node: Ints  # [k] ROOT, or a node
    top: Ints  # [k, t] the target's likeliest tokens, raw; t is 4, or the vocabulary's size where that is less
    top_p: Floats  # [k, t] their raw probabilities
    choice: Ints  # [k] the likeliest token of p
    choice_p: Floats  # [k] its p
    entropy: Floats  # [k] of p
    varentropy: Floats  # [k] of p
    q_entropy: Floats  # [k] of q; 0 where the children are deterministic
    q_varentropy: Floats  # [k]
    draft_top: Ints  # [k, m] the drafter's likeliest tokens, raw
    draft_top_p: Floats  # [k, m]
    choice_rank: Ints  # [k] rank of the target's raw first choice in the drafter's raw distribution; 0 if outside
    choice_q: Floats  # [k] its raw probability there
    outside: Floats  # [k] the target's raw mass on tokens outside the drafter's vocabulary
    # Over the n nodes of the tree; 0 where the parent was not tried
    raw_p: Floats  # [n] the target's raw probability of the node's token
    rank: Ints  # [n] of the token in p, from 1; 0 where its p is 0
    q_rank: Ints  # [n] of the token in q; 0 where the node is deterministic
    # Of the final token: the distribution that it was drawn from, and its probability in p before any rejection
    final_entropy: float
    final_varentropy: float
    final_target_p: float


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
    # KV blocks of the target that the step wrote to: those of its table from slot `context_len` on
    blocks: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    # Accepted nodes whose KV was moved to the slots after the root, where it did not lie there already
    moved: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    parents: ParentNotes | None = None  # None with --evidence lean, and in captures of before
    method: MethodNotes | None = None  # what the drafter's method tells besides; None where it tells nothing

    @property
    def rule(self) -> str:
        """The rule of its verdict."""
        return STANDARD if self.verdict is None else self.verdict.rule

    @property
    def lossy(self) -> bool:
        """Whether its rule may emit tokens that are not distributed as the target's own."""
        return is_lossy(self.rule)

    @property
    def position(self) -> int:
        """The root's position in the request: coins follow from it, and its slot."""
        return self.context_len + self.prefill_tokens

    def tokens(self) -> list[int]:
        """The tokens the verifier committed: the accepted path, then the final token."""
        if self.verdict is None:
            return []
        return [*self.tree.token[self.verdict.path].tolist(), self.verdict.token]

    def output(self) -> list[int]:
        """Those of them that became output."""
        return self.tokens()[: self.emitted]


@dataclass(frozen=True, eq=False)
class RequestInfo(ArrayEq):
    """A request as it came in. Filled when it is admitted to the batch for the first time."""

    id: str
    arrival_ns: int  # wall clock
    admitted_ns: int
    prompt: str  # the text that was tokenised; "" where the request came as ids, or text is off
    prompt_tokens: Ints
    params: SamplingParams
    labels: Mapping[str, str] = field(default_factory=dict)  # whatever else the prompt line held, `kind` for one
    title: str = ""  # for lists: the last chat message, where the prompt came as chat
    traceparent: str = ""  # the caller's span, as W3C trace context has it: ours go into its trace; "" for none


@dataclass(frozen=True, eq=False)
class RequestEnd(ArrayEq):
    """The end of a request. Filled by the engine in the step in which it ended."""

    info: RequestInfo
    finished_ns: int
    reason: FinishReason
    stop: str  # the stop string that matched, "" otherwise
    output: Ints  # all output tokens
    error: str = ""  # what went wrong, where reason is ERROR

    def cut(self, text: str) -> str:
        """The output's text up to the stop string, which is no part of it."""
        stopped = self.reason is FinishReason.STOP and self.stop in text
        return text[: text.index(self.stop)] if stopped else text


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

    @property
    def counted(self) -> tuple[RequestStep | Aggregate, ...]:
        """All that Acceptance counts."""
        return self.requests if self.aggregate is None else (*self.requests, self.aggregate)

    @property
    def before(self) -> int:
        """The step that this one follows; -1 for none."""
        return self.step - 1 if self.after is None else self.after

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
    eos_tokens: tuple[int, ...]
    max_context: int
    blocks: int  # KV blocks in all
    block_size: int
    params: Mapping[str, Any]  # the default SamplingParams as a dict
    versions: Mapping[str, str]  # specscope, torch, transformers, python, ...
    aux_layers: tuple[str, ...] = ()  # the target's layers that feed an EAGLE head
    draft_vocab: int = 0  # tokens that the drafter knows, where it is a model; 0 where it is none
    draft_tokens: str = ""  # which tokens those are, where not all of the target's: draft_vocabulary.py reads it
    evidence: str = ""  # full or lean; "" in captures of before
    # Another engine's own configuration of speculation: method, num_speculative_tokens, ...; of ours, suffix_shared
    speculation: Mapping[str, Any] = field(default_factory=dict)
    rule: str = STANDARD  # of verification, for whole runs
    costs: str = ""  # the digest of the step costs that adaptive trees follow from; "" where trees are not adaptive
    text: bool = True  # False with --no-text: prompts and text are left out

    @property
    def is_ours(self) -> bool:
        """Whether our own engine made it: then its coins follow from seeds and positions."""
        return "specscope" in self.versions and "vllm" not in self.versions
