"""What spans must look like: types, lengths and ranges of every attribute that we read, and how they hang together.

Whatever comes from a file or from the network is checked here and nowhere else: a span that passes can be trusted.
`read` gives a span's attributes as one of the Structs below, or raises DamagedError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field
from msgspec.structs import force_setattr

from specscope.errors import UserError
from specscope.trace.checked import decoded
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.privacy import NO_TOKEN, no_tokens
from specscope.trace.record.records import FinalKind, FinishReason, Outcome, Preceded
from specscope.trace.record.trace_sampling import LeftOut, Reason, Sampled
from specscope.trace.record.tree import MAX_NODES, ROOT, Drawn

MAX_STEP = 2**53  # engine steps
MAX_TEXT = 2**24  # characters of a prompt
MAX_TOKENS = 2**22  # tokens of a prompt or an output
MAX_BATCH = 2**16  # requests in a step
MAX_BLOCKS = 2**16  # KV blocks that a request writes to in a step
MAX_FED = 2**16  # rows of a drafter's first pass
MAX_AUX = 64  # layers that feed a head
MAX_PARENTS = 2**20  # characters of their notes
MAX_DROPPED = 2**16  # nodes that re-ranking left out: more than any dynamic plan looks at

Step = Annotated[int, Meta(ge=0, lt=MAX_STEP)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Time = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
# What an engine computed. A wrong number is evidence too, and kept: damage is a matter of type, length and nesting.
Probability: TypeAlias = float
LogProbability: TypeAlias = float
Norm: TypeAlias = float
Parent = Annotated[int, Meta(ge=ROOT, lt=MAX_NODES + MAX_DROPPED)]
Node = Annotated[int, Meta(ge=0, le=MAX_NODES)]

Name = Annotated[str, Meta(min_length=1, max_length=1000)]
Short = Annotated[str, Meta(max_length=2**16)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Piece = Annotated[str, Meta(max_length=4096)]  # what a token stands for, escaped

T = TypeVar("T")
PerNode = Annotated[list[T], Meta(max_length=MAX_NODES)]
PerFed = Annotated[list[T], Meta(max_length=MAX_FED)]
PerDropped = Annotated[list[T], Meta(max_length=MAX_DROPPED)]
Tokens = Annotated[list[Token], Meta(max_length=MAX_TOKENS)]
TokenCount = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Names = Annotated[list[Name], Meta(max_length=MAX_BATCH)]
Phases = Annotated[list[Name], Meta(max_length=4096)]
Times = Annotated[list[Time], Meta(max_length=8192)]
ParamValue = bool | int | float | str | list[str | int] | dict[str, float | str | list[str]] | None


class DamagedError(ValueError):
    """A span, or a line, that is not as declared here. The message is one line that names the attribute."""


class _OfStep(Struct, frozen=True, kw_only=True):
    """Every span that we read belongs to an engine step."""

    step: Step = field(name="specscope.step")


TRACEPARENT = "^(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?$"  # W3C trace context


class Queue(_OfStep, frozen=True, kw_only=True):
    """A request's admission."""

    request: Name = field(name="specscope.request.id")
    admitted: bool = field(name="specscope.request.admitted", default=True)  # False: it ended before it was
    params: Text = field(name="specscope.request.params")  # JSON: SamplingParams
    labels: Short = field(name="specscope.request.labels")  # JSON: dict[str, str]
    prompt: Text = field(name="specscope.request.prompt", default="")  # escaped, as is the title
    title: Text = field(name="specscope.request.title", default="")
    traceparent: Annotated[str, Meta(pattern=TRACEPARENT)] = field(name="specscope.request.traceparent", default="")
    prompt_tokens: Tokens = field(name="specscope.request.prompt_tokens", default_factory=list)

    def weight(self) -> int:
        """Bytes that it takes in memory, roughly; of the others too."""
        return (
            2000
            + 2 * (len(self.prompt) + len(self.title) + len(self.labels) + len(self.params))
            + 4 * len(self.prompt_tokens)
        )


