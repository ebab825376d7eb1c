"""Where the draws of drafts go wrong: whose coin drew them, and whether that coin draws that token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specscope.analyze.audit.audit import Audit
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.findings import CheckResult, Reference
from specscope.analyze.locate.located import Located, Operation, Proof, Stage
from specscope.analyze.verify.case import Case
from specscope.analyze.verify.coin_keys import CoinsOf
from specscope.trace.history.wording import plural
from specscope.trace.record.coins import Stream, coins, draw_number
from specscope.tree_shape import MAX_NODES

REUSED = {  # by the check of verify that fails, whose coin it is
    "coins unequal": "the coin of another draw or trial of the same step",
    "coins over steps": "the coin of another position of the request",
    "coins of requests": "the coin of another request with another seed or position",
}
INTERVALS, DRAWS, OF_MODEL = "draft coins in their intervals", "draft draws", "draft p"
ORDER, COINS, DRAW = "draft order", "draft coins", "draft draw"
WORDS = {
    COINS: "the coins that draw drafts",
    ORDER: "which node of the tree a draw becomes",
    DRAW: "the token that a coin draws from q",
}
SIDES = {  # by the share of coins that lie above
    1.0: "the coin is above the interval: the token comes before the one that the coin draws, or q is too small",
    0.0: "the coin is below the interval: the token comes after the one that the coin draws",
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
    known = [case.checks[name] for name in REUSED if name in case.checks]
    reused = next((each for each in known if each.result is CheckResult.FAILED), None)
    count = f"{len(wrong):,} of {plural(check.tested, 'draw')}"
    smallest = f"coin {c.draft_coin[wrong[0]]:.6g} of {check.example}"
    if reused is None and _are_moved(c, wrong):
        sentence = f"{count} have the coin of another draw in their tree"
        looks = "draws moved to other places among their siblings, or dropped"
        return _located(ORDER, sentence, looks, smallest, check.example, len(wrong))
    key = CoinsOf.drafts(c).key_of(np.unique(c.step[wrong])[:LOOKED_AT])[0]
    looks = f"the coins are {key}" if key else REUSED[reused.name] if reused else ""
    sentence = f"{count} do not have the coin of their seed, position and draw number"
    if reused:
        of_reused = f"{reused.failed:,} of {plural(reused.tested, reused.unit)}"
        sentence += f"; {REUSED[reused.name]} in {of_reused}: {reused.detail}"
    return _located(COINS, sentence, looks, smallest, check.example, len(wrong))


def _are_moved(c: Columns, wrong: Indices) -> bool:
    """Whether wrong coins are those of another draw of the same tree: the key is right."""
    of_steps = ((node, c.step[node]) for node in wrong.tolist()[:LOOKED_AT])
    keys = ((node, c.params[step].seed, int(c.position[step])) for node, step in of_steps)
    return all(c.draft_coin[n] in coins(seed, Stream.DRAFT, position, MOST) for n, seed, position in keys)


def _draws(case: Case, audit: Audit | None) -> Located | None:
    """A draw that does not give what its coin draws, where the q that it was made from is not in question."""
    check, c = case.checks.get(INTERVALS), case.evidence
    redrawn, q = (None, None) if audit is None else (audit.finding(DRAWS), audit.finding(OF_MODEL))
    if redrawn is not None and q is not None and q.result is CheckResult.FAILED:
        return None  # q itself differs: what is wrong lies before the draw, or q is recorded otherwise
    looks, certain = "", True
    if check is not None and len(check.wrong):  # on which side of their intervals these coins lie
        count, above = len(check.wrong), int((c.draft_coin[check.wrong] >= c.draft_low[check.wrong]).sum())
        looks = f"the coin is above the interval at {above:,}, below it at {count - above:,}"
        looks = SIDES.get(above / count, looks)
    if redrawn is not None and redrawn.result is CheckResult.FAILED:
        failed, sentence = redrawn, "" if q is None else f"q is the model's at all {plural(q.tested, 'node')}, but "
        sentence += "the coin draws another token"
    elif check is not None and check.result is CheckResult.FAILED:
        failed, sentence = check, "the coin is outside its draft's interval"
        certain = redrawn is not None and redrawn.result is CheckResult.PASSED
    else:
        return None
    sentence += f" at {failed.failed:,} of {plural(failed.tested, 'draw')}"
    found = _located(DRAW, sentence, looks, failed.detail, failed.example, failed.failed)
    return replace(found, certain=certain)


def _located(name: str, sentence: str, looks: str, smallest: str, where: Reference | None, count: int) -> Located:
    operation = Operation(Stage.DRAWS, name, WORDS[name])
    return Located(operation, sentence, looks, smallest, where, count, count, "draw", proof=Proof.ROWS)
