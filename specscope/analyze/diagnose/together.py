"""Which checks fail together, by their names: what the rows of causes.py are made of."""

# Of audit, what the others follow from first:
LOGPROBS = "log-probabilities"
TARGET = ("target raw p", "target top tokens", "target p", "final token", "final p", LOGPROBS)
DRAFTER = ("drafter top tokens", "draft p", "drafter tokens", "drafter tree", "draft draws", "head's features")
# Of verify, from here on.
# Where what comes out is not distributed as the target's
LOSSLESS = ("emitted surprisal", "target's choice emitted")
# Where drafts are accepted more or less often than their figures say
ACCEPTANCE = ("acceptance", "acceptance by place")
# Where the last token of a step is drawn from something else
OF_FINALS = (
    "final tokens",
    "share of the final token",
    "entropy of the final draw",
    "recovered draws",
    "final token",
    "final p",
)
# Where drafts are not drawn from the q that is stated
OF_Q = (
    "draft's temperature",
    "drafted surprisal",
    "later siblings",
    "order of siblings",
    "draft coins in their intervals",
    "draft draws",
)
# Where chance is no chance
COINS = (
    "coins",
    "draft coins",
    "coins unequal",
    "coins over steps",
    "coins of requests",
    "coins uniform",
    "coins in series",
    "coins and draws",
)
# Where p is not what the sampling parameters make of it
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
# Where a step does not begin as the one before ended
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
# Where another number of drafts is accepted than was judged right
COUNTED = ("paths", "kind of final token", "accepted KV moved", "greedy acceptance", "outcomes", "greedy tokens")
# Where a step holds figures of another
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