class Prefill(_OfStep, frozen=True, kw_only=True):
    """A request's part in a step, as far as prompt tokens were fed."""

    request: Name = field(name="specscope.request.id")
    index: Count = field(name="specscope.request.step")
    context_len: Count = field(name="specscope.context_len")
    prefill_tokens: Count = field(name="specscope.prefill_tokens")
    blocks: Annotated[list[Count], Meta(max_length=MAX_BLOCKS)] = field(
        name="specscope.kv.blocks", default_factory=list
    )
    moved: PerNode[Node] = field(name="specscope.kv.moved", default_factory=list)
    found: Count = field(name="specscope.kv.found", default=0)

    def weight(self) -> int:
        """As above."""
        return 1000


class DecodeStep(Prefill, frozen=True, kw_only=True):
    """A request's part in a step that ended in a verdict. Without the evidence it is of level `steps`."""

    drafter: Short = field(name="specscope.drafter")
    drafted: Count = field(name="specscope.drafted")
    accepted: Count = field(name="specscope.accepted")
    emitted: Count = field(name="specscope.emitted")
    final_kind: FinalKind = field(name="specscope.final.kind")
    final_token: Token | UnsetType = field(name="specscope.final.token", default=UNSET)
    final_p: Probability | UnsetType = field(name="specscope.final.p", default=UNSET)
    final_coin: Probability | UnsetType = field(name="specscope.final.coin", default=UNSET)
    final_margin: Probability = field(name="specscope.final.margin", default=1.0)
    sizing: Short = field(name="specscope.draft.sizing", default="")
    rule: Name = field(name="specscope.rule", default="standard")
    preceded: Preceded | None = field(name="specscope.preceded", default=None)
    forced: Annotated[list[Node], Meta(max_length=MAX_NODES + 1)] = field(name="specscope.forced", default_factory=list)
    # The tree
    token: PerNode[Token] = field(name="specscope.tree.token", default_factory=list)
    parent: PerNode[Parent] = field(name="specscope.tree.parent", default_factory=list)
    q: PerNode[Probability] = field(name="specscope.tree.q", default_factory=list)
    drawn: PerNode[Drawn] = field(name="specscope.tree.drawn", default_factory=list)
    # The verdict
    outcome: PerNode[Outcome] = field(name="specscope.verdict.outcome", default_factory=list)
    p: PerNode[Probability] = field(name="specscope.verdict.p", default_factory=list)
    p_trial: PerNode[Probability] = field(name="specscope.verdict.p_trial", default_factory=list)
    q_trial: PerNode[Probability] = field(name="specscope.verdict.q_trial", default_factory=list)
    accept_prob: PerNode[Probability] = field(name="specscope.verdict.accept_prob", default_factory=list)
    coin: PerNode[Probability] = field(name="specscope.verdict.coin", default_factory=list)
    residual_mass: PerNode[Probability] = field(name="specscope.verdict.residual_mass", default_factory=list)
    path: PerNode[Node] = field(name="specscope.verdict.path", default_factory=list)
    # A drafter's notes, where it is a model
    dropped: Count | UnsetType = field(name="specscope.draft.dropped", default=UNSET)
    prob: PerNode[Probability] = field(name="specscope.draft.prob", default_factory=list)
    score: PerNode[LogProbability] = field(name="specscope.draft.score", default_factory=list)
    dropped_token: PerDropped[Token] = field(name="specscope.draft.dropped_token", default_factory=list)
    dropped_parent: PerDropped[Parent] = field(name="specscope.draft.dropped_parent", default_factory=list)
    dropped_score: PerDropped[LogProbability] = field(name="specscope.draft.dropped_score", default_factory=list)
    draw_margin: PerNode[Probability] = field(name="specscope.draft.draw_margin", default_factory=list)
    cached: Count = field(name="specscope.draft.cached", default=0)
    rows: Annotated[list[Count], Meta(max_length=4096)] = field(name="specscope.draft.rows", default_factory=list)
    fed_token: PerFed[Token] = field(name="specscope.draft.fed_token", default_factory=list)
    fed_position: PerFed[Count] = field(name="specscope.draft.fed_position", default_factory=list)
    fed_norms: Annotated[list[Norm], Meta(max_length=MAX_FED * MAX_AUX)] = field(
        name="specscope.draft.fed_norms", default_factory=list
    )
    parents: Annotated[str, Meta(max_length=MAX_PARENTS)] = field(name="specscope.parents", default="")  # JSON: Parents
    method: Annotated[str, Meta(max_length=MAX_PARENTS)] = field(name="specscope.method", default="")  # JSON: Method
    form: Annotated[str, Meta(max_length=MAX_PARENTS)] = field(name="specscope.form", default="")  # JSON: Form
    logprobs: Annotated[str, Meta(max_length=MAX_PARENTS)] = field(name="specscope.logprobs", default="")  # JSON: Told
    # What the tokens of tree and verdict stand for
    text: Annotated[list[Piece], Meta(max_length=MAX_NODES + 1)] = field(
        name="specscope.tree.text", default_factory=list
    )
    special: Annotated[list[Token], Meta(max_length=MAX_NODES + 1)] = field(
        name="specscope.tree.special", default_factory=list
    )

    def weight(self) -> int:
        """As above."""
        return (
            3000 + 60 * len(self.token) + 12 * len(self.dropped_token) + 8 * (len(self.fed_token) + len(self.fed_norms))
        )

    @property
    def is_summary(self) -> bool:
        """Whether it came without its evidence."""
        return self.final_token is UNSET

    def __post_init__(self) -> None:
        if self.is_summary:
            if not (self.final_p is UNSET and self.final_coin is UNSET and not self.token and not self.path):
                raise ValueError("`specscope.final.token` is missing")
            return
        if self.final_p is UNSET or self.final_coin is UNSET:
            raise ValueError("`specscope.final.p` or `specscope.final.coin` is missing")
        n = len(self.token)
        _same_length(self, n, "tree", ("parent", "q", "drawn"))
        verdict = ("outcome", "p", "p_trial", "q_trial", "accept_prob", "coin", "residual_mass")
        _same_length(self, n, "verdict", verdict)
        _parents_first("specscope.tree.parent", self.parent, 0)
        self._check_path()
        self._check_notes(n)
        for name, says, holds in (
            ("specscope.drafted", self.drafted, n),
            ("specscope.accepted", self.accepted, len(self.path)),
        ):
            if says != holds:
                raise ValueError(f"`{name}` is {says}, the arrays hold {holds}")
        if self.emitted > len(self.path) + 1:
            raise ValueError(f"`specscope.emitted` is {self.emitted}, only {len(self.path) + 1} were committed")
        if self.text and len(self.text) != n + 1:
            raise ValueError(f"`specscope.tree.text` holds {len(self.text)} texts for {n + 1} tokens")
        if self.forced and max(self.forced) > n:
            raise ValueError(f"`specscope.forced` names node {max(self.forced)} of {n}")
        if self.moved and max(self.moved) >= n:
            raise ValueError(f"`specscope.kv.moved` names node {max(self.moved)} of {n}")

    def _check_path(self) -> None:
        above = ROOT
        for node in self.path:
            if node >= len(self.parent) or self.parent[node] != above:  # whether each was accepted, `verify` judges
                raise ValueError("`specscope.verdict.path` is no path of accepted nodes from the root down")
            above = node

    def _check_notes(self, n: int) -> None:
        if self.dropped is UNSET:
            return
        _same_length(self, n, "draft", ("prob", "score"))
        if self.draw_margin:
            _same_length(self, n, "draft", ("draw_margin",))
        _same_length(self, self.dropped, "draft", ("dropped_token", "dropped_parent", "dropped_score"))
        _parents_first("specscope.draft.dropped_parent", self.dropped_parent, n)
        rows = len(self.fed_token)
        _same_length(self, rows, "draft", ("fed_position",))
        if len(self.fed_norms) % max(rows, 1) or (self.fed_norms and not rows):
            raise ValueError(f"`specscope.draft.fed_norms` holds {len(self.fed_norms)} values for {rows} rows")


