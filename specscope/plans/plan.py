"""How to draft: what people write for --tree.

5, 3x4, [(0,), (1,), (0, 0)]      a static tree: sampled where the request is sampled, top tokens where it is greedy
sampled:3x4                       the same, spelled out
top:3x4                           a static tree of top tokens always: deterministic, and verified as such
dynamic:24,depth=6,top=4          EAGLE-2: the best 24 nodes of a search 6 deep and 4 wide; deterministic

and what other programs have: the lists of paths of EAGLE, Medusa and TensorRT-LLM, vLLM's `--speculative-config`, and
SGLang's three numbers.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from specscope.errors import UserError, short
from specscope.tree_shape import LONGEST, MAX_NODES, ROOT, TreeShape, parse_tree

MAX_DEPTH = MAX_TOP = 32
DEFAULT_DEPTH, DEFAULT_TOP = 5, 4
_DYNAMIC = re.compile(r"(?P<nodes>[0-9]{1,6})(?:,depth=(?P<depth>[0-9]{1,6}))?(?:,top=(?P<top>[0-9]{1,6}))?")
SGLANG = ("num_steps", "eagle_topk", "num_draft_tokens")
# As flags of a command line, as keys of a file of settings, or three numbers alone
_NAMED = [re.compile(rf"speculative[-_]{re.sub('_', '[-_]', name)}\W{{1,40}}([0-9]{{1,6}})\b") for name in SGLANG]
_NUMBERS = re.compile(r"([0-9]{1,6})[, ]\s*([0-9]{1,6})[, ]\s*([0-9]{1,6})")
_CONFIG = re.compile(r"(?:\bspeculative[-_]config|(?<!\S)-sc)\b[^\w{]{1,40}(?=\{)|\A\s*(?=\{)")


@dataclass(frozen=True)
class StaticPlan:
    """Every step's tree has this shape."""

    shape: TreeShape
    top: bool = False  # True: top tokens at any temperature; False: sampled where the request is sampled

    @property
    def max_nodes(self) -> int:
        return len(self.shape)

    @property
    def max_depth(self) -> int:
        return self.shape.max_depth

    @property
    def fed(self) -> list[int]:
        """How many nodes a drafter that is a model runs in each of its passes after the first: those with children."""
        inner = {above for above in self.shape.parent if above != ROOT}
        return [count for level in self.shape.levels if (count := len(inner.intersection(level)))]

    @property
    def is_chain(self) -> bool:
        return self.shape.is_chain

    def __str__(self) -> str:
        return f"top:{self.shape}" if self.top else str(self.shape)


@dataclass(frozen=True)
class DynamicPlan:
    """The tree follows the drafter's confidence (EAGLE-2, Li et al. 2024, section 4).

    At each depth the `top` nodes of highest cumulative probability are expanded by their `top` likeliest tokens; of
    all that were looked at, the `nodes` best are kept. Deterministic: q is a point mass.
    """

    nodes: int
    depth: int = DEFAULT_DEPTH
    top: int = DEFAULT_TOP

    @property
    def max_nodes(self) -> int:
        return min(self.nodes, self.candidates)

    @property
    def max_depth(self) -> int:
        return self.depth

    @property
    def fed(self) -> list[int]:
        return [self.top] * (self.depth - 1)

    @property
    def is_chain(self) -> bool:
        return self.top == 1

    @property
    def candidates(self) -> int:
        """Nodes that re-ranking chooses from."""
        return self.top + (self.depth - 1) * self.top**2

    def __str__(self) -> str:
        return f"dynamic:{self.nodes},depth={self.depth},top={self.top}"


TreePlan = StaticPlan | DynamicPlan


class _VllmConfig(msgspec.Struct):
    method: str | None = None
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, lt=10**6)] | None = None
    speculative_token_tree: str | None = None


