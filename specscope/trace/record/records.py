"""The one data model: what an engine step leaves behind.

Everything else (spans, metrics, screens, captures, replay, comparison) is derived from the stream of StepRecords
and from nothing else. Records hold token ids, never text: a Vocabulary turns ids into bytes elsewhere. What is text and
what a token id, and so left out where that is asked for, a field's type says (privacy.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specscope.trace.record import rules
from specscope.trace.record.aggregate import Aggregate, LeftOut, RequestFigures, Sampled
from specscope.trace.record.declared import (
    MAX_TEXT,
    ArrayEq,
    Count,
    Counted,
    Int64,
    Name,
    Names,
    Node,
    ParamValue,
    Probability,
    Short,
    Step,
    Text,
    Time,
    Token,
    Told,
    Wire,
    WireForm,
    Words,
    empty,
)
from specscope.trace.record.notes import DraftNotes as DraftNotes
from specscope.trace.record.notes import FormNotes, Logprobs, MethodNotes
from specscope.trace.record.notes import ParentNotes as ParentNotes
from specscope.trace.record.params import LIMITS, EngineWays, SamplingParams, kept_labels, kept_params, ways_of
from specscope.trace.record.privacy import IDS, Privacy, TokenId, TokenIds, Withheld, Written, marked
from specscope.trace.record.rules import MATCH, OUTCOME_ALONE, STANDARD, is_lossy, looks_ahead, margins, near, near_draw
from specscope.trace.record.tree import Doubles, DraftTree, Ints, NodeDoubles, NodeProbs
from specscope.trace.record.vocabulary import Vocabulary, stop_begins

EosTokens = Annotated[tuple[Token, ...], Meta(max_length=4096)]
Layers = Annotated[tuple[Name, ...], Meta(max_length=1024)]
DeviceTimes = Annotated[tuple[Time, ...], Meta(max_length=64)]
TraceParent = Annotated[str, Meta(pattern="^(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?$", title="text")]


class Outcome(IntEnum):
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
    """What verification decided about one tree, with every number behind it. Filled by speculate/verify/.

    Arrays are over the nodes of the tree. A node that was not tried has 0 in p_trial, q_trial, accept_prob and
    residual_mass; `outcome` is what says so. DESIGN: with p_i, q_i at trial i, a node is accepted when
    coin < min(1, p_i / q_i); after a rejection residual_mass is the sum of max(p_i - q_i, 0) over the vocabulary.
    The rule says how to read it. Under block and traversal (speculate/verify/traversal.py) a node is also accepted
    where one below it is: `judged` names those whose own coin spoke, and accept_prob of the others is the ratio of
    their path. Under match all children of a parent have one coin, which draws the parent's token.
    """

    PREFIX: ClassVar = "specscope.verdict."
    outcome: Annotated[NDArray[np.uint8], Wire(Outcome, "n")]  # an Outcome each
    p: NodeProbs  # the target's probability of the node's token at its parent
    p_trial: NodeProbs  # p_i: its probability in what was left of p when it was tried
    q_trial: NodeProbs  # q_i: the same for q; 1 for deterministic nodes
    accept_prob: NodeDoubles  # min(1, p_i / q_i)
    coin: NodeDoubles  # the uniform number in (0, 1) that decides; 0 where an engine tosses none
    residual_mass: NodeDoubles  # mass of the residual before it was renormalised, where rejected
    path: Annotated[Ints, Wire(Node, "a", told=Told.ALWAYS)]  # accepted nodes from the root down
    token: Annotated[TokenId, Wire(Token, name="final.token")]  # the final token, drawn after the accepted path
    kind: Annotated[FinalKind, Wire(name="final.kind")]  # where the final token came from
    # its probability in the distribution that it was drawn from
    final_p: Annotated[float, Wire(Probability, name="final.p")]
    # the uniform number that drew it; 0 where it was not drawn with one
    final_coin: Annotated[float, Wire(Probability, name="final.coin")]
    # how far the target's probabilities would have to move for another final token; 1 where none other has mass, and
    # where it is not known
    final_margin: Annotated[float, Wire(Probability, name="final.margin", told=Told.ALWAYS)] = 1.0
    # nodes whose outcome was forced and not judged, and n where the final token was: such a run is not lossless
    forced: Annotated[Ints, Wire(Node, "f", name="forced")] = empty(np.int32)
    # the rule of verification; lossy:NAME where it is not lossless, module:function where it is somebody's own
    rule: Annotated[str, Wire(Name, name="rule", told=Told.ALWAYS)] = STANDARD

    @property
    def judged(self) -> NDArray[np.bool_]:
        """[n] nodes whose own coin decided: of an accepted path that was found from its end, only the last."""
        tried: NDArray[np.bool_] = self.outcome != Outcome.UNTRIED
        if looks_ahead(self.rule):
            tried[self.path[:-1]] = False
        return tried

    @property
    def tells_p(self) -> bool:
        return self.final_p != 0 or len(self.outcome) in self.forced

    @property
    def tells_outcome_alone(self) -> bool:
        """Whether no p was recorded because nobody saw it; else a p of 0 is what was recorded."""
        return self.rule in OUTCOME_ALONE and not self.tells_p

    @property
    def is_greedy(self) -> bool:
        """Whether nothing was left to chance: all of p lay on one token wherever it was looked at; no coin decided."""
        tried = self.p_trial[self.outcome != Outcome.UNTRIED]
        certain = self.final_p in (0.0, 1.0) and bool(((tried == 0) | (tried == 1)).all())
        return certain and self.tells_p

    @property
    def accepted(self) -> int:
        return len(self.path)

    @property
    def margin(self) -> Doubles:
        """[n] how far the target's p would have to move for another outcome: |p_i - coin q_i|; 1 where nothing could.

        Nothing could where no coin was tossed for the node or its outcome was forced, and where p was exactly 0 or 1.
        Where a decides (rules.goes_by_a) it is |a - coin|; under match `final_margin` is the least of all draws.
        """
        decided, given = self.judged, (self.accept_prob, self.coin, self.p_trial, self.q_trial)
        decided[self.forced[self.forced < len(decided)]] = False
        return margins(*given, decided, by_a=rules.goes_by_a(self.rule), match=self.rule == MATCH)

    def near_ties(self, dtype: str) -> list[int]:
        """The decisions that rounding in this dtype could flip: nodes, and n for the draw of the final token."""
        by_a = rules.goes_by_a(self.rule)
        with np.errstate(all="ignore"):  # what an engine computed may be no number
            p, border = (self.accept_prob, self.coin) if by_a else (self.p_trial, self.coin * self.q_trial)
            nodes = (self.margin < 1) & near(p.astype(np.float64), border, dtype)
        coin = 0.0 if self.rule == MATCH else self.final_coin  # the margin is the least of several draws
        final = near_draw(np.array([coin]), np.array([self.final_margin]), dtype)
        return np.flatnonzero(np.concatenate([nodes, final])).tolist()

    def origins(self) -> list[Origin]:
        return [Origin.ACCEPTED] * len(self.path) + [Origin(self.kind.value)]


def followed_by(kind: FinalKind, drafted: int, accepted: int) -> Preceded:
    """The `Preceded` of the request's next step, after a verdict on so many nodes."""
    if not drafted:
        return Preceded.NO_DRAFT
    if not accepted:
        return Preceded.NOTHING
    return Preceded.FULL if kind is FinalKind.BONUS else Preceded.PARTIAL


