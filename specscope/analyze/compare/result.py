"""What a comparison finds, as plain values. Filled by comparison.py; text, page, screen and JSON all show these."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from specscope.analyze.findings import Reference
from specscope.trace.history.conditions import RATE, TAU
from specscope.trace.record.notes import SOURCES

NOT_KNOWN = "not known"  # a model or drafter of a side whose run is not recorded


class Sameness(StrEnum):
    """Whether the two sides do the same."""

    SAME = "same"
    CONFIGURED = "as configured"  # it differs where the configuration does, and nowhere else
    DIFFERENT = "different"
    UNKNOWN = "cannot be told"


# The table of figures, by name; with the rates by depth.
PER_STEP, WHOLE_PATHS = "tokens per step", "whole paths"
LOOPS, WITHOUT_LOOPS = "output in loops", "tau without loops"
Q_ABOVE, Q_ERROR = "q above acceptance", "squared error of q"
RATES_FROM = {source: f"rate from {source}" for source in SOURCES}
FIGURES = (TAU, RATE, PER_STEP, WHOLE_PATHS, LOOPS, WITHOUT_LOOPS, *RATES_FROM.values(), Q_ABOVE, Q_ERROR)


class StepStage(StrEnum):
    """A stage of a step: where a setting enters, and where evidence comes from."""

    TARGET = "target"
    SAMPLING = "sampling"  # temperature and rules, which shape p, and q with it
    FEATURES = "features"  # of the target, that feed a drafter
    DRAFTER = "drafter"
    COINS = "coins"
    TREE = "tree"
    VERDICT = "verdict"


class PairedBy(StrEnum):
    """What two requests have in common."""

    EXACT = "prompt, parameters and seed"
    SEED = "prompt and parameters"  # the seed differs
    PROMPT = "prompt"  # the parameters differ
    ORDER = "order"  # the prompt of one of them is not known


class PartingCause(StrEnum):
    """Why two outputs part: the first that applies, with the stage where it enters and a sentence.

    Those that are `suspect` no seed, no text and no rounding explains; those that are `harmless` are to be expected.
    """

    stage: StepStage | None
    about: str
    suspect: bool
    harmless: bool

    def __new__(cls, word: str, stage: StepStage | None, about: str, kind: str = "") -> PartingCause:
        """`kind`: suspect, harmless, or neither."""
        made = str.__new__(cls, word)
        made._value_, made.stage, made.about = word, stage, about
        made.suspect, made.harmless = kind == "suspect", kind == "harmless"
        return made

    PARAMETERS = "parameters", StepStage.SAMPLING, "the sampling parameters differ", "harmless"
    END = "end", None, "one output ends where the other goes on", "harmless"
    SEED = "seed", None, "the seeds differ", "harmless"
    ROUNDING = "rounding", None, "at a near tie: rounding alone explains it", "harmless"
    TARGET = "target", StepStage.TARGET, "the target's probabilities differ at the same context", "suspect"
    CUT = "cut", None, "top-k, top-p or min-p left other tokens: rounding at the edge, or another rule"
    CHOICE = "choice", None, "the target chose another token; whether at a near tie is not recorded"
    DRAFTER = "drafter", StepStage.DRAFTER, "the drafter's q differs at the same context", "suspect"
    DRAFTS = "drafts", None, "other tokens were drafted, so sampling used other coins", "harmless"
    COIN = "coin", StepStage.COINS, "the coins differ, though seed and position are the same", "suspect"
    RULE = (
        "rule",
        StepStage.COINS,
        "another rule of verification: the same p, q and coins decide otherwise",
        "harmless",
    )
    VERDICT = "verdict", StepStage.VERDICT, "p, q and coin are the same, and the verdict is another", "suspect"
    UNKNOWN = "not known", None, "the captures do not say why"


@dataclass(frozen=True)
class Difference:
    """One line of the configuration, or of what was observed, that is not the same."""

    name: str
    a: str
    b: str
    note: str = ""  # what it leads to
    enters: StepStage | None = None  # it explains what differs from there on; None: nothing


@dataclass(frozen=True)
class Decision:
    """A token that was tried, or drawn as the final one, where two outputs part."""

    node: int | None  # None: the final token
    token: int
    text: str  # the token for people
    what: str  # accepted, rejected, or the kind of final token
    p: float
    q: float | None  # as drawn; None where the draft is deterministic, and for a final token
    coin: float
    accept_prob: float | None  # None for a final token
    margin: float  # how far p would have to move for another outcome; 1 where nothing could
    gap: float | None  # the target's raw first less its second probability; None where not recorded
    near_tie: bool
    raw_p: float | None = None  # the target's probability before temperature and rules; None where not recorded
    draft_p: float | None = None  # the drafter's own; None where it is no model, or not recorded
    greedy: bool = False  # whether the step left nothing to chance: then coin and accept_prob decided nothing
    near_draw: bool = False  # whether rounding could make another token of the drafter's draw


@dataclass(frozen=True)
class Half:
    """One side of a parting."""

    at: Reference | None  # None where the output had ended
    position: int  # output tokens before the step
    decisions: tuple[Decision, ...]  # in the order of trial
    token: int | None  # that came out there; None where the output had ended
    row: int = -1  # its step in Side
    deep: int = 0  # output tokens of that step before this one
    rule: str = "standard"  # of verification
    drafted: tuple[tuple[int, int], ...] = ()  # (token, parent) of all nodes of the step

    @property
    def tried(self) -> list[Decision]:
        """Without that on the final token."""
        return [decision for decision in self.decisions if decision.node is not None]


@dataclass(frozen=True)
class Parting:
    """Where a pair's outputs part, or the first decision before that which differs."""

    position: int  # output tokens before it, the same on both sides
    cause: PartingCause
    a: Half
    b: Half