def read_plan(text: str) -> TreePlan | None:
    """The tree that a capture names; None where it names none that we can read."""
    try:
        return parse_plan(text) if text else None
    except UserError:
        return None


def parse_plan(text: str) -> TreePlan:
    """A --tree, also in another program's notation. Raises UserError."""
    text, _ = translated(text)
    kind, colon, rest = text.strip().partition(":")
    if kind == "dynamic" and colon:
        return _dynamic(rest, text)
    return StaticPlan(parse_tree(rest if kind in ("top", "sampled") and colon else text), top=kind == "top")


def _dynamic(rest: str, text: str) -> DynamicPlan:
    match = _DYNAMIC.fullmatch(re.sub(r"\s*([,=])\s*", r"\1", rest.strip()))
    if match is None:
        how = "write dynamic:NODES,depth=D,top=K; depth and top are optional"
        raise UserError(f"cannot read the tree {short(text)}: {how}")
    nodes = int(match["nodes"])
    depth, top = int(match["depth"] or min(DEFAULT_DEPTH, max(nodes, 1))), int(match["top"] or DEFAULT_TOP)
    for name, value, limit in (("nodes", nodes, MAX_NODES), ("depth", depth, MAX_DEPTH), ("top", top, MAX_TOP)):
        if not 1 <= value <= limit:
            raise UserError(f"tree {short(text)}: {name} must be between 1 and {limit}, not {value}")
    if depth > nodes:
        raise UserError(f"tree {short(text)}: {nodes} nodes cannot be {depth} deep")
    return DynamicPlan(nodes, depth, top)


def translated(text: str) -> tuple[str, str]:
    """(tree string, its origin in words); (`text`, "") where it is not another program's. Raises UserError."""
    if len(text) > LONGEST:
        return text, ""
    named = [pattern.search(text) for pattern in _NAMED]
    if any(named):
        missing = [f"speculative_{name}" for name, match in zip(SGLANG, named, strict=True) if match is None]
        if missing:
            raise UserError(f"tree {short(text)}: SGLang's tree needs three numbers, and {missing[0]} is missing")
        return _sglang(*(int(match[1]) for match in named if match))
    if numbers := _NUMBERS.fullmatch(text.strip()):
        return _sglang(*map(int, numbers.groups()))
    found = [match.end() for match in _CONFIG.finditer(text)]  # the last one: JSON may be around a command line
    return _vllm(text[found[-1] :]) if found else (text, "")


def _sglang(steps: int, top: int, tokens: int) -> tuple[str, str]:
    """SGLang's tree: EAGLE-2's, the best of a search and deterministic. Its number of draft tokens counts the root."""
    about = f"SGLang's {steps} steps, top {top}, {tokens} draft tokens, one of them the root"
    if top == 1:  # then it takes steps + 1 draft tokens, whatever is given
        return f"top:{steps}", about
    if tokens < 2:
        raise UserError(f"SGLang's draft tokens must be 2 or more, not {tokens}: one of them is the root")
    return f"dynamic:{tokens - 1},depth={steps},top={top}", about


def _vllm(text: str) -> tuple[str, str]:
    try:
        quote = re.match(r"""\{\s*(\\"|')""", text)  # within quotes, or in Python, which allows a comma at the end
        plain = re.sub(r",(?=\s*[}\]])", "", text.replace(quote[1], '"') if quote else text)
        config = msgspec.convert(json.JSONDecoder().raw_decode(plain)[0], _VllmConfig)
    except (ValueError, RecursionError) as error:  # ValueError: of both
        why = str(error).replace(" - at `$.", " in `")
        raise UserError(f"cannot read the tree of the configuration {short(text)}: {why}") from None
    about = f"vLLM's {config.method or 'speculative configuration'}"
    if config.speculative_token_tree is not None:
        return config.speculative_token_tree, f"{about}, its speculative_token_tree"
    if config.num_speculative_tokens is None:
        raise UserError(f"{short(text)} says neither num_speculative_tokens nor speculative_token_tree: it has no tree")
    return str(config.num_speculative_tokens), f"{about}, a chain of num_speculative_tokens"