@dataclass(frozen=True, eq=False)
class RequestStep(ArrayEq):
    """One request's part in one engine step. No field has a default of the class: __getattr__ is asked for it."""

    PREFIX: ClassVar = "specscope."
    request: Annotated[str, Wire(Name, name="request.id")]  # the request's id
    # the request's own step number, from 0; prefill chunks count too
    index: Annotated[int, Wire(Count, name="request.step")]
    context_len: Counted  # tokens whose KV was in the cache when the step began
    prefill_tokens: Counted  # tokens fed besides the root and the drafts
    drafter: Words  # the drafter's name, "none" where nothing could be drafted
    tree: DraftTree  # empty where nothing was drafted
    verdict: Verdict | None  # None for a prefill chunk that did not reach the end of the prompt
    emitted: Counted  # committed tokens that became output, after EOS, stop and length truncation
    notes: DraftNotes | None = empty()  # None where the drafter is no model, or nothing was drafted
    # why the tree has this size: costs decided it, in older captures, or another engine left drafts out
    sizing: Annotated[str, Wire(Short, name="draft.sizing")] = field(default_factory=str)
    # what came before it; None for a prefill chunk, and in captures of before
    preceded: Annotated[Preceded | None, Wire()] = empty()
    # of the target's KV, from `context_len` on
    blocks: Annotated[Ints, Wire(Count, "b", name="kv.blocks")] = empty(np.int32)
    # accepted nodes whose KV was moved to the slots after the root, where it did not lie there already
    moved: Annotated[Ints, Wire(Node, "v", name="kv.moved")] = empty(np.int32)
    # what target and drafter gave where children were tried; None with --evidence lean, and in captures of before
    parents: Annotated[ParentNotes | None, Wire()] = empty()
    # what the drafter's method tells besides; None where it tells nothing
    method: Annotated[MethodNotes | None, Wire()] = empty()
    # what the request's form took away; None where every token was allowed
    form: Annotated[FormNotes | None, Wire()] = empty()
    logprobs: Annotated[Logprobs | None, Wire()] = empty()  # of the emitted tokens, where they were asked for
    # tokens whose KV it found in the prefix cache, in the step in which it was admitted
    found: Annotated[int, Wire(Count, name="kv.found")] = field(default_factory=int)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401
            """Of a step in a run's columns, what it has is made when it is first asked for: see run/packed.py."""
            if "packed" not in self.__dict__:
                raise AttributeError(name)
            packed, row = self.__dict__["packed"]
            self.__dict__[name] = held = packed.attribute(row, name)
            return held

        def __getstate__(self) -> dict[str, Any]:
            """Without the columns of other steps."""
            return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def told(self, held: str, name: str) -> Any:  # noqa: ANN401
        """One field of what it holds (`verdict`), which is not made for it; None where it holds none."""
        if (packed := self.__dict__.get("packed")) is not None:
            return packed[0].field(packed[1], held, name)
        return getattr(getattr(self, held), name, None)

    @property
    def is_judged(self) -> bool:
        return self.told("verdict", "kind") is not None

    @property
    def rule(self) -> str:
        return self.told("verdict", "rule") or STANDARD

    @property
    def lossy(self) -> bool:
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
        margin, coin = self.notes.draw_margin, self.notes.coin
        return np.flatnonzero(near_draw(coin if len(coin) else np.zeros(len(margin)), margin, dtype)).tolist()

    def tokens(self) -> list[int]:
        """The tokens the verifier committed: the accepted path, then the final token."""
        if not self.is_judged:
            return []
        return [*self.told("tree", "token")[self.told("verdict", "path")].tolist(), self.told("verdict", "token")]

    def output(self) -> list[int]:
        return self.tokens()[: self.emitted]


