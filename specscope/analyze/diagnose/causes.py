"""What can be wrong with a run of speculative decoding, and what is no fault at all."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from specscope.analyze.locate.located import Stage
from specscope.analyze.verify.trial import OF_FINALS


def _names(text: str, *groups: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(text.split(", ")) + sum(groups, ())


# Which checks fail together, by their names: what the rows of causes are made of.
# Of audit, what the others follow from first:
LOGPROBS = "log-probabilities"
TARGET = _names("target raw p, target top tokens, target p, final token, final p", (LOGPROBS,))
DRAFTER = _names("drafter top tokens, draft p, drafter tokens, drafter tree, draft draws, head's features")
# Of verify, from here on.
# Where what comes out is not distributed as the target's
LOSSLESS = _names("emitted surprisal, target's choice emitted")
# Where drafts are accepted more or less often than their figures say
ACCEPTANCE = _names("acceptance, acceptance by place")
# Where drafts are not drawn from the q that is stated
OF_DRAWS = _names("draft coins in their intervals, draft draws")
OF_Q = _names("draft's temperature, drafted surprisal, later siblings, order of siblings", OF_DRAWS)
# Where chance is no chance
OF_CHANCE = _names("coins uniform, coins in series, coins and draws")
COINS = _names("coins, draft coins, coins unequal, coins over steps, coins of requests", OF_CHANCE)
# Where p is not what the sampling parameters make of it
RULED = _names("top-k, min-p, top-p, temperature and penalties, ranks, target's choice, target p, final p, final token")
# Where a step does not begin as the one before ended
STEPS = _names("step numbers, tokens in the cache, positions, prompt fed, tokens emitted, outputs, ends, what preceded")
STEPS = (*STEPS, "context")
# Where another number of drafts is accepted than was judged right
COUNTED = _names("paths, kind of final token, accepted KV moved, greedy acceptance, outcomes, greedy tokens")
# Where a step holds figures of another
LATE = _names("accept probability, trial order, p at later trials, q at trials, residual mass, siblings")
LATE = (*LATE, "raw probabilities")

ANY = ""
FED = r"^(tokens|last token|positions|rows|features|embedding|fc|draw|drawn)"  # what enters a model
# What attention does with positions, its mask and the KV cache, and what enters it
SEEN = r"^(tokens|positions|rows)|\.(query|key|value|keys read|values read|scores|attention)$"
OUT = r"^(lm_head|logits|d2t|vocabulary|norm|head)"  # from the last layer on
T, D, S, V, W = Stage.TARGET, Stage.DRAFTER, Stage.SAMPLING, Stage.VERDICT, Stage.DRAWS
# The checks of audit and verify that fail where a stage is wrong
OF_STAGES: Mapping[Stage, tuple[str, ...]] = {
    T: TARGET,
    D: (*DRAFTER, "head's embedding"),
    S: (*RULED, *OF_Q, *_names("draft p, entropies")),
    V: (*LOSSLESS, *ACCEPTANCE, *OF_FINALS, *COUNTED, *_names("accept probability, trial order, residual mass")),
    W: (*OF_Q, *COINS, "drafter tokens", "drafter tree"),
}
OF_OPERATIONS: Mapping[str, tuple[str, ...]] = {"coin": COINS, "entropy": ("entropies",)}  # beside these
Places = Mapping[Stage, str]  # by stage, the pattern of the operations at which a cause shows first


class Cause(Enum):
    """A cause, in the order of a step: what it is in a line, where to look, and what shows it."""

    def __init__(
        self, about: str, look: str, follows: tuple[str, ...] = (), places: Places = MappingProxyType({})
    ) -> None:
        """`follows`: the checks of verify and audit that fail where it is at work, and no others; `places`: by stage,
        the operations at which it shows first."""
        self.about, self.look, self.follows, self.places = about, look, frozenset(follows), places

    @property
    def label(self) -> str:
        return self.name.lower()

    NOT_A_NUMBER = (
        "probabilities are not numbers, or lie outside 0 to 1",
        "where NaN or infinity enters: logits before the softmax, a row that is masked whole, a division by no mass",
        (*TARGET, *DRAFTER, "probabilities"),
        {T: ANY, D: ANY, S: ANY, V: "^[pq]$"},
    )
    TOKEN_LOST = (
        "a token is lost or computed twice",
        "preemption and prefill chunk boundaries: the tokens before them and the positions after them",
        (*TARGET, *DRAFTER, *STEPS, *_names("coins, blocks kept")),
        {T: SEEN, D: SEEN},
    )
    VERDICT_LATE = (
        "a step gets the verdict of the step before it",
        "when verdicts are read: buffers that the next step writes, copies that are read before they finish",
        (*TARGET, *DRAFTER, *OF_FINALS, *COUNTED, *COINS, *ACCEPTANCE, *LOSSLESS, *RULED, *OF_Q, *STEPS, *LATE),
        {V: ANY},
    )
    TARGET_KV = (
        "the target's KV does not belong to the tokens before",
        "what moves, crops or computes KV again: after the verdict, a preemption or a prefill chunk, and "
        "over a long run",
        (*TARGET, *DRAFTER, *_names("accepted KV moved, tokens in the cache, positions, what preceded")),
        {T: SEEN},
    )
    BLOCKS_SHARED = (
        "a KV block is held by two requests",
        "the block pool: a block freed twice or handed out twice",
        (*TARGET, *DRAFTER, *_names("blocks written, blocks kept")),
        {T: SEEN},
    )
    MASK_SIBLINGS = (
        "the tree's attention mask is wrong",
        "what each node sees: the context with the root, its ancestors and itself; all of these, and nothing else",
        (*TARGET, *DRAFTER),
        {T: SEEN, D: SEEN},
    )
    ROTARY_POSITIONS = (
        "rotary positions are wrong",
        "the position of each node (root + depth, not its index), and the base and length of the rotary table",
        (*DRAFTER, *TARGET),
        {D: SEEN, T: SEEN},
    )
    LOGITS_SCALED = (
        "a model's logits are changed on their way to the softmax",
        "what scales, caps, rounds or moves logits: a temperature applied twice, a scale, a cap, a bias, a tied weight",
        (*TARGET, *DRAFTER, *RULED, *OF_Q),
        {T: OUT, D: OUT, S: ANY},
    )
    ROWS_SWAPPED = (
        "a request gets another request's rows or counts",
        "the order of requests in the batch: logits, drafts, q and counts of accepted tokens must all use it",
        (
            *_names("raw probabilities, drafts in place, q at trials, coins, blocks kept", TARGET, DRAFTER, STEPS),
            *(*COUNTED, *OF_FINALS, *RULED, *OF_Q, *LOSSLESS),
        ),
        {T: f"{FED}|{SEEN}|{OUT}", D: f"{FED}|{OUT}", S: ANY, V: ANY},
    )
    P_OTHER_ROW = (
        "the target's p is taken from another row of the tree",
        "which row of logits judges a node: its parent's",
        (*TARGET, *RULED, *LOSSLESS, *_names("raw probabilities, target's choice, siblings, greedy acceptance")),
        {T: OUT, S: ANY, V: ANY},
    )
    HEAD_EMBEDDING = (
        "the head's embedding is unrelated to the target's",
        "how the head's embed_tokens is loaded: its own weights, or the target's if the checkpoint has none",
        (*DRAFTER, "head's embedding"),
        {D: FED},
    )
    DRAFTER_FED = (
        "the drafter is fed the wrong features or tokens",
        "the rows and layers of the target's hidden states that go to the head, one for each committed position, each "
        "with the token after it",
        (*DRAFTER, "features fed"),
        {D: FED},
    )
    DRAFTER_BUILT = (
        "the drafter's parts are assembled wrongly",
        "its norms, the order in which embedding and state are joined, and which module drafts which depth",
        DRAFTER,
    )
    DRAFTER_KV = (
        "the drafter's KV is stale, missing, or another branch's or request's",
        "what the drafter's cache holds after a full acceptance, a rejection, a preemption or a cached "
        "prefix, and which slots each branch reads",
        (*DRAFTER, "drafter's cache"),
        {D: SEEN},
    )
    DRAFT_POSITION = (
        "the drafts are shifted in position",
        "which token the drafter continues from. Its last input must be the root, its first output must be at depth 1",
        (*DRAFTER, *OF_Q, *_names("drafts in place, likeliest draft first, drafter's likeliest, ranks")),
        {D: f"{SEEN}|^lookup", W: ANY},
    )
    DRAFT_VOCABULARY = (
        "the drafter's vocabulary is cut, or mapped to the wrong tokens of the target",
        "the map of the draft vocabulary (d2t), and what masks the drafter's logits before its choice",
        (*DRAFTER, *OF_Q, *_names("draft vocabulary, likeliest draft first, drafter's likeliest")),
        {D: OUT, W: ANY, S: ANY},
    )
    DRAFT_PLACEHOLDERS = (
        "placeholders are verified as drafts",
        "code that pads drafts to a fixed length: the padding must be cut off before verification",
        (*DRAFTER, *_names("placeholders, draft vocabulary, likeliest draft first, siblings")),
        {D: "^(lookup|chosen tokens|draft)", W: ANY},
    )
    RULES_WRONG = (
        "the sampling parameters are applied wrongly",
        "temperature, penalties, logit bias, min-p, top-k and top-p: each once, in this order, at every node "
        "with the tokens on its path",
        (*RULED, *LOSSLESS),
        {S: ANY},
    )
    Q_TEMPERATURE = (
        "q is recorded with other sampling parameters than the drafts were drawn with",
        "the tensor that drafts are drawn from, after temperature, top-k and top-p, must also judge them",
        (*OF_Q, *LOSSLESS, "draft p"),
        {S: ANY, W: ANY},
    )
    Q_NOT_DRAWN = (
        "drafts are judged as draws from q, and were not drawn from it",
        "the draw: taking the likeliest token is not a draw; a coin's token is where q's cumulative sum exceeds it",
        (*OF_Q, *LOSSLESS),
        {W: ANY},
    )
    Q_DROPPED = (
        "drafts were sampled, but are judged without their q",
        "how q travels from the drafter to the verifier: without it only deterministic drafts are verified correctly",
        (*DRAFTER, *LOSSLESS, *_names("drafts as planned, likeliest draft first")),
        {V: ANY, W: ANY},
    )
    SIBLINGS_CHANGED = (
        "sampled siblings are sorted, dropped or swapped after they were drawn",
        "code that re-ranks or prunes a tree: sampled siblings keep their draw order, with tokens, parents and q",
        (
            *_names("draft coins, drafts as planned, q at trials, ranks, drafter's likeliest", OF_Q, LOSSLESS, DRAFTER),
            *_names("p at later trials, residual mass"),
        ),
        {W: ANY, V: "^q$"},
    )
    Q_OTHER_ROW = (
        "the ratio test uses another q than the drafts were drawn from",
        "which row of q belongs to which node and request when the verifier reads it",
        (*OF_Q, *LOSSLESS, *_names("q at trials, p at later trials, residual mass, draft p")),
        {V: ANY},
    )
    OTHER_RULE = (
        "steps are judged by another rule of verification than the configured one",
        "how the rule reaches the sampler: a setting that is read and not used, or a silent fall-back",
        ("rule of verification",),
        {V: ANY},
    )
    TRIAL_ORDER = (
        "siblings are skipped, or tried out of draw order",
        "the loop over siblings: in draw order, until one is accepted or none is left",
        _names("trial order, kind of final token, p at later trials, q at trials, residual mass", LOSSLESS, OF_FINALS),
        {V: ANY},
    )
    P_NOT_USED = (
        "p, q and coin are right, and another p decided",
        "which row of the target's probabilities the acceptance test reads, if not the recorded one",
        (*ACCEPTANCE, *LOSSLESS, *OF_FINALS, *_names("outcomes, greedy acceptance, accept probability, greedy tokens")),
        {V: ANY},
    )
    RATIO_TEST = (
        "drafts are not accepted exactly when their coin is below min(1, p / q)",
        "the acceptance probability and the comparison; at temperature 0 only the target's top token is accepted",
        (*LOSSLESS, *ACCEPTANCE, *_names("accept probability, outcomes, greedy acceptance")),
        {V: ANY},
    )
    ACCEPTED_COUNT = (
        "more or fewer drafts are accepted than were judged right",
        "the count of accepted drafts: the loop's end, an index that is one off, a limit",
        (*TARGET, *STEPS, *OF_FINALS, *COUNTED, *LOSSLESS, *ACCEPTANCE, "trial order"),
        {V: ANY},
    )
    RESIDUAL_NOT_RENORMALISED = (
        "the residual after a rejection is wrong",
        "after a rejection p becomes max(p - q, 0) and q loses the rejected token; both are renormalised",
        (*LOSSLESS, *OF_FINALS, *_names("p at later trials, residual mass, q at trials")),
        {V: "^(residual|q$|final)"},
    )
    FINAL_NOT_RESIDUAL = (
        "after a rejection the final token is not drawn from the residual",
        "what the recovered token is drawn from: the last residual of p, not p, not q and not another row",
        (*LOSSLESS, *OF_FINALS),
        {V: ANY},
    )
    FINAL_OTHER_NODE = (
        "the final token is not drawn from the p after the last accepted node",
        "which row the final token is drawn from, and whether the drawn token is kept",
        (*LOSSLESS, *OF_FINALS, *_names("other final draws, greedy tokens")),
        {V: ANY},
    )
    COINS = (
        "coins or noise are used twice, or depend on the place in the batch",
        "each draw and each trial needs its own coin, keyed by the request's seed and position",
        _names("recovered draws, other final draws", OF_Q, LOSSLESS, COINS, ACCEPTANCE),
        {V: ANY, W: ANY},
    )
    LOGPROBS = (
        "the returned log-probabilities belong to other tokens",
        "which row and token each is read from: on an accepted path every token has its own row",
        ("log-probabilities",),
    )
    PAST_THE_END = (
        "output continues past its end",
        "where EOS, stop tokens and stop strings are searched: in every token of a step, not only in the last",
        _names("ends, outputs, tokens emitted"),
    )
    WEAK_DRAFTER = (
        "the drafter is weak here",
        "another drafter, or a head trained on text like this",
    )
    DRAFTS_SHIFTED = (
        "the drafts are shifted by one token",
        "which token the drafter continues from: its first draft must follow the last committed token",
    )
    DRAFTER_AT_CHANCE = (
        "the drafter guesses no better than chance",
        "another vocabulary map, tokenizer or target than it was trained for, or weights that were not read",
    )
    HARD_TEXT = (
        "the text is hard here: the target itself is unsure",
        "nothing is wrong; shorter drafts cost less",
    )
    HIGH_TEMPERATURE = (
        "the temperature is high: p is too wide for drafts to be accepted often",
        "nothing is wrong; a lower temperature, or shorter drafts",
    )
    TREE_TOO_SMALL = (
        "the tree is too small: its deepest level is still accepted",
        "a deeper or wider tree: `specscope tune` predicts what others would accept",
    )

    @property
    def is_fault(self) -> bool:
        return bool(self.follows)
