"""Where the faults that have a name lie, and what is located put together with them.

A fault that is located has a place; one whose row of causes.py fits has a name. What is both is shown once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Suspect
from specscope.analyze.diagnose.together import (
    ACCEPTANCE,
    COINS,
    COUNTED,
    DRAFTER,
    LOSSLESS,
    OF_FINALS,
    OF_Q,
    RULED,
    TARGET,
)
from specscope.analyze.locate.located import Located, Stage

ANY = ""
FED = r"^(tokens|positions|rows|features|embedding|fc|draw|drawn)"  # what enters a model, before its first layer
# What attention does with positions, its mask and the KV cache, and what enters it
SEEN = r"^(tokens|positions|rows)|\.(query|key|value|keys read|values read|scores|attention)$"
OUT = r"^(lm_head|logits|d2t|norm|head)"  # from the last layer on
T, D, S, V, W = Stage.TARGET, Stage.DRAFTER, Stage.SAMPLING, Stage.VERDICT, Stage.DRAWS
Places = Mapping[Stage, str]  # by stage, the pattern of the operations at which a cause shows first

PLACES: Mapping[Cause, Places] = {
    Cause.DRAFT_POSITION: {D: f"{SEEN}|^lookup", W: ANY},
    Cause.DRAFT_PLACEHOLDERS: {D: "^(lookup|chosen tokens|draft)", W: ANY},
    Cause.VOCABULARY_MAP: {D: OUT, W: ANY},
    Cause.Q_TEMPERATURE: {S: ANY, W: ANY},
    Cause.Q_NOT_DRAWN: {W: ANY},
    Cause.Q_UNPROCESSED: {S: ANY, W: ANY},
    Cause.Q_DROPPED: {V: ANY, W: ANY},
    Cause.DRAW_BESIDE: {W: ANY},
    Cause.SIBLINGS_SORTED: {W: ANY},
    Cause.SIBLINGS_PRUNED: {W: ANY},
    Cause.SIBLINGS_SWAPPED: {W: ANY},
    Cause.DRAFT_TOKENS_CUT: {D: OUT, S: ANY, W: ANY},
    Cause.FEATURES_STALE: {D: FED},
    Cause.FEATURES_MISSING: {D: FED},
    Cause.FEATURES_LAYERS: {D: FED},
    Cause.FEATURES_NORMALISED: {D: FED},
    Cause.DRAFTER_KV_FULL: {D: SEEN},
    Cause.DRAFTER_KV_PREEMPTION: {D: SEEN},
    Cause.DRAFTER_KV_NOT_MOVED: {D: SEEN},
    Cause.DRAFTER_KV_REWOUND: {D: SEEN},
    Cause.DRAFTER_KV_PREFIX: {D: SEEN},
    Cause.DRAFTER_OTHER_BRANCH: {D: SEEN},
    Cause.DRAFTER_CHUNKS: {D: f"{FED}|{SEEN}"},
    Cause.HEAD_EMBEDDING: {D: FED},
    Cause.LOGPROBS: {},
    Cause.DRAFTER_ROTARY: {D: SEEN},
    Cause.RESIDUAL: {V: ANY},
    Cause.FINAL_FROM_P: {V: ANY},
    Cause.RATIO_BY_P: {V: ANY},
    Cause.Q_OTHER_ROW: {V: ANY},
    Cause.Q_NOT_RENORMALISED: {V: ANY},
    Cause.AGAINST_COIN: {V: ANY},
    Cause.TRIAL_ORDER: {V: ANY},
    Cause.FINAL_NOT_RESIDUAL: {V: ANY},
    Cause.FINAL_OTHER_NODE: {V: ANY},
    Cause.NOISE_SHARED: {V: ANY, W: ANY},
    Cause.COINS_SHARED: {V: ANY, W: ANY},
    Cause.COINS_BY_BATCH: {V: ANY, W: ANY},
    Cause.RULES_OFF_PATH: {S: ANY},
    Cause.RULES_WRONG: {S: ANY},
    Cause.NOT_A_NUMBER: {T: ANY, D: ANY, S: ANY},
    Cause.OTHER_RULE: {V: ANY},
    Cause.ACCEPTED_COUNT: {V: ANY},
    Cause.P_NOT_USED: {V: ANY},
    Cause.P_OTHER_ROW: {T: OUT, S: ANY, V: ANY},
    Cause.ROWS_SWAPPED: {T: f"{FED}|{OUT}", D: f"{FED}|{OUT}", S: ANY, V: ANY},
    Cause.LOGITS_SCALED: {T: OUT, D: OUT, S: ANY},
    Cause.MASK_SIBLINGS: {T: SEEN, D: SEEN},
    Cause.POSITION_BY_INDEX: {T: SEEN, D: SEEN},
    Cause.KV_NOT_MOVED: {T: SEEN},
    Cause.BLOCKS_SHARED: {T: SEEN},
    Cause.KV_RECOMPUTED: {T: SEEN},
    Cause.KV_DECAY: {T: SEEN},
    Cause.TOKEN_LOST: {T: SEEN, D: SEEN},
    Cause.CACHE_NOT_CROPPED: {T: SEEN},
    Cause.COUNTS_SWAPPED: {T: SEEN, V: ANY},
    Cause.PAST_THE_END: {},
    Cause.VERDICT_LATE: {V: ANY},
}
# The checks of audit and verify that fail where a stage is wrong
CHECKS: Mapping[Stage, tuple[str, ...]] = {
    T: TARGET,
    D: (*DRAFTER, "head's embedding"),
    S: (*RULED, *OF_Q, "draft p"),
    V: (*LOSSLESS, *ACCEPTANCE, *OF_FINALS, *COUNTED, "accept probability", "trial order", "residual mass"),
    W: (*OF_Q, *COINS, "drafter tokens", "drafter tree"),
}


@dataclass(frozen=True)
class PlacedFault:
    """A fault as it is shown: with its place, where it was located, and its name, where it is known; one of them."""

    place: Located | None
    cause: Suspect | None


def fits(cause: Cause, place: Located) -> bool:
    """Whether a cause shows first at such a place."""
    pattern = PLACES.get(cause, {}).get(place.operation.stage)
    if pattern is None:
        return False
    return not pattern or not place.certain or re.search(pattern, place.operation.name) is not None


def placed(located: Sequence[Located], faults: Sequence[Suspect]) -> tuple[PlacedFault, ...]:
    """What is located, each with the likeliest name that fits; then the faults that only have a name.

    Of the causes that lie in a stage where something was located, the others follow from it: they are left out.
    """
    rest = list(faults)
    shown = []
    for place in located:
        name = next((fault for fault in rest if fits(fault.cause, place)), None)
        rest = [fault for fault in rest if fault is not name]
        shown.append(PlacedFault(place, name))
    stages = {place.operation.stage for place in located}
    elsewhere = [fault for fault in rest if not stages & PLACES.get(fault.cause, {}).keys()]
    return (*shown, *(PlacedFault(None, fault) for fault in elsewhere))


def explains(located: Sequence[Located], check: str) -> bool:
    """Whether a failed check follows from what is located."""
    return any(check in CHECKS[place.operation.stage] for place in located)