TEMPLATE = "chat_template_kwargs"  # the label that holds them, as JSON: thinking on or off


@dataclass(frozen=True, eq=False)
class RequestInfo(ArrayEq):
    """A request as it came in. Filled when it is admitted to the batch for the first time."""

    PREFIX: ClassVar = "specscope.request."
    id: Annotated[str, Wire(Name)]  # unique in its run
    arrival_ns: int  # wall clock
    admitted_ns: int  # wall clock; 0 where it ended before
    # the text that was tokenised; "" where the request came as ids, or text is off
    prompt: Annotated[Written, Wire(form=WireForm.ESCAPED, told=Told.ALWAYS, most=MAX_TEXT)]
    prompt_tokens: Annotated[TokenIds, Wire(Token, "prompt", told=Told.ALWAYS)]  # its tokens
    # how it is sampled
    params: Annotated[
        SamplingParams, Withheld(Privacy.NO_TEXT, SamplingParams.kept), Wire(form=WireForm.JSON, most=MAX_TEXT)
    ]
    # whatever else the prompt line held, `kind` for one; of other engines, what there is no parameter for
    labels: Annotated[
        Mapping[str, str],
        Withheld(Privacy.NO_TEXT, kept_labels),
        Wire(dict[str, str], form=WireForm.JSON, told=Told.NEEDED),
    ] = field(default_factory=dict)
    # for lists: the last chat message, where the prompt came as chat
    title: Annotated[Written, Wire(form=WireForm.ESCAPED, told=Told.ALWAYS, most=MAX_TEXT)] = ""
    # the caller's span, as W3C trace context has it: ours go into its trace; "" for none
    traceparent: Annotated[str, Wire(TraceParent)] = ""
    chat: Annotated[bool, Wire()] = False  # whether the prompt came as chat messages
    served: Annotated[bool, Wire()] = False  # whether it came over HTTP

    @property
    def tells_rules(self) -> bool:
        """Whether the parameters are all that shapes p: a label of another engine's may name more."""
        return self.labels.keys().isdisjoint(LIMITS)


