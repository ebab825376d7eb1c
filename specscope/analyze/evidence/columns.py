"""Decode steps laid out as arrays, for every judge and table: steps, nodes and parents are each a table of columns.

A tree of n nodes has n + 1 rows: one for its root, then one for each node; the children of a root or node are tried at
its row. The rows of all trees are numbered end to end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import (
    Indices,
    column,
    doubles,
    fitting,
    flags,
    holding,
    indices,
    joined,
    lengths,
    levels,
    number_of,
    numbered,
    numbers,
    of_nodes,
    places,
    previous,
    siblings,
    stacked,
    widths,
    words,
)
from specscope.analyze.evidence.visits import Texts, Visit
from specscope.analyze.findings import Reference
from specscope.trace.history.history import History
from specscope.trace.history.place import ratios
from specscope.trace.record.notes import TEXT
from specscope.trace.record.own_rule import OwnRule
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import FinalKind, Outcome, Preceded, RequestStep, RunInfo, Verdict
from specscope.trace.record.rules import LOOK_AHEAD, MATCH, STANDARD, is_own, margins
from specscope.trace.record.tree import Bools, Doubles, Drawn
from specscope.trace.run.packed import PartStore, PartViews, Picked

KINDS = tuple(FinalKind)
BONUS, RECOVERED, TARGET = (KINDS.index(kind) for kind in (FinalKind.BONUS, FinalKind.RECOVERED, FinalKind.TARGET))
PRECEDED = tuple(Preceded)
# By which a row of float32 over a vocabulary may miss 1. torch's softmax on a processor with AVX2 adds up each eighth
# of a row in one float: beside a token that has nearly all, 9e-5 was seen with 49,152 tokens, 7e-4 with 262,144
WHOLE = 5e-4
PLAIN = SamplingParams(temperature=1.0)  # where a request's own parameters are not known; `known` says so


@dataclass(frozen=True)
class TriedParents:
    """K parents that were tried, of the steps whose evidence has them; with what it says of nodes and final tokens."""

    columns: Columns  # of all steps
    picked = cached_property[list[Picked]](lambda e: e.columns.picked)  # the columns in which the steps lie

    # [K] fields of ParentNotes
    node = column("parents", "node", np.int64)  # within its tree; ROOT
    choice = column("parents", "choice", np.int64)
    choice_p = column("parents", "choice_p", np.float64)
    entropy = column("parents", "entropy", np.float64)
    varentropy = column("parents", "varentropy", np.float64)
    q_entropy = column("parents", "q_entropy", np.float64)
    q_varentropy = column("parents", "q_varentropy", np.float64)
    choice_rank = column("parents", "choice_rank", np.int64)
    choice_q = column("parents", "choice_q", np.float64)
    outside = column("parents", "outside", np.float64)
    # [K, t] the target's likeliest tokens, raw; [K, m] the drafter's; -1 where there are none, and probability 0
    top = stacked("top", np.int64)
    top_p = stacked("top_p", np.float64)
    draft_top = stacked("draft_top", np.int64)
    draft_top_p = stacked("draft_top_p", np.float64)
    tops = indices(lambda e: widths(e.picked, "parents", "top_p"))  # [K] how many of the t are recorded
    draft_tops = indices(lambda e: widths(e.picked, "parents", "draft_top_p"))  # and of the m
    # [N] of each node; 0 where there are no notes
    raw_p = of_nodes("parents", "raw_p", np.float64, 0)
    rank = of_nodes("parents", "rank", np.int64, 0)
    q_rank = of_nodes("parents", "q_rank", np.int64, 0)
    # [S] whether the step's evidence has parents; of the final token: of what it was drawn from, and its p before any
    # rejection
    there = flags(lambda e: holding(e.picked, "parents"))
    final_entropy = number_of("parents", "final_entropy")
    final_varentropy = number_of("parents", "final_varentropy")
    final_p = number_of("parents", "final_target_p")
    # [K] the step and the row of each
    step = indices(lambda e: np.repeat(np.arange(len(e.columns)), lengths(e.picked, "parents", "node")))
    row = indices(lambda e: e.columns.root_row[e.step] + 1 + e.node)
    # [N] the parent under which each node was tried, -1 where there is none
    at_node = indices(lambda e: e.at_row[e.columns.row])

    @cached_property
    def at_row(self) -> Indices:
        """[rows] the parent at each row, -1 where there is none."""
        parents = np.full(self.columns.rows, -1)
        parents[self.row] = np.arange(len(self.row))
        return parents

    def of_rows(self, values: Doubles, rows: Indices) -> Doubles:
        """The values [K] of the parents at these rows; NaN where there is none."""
        parents = self.at_row[rows]
        return np.where(parents >= 0, np.append(values, np.nan)[parents], np.nan)

    def at(self, values: Doubles) -> Doubles:
        """[N] those of each node's parent."""
        return self.of_rows(values, self.columns.row)

    @cached_property
    def gap(self) -> Doubles:
        """[K] the target's raw first less its raw second probability; NaN where two were not recorded."""
        if self.top_p.shape[1] < 2:
            return np.full(len(self), np.nan)
        return np.where(self.tops >= 2, self.top_p[:, 0] - self.top_p[:, 1], np.nan)

    def __len__(self) -> int:
        return len(self.step)

    def drafters(self, parents: Indices, token: Indices) -> Doubles:
        """The drafter's raw probability of these tokens at these parents; NaN where it is not among the likeliest."""
        if not self.draft_top.size:
            return np.full(len(parents), np.nan)
        same = (self.draft_top[parents] == token[:, None]) & (parents >= 0)[:, None]
        return np.where(same.any(axis=1), np.where(same, self.draft_top_p[parents], 0).sum(axis=1), np.nan)