class NamelessStep(DecodeStep, frozen=True, kw_only=True):
    """That of a run that was recorded with --no-tokens: what names a token is absent, and NO_TOKEN for readers."""

    @property
    def is_summary(self) -> bool:
        """As above."""
        return self.final_p is UNSET

    def __post_init__(self) -> None:
        for name, beside in (("token", "parent"), ("dropped_token", "dropped_parent"), ("fed_token", "fed_position")):
            force_setattr(self, name, [NO_TOKEN] * len(getattr(self, beside)))
        force_setattr(self, "final_token", UNSET if self.is_summary else NO_TOKEN)
        super().__post_init__()


class EngineStep(_OfStep, frozen=True, kw_only=True):
    """An engine step as a whole: who took part, and what it took."""

    branch: Count = field(name="specscope.branch", default=0)
    after: Annotated[int, Meta(ge=-1, lt=MAX_STEP)] | None = field(name="specscope.after", default=None)
    rewound: bool = field(name="specscope.rewound", default=False)
    running: Count = field(name="specscope.running")
    waiting: Count = field(name="specscope.waiting")
    blocks_used: Count = field(name="specscope.blocks_used")
    blocks_free: Count = field(name="specscope.blocks_free")
    speculation: bool = field(name="specscope.speculation")
    speculation_off: Short = field(name="specscope.speculation_off")
    budget: Count | None = field(name="specscope.budget", default=None)
    flight: Annotated[list[Time], Meta(min_length=3, max_length=3)] | None = field(
        name="specscope.flight", default=None
    )
    queried: Count = field(name="specscope.queried", default=0)
    blocks_cached: Count = field(name="specscope.blocks_cached", default=0)
    phase_names: Annotated[list[Name], Meta(min_length=1, max_length=64)] = field(name="specscope.phase.names")
    phase_times: Times = field(name="specscope.phase.times")
    pass_names: Phases = field(name="specscope.pass.names", default_factory=list)
    pass_times: Times = field(name="specscope.pass.times", default_factory=list)
    device_ns: Annotated[list[Time], Meta(max_length=64)] = field(
        name="specscope.phase.device_ns", default_factory=list
    )
    requests: Names = field(name="specscope.requests", default_factory=list)
    admitted: Names = field(name="specscope.admitted", default_factory=list)
    preempted: Names = field(name="specscope.preempted", default_factory=list)
    finished: Names = field(name="specscope.finished", default_factory=list)
    # What trace sampling took out; None where the step is whole
    left_steps: Step | None = field(name="specscope.left_out.steps", default=None)
    left_requests: Count = field(name="specscope.left_out.requests", default=0)
    left_prefill_tokens: Count = field(name="specscope.left_out.prefill_tokens", default=0)
    left_drafted: Count = field(name="specscope.left_out.drafted", default=0)
    left_accepted: Count = field(name="specscope.left_out.accepted", default=0)
    left_emitted: Count = field(name="specscope.left_out.emitted", default=0)

    @property
    def left_out(self) -> LeftOut | None:
        """The record's form."""
        if self.left_steps is None:
            return None
        return LeftOut(
            self.left_steps,
            self.left_requests,
            self.left_prefill_tokens,
            self.left_drafted,
            self.left_accepted,
            self.left_emitted,
        )

    def told(self) -> Aggregate | None:
        """The counts of an interval: aggregate_span.AggregateStep has them."""
        return None

    def weight(self) -> int:
        """As above."""
        names = len(self.requests) + len(self.admitted) + len(self.preempted) + len(self.finished)
        return 2000 + 200 * len(self.pass_names) + 100 * names

    def __post_init__(self) -> None:
        if self.after is not None and self.after >= self.step:
            raise ValueError(f"`specscope.after` is {self.after}: step {self.step} cannot follow a later one")
        if (self.left_steps or 0) > self.step:
            raise ValueError(f"`specscope.left_out.steps` is {self.left_steps}, before step {self.step}")
        for name, names, times in (
            ("specscope.phase", self.phase_names, self.phase_times),
            ("specscope.pass", self.pass_names, self.pass_times),
        ):
            if len(times) != 2 * len(names):
                raise ValueError(f"`{name}.times` holds {len(times)} times for {len(names)} names")
            if any(start > end for start, end in zip(times[::2], times[1::2], strict=True)):
                raise ValueError(f"`{name}.times` ends before it starts")
        for name in ("requests", "admitted", "finished"):
            if len(set(getattr(self, name))) != len(getattr(self, name)):
                raise ValueError(f"`specscope.{name}` names a request twice")


