"""Decode steps laid out as arrays: the one place where records become columns, for every judge and every table.

Steps, nodes and parents are each a table of columns. A tree of n nodes has n + 1 rows: one for its root, then one for
each node; the children of a root or node are tried at its row. TreeRows numbers the rows of all trees end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import Indices, levels, siblings
from specscope.analyze.evidence.fields import (
    holding,
    joined,
    lengths,
    numbers,
    of_finals_of_verdicts,
    of_methods,
    of_notes,
    of_trees,
    of_verdicts,
    tells_method,
    words,
)
from specscope.analyze.evidence.parents import TreeRows, TriedParents
from specscope.analyze.evidence.visits import Visit
from specscope.analyze.findings import Reference, Unit
from specscope.trace.history.place import ratios
from specscope.trace.record.notes import TEXT
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import FinalKind, Outcome, Preceded, RequestStep, Verdict
from specscope.trace.record.rules import BLOCK, MATCH, STANDARD, TRAVERSAL, looks_ahead, margins
from specscope.trace.record.tree import Bools, Doubles, Drawn
from specscope.trace.run.packed import Picked

# What the checks need to know of the rule of each step: ratios of paths, and whose coin decided.


@dataclass(frozen=True)
class ByRule:
    """What its rule makes of each of S steps with N nodes. Ratios are 1 under rules that do not use them."""

    walks: Bools  # [S] from the root down, sibling after sibling: standard and match
    ahead: Bools  # [S] block and traversal
    match: Bools  # [S]
    judged: Bools  # [N] whether the node's own coin decided
    parent: Doubles  # [N] what was left of the parent's ratio when the node was tried
    left: Doubles  # [N] what was left of the node's own ratio when its coin decided
    open: Bools  # [N] whether what lies below a tried node could be accepted

    @property
    def told(self) -> Bools:
        """[S] whether the step's rule can be checked."""
        return self.walks | self.ahead

    @staticmethod
    def of(parts: Sequence[RequestStep], picked: Sequence[Picked], *, ours: bool) -> ByRule:
        """`ours`: whether our own engine made the run; block verification by another engine records less."""
        rule = np.array(words(picked, "verdict", "rule"), np.str_)
        match = rule == MATCH
        ahead = np.isin(rule, (BLOCK, TRAVERSAL)) & ours
        outcome = joined(picked, "verdict", "outcome", np.uint8)
        judged, open_ = outcome != Outcome.UNTRIED, outcome == Outcome.ACCEPTED
        parent, left = np.ones((2, len(outcome)))
        ends = np.cumsum(lengths(picked, "tree", "token"))
        for step in np.flatnonzero(ahead).tolist():
            part, end = parts[step], int(ends[step])
            assert part.verdict is not None
            mine, path_ratios = slice(end - len(part.tree), end), ratios(part.tree, part.verdict)
            judged[mine], open_[mine] = part.verdict.judged, path_ratios.own > 0
            parent[mine], left[mine] = path_ratios.parent, path_ratios.left
        walks = (rule == STANDARD) | match
        return ByRule(walks, ahead, match, judged, parent, left, open_)


def left_out(parts: Sequence[RequestStep], checked: Bools) -> list[str]:
    """The rules of the steps that are not checked."""
    return sorted({part.rule for part, yes in zip(parts, checked.tolist(), strict=True) if not yes})


KINDS = tuple(FinalKind)
PRECEDED = tuple(Preceded)
SUMMED = 1e-4  # how far rounding may carry a probability beyond 0 or 1
PLAIN = SamplingParams(temperature=1.0)  # where a request's own parameters are not known; `known` says so


def in_range(values: Doubles) -> Bools:
    """Which values lie from 0 to 1, with an allowance for rounding; NaN never does."""
    return np.asarray((values >= -SUMMED) & (values <= 1 + SUMMED))


def rows_in_range(table: Doubles) -> Bools:
    """[K] of a table [K] or [K, t]: the rows whose values are all in range."""
    inside = in_range(table)
    return inside if inside.ndim == 1 else np.all(inside, axis=1)


