"""The rules of verification, by name: which are lossless, and what a node's coin means under each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

STANDARD = "standard"  # siblings one after the other from the root down, each by its own coin
BLOCK = "block"  # chains: the longest prefix whose coin falls, from the last token to the first (Sun et al. 2024)
TRAVERSAL = "traversal"  # the same for trees, from the leaves to the root (Weng et al. 2025, arXiv 2505.12398)
MATCH = "match"  # one token is drawn from the target at each node, and the walk goes on while a child is that token
RULES = (STANDARD, BLOCK, TRAVERSAL, MATCH)
ABOUT = {
    BLOCK: "from the last token to the first: accepts the longest prefix whose coin falls below its ratio",
    TRAVERSAL: "from the leaves to the root: a node is also accepted if one below it is",
    MATCH: "one token drawn from p decides for all children of a node",
}
LOOK_AHEAD = (BLOCK, TRAVERSAL)  # a node is accepted as well where one below it is
LOSSY = "lossy"  # a rule that is not lossless is called lossy:NAME
THRESHOLDS = f"{LOSSY}:thresholds"  # SGLang's acceptance thresholds below 1
SIMULATED = f"{LOSSY}:simulated"  # SGLang's SGLANG_SIMULATE_ACC_LEN: a count that was asked for
MADE_UP = (f"{LOSSY}:synthetic", SIMULATED)  # for benchmarks: what is accepted is drawn without the target
UNSEEN = "unseen"  # of another engine, which judged where specscope does not see p
OUTCOME_ALONE = (UNSEEN, *MADE_UP)  # under which p may not be known: what came out is told

# How far a model's probabilities move when a batch has another shape, by dtype. Measured: the largest change of any p
# over 160 contexts of SmolLM2-135M-Instruct, alone and in a batch of four, was 8.6e-6 in float32 and 0.049 in bfloat16.
ROUNDING = {"float32": 1e-5, "float16": 8e-3, "bfloat16": 5e-2}

SUM_ROUNDING = 1e-3  # by which a sum of float32 probabilities may be above 1

# The same for the norms of a target's hidden states (DraftNotes.fed_norms), relative to the norm.
NORM_ROUNDING = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


def is_lossy(rule: str) -> bool:
    """Whether a rule may emit tokens that are not distributed as the target's own."""
    return rule.split(":")[0] == LOSSY


def is_own(rule: str) -> bool:
    """Whether it is your own function, as module:function: what it gives for p and q is not known here."""
    return ":" in rule and not is_lossy(rule)


def looks_ahead(rule: str) -> bool:
    """Whether a coin that fails does not yet reject: the nodes below were judged before."""
    return rule in LOOK_AHEAD


def goes_by_a(rule: str) -> bool:
    """Whether an outcome is known to follow from a and the coin alone, and not from p and q as tried."""
    return looks_ahead(rule) or is_own(rule)


def margins(
    accept_prob: NDArray[np.float64],
    coin: NDArray[np.float64],
    p_trial: NDArray[np.floating],
    q_trial: NDArray[np.floating],
    decided: NDArray[np.bool_],
    *,
    by_a: bool | NDArray[np.bool_],
    match: bool | NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Verdict.margin of nodes. `decided`: whether the node's own coin did; `by_a`, `match`: of its step's rule."""
    p = p_trial.astype(np.float64)
    sure = np.where(by_a, accept_prob, p)
    with np.errstate(invalid="ignore"):  # of numbers that are none there is no distance
        away = np.abs(np.where(by_a, accept_prob - coin, p - coin * q_trial))
    return np.where(match | ~decided | (sure == 0) | (sure == 1), 1.0, away)


def log_odds(p: NDArray[Any], low: float = 0.0, high: float = 1.0) -> NDArray[Any]:
    """Of probabilities; of those beyond `low` and `high`, of these."""
    kept = np.clip(p, low, high)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(kept) - np.log1p(-kept))


def near(p: NDArray[Any], border: NDArray[Any], dtype: str) -> NDArray[np.bool_]:
    """Whether rounding could move p over the border: also in log odds, so that 4e-12 is far from 0.03.

    A probability moves by at most a quarter of what its log odds do; those of unlikely tokens move up to twice as far.
    """
    least = ROUNDING.get(dtype, 0.0)
    with np.errstate(invalid="ignore"):  # of what is 0 on both sides there is no distance
        close: NDArray[np.bool_] = (np.abs(p - border) < least) & (np.abs(log_odds(p) - log_odds(border)) < 8 * least)
    return close


def near_draw(coin: NDArray[Any], margin: NDArray[Any], dtype: str) -> NDArray[np.bool_]:
    """The same of a draw: the next token's interval is `margin` away on one side. A coin not known is taken for 1/2."""
    known = np.where((coin > 0) & (coin < 1), coin, 0.5)
    sides = [np.clip(known + way * margin, 0, 1) for way in (-1, 1)]
    close: NDArray[np.bool_] = (margin < 1) & np.any([near(side, known, dtype) for side in sides], axis=0)
    return close


def sound(values: NDArray[Any]) -> NDArray[Any]:
    """The values that can be probabilities, NaN elsewhere: means and curves skip NaN, and `verify` reports it."""
    masked: NDArray[Any] = np.where((values >= 0) & (values <= 1 + SUM_ROUNDING), values, np.nan)
    return masked