WIDEST_MASK = 64  # nodes; wider masks are left out
TOP_RULE = "rule        top tokens, deterministic: accepted with p"
RULE = "rule        sampled without replacement if the request is sampled, top tokens if it is greedy"


def describe(plan: TreePlan, *, mask: bool, about: str | None = None) -> str:
    """What `specscope tree` prints. `about`: the origin of a tree of another program."""
    lines = [f"tree {plan}", *([f"from        {about}"] if about else ())]
    lines += [f"here        --tree {shlex.quote(str(plan))}"] if about is not None else []
    nodes, depth, rows, leaves = plan.max_nodes, plan.max_depth, sum(plan.fed) + 1, ""
    if isinstance(plan, StaticPlan):
        drawn = branches(plan.shape.parent)
        paths = (f"{lead}{node}  {','.join(map(str, plan.shape.paths[node]))}" for node, lead in drawn)
        lines += ["", "●  root: the last committed token", *paths, ""]
        leaves = f", {sum(not plan.shape.children(node) for node in range(nodes))} of them leaves"
    else:
        searched = f"searched in each step: the {plan.top} likeliest nodes of a depth get {plan.top} children each,"
        kept = f"{depth} deep; of {plan.candidates} candidates the {nodes} best are kept"
        lines += ["", f"shape       {searched}", f"            {kept}"]
    passes = f"{depth} pass{'es' * (depth != 1)}, {rows:,} row{'s' * (rows != 1)}"
    lines += [
        f"nodes       {nodes}{leaves}",
        f"depth       {depth}: at most {depth + 1} tokens per step, with the final token",
        f"verify      {nodes + 1} rows per request (root and nodes), {nodes + 1} slots of the target's KV cache",
        f"draft       {passes}, if the drafter is a model",
    ]
    lines.append(TOP_RULE if isinstance(plan, DynamicPlan) or plan.top else RULE)
    if mask and isinstance(plan, StaticPlan):
        lines += _mask(plan.shape.paths)
    return "\n".join(lines)


def branches(parent: Sequence[int]) -> list[tuple[int, str]]:
    """(node, the branch characters before it) depth first, siblings in draw order."""
    children: dict[int, list[int]] = {}
    for node, above in enumerate(parent):
        children.setdefault(above, []).append(node)

    def below(above: int, lead: str) -> Iterator[tuple[int, str]]:
        for node in (siblings := children.get(above, [])):
            last = node == siblings[-1]
            yield node, lead + ("└─ " if last else "├─ ")
            yield from below(node, lead + ("   " if last else "│  "))

    return list(below(ROOT, ""))


def _mask(paths: Sequence[Sequence[int]]) -> Iterator[str]:
    if len(paths) > WIDEST_MASK:
        yield f"mask        not drawn for {len(paths)} nodes"
        return
    yield from ("", "mask        a row may attend to the context, the root and the nodes marked ■")
    for node, path in enumerate(paths):
        yield f"{node:>4}        " + " ".join("■" if path[: len(other)] == other else "·" for other in paths)


def plan_dict(plan: TreePlan, about: str = "") -> dict[str, Any]:
    """What `describe` says, as plain values."""
    values: dict[str, Any] = {"tree": str(plan), "from": about, "nodes": plan.max_nodes, "depth": plan.max_depth}
    values["rows"] = {"verify": plan.max_nodes + 1, "draft": sum(plan.fed) + 1}
    if isinstance(plan, StaticPlan):
        parents, depths = list(plan.shape.parent), list(plan.shape.depth)
        return values | {"kind": "top" if plan.top else "sampled", "parents": parents, "depths": depths}
    return values | {"kind": "dynamic", "top": plan.top, "candidates": plan.candidates}