@dataclass(frozen=True, eq=False)
class RequestEnd(ArrayEq):
    """The end of a request. Filled by the engine in the step in which it ended."""

    info: RequestInfo  # what it was
    finished_ns: int  # wall clock
    PREFIX: ClassVar = "specscope.finish."
    # in a list of one
    reason: Annotated[FinishReason, Wire(name="gen_ai.response.finish_reasons", form=WireForm.BY_HAND)]
    # the stop string that matched, "" otherwise
    stop: Annotated[str, Withheld(Privacy.NO_TEXT, marked), Wire(form=WireForm.ESCAPED, most=MAX_TEXT)]
    output: Annotated[TokenIds, Wire(Token, "output", name="output.tokens", told=Told.ALWAYS)]  # all output tokens
    # what went wrong, where reason is ERROR: it may quote the request
    error: Annotated[str, Withheld(Privacy.NO_TEXT, marked), Wire(Text, told=Told.NEEDED)] = ""
    sampled: Sampled | None = None  # why its spans were kept, where not all requests' are
    # its sums, where it was read from spans: what a file that lacks its steps tells of them. None in an engine
    figures: RequestFigures | None = field(default=None, compare=False)

    def text(self, tokens: Sequence[int], vocabulary: Vocabulary) -> str:
        """The text of its output tokens up to the stop string that ended it, which is no part of it."""
        text = vocabulary.text(tokens)
        if self.reason is not FinishReason.STOP or not self.stop:
            return text
        return text[: stop_begins(text, len(vocabulary.text(tokens[:-1])), self.stop)]

    @property
    def stop_token(self) -> int | None:
        stopped = self.reason is FinishReason.STOP and not self.stop and len(self.output) > 0
        return int(self.output[-1]) if stopped else None


def decode_steps(end: RequestEnd | None) -> int:
    """The decode steps that its own span counts, whether they are in a file or not; 0 where it counts none."""
    return 0 if end is None or end.figures is None else end.figures.steps


def missing_steps(through: int, steps: int, decoded: int, counted: int) -> int:
    """How many steps of a request a file lacks: before its last, number `through` - 1, and of the decode steps that its
    end counts. `steps`: that are there, of which some `decoded`; of a request without any nothing is known.
    """
    return max(through - steps, counted - decoded) if steps else 0


