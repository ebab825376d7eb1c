"""Which checks fail together, by their names: what the rows of causes.py are made of."""

# Of audit:
TARGET = ("target p", "target raw p", "target top tokens", "final token", "final p")
DRAFTER = ("draft p", "drafter tokens", "drafter top tokens", "drafter tree")
# Of verify:
LOSSLESS = ("emitted surprisal", "target's choice emitted")
ACCEPTANCE = ("acceptance", "acceptance by depth", "acceptance by sibling", "acceptance by size")
OF_FINALS = (
    "final tokens",
    "share of the final token",
    "entropy of the final draw",
    "recovered draws",
    "final token",
    "final p",
)
OF_Q = ("draft's temperature", "drafted surprisal", "later siblings", "order of siblings")
COINS = ("coins", "coins unequal", "coins of requests", "coins uniform", "coins in series", "coins and draws")
RULED = (
    "top-k",
    "min-p",
    "top-p",
    "temperature and penalties",
    "ranks",
    "target's choice",
    "target p",
    "final p",
    "final token",
)
STEPS = (
    "step numbers",
    "tokens in the cache",
    "positions",
    "prompt fed",
    "tokens emitted",
    "outputs",
    "ends",
    "what preceded",
    "context",
)
COUNTED = ("paths", "kind of final token", "accepted KV moved", "greedy acceptance", "outcomes", "greedy tokens")
LATE = (
    "accept probability",
    "trial order",
    "p at later trials",
    "q at trials",
    "residual mass",
    "siblings",
    "raw probabilities",
    "what preceded",
)