@dataclass(frozen=True)
class Columns:
    """S decode steps with N nodes, and K parents where the evidence has them."""

    parts: list[RequestStep]  # [S] each has a verdict
    visits: Sequence[Visit] = ()  # [S] the same with what lies around them; empty where only their figures matter
    ours: bool = True  # whether our own engine made the run: then coins follow from seed and position

    # [N] fields of DraftTree and Verdict
    token = of_trees("token", np.int64)
    parent = of_trees("parent", np.int64)
    q = of_trees("q", np.float64)
    drawn = of_trees("drawn", np.uint8)
    outcome = of_verdicts("outcome", np.uint8)
    p = of_verdicts("p", np.float64)
    p_trial = of_verdicts("p_trial", np.float64)
    q_trial = of_verdicts("q_trial", np.float64)
    accept_prob = of_verdicts("accept_prob", np.float64)
    coin = of_verdicts("coin", np.float64)
    residual_mass = of_verdicts("residual_mass", np.float64)
    prob = of_notes("prob", np.float64, np.nan)  # the drafter's own; draft_prob leaves out tokens taken from a text
    draw_margin = of_notes("draw_margin", np.float64, np.nan)  # of the drafter's draw
    draft_coin = of_notes("coin", np.float64, 0.0)  # that drew it; 0 where it is no draw, or it is not recorded
    draft_low = of_notes("low", np.float64, 0.0)  # the lower end of its interval, likewise
    score = of_notes("score", np.float64, np.nan)  # log probability of the path, by which trees are ranked
    source = of_methods("source", np.int32, -1)  # who drafted it: a number of method.SOURCES; -1 where only one drafts
    confidence = of_methods("confidence", np.float64, np.nan)
    tells_confidence = tells_method("confidence")
    module = of_methods("module", np.int32, -1)

    @staticmethod
    def of(every: Sequence[Visit], *, ours: bool = True) -> Columns:
        """The columns of the decode steps among these visits."""
        visits = [visit for visit in every if visit.part.is_judged]
        return Columns([visit.part for visit in visits], visits, ours)

    # [S] of the final token: itself, its probability, the coin that drew it, its margin
    final = of_finals_of_verdicts("token")
    final_p = of_finals_of_verdicts("final_p")
    final_coin = of_finals_of_verdicts("final_coin")
    final_margin = of_finals_of_verdicts("final_margin")

    # Steps

    def __len__(self) -> int:
        return len(self.parts)

    @cached_property
    def picked(self) -> list[Picked]:
        """The columns in which they lie."""
        return Picked.of(self.parts)

    @cached_property
    def start(self) -> Indices:
        """[S + 1] the first node of each step."""
        return np.concatenate([[0], np.cumsum(lengths(self.picked, "tree", "token"))]).astype(np.int64)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """[S] the verdict of each step."""
        return [verdict for part in self.parts if (verdict := part.verdict) is not None]

    @cached_property
    def kind(self) -> NDArray[np.uint8]:
        """[S] the kind of the final token, as its place in KINDS."""
        place = {kind: i for i, kind in enumerate(KINDS)}
        return np.array([place[kind] for kind in words(self.picked, "verdict", "kind")], np.uint8)

    @cached_property
    def tells_p(self) -> Bools:
        """[S] whether p was recorded."""
        return np.asarray((self.final_p != 0) | self.forced_final)

    @cached_property
    def looks_ahead(self) -> Bools:
        """[S] whether a node may be accepted for one below it."""
        return np.array(list(map(looks_ahead, words(self.picked, "verdict", "rule"))), np.bool_)

    @cached_property
    def by_own_coin(self) -> Bools:
        """[N] Verdict.judged: whether its own coin decided."""
        above_last = self.on_path & (np.arange(len(self.token)) != self.last[self.step])
        return np.asarray(self.tried & ~(self.looks_ahead[self.step] & above_last))

    @cached_property
    def margin(self) -> Doubles:
        """[N] Verdict.margin."""
        rule, of_step = self.by_rule, self.step
        given = (self.accept_prob, self.coin, self.p_trial, self.q_trial)
        decided = self.by_own_coin & ~self.forced
        return margins(*given, decided, ahead=self.looks_ahead[of_step], match=rule.match[of_step])

    @cached_property
    def by_rule(self) -> ByRule:
        """What the rule of each step makes of its coins and ratios."""
        return ByRule.of(self.parts, self.picked, ours=self.ours)

    @cached_property
    def told(self) -> Bools:
        """[S] whether it can be checked: its rule is lossless and has the evidence it needs, and all is in range."""
        return self.by_rule.told & self.sound

    @cached_property
    def sound(self) -> Bools:
        """[S] whether all its figures are in range: if one is not, nothing can be computed from them."""
        sound: Bools = np.all([in_range(values) for values in self.figures_of_finals().values()], axis=0)
        for values in self.figures_of_nodes().values():
            sound[self.step[~in_range(values)]] = False
        for values in (self.accept_prob, self.residual_mass):  # checks of their own compare these with p and q
            sound[self.step[~np.isfinite(values)]] = False
        e = self.parents
        for table in e.shares().values():
            sound[e.step[~rows_in_range(table)]] = False
        for values in e.nats().values():
            sound[e.step[~np.isfinite(values)]] = False
        return sound

    def figures_of_nodes(self) -> dict[str, Doubles]:
        """[N] each, by name: all that is a probability or a coin."""
        names = ("p", "q", "p_trial", "q_trial", "coin")
        of_draws = {"draft coin": self.draft_coin, "lower end of the draw": self.draft_low}
        return {**{name: getattr(self, name) for name in names}, **of_draws, "raw p": self.parents.raw_p}

    def figures_of_finals(self) -> dict[str, Doubles]:
        """[S] each, by name: the final token's."""
        return {"p": self.final_p, "coin": self.final_coin, "target's p": self.parents.final_p}

    @cached_property
    def params(self) -> list[SamplingParams]:
        """[S] the sampling parameters of the request; PLAIN where they are not known."""
        infos = [visit.request.info for visit in self.visits]
        return [PLAIN if info is None or not info.params.is_known else info.params for info in infos]

    @cached_property
    def known(self) -> Bools:
        """[S] whether the request's parameters are known."""
        infos = [visit.request.info for visit in self.visits]
        return np.array([info is not None and info.params.is_known for info in infos], np.bool_)

    @cached_property
    def greedy(self) -> Bools:
        """[S] whether the request is known to be greedy."""
        return np.array([params.greedy for params in self.params], np.bool_) & self.known

    @cached_property
    def position(self) -> Indices:
        """[S] the position of the root."""
        return np.asarray(
            numbers(self.picked, "", "context_len") + numbers(self.picked, "", "prefill_tokens"), np.int64
        )

    @cached_property
    def last(self) -> Indices:
        """[S] the last node of the accepted path, numbered over all nodes; -1 where nothing was accepted."""
        ends = np.cumsum(self.depth_reached) - 1
        last = np.where(self.depth_reached > 0, self.path[ends] if len(self.path) else -1, -1)
        return np.where(last < 0, -1, self.start[:-1] + last)

    @cached_property
    def final_row(self) -> Indices:
        """[S] the row at which the final token was drawn."""
        root = self.root_row
        return np.where(self.last < 0, root, self.last + np.arange(len(self)) + 1)

    @cached_property
    def root_row(self) -> Indices:
        """[S] the row of the root."""
        return self.start[:-1] + np.arange(len(self))

    @cached_property
    def rows(self) -> int:
        """How many rows all trees have."""
        return len(self.token) + len(self)

    @cached_property
    def seeds(self) -> list[object]:
        """[S] the seed that its coins follow from; the request's name where no other request shares its coins."""
        infos = [(visit.request.id, visit.request.info) for visit in self.visits]
        return [name if i is None or i.labels.get("seed") == "none" else i.params.seed for name, i in infos]

    @cached_property
    def fresh(self) -> Bools:
        """[S] False where an earlier step of another request had the same seed and position, and so the same coins.

        An outcome that depends on coins already seen is no independent event: sums over chance leave it out. Another
        engine's coins may follow from something else, as from the position of each token: there the coins themselves
        are compared too, those of one seed with each other. Greedy requests use no coins.
        """
        seen: dict[object, str] = {}  # the request that had it
        fresh = []
        numbered = zip(self.visits, self.position.tolist(), self.greedy.tolist(), strict=True)
        coins = np.where(self.drawn_by_coin, self.draft_coin, 0.0)
        for step, (visit, position, greedy) in enumerate(numbered):
            if greedy:
                fresh.append(True)
                continue
            seed = self.seeds[step]
            keys: list[object] = [(seed, position)]
            known = (seed, position) in seen
            name = visit.request.id
            if not self.ours:
                nodes = slice(self.start[step], self.start[step + 1])
                mine = (*self.coin[nodes].tolist(), self.final_coin.item(step), *coins[nodes].tolist())
                keys += [(seed, coin) for coin in mine if coin > 0]
            fresh.append(not known and all(seen.get(key, name) == name for key in keys))
            seen.update((key, seen.get(key, name)) for key in keys)
        return np.array(fresh, np.bool_)

    @cached_property
    def recomputed(self) -> Bools:
        """[S] whether its coins follow from a seed and positions that are known: each is checked by itself."""
        return self.known & self.ours

    # Nodes

    @cached_property
    def named(self) -> Bools:
        """[N] whether its token id is recorded."""
        return np.not_equal(self.token, NO_TOKEN)

    @cached_property
    def step(self) -> Indices:
        """[N] the step of each node."""
        return np.repeat(np.arange(len(self)), np.diff(self.start))

    @cached_property
    def node(self) -> Indices:
        """[N] its number in its own tree."""
        return np.arange(len(self.token)) - self.start[self.step]

    @cached_property
    def row(self) -> Indices:
        """[N] the row of its parent, which siblings share."""
        return self.root_row[self.step] + 1 + self.parent

    @cached_property
    def own_row(self) -> Indices:
        """[N] the node's own row, at which its children are tried."""
        return np.arange(len(self.token)) + self.step + 1

    @cached_property
    def above(self) -> Indices:
        """[N] its parent as a number over all nodes; -1 for the root."""
        return np.where(self.parent < 0, -1, self.start[self.step] + self.parent)

    @cached_property
    def elder(self) -> Indices:
        """[N] the sibling that was drawn just before it, as a number over all nodes; -1 for the first."""
        order = np.argsort(self.row, kind="stable")
        row, elder = self.row[order], np.full(len(order), -1)
        same = np.flatnonzero(row[1:] == row[:-1])
        elder[order[same + 1]] = order[same]
        return elder

    @cached_property
    def sibling(self) -> Indices:
        """[N] its place among its siblings, from 0."""
        return siblings(self.row).astype(np.int64)

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
    def depth(self) -> Indices:
        """[N] 1 for the root's children."""
        return levels(self.above)

    @cached_property
    def tree_depth(self) -> Indices:
        """[S] levels of each step's tree."""
        deepest = np.zeros(len(self), np.int64)
        np.maximum.at(deepest, self.step, self.depth)
        return deepest

    @cached_property
    def tried(self) -> Bools:
        """[N] whether it was tried."""
        return np.not_equal(self.outcome, Outcome.UNTRIED)

    @cached_property
    def accepted(self) -> Bools:
        """[N] whether it was accepted."""
        return np.equal(self.outcome, Outcome.ACCEPTED)

    @cached_property
    def rejected(self) -> Bools:
        """[N] whether it was rejected."""
        return np.equal(self.outcome, Outcome.REJECTED)

    @cached_property
    def sampled(self) -> Bools:
        """[N] whether its token was drawn from q."""
        return np.not_equal(self.drawn, Drawn.DETERMINISTIC)

    @cached_property
    def on_path(self) -> Bools:
        """[N] whether it is on the accepted path."""
        mask = np.zeros(len(self.token), np.bool_)
        mask[self.path + np.repeat(self.start[:-1], self.depth_reached)] = True
        return mask

    @cached_property
    def path(self) -> Indices:
        """The accepted nodes of all steps, each within its tree."""
        return joined(self.picked, "verdict", "path", np.int64)

    @cached_property
    def depth_reached(self) -> Indices:
        """[S] how many accepted nodes each step has."""
        return lengths(self.picked, "verdict", "path")

    @cached_property
    def output(self) -> Indices:
        """The output tokens of all steps, end to end: accepted paths and final tokens, as far as they were emitted."""
        committed = self.depth_reached + 1
        ends = np.cumsum(committed)
        final = np.zeros(int(committed.sum()), np.bool_)
        final[ends - 1] = True
        tokens = np.empty(len(final), np.int64)
        tokens[final] = self.final
        tokens[~final] = self.token[self.path + np.repeat(self.start[:-1], self.depth_reached)]
        place = np.arange(len(final)) - np.repeat(ends - committed, committed)
        return tokens[place < np.repeat(numbers(self.picked, "", "emitted"), committed)]

    @cached_property
    def forced(self) -> Bools:
        """[N] whether its outcome was forced."""
        return self._forced[0]

    @cached_property
    def forced_final(self) -> Bools:
        """[S] whether the final token was forced."""
        return self._forced[1]

    @cached_property
    def _forced(self) -> tuple[Bools, Bools]:
        nodes, finals = np.zeros(len(self.token), np.bool_), np.zeros(len(self), np.bool_)
        forced = joined(self.picked, "verdict", "forced", np.int64)
        step = np.repeat(np.arange(len(self)), lengths(self.picked, "verdict", "forced"))
        is_final = forced == np.diff(self.start)[step]
        nodes[(self.start[step] + forced)[~is_final]] = True
        finals[step[is_final]] = True
        return nodes, finals

    @cached_property
    def draft_prob(self) -> Doubles:
        """[N] the drafter's own probability of each token; NaN where no model drafted it."""
        return np.where(self.source == TEXT, np.nan, self.prob)

    @cached_property
    def has_coins(self) -> bool:
        """Whether coins are recorded: another engine may not record them."""
        return bool(len(self)) and not (np.all(self.coin == 0) and np.all(self.final_coin == 0))

    @cached_property
    def drawn_by_coin(self) -> Bools:
        """[N] whether it was drawn from q by a coin that is recorded."""
        drawn: Bools = self.sampled & (self.draft_coin != 0)
        return drawn

    def holds(self, token: int | None) -> Bools:
        """[N] the nodes with this token; none where it is None."""
        holding: Bools = self.token == (-2 if token is None else token)
        return holding

    def children_at(self, nodes: Bools) -> Bools:
        """[rows] whether any of these nodes is a child of the row."""
        has_child = np.zeros(self.rows, np.bool_)
        has_child[self.row[nodes]] = True
        return has_child

    @cached_property
    def parents(self) -> TriedParents:
        """What the evidence says about the parents that were tried."""
        there = holding(self.picked, "parents")
        rows = TreeRows(self.step, self.row, self.root_row, self.rows)
        return TriedParents(self.picked, there, rows)

    @property
    def nodes(self) -> Unit:
        """What a check over nodes looks at."""
        return Unit("node", self.at_node)

    @property
    def steps(self) -> Unit:
        """What a check over decode steps looks at."""
        return Unit("step", self.at_step)

    @property
    def tried_parents(self) -> Unit:
        """What a check over parents looks at: each is shown at its step."""
        return Unit("parent", lambda parent: self.at_step(int(self.parents.step[parent])))

    def at_node(self, node: int) -> Reference:
        """Where to look at a node."""
        return self.visits[int(self.step[node])].reference(int(self.node[node]))

    def at_step(self, step: int) -> Reference:
        """Where to look at a step."""
        return self.visits[step].reference()