PHASES = ("schedule", "draft", "forward", "verify", "commit")  # of a step of ours, in order


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a step. Wall-clock nanoseconds."""

    name: str  # of another engine's step, others than PHASES
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Flight:
    """An asynchronous step on its way, while the next one ran. Wall-clock nanoseconds."""

    launched_ns: int  # the step was given to the worker; its first phase begins when the step before has ended
    read_ns: int  # its verdicts were taken from the worker
    committed_ns: int  # its record was whole


@dataclass(frozen=True)
class Absent:
    """What happened in a step and is not in its file. Filled while that is read."""

    requests: int | None = 0  # that took part; None: not told, nor anything else of the engine
    names: tuple[str, ...] = ()  # theirs, where the engine step's span is there
    engine: bool = False  # that span is not: passes, flight and device times are not known
    steps: int = 0  # engine steps between the one before in the file and this one, sampled ones left out
    others: int = 0  # admissions and ends in it


@dataclass(frozen=True, eq=False)
class StepRecord(ArrayEq):
    """One engine step. Immutable; published once by the engine."""

    PREFIX: ClassVar = "specscope."
    step: Annotated[int, Wire(Step)]  # stable and quotable, from 0; unique over all branches, and rising
    phases: Annotated[tuple[Phase, ...], Wire(name="phase.", form=WireForm.BY_HAND)]  # what it did, and when
    running: Counted  # requests in the batch or holding KV
    waiting: Counted  # requests that wait for admission
    blocks_used: Counted  # KV blocks of the target
    blocks_free: Counted  # KV blocks of the target
    speculation: Annotated[bool, Wire()]  # whether drafting was on
    speculation_off: Words  # why not, "" where it was on
    # who came; the spans `queue` tell the rest
    admitted: Annotated[tuple[RequestInfo, ...], Wire(form=WireForm.BY_HAND)]
    # who took part; the spans `decode_step` and `prefill` tell the rest
    requests: Annotated[Sequence[RequestStep], Wire(form=WireForm.BY_HAND)]
    # ids of requests that lost their KV to make room
    preempted: Annotated[tuple[str, ...], Wire(Names, told=Told.ALWAYS)]
    # who ended; the requests' own spans tell the rest
    finished: Annotated[tuple[RequestEnd, ...], Wire(form=WireForm.BY_HAND)]
    # the drafter's own passes, inside the phase `draft`
    passes: Annotated[tuple[Phase, ...], Wire(name="pass.", form=WireForm.BY_HAND)] = ()
    # of older captures, on a GPU: what the phases of the step before took there
    device_ns: Annotated[tuple[int, ...], Wire(DeviceTimes, name="phase.device_ns")] = ()
    branch: Counted = 0  # a branch begins where the engine went back and something was then different
    # drafts that it might verify at most, over all requests; None where there is no limit
    budget: Annotated[int | None, Wire(Count | None)] = None
    # an asynchronous step on its way: launched, read, committed; None where steps run one after another
    flight: Annotated[Flight | None, Wire(form=WireForm.BY_HAND)] = None
    queried: Counted = 0  # with a prefix cache: tokens of the requests that were admitted and looked for theirs in it
    blocks_cached: Counted = 0  # free blocks in which a later request may find its KV
    # on the first step of a branch: the step that it follows, -1 for none; else None
    after: Annotated[int | None, Wire(Annotated[int, Meta(ge=-1, lt=2**53)] | None)] = None
    # the engine went back since the step before: KV that it computed again may lie elsewhere
    rewound: Annotated[bool, Wire()] = False
    left_out: LeftOut | None = None  # what trace sampling took out of it; None where it is whole
    aggregate: Aggregate | None = None  # of an engine that tells counts: the step is an interval, and has no requests
    absent: Absent | None = None  # what of it is not in its file; None where all is, and in an engine

    @property
    def counted(self) -> tuple[RequestStep | Aggregate, ...]:
        return (*self.requests, *(() if self.aggregate is None else (self.aggregate,)))

    @property
    def batch(self) -> int:
        """Requests that took part, as far as is known: those that are not in its file among them."""
        left_out = 0 if self.left_out is None else self.left_out.requests
        return len(self.requests) + left_out + (0 if self.absent is None else self.absent.requests or 0)

    @property
    def is_timed(self) -> bool:
        """Whether it is known what the engine did: its phases, batch, queue and KV blocks."""
        return self.absent is None or self.absent.requests is not None

    @property
    def tells_preempted(self) -> bool:
        """Whether it is known who was preempted: the engine step's own span alone says so."""
        return self.absent is None or not self.absent.engine

    @property
    def before(self) -> int:
        """The step that this one follows; -1 for none."""
        if self.after is not None:
            return self.after
        left_out = 0 if self.left_out is None else self.left_out.steps
        return self.step - 1 - left_out - (0 if self.absent is None else self.absent.steps)

    @property
    def start_ns(self) -> int:
        return self.phases[0].start_ns if self.phases else 0

    @property
    def end_ns(self) -> int:
        return self.phases[-1].end_ns if self.phases else 0


@dataclass(frozen=True)
class Moved:
    """The run now stands after a step that is known: it was rewound there, or that step came out again as before."""

    step: int  # -1: before the first


