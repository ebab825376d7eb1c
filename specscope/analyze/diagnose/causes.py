"""What can be wrong with a run of speculative decoding, and what is no fault at all."""

from __future__ import annotations

from enum import Enum

from specscope.analyze.diagnose.together import (
    ACCEPTANCE,
    COINS,
    COUNTED,
    DRAFTER,
    LATE,
    LOSSLESS,
    OF_FINALS,
    OF_Q,
    RULED,
    STEPS,
    TARGET,
)


class Cause(Enum):
    """A cause: its stable name, what it is in a line, where to look, and which checks fail where it is at work."""

    def __init__(self, label: str, about: str, look: str, follows: tuple[str, ...] = ()) -> None:
        """`follows`: the checks of verify and audit that fail where it is at work, and no others."""
        self.label, self.about, self.look, self.follows = label, about, look, frozenset(follows)

    # Drafts
    DRAFT_POSITION = (
        "draft_position",
        "the drafts are shifted in position",
        "which token the drafter continues from: the root must be its last input, its first output depth 1",
        (*DRAFTER, *OF_Q, "drafts in place", "likeliest draft first", "drafter's likeliest", "ranks"),
    )
    DRAFT_PLACEHOLDERS = (
        "draft_placeholders",
        "placeholders are judged as drafts",
        "who pads drafts to a fixed length, and whether the padding is cut off before it is verified",
        (*DRAFTER, "placeholders", "draft vocabulary", "likeliest draft first", "siblings"),
    )
    VOCABULARY_MAP = (
        "vocabulary_map",
        "draft tokens are mapped to the wrong tokens of the target",
        "the map from the draft vocabulary (d2t): an offset that is missing, added twice or off by a row",
        (*DRAFTER, *OF_Q, "draft vocabulary", "likeliest draft first", "drafter's likeliest"),
    )
    Q_TEMPERATURE = (
        "q_temperature",
        "q is recorded at a different temperature from the one used to draw the drafts",
        "the tensor that drafts are drawn from must be the one that the ratio test uses",
        (*OF_Q, *LOSSLESS, "draft p"),
    )
    Q_NOT_DRAWN = (
        "q_not_drawn",
        "drafts are the drafter's likeliest tokens, but they are judged as if they had been drawn from q",
        "the drafter takes the argmax of its logits and hands them on: draw from that q, or state a point mass",
        (*OF_Q, *LOSSLESS),
    )
    Q_UNPROCESSED = (
        "q_unprocessed",
        "drafts were drawn after the sampling parameters were applied, but they are judged by the q of before",
        "which of the drafter's logits are handed on: those that were drawn from, behind temperature, top-k and top-p",
        (*OF_Q, *LOSSLESS, "draft p"),
    )
    Q_DROPPED = (
        "q_dropped",
        "drafts were sampled, but they are judged without their q",
        "how q travels from the drafter to the verifier: without it only deterministic drafts are verified correctly",
        (*DRAFTER, *LOSSLESS, "drafts as planned", "likeliest draft first"),
    )
    DRAW_BESIDE = (
        "draw_beside",
        "drafted tokens are not those that their coins draw from q",
        "the inverse of q's distribution function: the token it gives for a coin, and at which token q is then read",
        (*OF_Q, *LOSSLESS),
    )
    SIBLINGS_SORTED = (
        "siblings_sorted",
        "sampled siblings are sorted after they were drawn",
        "re-ranking is for deterministic trees only: sampled siblings are tried in the order of their draws",
        (*OF_Q, *LOSSLESS, "draft coins"),
    )
    SIBLINGS_PRUNED = (
        "siblings_pruned",
        "sampled siblings are dropped after they were drawn",
        "pruning by probability is for deterministic trees only: every sampled sibling must be tried",
        (*OF_Q, *LOSSLESS, "draft coins", "drafts as planned"),
    )
    SIBLINGS_SWAPPED = (
        "siblings_swapped",
        "tokens are swapped among siblings after they were drawn",
        "whatever reorders a tree's tokens: tokens, parents and q must be reordered together",
        (
            *OF_Q,
            *LOSSLESS,
            "q at trials",
            *DRAFTER,
            "ranks",
            "drafter's likeliest",
            "p at later trials",
            "residual mass",
        ),
    )
    DRAFT_TOKENS_CUT = (
        "draft_tokens_cut",
        "the drafter chooses among a part of its vocabulary only",
        "what is left of the drafter's logits before its choice: a slice, a shard, a mask that is too short",
        (*DRAFTER, "likeliest draft first"),
    )
    # What the drafter is fed
    FEATURES_STALE = (
        "features_stale",
        "the drafter is fed features from the wrong positions",
        "which rows of the target's hidden states go to the head: one of each committed position, in order",
        (*DRAFTER, "features fed"),
    )
    FEATURES_MISSING = (
        "features_missing",
        "features are missing from what the drafter is fed",
        "whether every committed position's hidden states reach the head, prompt and accepted path alike",
        (*DRAFTER, "features fed"),
    )
    FEATURES_LAYERS = (
        "features_layers",
        "the drafter is fed features from the wrong layers",
        "the aux layers: whether j means the input or the output of layer j, and the order of the layers",
        (*DRAFTER,),
    )
    FEATURES_NORMALISED = (
        "features_normalised",
        "the drafter is fed features that were normalised",
        "where features are taken: what enters a layer, before its norm, as the head saw it in training",
        (*DRAFTER, "features fed"),
    )
    DRAFTER_KV_FULL = (
        "drafter_kv_full",
        "the drafter's KV is stale after a full acceptance",
        "the last accepted token was never run by the drafter: it must be fed with the next root",
        (*DRAFTER, "drafter's cache"),
    )
    DRAFTER_KV_PREEMPTION = (
        "drafter_kv_preemption",
        "the drafter's KV is stale after a preemption",
        "what the drafter resets on preemption: its blocks and its count of computed tokens must be reset together",
        (*DRAFTER, "drafter's cache"),
    )
    DRAFTER_KV_NOT_MOVED = (
        "drafter_kv_not_moved",
        "the drafter's KV of the accepted path is not moved to its place",
        "the drafter's move after the verdict, where the path is not the first nodes that it ran",
        (*DRAFTER,),
    )
    DRAFTER_KV_REWOUND = (
        "drafter_kv_rewound",
        "the drafter's KV is wrong after a rejection",
        "how far the drafter goes back after a rejection: to the last token that is committed, no further and no less",
        (*DRAFTER, "drafter's cache"),
    )
    DRAFTER_KV_PREFIX = (
        "drafter_kv_prefix",
        "the drafter's KV of a cached prefix is missing, or another request's",
        "blocks from the prefix cache: they must hold the drafter's KV, which may depend on the token behind",
        (*DRAFTER, "drafter's cache"),
    )
    DRAFTER_OTHER_BRANCH = (
        "drafter_other_branch",
        "while a tree is drafted, a branch attends to the KV of another branch",
        "the drafter's KV slots of each branch: where a branch begins at another's node, it must read that one's slots",
        (*DRAFTER,),
    )
    DRAFTER_CHUNKS = (
        "drafter_chunks",
        "the drafter is fed the wrong token at the border of a prefill chunk",
        "the token behind the last one of a chunk: the prompt's next token, not its last one and no sampled one",
        DRAFTER,
    )
    HEAD_EMBEDDING = (
        "head_embedding",
        "the head's embedding has nothing in common with the target's",
        "how the head's embed_tokens is loaded: its own weights, or the target's where the checkpoint has none",
        ("head's embedding", *DRAFTER),
    )
    DRAFTER_ROTARY = (
        "drafter_rotary",
        "the drafter's rotary positions or table are wrong",
        "the position of each drafted node (root + depth), and the length of the drafter's rotary table",
        (*DRAFTER,),
    )
    # The rule
    RESIDUAL = (
        "residual_not_renormalised",
        "the residual after a rejection is wrong",
        "after a rejection p becomes max(p - q, 0), renormalised, before the next sibling is tried",
        (*LOSSLESS, *OF_FINALS, "p at later trials", "residual mass"),
    )
    FINAL_FROM_P = (
        "final_from_p",
        "after a rejection the final token is drawn from p, not from the residual",
        "the draw after the last rejection: from max(p - q, 0), or from p without the rejected tokens",
        (*LOSSLESS, *OF_FINALS),
    )
    RATIO_BY_P = (
        "ratio_by_p",
        "the ratio test is not min(1, p / q)",
        "the acceptance probability of sampled drafts",
        (*LOSSLESS, "accept probability", "outcomes"),
    )
    Q_OTHER_ROW = (
        "q_other_row",
        "the ratio test uses another q than the drafts were drawn from",
        "which row of q belongs to which node and request when the verifier reads it",
        (*OF_Q, *LOSSLESS, "q at trials", "p at later trials", "residual mass", "draft p"),
    )
    Q_NOT_RENORMALISED = (
        "q_not_renormalised",
        "q is not renormalised after a sibling was taken out",
        "drawn without replacement, the next sibling's q is q without the tokens before it, divided by what is left",
        (*LOSSLESS, *OF_FINALS, "q at trials", "p at later trials", "residual mass"),
    )
    AGAINST_COIN = (
        "against_coin",
        "drafts are accepted or rejected against their own coin, or at temperature 0 against the target's choice",
        "the comparison: accept where coin < min(1, p / q), at temperature 0 the target's choice, and nowhere else",
        (*LOSSLESS, *ACCEPTANCE, "outcomes", "greedy acceptance"),
    )
    TRIAL_ORDER = (
        "trial_order",
        "siblings are skipped, or tried in another order than they were drawn",
        "the loop over siblings: in draw order, until one is accepted or none is left",
        (
            *LOSSLESS,
            *OF_FINALS,
            "trial order",
            "kind of final token",
            "p at later trials",
            "q at trials",
            "residual mass",
        ),
    )
    FINAL_NOT_RESIDUAL = (
        "final_not_residual",
        "after a rejection the final token is drawn from something else than the residual",
        "what the recovered token is drawn from: the last residual of p, not q and not another row",
        (*LOSSLESS, *OF_FINALS),
    )
    FINAL_OTHER_NODE = (
        "final_other_node",
        "the final token is not drawn from the p behind the last accepted node",
        "which row the final token is drawn from, and whether the drawn token is the one that is kept",
        (*LOSSLESS, *OF_FINALS, "other final draws", "greedy tokens"),
    )
    NOISE_SHARED = (
        "noise_shared",
        "the residual is drawn with noise that was used before",
        "the noise (or coin) of the final draw: it must be independent of what drew and judged the draft",
        (*LOSSLESS, *COINS, "recovered draws"),
    )
    COINS_SHARED = (
        "coins_shared",
        "coins are shared among siblings, steps or requests",
        "each draw and each trial needs a coin of its own: the counter of the generator, and its key",
        (
            *LOSSLESS,
            *COINS,
            *ACCEPTANCE,
            "recovered draws",
            "other final draws",
            "drafted surprisal",
            "later siblings",
            "order of siblings",
        ),
    )
    COINS_BY_BATCH = (
        "coins_by_batch",
        "coins depend on the place in the batch",
        "the key of a coin: seed and position of the request, never its row",
        (*LOSSLESS, *COINS, *ACCEPTANCE, "recovered draws", "other final draws"),
    )
    RULES_OFF_PATH = (
        "rules_off_path",
        "the sampling rules are not applied along a node's own path",
        "penalties, top-k, top-p, min-p and grammar must be applied at every node, with the tokens on its path",
        (*RULED, *LOSSLESS),
    )
    RULES_WRONG = (
        "rules_wrong",
        "the sampling parameters are applied wrongly",
        "temperature, penalties, logit bias, min-p, top-k and top-p of the target: each once, in this order",
        (*RULED, *LOSSLESS),
    )
    NOT_A_NUMBER = (
        "not_a_number",
        "probabilities are not numbers, or lie outside 0 to 1",
        "where NaN or infinity enters: logits before the softmax, a row that is masked whole, a division by no mass",
        ("probabilities", *TARGET, *DRAFTER),
    )
    LOGPROBS = (
        "logprobs",
        "the log-probabilities that are handed out are not the tokens' own",
        "whose row and which token each is read from: behind an accepted path every token has a row of its own",
        ("log-probabilities",),
    )
    OTHER_RULE = (
        "other_rule",
        "steps are judged by another rule of verification than the one that is set",
        "how the rule reaches the sampler: a setting that is read and not used, or a fall-back that nobody is told of",
        ("rule of verification",),
    )
    ACCEPTED_COUNT = (
        "accepted_count",
        "more or fewer drafts are accepted than were judged right",
        "the count of accepted drafts: the loop's end, an index that is one off, a limit",
        (*TARGET, *STEPS, *OF_FINALS, *COUNTED, *LOSSLESS, *ACCEPTANCE, "trial order"),
    )
    P_NOT_USED = (
        "p_not_used",
        "p, q and coin are right, and another p decided",
        "which row of the target's probabilities the acceptance test reads, beside the one that is recorded",
        ("outcomes", "greedy acceptance", "accept probability", *ACCEPTANCE, *LOSSLESS, *OF_FINALS, "greedy tokens"),
    )
    # The target
    P_OTHER_ROW = (
        "p_other_row",
        "the target's p is taken from another row of the tree",
        "which row of logits judges a node: its parent's",
        (*TARGET, *RULED, *LOSSLESS, "raw probabilities", "target's choice", "siblings", "greedy acceptance"),
    )
    ROWS_SWAPPED = (
        "rows_swapped",
        "a request is given another request's rows",
        "the order of requests in the batch: logits, drafts and q must be in the same one",
        (
            *TARGET,
            *STEPS,
            *COUNTED,
            *OF_FINALS,
            *DRAFTER,
            *RULED,
            *OF_Q,
            *LOSSLESS,
            "raw probabilities",
            "drafts in place",
            "q at trials",
        ),
    )
    LOGITS_SCALED = (
        "logits_scaled",
        "a model's logits are scaled on their way to the softmax",
        "what multiplies or divides logits: a temperature applied twice, a scale of the head, a wrong tied weight",
        (*TARGET, *DRAFTER, *RULED, *OF_Q),
    )
    MASK_SIBLINGS = (
        "mask_siblings",
        "the tree's attention mask lets a node see tokens that it must not see",
        "a node sees the context, its ancestors and itself: no siblings, no other branch",
        (*TARGET, *DRAFTER),
    )
    POSITION_BY_INDEX = (
        "position_by_index",
        "the positions of the tree's nodes are not root + depth",
        "the rotary position of a node: its depth counts, not its index",
        (*TARGET, *DRAFTER),
    )
    KV_NOT_MOVED = (
        "kv_not_moved",
        "the accepted path's KV is not moved to its place",
        "the move after the verdict, where the path is not the tree's first nodes",
        (*TARGET, *DRAFTER, "accepted KV moved"),
    )
    BLOCKS_SHARED = (
        "blocks_shared",
        "a KV block is held by two requests",
        "the block pool: a block that is freed twice or given to two",
        (*TARGET, *DRAFTER, "blocks written", "blocks kept"),
    )
    KV_RECOMPUTED = (
        "kv_recomputed",
        "KV that is computed after a preemption, or chunk by chunk, is wrong",
        "what a later prefill chunk sees and where it lies: positions, mask and slots of the tokens before it",
        (*TARGET, *DRAFTER),
    )
    KV_DECAY = (
        "kv_decay",
        "results get worse the longer the engine runs",
        "what lives longer than a request: caches of blocks by hash, reference counts, buffers that are used again",
        (*TARGET, *DRAFTER),
    )
    # Bookkeeping
    TOKEN_LOST = (
        "token_lost",
        "a token is lost or computed twice",
        "preemption and prefill chunk boundaries: the tokens before them and the positions after them",
        (*TARGET, *DRAFTER, *STEPS, "coins", "blocks kept"),
    )
    CACHE_NOT_CROPPED = (
        "cache_not_cropped",
        "the target's cache keeps KV of rejected drafts",
        "how far the target's cache goes back after a rejection: to the last accepted token, whatever was drafted",
        (*TARGET, *STEPS),
    )
    COUNTS_SWAPPED = (
        "counts_swapped",
        "a request gets another request's count of accepted tokens",
        "the rows of the batch when the counts are read: an asynchronous copy, a batch that was reordered",
        (*TARGET, *DRAFTER, *STEPS, *OF_FINALS, *COUNTED, *LOSSLESS, "coins", "blocks kept"),
    )
    PAST_THE_END = (
        "past_the_end",
        "output goes on past its end",
        "where EOS, stop tokens and stop strings are looked for: in every token that a step commits, not in its last",
        ("ends", "outputs", "tokens emitted"),
    )
    VERDICT_LATE = (
        "verdict_late",
        "a step is given the verdict of the step before it",
        "when verdicts are read: buffers that the next step writes, copies that are read before they finish",
        (*TARGET, *DRAFTER, *OF_FINALS, *COUNTED, *COINS, *ACCEPTANCE, *LOSSLESS, *RULED, *OF_Q, *STEPS, *LATE),
    )
    # No fault
    WEAK_DRAFTER = (
        "weak_drafter",
        "the drafter is weak here",
        "another drafter, or a head trained on text like this",
    )
    DRAFTER_AT_CHANCE = (
        "drafter_at_chance",
        "the drafter guesses no better than chance",
        "another vocabulary map, tokenizer or target than it was trained for, or weights that were not read",
    )
    HARD_TEXT = (
        "hard_text",
        "the text is hard here: the target itself is unsure",
        "nothing is wrong; shorter drafts cost less",
    )
    HIGH_TEMPERATURE = (
        "high_temperature",
        "the temperature is high: p is too wide for drafts to be accepted often",
        "nothing is wrong; a lower temperature, or shorter drafts",
    )
    TREE_TOO_SMALL = (
        "tree_too_small",
        "the tree is too small: its deepest level is still accepted",
        "a deeper or wider tree: `specscope tune` says what others would have accepted",
    )

    @property
    def is_fault(self) -> bool:
        """Whether something is wrong where it is named."""
        remarks = (Cause.HARD_TEXT, Cause.HIGH_TEMPERATURE, Cause.TREE_TOO_SMALL)
        return self not in (Cause.WEAK_DRAFTER, Cause.DRAFTER_AT_CHANCE, *remarks)