@dataclass(frozen=True)
class Columns:
    """S decode steps with N nodes, and K parents where the evidence has them."""

    parts: Sequence[RequestStep]  # [S] each has a verdict
    visits: Sequence[Visit] = ()  # [S] the same with what lies around them; empty where only their figures matter
    history: History | None = None  # the run, where all of it is judged
    every: Sequence[Visit] = ()  # with prefill chunks among them
    own_rule: OwnRule | None = None  # that somebody named: it may be asked what it gives

    @staticmethod
    def of(every: Sequence[Visit], history: History | None = None, own_rule: OwnRule | None = None) -> Columns:
        """The columns of the decode steps among these visits."""
        visits = [visit for visit in every if visit.part.is_judged]
        return Columns([visit.part for visit in visits], visits, history, every, own_rule)

    run = cached_property[RunInfo | None](lambda c: None if c.history is None else c.history.run)
    # Whether our own engine made the run, as far as is known: then coins follow from seed and position
    ours = cached_property[bool](lambda c: c.history is None or (c.run is not None and c.run.is_ours))

    # [N] fields of DraftTree and Verdict
    token = column("tree", "token", np.int64)
    parent = column("tree", "parent", np.int64)
    q = column("tree", "q", np.float64)
    drawn = column("tree", "drawn", np.uint8)
    outcome = column("verdict", "outcome", np.uint8)
    p = column("verdict", "p", np.float64)
    p_trial = column("verdict", "p_trial", np.float64)
    q_trial = column("verdict", "q_trial", np.float64)
    accept_prob = column("verdict", "accept_prob", np.float64)
    coin = column("verdict", "coin", np.float64)
    residual_mass = column("verdict", "residual_mass", np.float64)
    # [N] fields of notes
    prob = of_nodes("notes", "prob", np.float64, np.nan)  # the drafter's own
    draft_prob = doubles(lambda c: np.where(c.source == TEXT, np.nan, c.prob))  # without tokens taken from a text
    draw_margin = of_nodes("notes", "draw_margin", np.float64, np.nan)  # of the drafter's draw
    draft_coin = of_nodes("notes", "coin", np.float64, 0.0)  # that drew it; 0 where it is no draw, or not recorded
    draft_low = of_nodes("notes", "low", np.float64, 0.0)  # the lower end of its interval, likewise
    score = of_nodes("notes", "score", np.float64, np.nan)  # log probability of the path, by which trees are ranked
    source = of_nodes("method", "source", np.int32, -1)  # who drafted it: a number of SOURCES; -1 where only one drafts
    confidence = of_nodes("method", "confidence", np.float64, np.nan)
    tells_confidence = flags(lambda c: fitting(c, "method", "confidence")[c.step])
    module = of_nodes("method", "module", np.int32, -1)

    # [N] where each node is: its step, its number in its own tree, the row of its parent, which siblings share, its own
    # row, at which its children are tried; its parent as a number over all nodes, -1 for the root; its place among its
    # siblings, from 0; its depth, 1 for the root's children
    step = indices(lambda c: np.repeat(np.arange(len(c)), np.diff(c.start)))
    node = indices(lambda c: np.arange(len(c.token)) - c.start[c.step])
    row = indices(lambda c: c.root_row[c.step] + 1 + c.parent)
    own_row = indices(lambda c: np.arange(len(c.token)) + c.step + 1)
    above = indices(lambda c: np.where(c.parent < 0, -1, c.start[c.step] + c.parent))
    sibling = indices(lambda c: siblings(c.row))
    depth = indices(lambda c: levels(c.above))

    # [N] whether its token id is recorded; it was tried, accepted, rejected; it was drawn from q, by a coin that is
    # recorded; its own coin decided, see Verdict.judged
    named = flags(lambda c: c.token != NO_TOKEN)
    tried = flags(lambda c: c.outcome != Outcome.UNTRIED)
    accepted = flags(lambda c: c.outcome == Outcome.ACCEPTED)
    rejected = flags(lambda c: c.outcome == Outcome.REJECTED)
    sampled = flags(lambda c: c.drawn != Drawn.DETERMINISTIC)
    drawn_by_coin = flags(lambda c: c.sampled & (c.draft_coin != 0))
    no_draw = flags(lambda c: np.isnan(c.draw_margin) & ~c.sampled)
    by_own_coin = flags(
        lambda c: c.tried & ~(c.looks_ahead[c.step] & c.on_path & (np.arange(len(c.token)) != c.last[c.step]))
    )

    # [S] of the final token: itself, its probability, the coin that drew it, its margin; the row at which it was drawn
    final = number_of("verdict", "token")
    final_p = number_of("verdict", "final_p")
    final_coin = number_of("verdict", "final_coin")
    final_margin = number_of("verdict", "final_margin")
    final_row = indices(lambda c: np.where(c.last < 0, c.root_row, c.last + np.arange(len(c)) + 1))

    # [S + 1] the first node of each step. [S] the position of the root and its row; accepted nodes
    start = indices(lambda c: np.concatenate([[0], np.cumsum(lengths(c.picked, "tree", "token"))]).astype(np.int64))
    position = indices(
        lambda c: (numbers(c.picked, "", "context_len") + numbers(c.picked, "", "prefill_tokens")).astype(np.int64)
    )
    root_row = indices(lambda c: c.start[:-1] + np.arange(len(c)))
    batch = indices(lambda c: np.array([visit.record.step for visit in c.visits], np.int64))  # [S] the engine's step
    depth_reached = indices(lambda c: lengths(c.picked, "verdict", "path"))
    # The accepted nodes of all steps end to end, each within its tree; and numbered over all nodes. [N] which they are
    path = column("verdict", "path", np.int64)
    path_node = indices(lambda c: c.path + np.repeat(c.start[:-1], c.depth_reached))
    on_path = flags(lambda c: np.isin(np.arange(len(c.token)), c.path_node))

    # [S] whether p was recorded; a node may be accepted for one below it; the request's parameters are known, it is
    # known to be greedy, its parameters are all that shapes p, its tokens are limited, its rules cut tokens off; the
    # step's coins follow from a seed and positions that are known, so that each is checked by itself
    tells_p = flags(lambda c: (c.final_p != 0) | c.forced_final)
    looks_ahead = flags(lambda c: np.isin(c.rule, LOOK_AHEAD))
    known = flags(lambda c: np.array([visit.params is not None for visit in c.visits], np.bool_))
    greedy = flags(lambda c: c.asked(lambda params: params.greedy) & c.known)
    tells_rules = flags(lambda c: c.known & np.array([c.ours or visit.tells_rules for visit in c.visits], np.bool_))
    limited = flags(lambda c: c.asked(lambda params: params.limited))
    cut = flags(lambda c: c.limited | c.asked(lambda asked: asked.top_k > 0 or asked.top_p < 1 or asked.min_p > 0))
    recomputed = flags(lambda c: c.known & c.ours)
    # [S] by its rule: it is somebody's own; it walks from the root down, sibling after sibling; all siblings share a
    # coin; it looks ahead and our own engine made the run (another's block verification records less). Whether it can
    # be checked: its rule is one of these, and all its figures are in range
    by_own_rule = flags(lambda c: np.array(list(map(is_own, c.rule.tolist())), np.bool_))
    walks = flags(lambda c: np.isin(c.rule, (STANDARD, MATCH)) | c.by_own_rule)
    match = flags(lambda c: c.rule == MATCH)
    ahead = flags(lambda c: c.looks_ahead & c.ours)
    told = flags(lambda c: (c.walks | c.ahead) & c.sound)
    free = flags(lambda c: c.fresh & c.told)  # [S] and its coins were not known before
    by_chance = flags(lambda c: c.sound & ~c.recomputed)  # [S] coins in range, of which none is computed again
    # [S] the request's decode step before it; [N] the sibling that was drawn just before it; -1 for none
    before = indices(lambda c: previous(c.request))
    elder = indices(lambda c: previous(c.row))
    # [S] the verdict; the rule of verification; the kind of the final token, as its place in KINDS; the sampling
    # parameters of the request, PLAIN where they are not known; a number for each request
    verdicts = cached_property[list[Verdict]](lambda c: [part.verdict for part in c.parts])
    rule = cached_property[NDArray[np.str_]](lambda c: np.array(words(c.picked, "verdict", "rule"), np.str_))
    kind = indices(lambda c: np.array(list(map(KINDS.index, words(c.picked, "verdict", "kind"))), np.int64))
    params = cached_property[list[SamplingParams]](lambda c: [visit.params or PLAIN for visit in c.visits])
    request = indices(lambda c: numbered(visit.request.id for visit in c.visits))
    # What the evidence says about the parents that were tried, the requests' texts; the columns in which the steps lie
    parents = cached_property(TriedParents)
    texts = cached_property[Texts](lambda c: Texts.of(c.visits))
    picked = cached_property[list[Picked]](lambda c: Picked.of(c.parts))
    rows = cached_property[int](lambda c: len(c.token) + len(c))  # of all trees
    # Whether coins are recorded: another engine may not record them
    has_coins = cached_property[bool](lambda c: bool(np.any(c.coin) or np.any(c.final_coin)))
    # [N] what was left of the parent's ratio when the node was tried, and of its own when its coin decided: 1 under
    # rules that do not use ratios. Whether what lies below a tried node could be accepted
    parent_ratio = doubles(lambda c: c._ratios[0])
    own_ratio = doubles(lambda c: c._ratios[1])
    open = flags(lambda c: c._ratios[2])
    # [N] whether its outcome was forced; it holds the token with which the engine fills its trees. [S] whether the
    # final token was forced; levels of each step's tree
    forced = flags(lambda c: c._forced[c.own_row - 1])
    filler = flags(lambda c: c.token == (-2 if c.run is None or c.run.ways.filler is None else c.run.ways.filler))
    forced_final = flags(lambda c: c._forced[c.root_row + np.diff(c.start)])

    def __len__(self) -> int:
        return len(self.parts)

    def __reduce__(self) -> tuple[Any, ...]:
        """The steps alone, as they lie: each by itself takes ten times as much."""
        return _received, (self.picked,)

    @cached_property
    def _ratios(self) -> tuple[Doubles, Doubles, Bools]:
        parent, own = np.ones((2, len(self.token)))
        open_ = self.accepted.copy()
        for step in np.flatnonzero(self.ahead).tolist():
            mine, of_path = slice(*self.start[step : step + 2]), ratios(self.parts[step].tree, self.verdicts[step])
            parent[mine], own[mine], open_[mine] = of_path.parent, of_path.left, of_path.own > 0
        return parent, own, open_

    @cached_property
    def margin(self) -> Doubles:
        """[N] Verdict.margin."""
        given = (self.accept_prob, self.coin, self.p_trial, self.q_trial, self.by_own_coin & ~self.forced)
        return margins(*given, by_a=(self.looks_ahead | self.by_own_rule)[self.step], match=self.match[self.step])

    @cached_property
    def by_request(self) -> list[list[Visit]]:
        found = defaultdict[str, list[Visit]](list)
        for visit in self.every:
            found[visit.part.request].append(visit)
        return list(found.values())

    def figures(self) -> Iterator[tuple[str, NDArray[Any], Indices, Bools]]:
        """By name all that must be a number in its range: the values, the step of each, and which are not."""
        e = self.parents
        of_nodes = {name: getattr(self, name) for name in ("p", "q", "p_trial", "q_trial", "coin")}
        of_nodes |= {"draft coin": self.draft_coin, "lower end of the draw": self.draft_low, "raw p": e.raw_p}
        of_finals = {"p": self.final_p, "coin": self.final_coin, "target's p": e.final_p}
        of_parents: dict[str, NDArray[Any]] = {
            "p of the likeliest tokens": e.top_p,
            "p of the choice": e.choice_p,
            "the drafter's probability of its likeliest tokens": e.draft_top_p,
            "the drafter's probability of the choice": e.choice_q,
        }
        ends = of_finals, "the final token", np.arange(len(self))
        for shares, place, step in ((of_nodes, "node {}", self.step), ends, (of_parents, "a parent", e.step)):
            for name, values in shares.items():
                wrong = ~((values >= -WHOLE) & (values <= 1 + WHOLE))  # NaN always is
                yield f"{name} of {place}", values, step, np.asarray(np.atleast_2d(wrong.T).any(axis=0))
        for name, values in (("a", self.accept_prob), ("residual mass", self.residual_mass)):
            yield f"{name} of node {{}}", values, self.step, ~np.isfinite(values)  # others hold these against p and q
        for name in ("entropy", "varentropy", "q_entropy", "q_varentropy"):
            yield f"{name} of a parent", getattr(e, name), e.step, ~np.isfinite(getattr(e, name))

    @cached_property
    def sound(self) -> Bools:
        """[S] whether all its figures are in range: if one is not, nothing can be computed from them."""
        sound = np.ones(len(self), np.bool_)
        for _, _, step, wrong in self.figures():
            sound[step[wrong]] = False
        return sound

    def asked(self, what: Callable[[SamplingParams], bool]) -> Bools:
        return np.array(list(map(what, self.params)), np.bool_)

    def parameter(self, name: str) -> Doubles:
        """[N] a sampling parameter of each node's request."""
        return np.array([getattr(params, name) for params in self.params], np.float64)[self.step]

    @cached_property
    def last(self) -> Indices:
        """[S] the last node of the accepted path, numbered over all nodes; -1 where nothing was accepted."""
        last, some = np.full(len(self), -1), self.depth_reached > 0
        last[some] = self.path_node[np.cumsum(self.depth_reached)[some] - 1]
        return last

    @cached_property
    def seed(self) -> Indices:
        """[S] a number for the seed that its coins follow from; one of its own where no other request shares them."""
        infos = [(visit.request.id, visit.request.info) for visit in self.visits]
        seeds = ((name, "none" if info is None else info.labels.get("seed", info.params.seed)) for name, info in infos)
        return numbered(name if seed == "none" else seed for name, seed in seeds)

    @cached_property
    def fresh(self) -> Bools:
        """[S] False where an earlier step of another request had the same seed and position, and so the same coins.

        An outcome that depends on coins already seen is no independent event: sums over chance leave it out. Another
        engine's coins may follow from something else, as from the position of each token: there the coins themselves
        are compared too, those of one seed with each other. Greedy requests use no coins.
        """
        seen: dict[object, str] = {}  # the request that had it
        fresh = np.ones(len(self), np.bool_)
        coins = np.where(self.drawn_by_coin, self.draft_coin, 0.0)
        for step in np.flatnonzero(~self.greedy).tolist():
            name, key = self.visits[step].request.id, (self.seed.item(step), self.position.item(step))
            keys: list[object] = [key]
            if not self.ours:
                nodes = slice(self.start[step], self.start[step + 1])
                mine = (*self.coin[nodes].tolist(), self.final_coin.item(step), *coins[nodes].tolist())
                keys += [(key[0], coin) for coin in mine if coin > 0]
            fresh[step] = key not in seen and all(seen.get(one, name) == name for one in keys)
            for one in keys:
                seen.setdefault(one, name)
        return fresh

    @cached_property
    def is_first(self) -> Bools:
        """[N] whether its path is all first siblings: what the drafter thinks likeliest."""
        first = np.equal(self.sibling, 0)
        for depth in range(2, int(self.depth.max(initial=0)) + 1):
            nodes = np.flatnonzero(self.depth == depth)
            first[nodes] &= first[self.above[nodes]]
        return first

    @cached_property
    def q_left(self) -> Doubles:
        """[N] what earlier siblings drawn without replacement left of q; the node was drawn with its q over that."""
        left = np.ones(len(self.token))
        gone = np.where(self.drawn == Drawn.WITHOUT_REPLACEMENT, self.q, 0.0)
        for place in range(1, int(self.sibling.max(initial=0)) + 1):
            nodes = np.flatnonzero(self.sibling == place)
            left[nodes] = left[self.elder[nodes]] - gone[self.elder[nodes]]
        return left

    @cached_property
    def tree_depth(self) -> Indices:
        deepest = np.zeros(len(self), np.int64)
        np.maximum.at(deepest, self.step, self.depth)
        return deepest

    @cached_property
    def output(self) -> Indices:
        """The output tokens of all steps, end to end: accepted paths and final tokens, as far as they were emitted."""
        tokens = np.insert(self.token[self.path_node], np.cumsum(self.depth_reached), self.final)
        step = np.repeat(np.arange(len(self)), self.depth_reached + 1)
        return tokens[places(step) < numbers(self.picked, "", "emitted")[step]]

    @cached_property
    def _forced(self) -> Bools:
        """[rows] of each step first its nodes, then its final token."""
        step = np.repeat(np.arange(len(self)), lengths(self.picked, "verdict", "forced"))
        place = self.root_row[step] + joined(self.picked, "verdict", "forced", np.int64)
        return np.isin(np.arange(self.rows), place)

    def any_in_step(self, nodes: Bools) -> Bools:
        """[S] whether a step has any of these nodes."""
        has_node = np.zeros(len(self), np.bool_)
        has_node[self.step[nodes]] = True
        return has_node

    def children_at(self, nodes: Bools) -> Bools:
        """[rows] whether any of these nodes is a child of the row."""
        has_child = np.zeros(self.rows, np.bool_)
        has_child[self.row[nodes]] = True
        return has_child

    def at_node(self, node: int) -> Reference:
        return self.visits[int(self.step[node])].reference(int(self.node[node]))

    def at_step(self, step: int) -> Reference:
        return self.visits[step].reference()

    def at_parent(self, parent: int) -> Reference:
        return self.at_step(int(self.parents.step[parent]))


def _received(picked: list[Picked]) -> Columns:
    store = PartStore()
    rows = [store.append(each.steps[row]) for each in picked for row in each.rows.tolist()]
    return Columns(PartViews(store, rows))
