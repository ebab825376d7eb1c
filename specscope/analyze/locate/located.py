"""What `locate` finds: the operations of a step in the order of computing, each held against a reference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.findings import Exit, Reference
from specscope.analyze.plain import fields

Floats = NDArray[np.float32]
IN = ":in"
# In the order of computing; by the name of a module or, inside attention, of what it does. A name that is not here
# stands for itself.
WORDS = {
    "tokens": "the tokens that are fed",
    "last token": "the token that was sampled, fed last",
    "positions": "the positions of the rows",
    "later positions": "the positions of the drafter's later passes",
    "block table": "the block table passed to attention",
    "slots": "the slots where keys and values are written",
    "keys seen": "how many keys each row sees",
    "later keys seen": "how many keys the drafter's later passes see",
    "features": "the target's features, as the head is fed them",
    "input_norm": "the norm of the features",
    "fc": "the projection of the features",
    "fed back": "the state fed back from the parent",
    "state": "the state fed back to the next pass",
    "embedding": "the embedding",
    "enorm": "the norm of the token's embedding",
    "hnorm": "the norm of the state",
    "eh_proj:in": "embedding and state, normed, side by side",
    "eh_proj": "the projection of embedding and state",
    "post_norm": "the norm after the layer",
    "input_layernorm": "the norm before attention",
    "hidden_norm": "the norm of the features or of the state",
    "self_attn.q_proj": "the queries' projection",
    "self_attn.k_proj": "the keys' projection",
    "self_attn.v_proj": "the values' projection",
    "self_attn.q_norm": "the queries' norm",
    "self_attn.k_norm": "the keys' norm",
    "self_attn.query": "the queries after rotary",
    "self_attn.key": "the keys after rotary",
    "self_attn.value": "the values",
    "self_attn.keys read": "the keys as read from the KV cache",
    "self_attn.values read": "the values as read from the KV cache",
    "self_attn.context key": "the keys of committed positions",
    "self_attn.context value": "the values of committed positions",
    "self_attn.scores": "the attention scores with mask",
    "self_attn.attention": "the attention output",
    "self_attn.o_proj:in": "the attention output of all heads, side by side",
    "self_attn.o_proj": "the projection of the attention output",
    "self_attn": "the attention output, projected",
    "post_attention_layernorm:in": "the residual after attention",
    "post_attention_layernorm": "the norm before the MLP",
    "mlp.gate_proj": "the MLP's gate",
    "mlp.up_proj": "the MLP's up projection",
    "mlp.act_fn": "the MLP's activation",
    "mlp.down_proj:in": "gate times up",
    "mlp.down_proj": "the MLP's down projection",
    "mlp.gate": "the router of the experts",
    "mlp.experts": "the experts",
    "mlp": "the MLP",
    "norm": "the final norm",
    "lm_head": "the logits",
    "d2t": "the logits by the target's tokens (d2t)",
    "vocabulary": "the logits by the target's tokens",
    "chosen tokens": "the tokens chosen by their logits",
    "parameters": "temperature, top-k and top-p of drafted rows",
    "draft": "the token drafted by the drafter's logits",
    "choice": "the tokens chosen by the target's logits",
}


class Stage(StrEnum):
    """The stages of a step, in the order of computing."""

    TARGET = "target"
    DRAFTER = "drafter"
    SAMPLING = "sampling"  # logits to p and q
    VERDICT = "verdict"  # p, q and coins to accepted drafts and the final token
    DRAWS = "draws"  # coins to drafted tokens


@dataclass(frozen=True)
class Operation:
    stage: Stage
    name: str  # "layers.3.self_attn.q_proj", "top-p"; the name of a module is the model's own
    words: str  # "layer 3: the queries' projection"
    code: str = ""  # inside vLLM, where it is computed: class and method

    @property
    def told(self) -> dict[str, str]:
        return {"stage": self.stage.value, "operation": self.name, "words": self.words, "code": self.code}


@dataclass(frozen=True)
class FedRow:
    """A row that was fed: where it stands."""

    position: int
    token: int
    node: int | None = None  # the tree's node; None for a token of the text


@dataclass(frozen=True)
class Held:
    """One operation of a walk, held against the reference. Filled by a walk."""

    operation: Operation
    allowed: float  # relative error that rounding explains
    error: float  # the largest over all rows and parts
    rows: int  # that were compared
    differing: int  # of these, how many are off by more than is allowed
    # [rows, parts] relative error of each row, by part: attention heads where the operation has them, else one
    errors: Floats = field(default_factory=lambda: np.zeros((0, 1), np.float32), compare=False, repr=False)

    @property
    def differs(self) -> bool:
        return self.differing > 0

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for --json; the errors of rows and parts are rounded to 3 digits."""
        errors = [[float(f"{value:.3g}") for value in row] for row in self.errors.tolist()]
        return self.operation.told | fields(self, "operation", "errors") | {"errors": errors}


