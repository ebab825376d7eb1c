"""Where the draws of drafts go wrong: whose coin drew them, and whether that coin draws that token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from specscope.analyze.audit.audit import Audit
from specscope.analyze.diagnose.case import Case
from specscope.analyze.diagnose.randomness import key_of, of_drafts
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.findings import CheckResult
from specscope.analyze.locate.code import code_of
from specscope.analyze.locate.located import Located, Operation, Proof, Stage
from specscope.trace.history.wording import plural
from specscope.trace.record.coins import Stream, coins, draw_number
from specscope.trace.record.tree import Bools, Doubles
from specscope.tree_shape import MAX_NODES

COIN_CHECKS = ("draft coins", "coins over steps", "coins unequal", "coins of requests")
INTERVALS, DRAWS, OF_MODEL = "draft coins in their intervals", "draft draws", "draft p"
ORDER = "draft order"
MOST = draw_number(MAX_NODES, 0)  # draws of a tree
LOOKED_AT = 1000  # steps whose coins are computed again


def located_draws(case: Case, audit: Audit | None = None) -> list[Located]:
    """The operations of drawing that are wrong: coins of drafts, their order, draws. Empty where all is right."""
    coins_, draws = _coins(case), _draws(case, audit)
    if coins_ is not None and coins_.operation.name == ORDER:
        draws = None  # which moved coins do not give either
    return [located for located in (coins_, draws) if located is not None]


@dataclass(frozen=True)
class Reused:
    """Draft coins that came elsewhere too."""

    nodes: Indices  # over all of the run
    words: str  # where else


def _coins(case: Case) -> Located | None:
    c = case.evidence
    nodes = np.flatnonzero(c.drawn_by_coin)
    failed = [case.checks[name] for name in COIN_CHECKS if name in case.checks]
    failed = [check for check in failed if check.result is CheckResult.FAILED]
    shared = max(_shared(c, nodes), key=lambda shared: len(shared.nodes), default=Reused(nodes[:0], ""))
    of_key = case.checks.get("draft coins")
    wrong = of_key.wrong if of_key is not None and of_key in failed else nodes[:0]
    if not failed or not (len(wrong) or len(shared.nodes)):
        return None  # coins of verdicts alone
    if not len(shared.nodes) and _moved(case, wrong).all():
        return _order(case, wrong, len(nodes))
    key, explained = _key(case, wrong), max(len(shared.nodes), len(wrong))
    lines = [f"{shared.words} at {len(shared.nodes):,} of {plural(len(nodes), 'draw')}"] if len(shared.nodes) else []
    if len(wrong):
        lines.append(
            f"{len(wrong):,} of {plural(len(nodes), 'draw')} do not have the coin of their seed, position and number"
        )
    first = int((shared.nodes if len(shared.nodes) else wrong)[0])
    return Located(
        _operation(case, "draft coins", "the coins that draw drafts"),
        sentence="; ".join(lines),
        looks=f"the coins are {key}" if key else shared.words,
        smallest=f"coin {c.draft_coin[first]:.6g} of {c.at_node(first)}{_other(c, nodes, first)}",
        where=c.at_node(first),
        explained=explained,
        differing=max(len(np.union1d(wrong, shared.nodes)), explained),
        unit="draw",
        proof=Proof.ROWS,
    )


def _moved(case: Case, wrong: Indices) -> Bools:
    """Which wrong coins are those of another draw of the same tree: the key is right."""
    c = case.evidence
    return np.array(
        [
            c.draft_coin[node] in coins(c.params[c.step[node]].seed, Stream.DRAFT, int(c.position[c.step[node]]), MOST)
            for node in wrong.tolist()[:LOOKED_AT]
        ],
        np.bool_,
    )


def _order(case: Case, wrong: Indices, draws: int) -> Located:
    """Coins that are of the right key, each at another node than its own."""
    c, first = case.evidence, int(wrong[0])
    return Located(
        _operation(case, ORDER, "which node of the tree a draw becomes"),
        sentence=f"{len(wrong):,} of {plural(draws, 'draw')} have the coin of another draw of their tree",
        looks="draws moved to other places among their siblings, or dropped",
        smallest=f"coin {c.draft_coin[first]:.6g} of {c.at_node(first)}",
        where=c.at_node(first),
        explained=len(wrong),
        differing=len(wrong),
        unit="draw",
        proof=Proof.ROWS,
    )


def _key(case: Case, wrong: Indices) -> str:
    """The key that the wrong coins follow from, where there is one; else ""."""
    steps = map(case.step_at, np.unique(case.evidence.step[wrong]).tolist()[:LOOKED_AT])
    looked = [step for step in steps if step is not None and step.params is not None]
    return key_of(case, looked, of_drafts(case)) if looked else ""


def _shared(c: Columns, nodes: Indices) -> Iterator[Reused]:
    """Draft coins that are also another's: the verdict's, of another draw of the step, another step or request."""
    coin, step = c.draft_coin[nodes], c.step[nodes]
    judged = (coin == c.final_coin[step]) | _in(coin, step, c.coin[c.coin > 0], c.step[c.coin > 0])
    if judged.any():
        yield Reused(nodes[judged], "the coin of a trial, or of the final token, of the same step")
    names: dict[str, int] = {}
    request = np.array([names.setdefault(visit.request.id, len(names)) for visit in c.visits], np.int64)[step]
    values, place = np.unique(coin, return_inverse=True)
    once = {name: _groups(place, group, len(values)) for name, group in (("step", step), ("request", request))}
    times = np.bincount(place, minlength=len(values))
    again = (times > once["step"])[place]
    if again.any():
        yield Reused(nodes[again], "the coin of another draw of the same step")
    over_steps = (once["step"] > once["request"])[place]
    if over_steps.any():
        most = int(once["step"][once["step"] > once["request"]].max())
        yield Reused(nodes[over_steps], f"the same coin as at other positions of the request, up to {most:,} steps")
    seeds = np.array([c.params[s].seed for s in step], np.uint64)
    keys = np.unique(np.stack([seeds, c.position[step].astype(np.uint64)]), axis=1, return_inverse=True)[1].ravel()
    others = ((once["request"] > 1) & (_groups(place, keys, len(values)) > 1))[place]
    if others.any():
        yield Reused(nodes[others], "the coin of another request, of another seed or position")


def _in(coin: Doubles, step: Indices, others: Doubles, their_step: Indices) -> Bools:
    """Which coins are among others of the same step."""
    pairs = set(zip(their_step.tolist(), others.tolist(), strict=True))
    return np.array([pair in pairs for pair in zip(step.tolist(), coin.tolist(), strict=True)], np.bool_)


def _groups(place: Indices, group: Indices, values: int) -> Indices:
    """[values] in how many groups each value comes. `place`: of each item's value; `group`: each item's."""
    both = np.unique(np.stack([place, group]), axis=1)
    return np.bincount(both[0], minlength=values)


def _other(c: Columns, nodes: Indices, first: int) -> str:
    """Another place that has a node's coin, in words; "" where none has."""
    same = nodes[(c.draft_coin[nodes] == c.draft_coin[first]) & (nodes != first)]
    return f" is that of {c.at_node(int(same[0]))} too" if len(same) else ""


