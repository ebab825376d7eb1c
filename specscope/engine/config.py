"""EngineConfig: all that decides what an engine is. No torch: the command line and the parent process read it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

import specscope
from specscope.errors import UserError
from specscope.gone import refuse_gone
from specscope.model.places import config_of, on_disk
from specscope.plans.dflash import longest_draft
from specscope.plans.kinds import KINDS, RUN_HERE, head_kind, is_head, lies_in_target, modules_in, runs_head
from specscope.plans.model_digest import model_digest, of_layers
from specscope.plans.plan import DynamicPlan, StaticPlan, TreePlan, parse_plan
from specscope.speculate.named import NamedCode, is_named, name_of
from specscope.trace.checked import Flag, base_of, checked, flags_of, required_types, short, whole
from specscope.trace.record.own_rule import NodeTrial, OwnRule
from specscope.trace.record.rules import BLOCK, LOSSY, RULES, STANDARD, is_lossy
from specscope.whole_file import read_object

DRAFTERS = ("auto", *RUN_HERE, "none")
NAMED = (("drafter", "own", DRAFTERS, "module:Class"), ("rule", "own_rule", RULES, "module:function"))  # or code
DEFAULT_HEAD = Path(specscope.__file__).parent / "heads" / "SmolLM2-135M-Instruct"
DEFAULT_TREES = {kind.name: kind.tree for kind in KINDS if kind.runs}
MOST_THREADS = os.cpu_count() or 1

Count = Annotated[int, Meta(ge=1, le=1024, description="between 1 and 1024")]
StepTokens = Annotated[int, Meta(ge=16, le=2**20, description=f"at least 16, and at most {2**20}")]
Context = Annotated[int, Meta(ge=2, le=2**31 - 1, description="at least 2")]
Gib = Annotated[float, Meta(ge=0.001, le=1e6, description="at least 0.001, and at most what the machine has")]
Threads = Annotated[
    int, Meta(ge=1, le=MOST_THREADS, description=f"between 1 and {MOST_THREADS}, the processors of this machine")
]


@dataclass(frozen=True)
class EngineConfig:
    """How to build an Engine. Raises UserError where values do not fit together."""

    target: Annotated[
        str | None, Flag("Model: a folder, a hub name or a .gguf file.  [default: SmolLM2-135M-Instruct]", "MODEL")
    ] = None
    # One of DRAFTERS, or module:Class; auto: eagle with the default target or a head, ngram with another target
    drafter: Annotated[
        str,
        Flag(
            f"How to draft, such as eagle, ngram, or your module:Class. One of {', '.join(RUN_HERE)}, none, or a class "
            "derived from specscope.Drafter.  [default: eagle; ngram with --target]",
            "DRAFTER",
        ),
    ] = "auto"
    draft_model: Annotated[
        str | None, Flag("A head, a smaller model, or self:N. With self:N, the target's first N layers.", "MODEL")
    ] = None
    tree: Annotated[
        str | None,
        Flag(
            "Draft tree, such as 5, 3x5 or dynamic:16. Also '[(0,), (0, 0)]', top:3x5; see specscope tree -h.", "TREE"
        ),
    ] = None
    speculation: Annotated[str, Flag("Whether to draft.  [default: on]", choices=("on", "off"))] = "on"
    disable_above: Annotated[
        Count | None, Flag("Stop drafting above N decoding requests. It resumes at a quarter fewer.", "N")
    ] = None
    async_scheduling: Annotated[
        bool,
        Flag(
            "Run a step while the previous one is still being recorded; a debugger runs one step at a time.  "
            "[default: off]"
        ),
    ] = False
    rule: Annotated[
        str,
        Flag(
            "standard, block, traversal, match or your own. How drafts are verified, your own by module:function. "
            "Block and traversal accept more sampled drafts.  [default: standard]",
            "RULE",
        ),
    ] = STANDARD
    dtype: Annotated[
        str, Flag("Number format of the models.  [default: auto]", choices=("auto", "float32", "bfloat16", "float16"))
    ] = "auto"
    device: Annotated[str, Flag("Where to run: cpu, cuda or auto.  [default: auto]", "DEVICE")] = "auto"
    backend: Annotated[
        str, Flag("Kernels; triton needs a GPU.  [default: auto]", choices=("auto", "torch", "triton"))
    ] = "auto"
    graphs: Annotated[str, Flag("Use CUDA graphs on a GPU.  [default: auto]", choices=("auto", "off"))] = "auto"
    max_batch: Annotated[Count, Flag("Maximum requests in a batch.  [default: 8]", "N")] = 8
    max_step_tokens: Annotated[StepTokens, Flag("Maximum tokens in one step.  [default: 512]", "N")] = 512
    max_context: Annotated[Context | None, Flag("Maximum tokens in a request.  [default: the model's limit]", "N")] = (
        None
    )
    evidence: Annotated[
        str,
        Flag(
            "lean leaves out entropies, ranks and likeliest tokens.  [default: full; lean on a GPU]",
            choices=("auto", "full", "lean"),
        ),
    ] = "auto"
    kv_memory: Annotated[Gib, Flag("Memory for the KV cache.  [default: 1]", "GIB")] = 1.0
    threads: Annotated[Threads | None, Flag("CPU threads.  [default: torch's choice]", "N")] = None
    ngram_min: Annotated[int, Meta(ge=1, le=4, description="between 1 and 4")] = 2  # shortest suffix of prompt lookup
    own: Callable[..., Any] | NamedCode | None = None  # what makes a drafter that is none of DRAFTERS
    own_rule: Callable[[NodeTrial], Any] | NamedCode | None = None  # a rule that is none of RULES

    def __post_init__(self) -> None:
        for named in NAMED:
            self._take_named(*named)
        for name in ("target", "draft_model", "tree", "device"):
            if getattr(self, name) == "":
                raise UserError(f"--{name.replace('_', '-')} is empty: give a value, or leave the flag out")
        if is_lossy(self.rule):
            raise UserError(f"--rule {short(self.rule)}: {LOSSY}:NAME is a rule of another engine: rename your module")
        if self.drafter == "auto":
            object.__setattr__(self, "drafter", self._pick_drafter())
        if self.drafter == "draft_model" and self.draft_model is None:
            raise UserError("the drafter draft_model needs --draft-model: a model with the target's vocabulary")
        has_head = self.drafter == "eagle" and self.target is None
        if runs_head(self.drafter) and self.draft_model is None and not (has_head or lies_in_target(self.drafter)):
            need = "the folder of a head trained for the target"
            raise UserError(f"the drafter {self.drafter} needs --draft-model: {need}")
        if lies_in_target(self.drafter) and self.draft_model is not None:
            raise UserError(f"--draft-model is given, but the drafter {self.drafter} is in the target's checkpoint")
        if self.drafter in ("ngram", "suffix", "none") and self.draft_model is not None:
            add = f"add --drafter {self._pick_drafter()}"
            raise UserError(f"--draft-model is given, but the drafter is {self.drafter}: {add}")
        if self.drafter == "none" and self.tree is not None:
            raise UserError("--tree is given, but the drafter is none")
        for name, flag in flags_of(EngineConfig).items():
            if flag.choices and getattr(self, name) not in flag.choices:
                refuse_gone(f"--{name} {getattr(self, name)}")
                raise UserError(f"unknown {name} {short(getattr(self, name))}: use {', '.join(flag.choices)}")
        if self.rule == BLOCK and self.plan is not None and not self.plan.is_chain:
            takes = "takes a chain, such as --tree 5"
            raise UserError(f"--rule block {takes}; for the tree {self.plan} use --rule traversal")
        for name, kind in _NUMBERS.items():
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else checked(value, kind, name))
        _ = self.draft_layers, self.plan  # what cannot be read is refused before anything is loaded

    def _take_named(self, what: str, own: str, known: Sequence[str], form: str) -> None:
        """Keep code of somebody's own by its name. Refuses a name that nobody gave leave to import, and is unknown."""
        if callable(given := getattr(self, what)):
            object.__setattr__(self, own, given)
            object.__setattr__(self, what, name_of(given))
        name, code = getattr(self, what), getattr(self, own)
        if name in known or (code is not None and name_of(code) == name):
            return
        refuse_gone(name.partition(":")[0])
        if is_named(name):
            raise UserError(f"the {what} {short(name)} is imported only if --{what} names it")
        raise UserError(f"unknown {what} {short(name)}: use {', '.join(known)} or {form}")

    def _pick_drafter(self) -> str:
        """A model that was given drafts; the default target has a head of its own."""
        if self.draft_model is not None:
            folder = Path(self.draft_model)
            return head_kind(folder) if is_head(folder) else "draft_model"
        return "eagle" if self.target is None and is_head(DEFAULT_HEAD) else "ngram"

    @property
    def is_own(self) -> bool:
        """Whether a class of the user's drafts."""
        return self.drafter not in DRAFTERS

    def load_rule(self) -> OwnRule | None:
        """The rule of somebody's own, imported where it was named; None of one of RULES. Raises UserError."""
        return None if self.rule in RULES or self.own_rule is None else load_rule(self.rule, self.own_rule)

    @property
    def head(self) -> str:
        """The folder of the EAGLE head."""
        return str(DEFAULT_HEAD) if self.draft_model is None else self.draft_model

    @property
    def draft_layers(self) -> int | None:
        """N of --draft-model self:N; None for a model of its own."""
        if self.drafter != "draft_model" or not (self.draft_model or "").startswith("self:"):
            return None
        if not (count := whole((self.draft_model or "").removeprefix("self:"))):
            raise UserError(f"--draft-model {short(self.draft_model)}: write self:N, for the target's first N layers")
        return count

    @cached_property
    def _chain(self) -> str | None:
        """As deep as the head's config says that it drafts at once, or as the target has modules; None for no head."""
        if lies_in_target(self.drafter):
            return str(max(modules_in(config_of(self.target)), 1))
        with suppress(UserError):  # the loader says what is wrong
            told = read_object(Path(self.head).expanduser() / "config.json") if runs_head(self.drafter) else None
            return None if told is None else str(longest_draft(told) or 1)
        return "1"

    @property
    def plan(self) -> TreePlan | None:
        """How trees are drafted; None for drafter none."""
        usual = None if lies_in_target(self.drafter) else DEFAULT_TREES.get(self.drafter)
        text = self.tree or usual or self._chain
        plan = None if text is None else parse_plan(text)
        if self.drafter == "ngram" and (not isinstance(plan, StaticPlan) or plan.top or "[" in str(plan)):
            raise UserError(f"the ngram drafter takes a chain (5) or WIDTHxDEPTH (3x5) as tree, not {plan}")
        if self.drafter == "suffix" and not isinstance(plan, DynamicPlan):
            raise UserError(f"the suffix drafter takes the largest tree, as dynamic:16,depth=12, and not {plan}")
        return plan