class Root(_OfStep, frozen=True, kw_only=True):
    """A request's end, and of what it asked as much as any viewer of model calls understands."""

    request: Name = field(name="specscope.request.id")
    reasons: Annotated[list[FinishReason], Meta(min_length=1, max_length=1)] = field(
        name="gen_ai.response.finish_reasons"
    )
    stop_string: Text = field(name="specscope.finish.stop")
    error: Text = field(name="specscope.finish.error")
    labels: Short = field(name="specscope.request.labels")
    output: Tokens = field(name="specscope.output.tokens", default_factory=list)
    temperature: float = field(name="gen_ai.request.temperature")
    top_k: Int64 = field(name="gen_ai.request.top_k")
    top_p: float = field(name="gen_ai.request.top_p")
    frequency_penalty: float = field(name="gen_ai.request.frequency_penalty")
    presence_penalty: float = field(name="gen_ai.request.presence_penalty")
    max_tokens: Int64 = field(name="gen_ai.request.max_tokens")
    seed: Int64 = field(name="gen_ai.request.seed")
    stop: list[Short] = field(name="gen_ai.request.stop_sequences", default_factory=list)
    sampling_reason: Reason | None = field(name="specscope.sampling.reason", default=None)
    sampling_ratio: Annotated[float, Meta(ge=0, le=1)] = field(name="specscope.sampling.ratio", default=0.0)
    sampling_early: bool = field(name="specscope.sampling.early", default=False)

    @property
    def sampled(self) -> Sampled | None:
        """The record's form."""
        reason = self.sampling_reason
        return None if reason is None else Sampled(reason, self.sampling_ratio, self.sampling_early)

    def weight(self) -> int:
        """As above."""
        return 2000 + 4 * len(self.output) + 2 * (len(self.error) + len(self.labels) + len(self.stop_string))