def _draws(case: Case, audit: Audit | None) -> Located | None:
    """A draw that does not give what its coin draws, where the q that it was made from is not in question."""
    c, check = case.evidence, case.checks.get(INTERVALS)
    redrawn = None if audit is None else audit.finding(DRAWS)
    q = None if audit is None else audit.finding(OF_MODEL)
    operation = _operation(case, "draft draw", "the token that a coin draws from q")
    if redrawn is not None and q is not None and q.result is CheckResult.FAILED:
        return None  # q itself differs: what is wrong lies before the draw, or q is recorded otherwise
    if redrawn is not None and redrawn.result is CheckResult.FAILED:
        agree = "" if q is None else f"q is the model's at all {plural(q.tested, 'node')}, but "
        return Located(
            operation,
            sentence=f"{agree}the coin draws another token at {redrawn.failed:,} of {plural(redrawn.tested, 'draw')}",
            looks=_beside(c, check.wrong) if check is not None and len(check.wrong) else "",
            smallest=redrawn.detail,
            where=redrawn.example,
            explained=redrawn.failed,
            differing=redrawn.failed,
            unit="draw",
            proof=Proof.ROWS,
        )
    if check is None or check.result is not CheckResult.FAILED:
        return None
    return Located(
        operation,
        sentence=f"the coin lies outside of its draft's interval at {check.failed:,} of {plural(check.tested, 'draw')}",
        looks=_beside(c, check.wrong),
        smallest=check.detail,
        where=check.example,
        explained=check.failed,
        differing=check.failed,
        unit="draw",
        proof=Proof.ROWS,
        certain=redrawn is not None and redrawn.result is CheckResult.PASSED,
    )


def _beside(c: Columns, wrong: Indices) -> str:
    """On which side of their intervals these coins lie."""
    above = int((c.draft_coin[wrong] >= c.draft_low[wrong]).sum())
    if above == len(wrong):
        return "the coin lies above the interval: the token comes before the one that the coin draws, or q is too small"
    if not above:
        return "the coin lies below the interval: the token comes behind the one that the coin draws"
    return f"the coin lies above the interval at {above:,}, below it at {len(wrong) - above:,}"


def _operation(case: Case, name: str, words: str) -> Operation:
    return Operation(Stage.DRAWS, name, words, code_of(case.history.run, name))