_NUMBERS = {name: kind for name, kind in required_types(EngineConfig).items() if base_of(kind) in (int, float)}


def named_code(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of an EngineConfig as somebody wrote them: a drafter and a rule that they name may be imported."""
    given = [(own, f"--{what}", settings.get(what)) for what, own, known, _ in NAMED if settings.get(what) not in known]
    named = [(own, flag, name) for own, flag, name in given if isinstance(name, str) and is_named(name)]
    return settings | {own: NamedCode.find(name, flag) for own, flag, name in named}


def load_rule(name: str, code: Callable[[NodeTrial], Any] | NamedCode) -> OwnRule:
    """A rule of somebody's own. Raises UserError where it cannot be imported, or is no function."""
    function = code.load("--rule") if isinstance(code, NamedCode) else code
    if not callable(function):
        raise UserError(f"--rule {name} is {short(function)}: name a function")
    return OwnRule(name, function)


def models_given(config: EngineConfig) -> dict[str, Any]:
    """RunInfo's fields of the models that an engine is given: their paths as they are given, and digests of them.

    "" for what is not on this machine. Takes half a second for each 270 MB that were never hashed on it.
    """
    target, draft = given_digest(config.target), ""
    if lies_in_target(config.drafter):
        draft = target
    elif runs_head(config.drafter):
        draft = model_digest(Path(config.head).expanduser())
    elif config.draft_layers is not None:
        draft = of_layers(target, config.draft_layers)
    elif config.draft_model is not None:
        draft = given_digest(config.draft_model)
    paths = {"target_path": config.target or "", "draft_path": config.draft_model or ""}
    return {**paths, "target_digest": target, "draft_digest": draft}


def given_digest(target: str | None) -> str:
    """The digest of the model that a --target names; "" where it is not on this machine."""
    return "" if (place := on_disk(target)) is None else model_digest(place)