COUNTS = "counts"  # a run of intervals, without steps
EVIDENCE = ("full", "lean", COUNTS)


@dataclass(frozen=True)
class RunInfo:
    """What a capture says of its run, so that it stands alone. Filled when the engine has loaded."""

    PREFIX: ClassVar = "specscope.run."
    run_id: Annotated[str, Wire(Name, name="run.id")]  # unique; trace ids follow from it
    target: Words  # model name as people know it
    revision: Words  # hub revision or content hash of the configuration
    drafter: Words  # the drafter's name
    draft_model: Words  # "" where the drafter has none
    tree: Words  # tree string, "" where there is none
    device: Words  # cpu, cuda, ...
    dtype: Words  # of the models
    backend: Words  # of attention
    seed: Annotated[int, Wire(Int64)]  # of requests that name none
    eos_tokens: Annotated[tuple[int, ...], IDS, Wire(EosTokens, told=Told.ALWAYS)]  # tokens that end an output
    max_context: Counted  # tokens of a request at most
    blocks: Counted  # KV blocks in all
    block_size: Annotated[int, Wire(Annotated[int, Meta(ge=1, lt=2**31, title="count")])]  # tokens of a KV block
    # the default SamplingParams as a dict
    params: Annotated[
        Mapping[str, Any],
        Withheld(Privacy.NO_TEXT, kept_params),
        Wire(dict[str, ParamValue], form=WireForm.JSON, most=MAX_TEXT),
    ]
    # specscope, torch, transformers, python, ...
    versions: Annotated[Mapping[str, str], Wire(dict[str, str], form=WireForm.JSON)]
    # the target's layers that feed an EAGLE head
    aux_layers: Annotated[tuple[str, ...], Wire(Layers, told=Told.ALWAYS)] = ()
    # tokens that the drafter knows, where it is a model; 0 where it is none
    draft_vocab: Annotated[int, Wire(Count, told=Told.ALWAYS)] = 0
    # which tokens those are, where not all of the target's: draft_vocabulary.py reads it
    draft_tokens: Annotated[str, IDS, Wire(Text)] = ""
    evidence: Annotated[str, Wire(Short, told=Told.ALWAYS)] = ""  # one of EVIDENCE; "" in captures of before
    # another engine's own configuration of speculation: method, num_speculative_tokens, ...; of ours once suffix_shared
    speculation: Annotated[Mapping[str, Any], Wire(dict[str, Any], form=WireForm.JSON)] = field(default_factory=dict)
    # another engine's own settings that shape its batches: max_num_batched_tokens, enable_prefix_caching, ...
    settings: Annotated[Mapping[str, Any], Wire(dict[str, Any], form=WireForm.JSON)] = field(default_factory=dict)
    rule: Annotated[str, Wire(Name, told=Told.ALWAYS)] = STANDARD  # the rule of verification, for whole runs
    # in older captures, the digest of the step costs that trees follow from; "" where they follow from none
    costs: Annotated[str, Wire(Short, told=Told.ALWAYS)] = ""
    # what is left out of its records
    privacy: Annotated[Privacy, Wire(name="run.", form=WireForm.BY_HAND)] = Privacy.EVERYTHING
    sampling: Words = ""  # which requests' spans are kept, as flags; "" for all
    target_path: Words = ""  # where the target is, as given; "" for the default model
    # digest of what was there (model_digest.py); "" where it is unknown, and in older captures
    target_digest: Words = ""
    draft_path: Words = ""  # as target_path; self:N for the target's first N layers
    draft_digest: Words = ""  # digest of what was there

    @property
    def tells_text(self) -> bool:
        return self.privacy < Privacy.NO_TEXT

    @property
    def tells_tokens(self) -> bool:
        """Whether token ids are; else each is NO_TOKEN."""
        return self.privacy < Privacy.NO_TOKENS

    @property
    def is_ours(self) -> bool:
        """Whether our own engine made it: then its coins follow from seeds and positions."""
        return "specscope" in self.versions and "vllm" not in self.versions

    @property
    def ways(self) -> EngineWays:
        return ways_of(self.versions, self.drafter)
