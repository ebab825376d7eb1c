"""Where the draws of drafts go wrong: whose coin drew them, and whether that coin draws that token."""

from __future__ import annotations

import numpy as np

from specscope.analyze.audit.audit import Audit
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.findings import CheckResult, Reference
from specscope.analyze.locate.located import Located, Proof, Stage
from specscope.analyze.locate.operations import our_operation
from specscope.analyze.verify.case import Case
from specscope.analyze.verify.coin_keys import CoinsOf
from specscope.trace.history.wording import plural
from specscope.trace.record.coins import Stream, coins, draw_number
from specscope.trace.record.records import RunInfo
from specscope.trace.record.tree import Bools
from specscope.tree_shape import MAX_NODES

REUSED = {  # by the check of verify that fails, whose coin it is
    "coins unequal": "the coin of another draw or trial of the same step",
    "coins over steps": "the same coin as at other positions of the request",
    "coins of requests": "the coin of another request, of another seed or position",
}
INTERVALS, DRAWS, OF_MODEL = "draft coins in their intervals", "draft draws", "draft p"
ORDER, COINS = "draft order", "draft coins"
WORDS = {
    COINS: "the coins that draw drafts",
    ORDER: "which node of the tree a draw becomes",
    "draft draw": "the token that a coin draws from q",
}
MOST = draw_number(MAX_NODES, 0)  # draws of a tree
LOOKED_AT = 1000  # steps whose coins are computed again


def located_draws(case: Case, audit: Audit | None = None) -> list[Located]:
    """The operations of drawing that are wrong: coins of drafts, their order, draws. Empty where all is right."""
    of_coins, of_draws = _coins(case), _draws(case, audit)
    if of_coins is not None and of_coins.operation.name == ORDER:
        of_draws = None  # which moved coins do not give either
    return [located for located in (of_coins, of_draws) if located is not None]


def _coins(case: Case) -> Located | None:
    """Coins of drafts that are not those of their seed, position and draw; what they are instead."""
    c, check = case.evidence, case.checks.get(COINS)
    if check is None or check.result is not CheckResult.FAILED:
        return None
    wrong = check.wrong
    reused = [case.checks[name] for name in REUSED if name in case.checks]
    reused = [each for each in reused if each.result is CheckResult.FAILED]
    count, smallest = (
        f"{len(wrong):,} of {plural(check.tested, 'draw')}",
        f"coin {c.draft_coin[wrong[0]]:.6g} of {check.example}",
    )
    if not reused and _moved(c, wrong).all():
        name, looks = ORDER, "draws moved to other places among their siblings, or dropped"
        sentence = f"{count} have the coin of another draw of their tree"
    else:
        key, name = _key(case, wrong), COINS
        looks = f"the coins are {key}" if key else REUSED[reused[0].name] if reused else ""
        sentence = f"{count} do not have the coin of their seed, position and number"
        for each in reused[:1]:
            sentence += f"; {REUSED[each.name]} in {each.failed:,} of {plural(each.tested, each.unit)}: {each.detail}"
    return _located(case.history.run, name, sentence, looks, smallest, check.example, len(wrong))


def _moved(c: Columns, wrong: Indices) -> Bools:
    """Which wrong coins are those of another draw of the same tree: the key is right."""
    of_steps = ((node, c.step[node]) for node in wrong.tolist()[:LOOKED_AT])
    keys = ((node, c.params[step].seed, int(c.position[step])) for node, step in of_steps)
    return np.array([c.draft_coin[n] in coins(seed, Stream.DRAFT, at, MOST) for n, seed, at in keys], np.bool_)


def _key(case: Case, wrong: Indices) -> str:
    """The key that the wrong coins follow from, where there is one; else ""."""
    steps = np.unique(case.evidence.step[wrong])[:LOOKED_AT]
    return CoinsOf.drafts(case.evidence).key_of(steps)[0]


def _draws(case: Case, audit: Audit | None) -> Located | None:
    """A draw that does not give what its coin draws, where the q that it was made from is not in question."""
    check, run = case.checks.get(INTERVALS), case.history.run
    redrawn, q = (None, None) if audit is None else (audit.finding(DRAWS), audit.finding(OF_MODEL))
    if redrawn is not None and q is not None and q.result is CheckResult.FAILED:
        return None  # q itself differs: what is wrong lies before the draw, or q is recorded otherwise
    looks = _beside(case.evidence, check.wrong) if check is not None and len(check.wrong) else ""
    if redrawn is not None and redrawn.result is CheckResult.FAILED:
        sentence = "" if q is None else f"q is the model's at all {plural(q.tested, 'node')}, but "
        sentence += f"the coin draws another token at {redrawn.failed:,} of {plural(redrawn.tested, 'draw')}"
        return _located(run, "draft draw", sentence, looks, redrawn.detail, redrawn.example, redrawn.failed)
    if check is None or check.result is not CheckResult.FAILED:
        return None
    sentence = f"the coin lies outside of its draft's interval at {check.failed:,} of {plural(check.tested, 'draw')}"
    certain = redrawn is not None and redrawn.result is CheckResult.PASSED
    return _located(run, "draft draw", sentence, looks, check.detail, check.example, check.failed, certain=certain)


def _beside(c: Columns, wrong: Indices) -> str:
    """On which side of their intervals these coins lie."""
    above = int((c.draft_coin[wrong] >= c.draft_low[wrong]).sum())
    if above == len(wrong):
        return "the coin lies above the interval: the token comes before the one that the coin draws, or q is too small"
    if not above:
        return "the coin lies below the interval: the token comes behind the one that the coin draws"
    return f"the coin lies above the interval at {above:,}, below it at {len(wrong) - above:,}"


def _located(
    run: RunInfo | None,
    name: str,
    sentence: str,
    looks: str,
    smallest: str,
    where: Reference | None,
    count: int,
    *,
    certain: bool = True,
) -> Located:
    operation = our_operation(run, Stage.DRAWS, name, WORDS[name])
    return Located(operation, sentence, looks, smallest, where, count, count, "draw", certain, proof=Proof.ROWS)