@dataclass(frozen=True)
class Pair:
    """A request of each side."""

    a: int  # place in Side.requests
    b: int
    id_a: str
    id_b: str
    title: str
    match: PairedBy
    tokens: tuple[int, int]
    tau: tuple[float | None, float | None]
    drafts: tuple[int, int]  # steps with drafts
    parting: Parting | None = None  # None where the outputs are the same
    first: Parting | None = None  # the first decision that differs, where that is before the parting

    @property
    def same(self) -> bool:
        """Whether the outputs are the same."""
        return self.parting is None

    @property
    def causes(self) -> list[PartingCause]:
        """Of its first differing decision and of where its outputs part."""
        return [parting.cause for parting in (self.first, self.parting) if parting is not None]


@dataclass(frozen=True)
class Where:
    """How often a field differs at contexts of one kind."""

    group: str  # depth, sibling, after, batch
    value: str
    compared: int
    differ: int


@dataclass(frozen=True)
class Field:
    """One kind of evidence at equal contexts."""

    name: str
    compared: int
    differ: int
    largest: float | None  # the largest difference; None where it is no number
    tolerance: float | None
    example: tuple[Reference, Reference] | None  # of the largest, or the first
    where: tuple[Where, ...] = ()
    suspect: bool = False  # whether no rounding and nothing in the configuration explains it
    explained: tuple[str, ...] = ()  # what in the configuration does, where no rounding can
    unsure: bool = False  # whether it is not recorded if rounding explains it
    judged: bool = False  # whether it may be suspect or unsure; else it follows from other fields, or from the load
    note: str = ""
    condition: str = ""  # the condition that best says where it differs, with its counts
    stage: StepStage | None = None  # None: it follows from other fields, or from the load

    @property
    def share(self) -> float:
        """The share of those compared that differ."""
        return self.differ / self.compared if self.compared else 0.0


@dataclass(frozen=True)
class Estimate:
    """A figure of both sides, and the difference B - A with its 95 % interval."""

    name: str
    a: float | None
    b: float | None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    significant: bool = False  # tau: by its interval; any other: after Holm's correction over its table
    visible: float | None = None  # the least difference that would be seen with 95 % power
    clusters: int = 0  # that it is computed from: requests, or pairs of these; for counts, drafts
    weight: tuple[float, float] = (0.0, 0.0)  # drafts, steps or nodes under the figure
    standard_error: float | None = None
    percent: bool = False  # whether it is a share
    unit: str = "request"  # what a cluster is
    without_interval: str = ""  # why there is none, where more data would not help

    @property
    def nonzero(self) -> bool:
        """Whether its interval leaves 0 out."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class CalibrationBin:
    """Nodes whose q lies in one range: how often they were accepted."""

    low: float
    high: float
    nodes: tuple[int, int]
    q: tuple[float | None, float | None]  # means
    accepted: tuple[float | None, float | None]


@dataclass(frozen=True)
class FailCondition:
    """A --fail-if condition and its outcome."""

    text: str
    hit: bool
    detail: str


@dataclass(frozen=True)
class SideFacts:
    """The sources, models and counts of one side."""

    sources: tuple[str, ...]
    warnings: tuple[str, ...]
    target: str
    drafter: str
    requests: int
    unmatched: int
    engine_steps: int
    decode_steps: int
    tokens: int


@dataclass(frozen=True)
class Comparison:
    """Everything that `specscope compare` shows."""

    a: SideFacts
    b: SideFacts
    answer: Sameness  # this and the next three are the verdict's
    summary: str  # it in a sentence
    headline: str  # the acceptance length of both sides, its change and interval
    reasons: tuple[str, ...]  # what speaks for it, the strongest first
    differences: tuple[Difference, ...]
    missing: tuple[str, ...]  # what a side lacks, and what was therefore not compared
    pairs: tuple[Pair, ...]
    nodes: int  # at equal contexts
    steps: int  # at equal contexts
    fields: tuple[Field, ...]
    figures: tuple[Estimate, ...]
    groups: dict[str, tuple[Estimate, ...]] = field(default_factory=dict)  # acceptance length by group
    calibration: tuple[CalibrationBin, ...] = ()
    conditions: tuple[FailCondition, ...] = ()
    unpaired: str = ""  # why there is no pair, in a sentence; "" where there is one

    @property
    def tau(self) -> Estimate | None:
        """The primary figure; None where it is not known on both sides."""
        return next((figure for figure in self.figures if figure.name == TAU), None)

    @property
    def partings(self) -> dict[PartingCause, int]:
        """How many pairs part, by cause, the most frequent first."""
        return dict(Counter(pair.parting.cause for pair in self.pairs if pair.parting is not None).most_common())

    @property
    def exit_code(self) -> int:
        """1 where something differs beyond error and not as configured, else 0; --fail-if alone decides."""
        hit = any(condition.hit for condition in self.conditions)
        return int(hit if self.conditions else self.answer is Sameness.DIFFERENT)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = dataclasses.asdict(self)
        values["partings"] = {str(cause): count for cause, count in self.partings.items()}
        for side in ("a", "b"):
            values[side]["source"] = list(values[side].pop("sources"))
        return values