@dataclass(frozen=True)
class Walk:
    """Both sides over one step of one request, operation by operation."""

    stage: Stage
    where: Reference
    rows: tuple[FedRow, ...]
    operations: tuple[Held, ...]  # in the order of computing, up to the first that differs
    engine: str = ""  # what was walked: "specscope, torch's operators", "vLLM 0.32.0"
    reference: str = ""  # what it was held against

    @property
    def first(self) -> int | None:
        """The place of the first operation that differs; None where all agree."""
        return next((place for place, held in enumerate(self.operations) if held.differs), None)

    @property
    def sides(self) -> str:
        return self.engine + (f" against {self.reference}" if self.reference else "")


class Proof(IntEnum):
    """How a fault was found or named, the surest first."""

    PLACE = 0  # an operation whose inputs agree and whose output does not
    ROWS = 1  # rows that a formula, or a change of the reference, gives as they were recorded
    CONDITION = 2  # differences are where the cause would put them
    SUM = 3  # figures that are off over many rows, by more than chance allows


@dataclass(frozen=True)
class Located:
    operation: Operation
    sentence: str  # what agrees before it and how it differs, with figures, n and unit
    looks: str = ""  # what the difference is like: "a factor of 0.577 at every position"; "" where like nothing known
    smallest: str = ""  # the smallest input that shows it, in a line
    where: Reference | None = None  # a step, or node, that shows it
    explained: int = 0  # how many of what differs it explains
    differing: int = 0  # how many differ
    unit: str = "row"
    certain: bool = True  # False: a region, not one operation
    runner_up: str = ""  # the next best explanation and how many it leaves, where several were tried
    spoiled: int = 0  # how many that are right would be wrong by it
    proof: Proof = Proof.PLACE

    @property
    def share(self) -> float:
        return self.explained / self.differing if self.differing else 1.0

    def to_dict(self) -> dict[str, Any]:
        return self.operation.told | fields(self, "operation", "proof") | {"proof": self.proof.name.lower()}


@dataclass
class Location:
    """The answer of `locate`: faults with their places, the walks behind them, and what was ruled out."""

    source: str
    located: tuple[Located, ...] = ()  # as `ranked` has them
    walks: tuple[Walk, ...] = ()
    ruled_out: tuple[str, ...] = ()  # what agrees, a sentence each with n and unit
    rerun: dict[str, Stage] = field(default_factory=dict)  # those of them that an engine showed which ran again here
    unexplained: tuple[str, ...] = ()  # what differs and has no place, besides failed checks
    unplaced: tuple[str, ...] = ()  # checks of audit and verify that failed and have none
    left_out: tuple[str, ...] = ()  # what could not be walked or searched, and why
    notes: tuple[str, ...] = ()  # steps that were not judged, and why; nobody asked for them by name
    seconds: float = 0.0

    @property
    def without_place(self) -> tuple[str, ...]:
        return (*self.unexplained, *self.unplaced)

    @property
    def exit(self) -> Exit:
        """1: something is wrong; else 2: something could not be walked; else 0."""
        return Exit.of(wrong=bool(self.located or self.without_place), unjudged=bool(self.left_out))

    def to_dict(self) -> dict[str, Any]:
        more = {"exit": int(self.exit), "unexplained": list(self.without_place), "seconds": round(self.seconds, 3)}
        return fields(self, "unplaced", "rerun") | more


def ranked(located: Sequence[Located]) -> tuple[Located, ...]:
    """The surest proof first; then by what they explain less what they spoil; then by the order of a step. What a walk
    finds is a place in one step, and its rows are no measure of how much follows from it."""

    def key(item: Located) -> tuple[int, int, int]:
        gain = 0 if item.proof is Proof.PLACE else item.explained - item.spoiled
        return item.proof, -gain, [*Stage].index(item.operation.stage)

    return tuple(sorted(located, key=key))


def operation(stage: Stage, name: str) -> Operation:
    """An operation with its words. `name`: "norm", or within a layer "layers.3.self_attn.q_proj"."""
    layer = re.match(r"(?:layers\.(\d+)|midlayer)(?:\.(.*))?$", name)
    if layer is None:
        return Operation(stage, name, _words(name))
    where = f"{'the drafter, ' if stage is Stage.DRAFTER else ''}layer {layer[1] or 0}"
    return Operation(stage, name, f"{where}: {_words(layer[2]) if layer[2] else 'its output'}")


def _words(name: str) -> str:
    if name in WORDS:
        return WORDS[name]
    if name.startswith("features layer"):
        return f"the target's hidden states at the input of its {name.removeprefix('features ')}, as fed"
    if name.startswith("fc_norm."):
        return f"the norm of the features of part {name.removeprefix('fc_norm.')}"
    plain = name.removesuffix(IN)
    return f"the input of {WORDS.get(plain, plain)}" if name.endswith(IN) else plain