class NamelessQueue(Queue, frozen=True, kw_only=True):
    """As NamelessStep."""

    length: TokenCount = field(name="specscope.request.prompt_length")

    def __post_init__(self) -> None:
        force_setattr(self, "prompt_tokens", no_tokens(self.length))


class NamelessRoot(Root, frozen=True, kw_only=True):
    """As NamelessStep."""

    length: TokenCount = field(name="gen_ai.usage.output_tokens")

    def __post_init__(self) -> None:
        force_setattr(self, "output", no_tokens(self.length))


ROOT_NAME = "text_completion"
AnySpan = Queue | Prefill | DecodeStep | EngineStep | Root
KINDS: Mapping[str, type[AnySpan]] = {
    "queue": Queue,
    "prefill": Prefill,
    "decode_step": DecodeStep,
    "engine_step": EngineStep,
    ROOT_NAME: Root,
}
NAMELESS: Mapping[type[AnySpan], type[AnySpan]] = {
    Queue: NamelessQueue,
    DecodeStep: NamelessStep,
    Root: NamelessRoot,
}

S = TypeVar("S", bound=Struct)


def read(kind: type[S], attributes: Mapping[str, Any]) -> S:
    """A span's attributes, checked. Raises DamagedError."""
    try:
        return msgspec.convert(attributes, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DamagedError(plain_error(error)) from None


def check_times(start_ns: int, end_ns: int) -> None:
    """When a span began and ended. Raises DamagedError."""
    if not (0 <= start_ns < 2**63 and 0 <= end_ns < 2**63):
        raise DamagedError("its start or end is no time in nanoseconds")


def read_json(text: str, kind: type[T], name: str) -> T:
    """The JSON that an attribute holds, checked. Raises DamagedError."""
    try:
        return decoded(text, kind)
    except (UserError, ValueError) as error:
        raise DamagedError(f"`{name}`: {plain_error(error)}") from None


def plain_error(error: Exception) -> str:
    """msgspec's message without its JSON path's sign."""
    return str(error).replace(" - at `$.", " in `").replace(" - at `$`", "")


def _same_length(span: Struct, length: int, of: str, names: Sequence[str]) -> None:
    for name in names:
        if len(getattr(span, name)) != length:
            raise ValueError(f"`specscope.{of}.{name}` holds {len(getattr(span, name))} values, not {length}")


def _parents_first(name: str, parents: Sequence[int], first: int) -> None:
    """Nodes `first` and on: every parent comes before its child."""
    for node, above in enumerate(parents, first):
        if above >= node:
            raise ValueError(f"`{name}`: node {above} is no parent of node {node}: parents come first")
