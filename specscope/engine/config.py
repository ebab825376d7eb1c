"""EngineConfig: all that decides what an engine is. No torch: the command line and the parent process read it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta

import specscope
from specscope.errors import UserError
from specscope.model.places import on_disk
from specscope.trace.checked import checked, short, whole
from specscope.trace.head_folder import is_head
from specscope.trace.model_digest import model_digest, of_layers
from specscope.trace.plan import DynamicPlan, StaticPlan, TreePlan, parse_plan
from specscope.trace.record.method import MODELS, TEXTS, model_part, text_part
from specscope.trace.record.rules import BLOCK, RULES, STANDARD
from specscope.trace.record.tree import ROOT

COMBINED = tuple(f"{text}+{model}" for model in MODELS for text in TEXTS)
DRAFTERS = ("auto", "eagle", "ngram", "suffix", "draft_model", *COMBINED, "none")
DEFAULT_HEAD = Path(specscope.__file__).parent / "heads" / "SmolLM2-135M-Instruct"
DEFAULT_TREES = {
    "eagle": "dynamic:4,depth=2,top=4",
    "ngram": "3x5",
    "suffix": "dynamic:16,depth=12",
    "draft_model": "5",
    **dict.fromkeys(COMBINED, "dynamic:12,depth=2,top=4"),
}
# The largest, where each step's tree follows its costs
ADAPTIVE_TREES = {
    **dict.fromkeys(("eagle", *(name for name in COMBINED if model_part(name) == "eagle")), "dynamic:16,depth=5,top=4"),
}
MOST_THREADS = os.cpu_count() or 1

Count = Annotated[int, Meta(ge=1, le=1024, description="between 1 and 1024")]
StepTokens = Annotated[int, Meta(ge=16, le=2**20, description=f"at least 16, and at most {2**20}")]
Context = Annotated[int, Meta(ge=2, le=2**31 - 1, description="at least 2")]
Gib = Annotated[float, Meta(ge=0.001, le=1e6, description="at least 0.001, and at most what the machine has")]
Shared = Annotated[int, Meta(ge=0, le=2**26, description=f"between 0 and {2**26}")]
Threads = Annotated[
    int, Meta(ge=1, le=MOST_THREADS, description=f"between 1 and {MOST_THREADS}, the processors of this machine")
]


@dataclass(frozen=True)
class EngineConfig:
    """How to build an Engine. Raises UserError where values do not fit together."""

    target: str | None = None  # None: the bundled default; else a folder, a hub name or a .gguf file
    # One of DRAFTERS; auto: suffix+eagle with the default target, eagle where its tree is given or not adaptive, or a
    # head is; ngram with another target
    drafter: str = "auto"
    draft_model: str | None = None  # for "draft_model": as target, or self:N for the target's first N layers;
    # for "eagle", alone or combined: the folder of a head, None: the default target's
    tree: str | None = None  # a tree string (trace/plan.py); None: the drafter's default
    rule: str = STANDARD  # of verification: one of RULES
    # Depth and nodes follow measured costs and recent acceptance; needs a dynamic tree. None: where no tree is given
    adaptive: bool | None = None
    speculation: str = "on"  # on; off: nothing is drafted; auto: adaptive trees, which may be empty
    disable_above: Count | None = None  # requests that decode in a step: with more it does not draft
    costs: str | None = None  # a file of step costs for adaptive trees, made where there is none; None: in the cache
    ngram_max: Count = 4  # longest suffix that prompt lookup tries
    ngram_min: Count = 2  # shortest
    suffix_shared: Shared = 0  # tokens of earlier requests that suffix decoding keeps for later ones
    device: str = "auto"
    backend: str = "auto"  # auto, torch or triton (model/backend.py)
    graphs: str = "auto"  # auto: CUDA graphs where the triton backend runs on a GPU; off: none
    dtype: str = "auto"
    max_batch: Count = 8  # requests that run at once
    max_step_tokens: StepTokens = 512  # tokens fed in one step: decode first, prefill chunks with the rest
    max_context: Context | None = None  # None: what the model was made for
    kv_memory: Gib = 1.0  # GiB for the target's KV cache
    # Whether requests begin with the KV of earlier ones that had the same first tokens
    prefix_cache: bool = False
    evidence: str = "auto"  # full; lean: without what is noted at the parents tried; auto: full, but lean on a GPU
    async_scheduling: bool = False  # whether a step runs while the one before is accounted for
    threads: Threads | None = None  # CPU threads of the engine; None: torch's choice

    def __post_init__(self) -> None:
        for name in ("target", "draft_model", "tree", "device", "costs"):
            if getattr(self, name) == "":
                raise UserError(f"--{name.replace('_', '-')} is empty: give a value, or leave the flag out")
        if self.drafter not in DRAFTERS and self.synthetic_rates is None:
            raise UserError(
                f"unknown drafter {short(self.drafter)}: use {', '.join(DRAFTERS)} or synthetic:0.8,0.6,..."
            )
        if self.drafter == "auto":
            object.__setattr__(self, "drafter", self._pick_drafter())
        if self.model_part == "draft_model" and self.draft_model is None:
            raise UserError(f"the drafter {self.drafter} needs --draft-model: a model with the target's vocabulary")
        if self.model_part == "eagle" and self.draft_model is None and self.target is not None:
            raise UserError(
                f"the drafter {self.drafter} needs --draft-model: the folder of a head trained for the target"
            )
        if self.suffix_shared and self.text_part != "suffix":
            raise UserError(f"--suffix-shared is given, but the drafter is {self.drafter}: add --drafter suffix")
        if (self.drafter in ("ngram", "suffix", "none") or self.synthetic_rates) and self.draft_model is not None:
            raise UserError(f"--draft-model is given, but the drafter is {self.drafter}: add --drafter draft_model")
        if self.synthetic_rates and not isinstance(self.plan, StaticPlan):
            raise UserError("a synthetic drafter takes a static tree: 5, 3x5 or '[(0,), (0, 0)]'")
        if self.drafter == "none" and self.tree is not None:
            raise UserError("--tree is given, but the drafter is none")
        if self.speculation not in ("on", "off", "auto"):
            raise UserError(f"speculation must be on, off or auto, not {self.speculation!r}")
        if self.speculation == "auto":
            if self.adaptive is False:
                raise UserError("--speculation auto sizes trees by their costs: leave out --no-adaptive")
            object.__setattr__(self, "adaptive", True)
        if self.graphs not in ("auto", "off"):
            raise UserError(f"graphs must be auto or off, not {self.graphs!r}")
        if self.evidence not in ("auto", "full", "lean"):
            raise UserError(f"evidence must be auto, full or lean, not {self.evidence!r}")
        self._check_rule()
        for name, kind in _NUMBERS.items():
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else checked(value, kind, name))
        if self.ngram_max < self.ngram_min:
            raise UserError(f"ngram_max ({self.ngram_max}) is below ngram_min ({self.ngram_min})")
        if self.adaptive and (not self.model_part or not isinstance(self.plan, DynamicPlan)):
            raise UserError("--adaptive needs a dynamic tree: --drafter eagle or draft_model with --tree dynamic:16")
        if self.costs is not None and not self.adapts:
            raise UserError("--costs is of use to adaptive trees alone: leave it out, or add --adaptive")
        _ = self.draft_layers, self.plan  # what cannot be read is refused before anything is loaded

    def without_drafting(self) -> EngineConfig:
        """The same engine that drafts nothing: what others are measured beside."""
        return replace(self, drafter="none", draft_model=None, tree=None, adaptive=False, suffix_shared=0, costs=None)

    def _check_rule(self) -> None:
        if self.rule not in RULES:
            raise UserError(f"unknown rule {short(self.rule)}: use {', '.join(RULES)}")
        if self.rule != STANDARD and self.synthetic_rates:
            raise UserError(f"--rule {self.rule} with a synthetic drafter: its verdicts are forced, under no rule")
        if self.rule == BLOCK and self.plan is not None and not self.plan.is_chain:
            raise UserError(
                f"--rule block takes a chain, such as --tree 5; for the tree {self.plan} use --rule traversal"
            )

    def _pick_drafter(self) -> str:
        """A model that was given drafts; the default target has a head of its own, beside which the text may draft.

        A tree that was given is the head's alone, so that what is seen of it is the head's.
        """
        if self.draft_model is not None:
            return "eagle" if is_head(Path(self.draft_model)) else "draft_model"
        if self.target is not None or not is_head(DEFAULT_HEAD):
            return "ngram"
        alone = self.tree is not None or self.adaptive is False
        return "eagle" if alone and not self.suffix_shared else "suffix+eagle"

    @property
    def adapts(self) -> bool:
        """Whether trees are adaptive: where that was asked for, or nothing was said of the tree of a head."""
        return (self.drafter in ADAPTIVE_TREES and self.tree is None) if self.adaptive is None else self.adaptive

    @property
    def text_part(self) -> str:
        """Which part looks into the text: suffix or ngram; "" for none."""
        return text_part(self.drafter)

    @property
    def model_part(self) -> str:
        """Which part runs a model: eagle or draft_model; "" for none."""
        return model_part(self.drafter)

    @property
    def head(self) -> str:
        """The folder of the EAGLE head."""
        return str(DEFAULT_HEAD) if self.draft_model is None else self.draft_model

    @property
    def draft_layers(self) -> int | None:
        """N of --draft-model self:N; None for a model of its own."""
        if self.model_part != "draft_model" or not (self.draft_model or "").startswith("self:"):
            return None
        layers = (self.draft_model or "").removeprefix("self:")
        count = whole(layers)
        if not count:
            raise UserError(f"--draft-model {short(self.draft_model)}: write self:N, for the target's first N layers")
        return count

    @property
    def synthetic_rates(self) -> tuple[float, ...] | None:
        """The rates of synthetic:0.8,0.6,..., of which none rises; None for a real drafter."""
        name, _, text = self.drafter.partition(":")
        if name != "synthetic":
            return None
        try:
            rates = tuple(float(part) for part in text.split(","))
        except ValueError:
            rates = ()
        falling = all(1 >= a >= b >= 0 for a, b in zip((1.0, *rates), rates, strict=False))
        if not rates or not falling:
            raise UserError(
                f"--drafter {self.drafter}: write synthetic:0.8,0.6,0.45, the share of drafts that are accepted down "
                "to depth 1, 2, 3; each between 0 and the one before it"
            )
        return rates

    @property
    def plan(self) -> TreePlan | None:
        """How trees are drafted; None for drafter none."""
        rates = self.synthetic_rates
        trees = {**DEFAULT_TREES, **(ADAPTIVE_TREES if self.adapts else {})}
        text = self.tree or (trees.get(self.drafter) if rates is None else str(len(rates)))
        if text is None:
            return None
        plan = parse_plan(text)
        if self.drafter == "ngram" and (not isinstance(plan, StaticPlan) or plan.top or "[" in str(plan)):
            raise UserError(f"the ngram drafter takes a chain (5) or WIDTHxDEPTH (3x5) as tree, not {plan}")
        if self.drafter == "suffix" and not isinstance(plan, DynamicPlan):
            raise UserError(f"the suffix drafter takes the largest tree, as dynamic:16,depth=12, and not {plan}")
        if self.drafter in COMBINED and not isinstance(plan, DynamicPlan):
            raise UserError(
                f"the drafter {self.drafter} ranks deterministic nodes: it takes a tree like "
                f"{DEFAULT_TREES[self.drafter]}, not {plan}"
            )
        return plan

    @property
    def width(self) -> int:
        """Children of the root in a static tree."""
        return len(self.plan.shape.children(ROOT)) if isinstance(self.plan, StaticPlan) else 0


_NUMBERS = {
    "ngram_max": Count,
    "ngram_min": Count,
    "suffix_shared": Shared,
    "max_batch": Count,
    "disable_above": Count,
    "max_step_tokens": StepTokens,
    "max_context": Context,
    "kv_memory": Gib,
    "threads": Threads,
}


@dataclass(frozen=True)
class ModelsGiven:
    """Which models a run was given: their paths as they were given, and digests of what lay there.

    RunInfo's fields of the same names. Filled by `models_given`.
    """

    target_path: str = ""
    target_digest: str = ""
    draft_path: str = ""
    draft_digest: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether all that was given is known."""
        return bool(self.target_digest) and (bool(self.draft_digest) or not self.draft_path)


def models_given(config: EngineConfig) -> ModelsGiven:
    """Of an engine. Half a second for each 270 MB that were never hashed on this machine."""
    target = given_digest(config.target)
    told = ModelsGiven(config.target or "", target)
    if not config.model_part:
        return told
    if config.model_part == "eagle":
        digest = model_digest(Path(config.head).expanduser())
    elif config.draft_layers is not None:
        digest = of_layers(target, config.draft_layers)
    else:
        digest = given_digest(config.draft_model)
    return ModelsGiven(told.target_path, target, config.draft_model or "", digest)


def given_digest(target: str | None) -> str:
    """Of the model that a --target names; "" where it is not on this machine."""
    place = on_disk(target)
    return "" if place is None else model_digest(place)
