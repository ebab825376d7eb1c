"""What is recorded of the real vLLM with faults planted in it, and which causes would be right. tests/vllm/record.py
runs it, faults/ holds the faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specscope.model.bundled import bundled_model
from tests.vllm.models import DRAFT, HEAD, TARGET

HERE = Path(__file__).parent
BUNDLED_HEAD = HERE.parents[1] / "specscope" / "heads" / "SmolLM2-135M-Instruct"
SAMPLED = {"draft_sample_method": "probabilistic"}

BUNDLED = {"method": "eagle3", "model": str(BUNDLED_HEAD), "num_speculative_tokens": 3}

# vLLM's `speculative_config`, and options of its engine, by name
ENGINES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eagle": ({"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 4}, {}),
    "eagle sampled": ({"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 4} | SAMPLED, {}),
    "model": ({"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 3}, {}),
    "model sampled": ({"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 3} | SAMPLED, {}),
    "ngram": (
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        {},
    ),
    "eagle chunks": (
        {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 4},
        {"max_num_batched_tokens": 48},
    ),
    "default": (BUNDLED, {"max_num_seqs": 4}),
    "default sampled": (BUNDLED | SAMPLED, {"max_num_seqs": 4}),
    "default chunks": (BUNDLED, {"max_num_seqs": 4, "max_num_batched_tokens": 16}),
    "model chunks": (
        {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 3},
        {"max_num_batched_tokens": 64},
    ),
}
WARM = {"temperature": 0.9}
PERSON = {
    "type": "object",
    "properties": {"who": {"enum": ["anna", "bob"]}, "times": {"type": "integer"}},
    "required": ["who"],
}
STOPS = [84]  # r: without it the text goes on much as before, and drafts are accepted
HOTTEST = {"temperature": 2.0}  # the most that vLLM takes
HOT = {"temperature": 1.5}  # drafts are rejected often, so that what a rejection does shows


@dataclass(frozen=True)
class Run:
    """One run. `right`: labels of causes that would be right, none for a healthy run."""

    name: str
    engine: str
    about: str
    right: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    proposed: str = ""  # a label that there is none of yet
    subtle: bool = False  # a tenth of a nat a draw: so few draws may not show it
    requests: int = 8
    tokens: int = 64
    prompt: int = 60  # characters of a prompt

    @property
    def draft(self) -> Path | None:
        """The folder of its draft model or head."""
        return {"eagle": HEAD, "model": DRAFT, "default": BUNDLED_HEAD}.get(self.engine.split()[0])

    @property
    def target(self) -> Path:
        """The folder of its target."""
        return bundled_model(lambda text: None) if self.engine.startswith("default") else TARGET


def fault(name: str, engine: str, about: str, *right: str, **more: Any) -> Run:
    """A run with the fault of that name."""
    return Run(name, engine, about, right, more.pop("faults", (name.split(" ")[0],)), **more)


FAULTY = (
    # The rule
    fault(
        "one_more_greedy",
        "eagle",
        "one draft more is accepted than is the target's choice",
        "accepted_count",
        "ratio_test",
    ),
    fault(
        "one_more_sampled",
        "model sampled",
        "one draft more is accepted than its coin says",
        "accepted_count",
        "ratio_test",
        params=HOT,
    ),
    fault(
        "greedy_rejection_ignored",
        "model",
        "the first draft is accepted whatever the target's choice is",
        "p_not_used",
        "ratio_test",
    ),
    fault(
        "counts_of_others", "eagle", "each request gets the count of accepted drafts of the next one", "rows_swapped"
    ),
    fault("counts_of_others sampled", "model sampled", "likewise, sampled", "rows_swapped", params=HOT),
    fault(
        "decided_by_another_p",
        "model sampled",
        "p, q and coin are recorded right, and another p decided",
        "p_not_used",
        params=HOT,
    ),
    fault(
        "against_coins",
        "model sampled",
        "a draft is accepted where its coin is a little above the ratio",
        "ratio_test",
        params=HOT,
    ),
    fault(
        "final_not_residual",
        "model sampled",
        "the recovered token is drawn from p",
        "final_not_residual",
        params=HOT,
        requests=12,
    ),
    fault(
        "final_from_p deterministic",
        "eagle",
        "likewise, of drafts that were not sampled",
        "final_not_residual",
        params=HOT,
    ),
    fault("final_from_p default", "default", "likewise, of the default model", "final_not_residual", params=WARM),
    fault(
        "final_from_q",
        "model sampled",
        "the recovered token is drawn from q without p",
        "final_not_residual",
        params=HOT,
    ),
    fault(
        "bonus_of_the_row_before",
        "model",
        "the bonus token is drawn from the row of the last draft",
        "final_other_node",
    ),
    fault("bonus_of_the_row_before sampled", "model sampled", "likewise, sampled", "final_other_node", params=HOT),
    fault("verdict_late", "eagle", "every fourth step has the output of the step before", "verdict_late"),
    fault(
        "outputs_swapped",
        "eagle",
        "every fourth step the first two requests get each other's tokens",
        "rows_swapped",
        "rows_swapped",
    ),
    # Rows of p and q
    fault(
        "p_of_the_next_request",
        "model sampled",
        "drafts are judged by p of the next request's rows",
        "rows_swapped",
        "p_other_row",
        params=HOT,
    ),
    fault("p_of_the_next_request greedy", "eagle", "likewise, greedy", "rows_swapped", "p_other_row"),
    fault("p_of_the_next_row", "model", "drafts are judged by the row behind them", "p_other_row"),
    fault(
        "temperature_left_out",
        "model sampled",
        "drafts are judged at temperature 1, 1.6 was asked for",
        "rules_wrong",
        params={"temperature": 1.6},
    ),
    fault(
        "penalties_without_drafts",
        "model sampled",
        "penalties do not count the drafts before a row",
        "rules_wrong",
        params={"temperature": 1.2, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    ),
    fault(
        "penalties_without_drafts greedy",
        "eagle",
        "likewise, greedy",
        "rules_wrong",
        params={"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    ),
    fault(
        "q_of_another_request", "model sampled", "a request is judged with the next one's q", "q_other_row", params=HOT
    ),
    fault("q_of_another_request eagle", "eagle sampled", "likewise, of a head", "q_other_row", params=WARM),
    fault(
        "q_shifted", "model sampled", "a draft is judged with the q of the draft behind it", "q_other_row", params=HOT
    ),
    fault(
        "q_of_the_step_before",
        "model sampled",
        "drafts are judged with the q of the step before",
        "q_other_row",
        params=HOT,
    ),
    fault("q_dropped", "model sampled", "drafts are sampled and judged without q", "q_dropped", params=HOT),
    fault(
        "q_at_another_temperature",
        "model sampled",
        "q is recorded at a higher temperature than drafts were drawn at",
        "q_temperature",
        params=HOT,
    ),
    fault(
        "drawn_at_another_temperature",
        "model sampled",
        "drafts are drawn at a higher temperature than q says",
        "q_temperature",
        params=HOT,
    ),
    fault(
        "q_with_a_bias",
        "model sampled",
        "the q that judges has a bias, which drafts were drawn without",
        "q_other_row",
        params=HOT,
        proposed="q_biased",
    ),
    fault(
        "drawn_with_a_bias",
        "model sampled",
        "drafts are drawn with a bias that q does not have",
        "q_other_row",
        params=HOTTEST,
        requests=16,
        tokens=96,
        proposed="q_biased",
    ),
    fault(
        "nan_now_and_then",
        "eagle",
        "the target's logits of a request are NaN every fifth step",
        "not_a_number",
    ),
    fault("nan_now_and_then sampled", "model sampled", "likewise, sampled", "not_a_number", params=WARM),
    # Noise
    fault(
        "coins_of_a_request_shared",
        "model sampled",
        "all drafts of a request have one coin",
        "coins",
        params=HOT,
    ),
    fault(
        "coins_of_requests_shared",
        "model sampled",
        "all requests of a step have the same coins",
        "coins",
        params=HOT,
    ),
    fault(
        "noise_reused",
        "model sampled",
        "the residual is drawn with the noise that drew the rejected draft",
        "coins",
        params=HOTTEST,
        requests=48,
        tokens=96,
        subtle=True,
    ),
    # Drafts
    fault("one_late", "ngram", "the first draft of each chain is lost", "draft_position"),
    fault("one_late eagle", "eagle", "likewise, of a head", "draft_position"),
    fault(
        "first_tokens_only",
        "eagle",
        "the drafter chooses among the first tokens of the vocabulary only",
        "draft_vocabulary",
    ),
    fault(
        "placeholders", "ngram", "short drafts are padded with token 0, and the padding is judged", "draft_placeholders"
    ),
    fault("placeholders eagle", "eagle", "the second half of each draft is token 0", "draft_placeholders"),
    # Features, positions and KV
    fault("drafter_fed", "eagle", "the head is fed zeros", "drafter_fed"),
    fault("features_shifted", "eagle", "the head is fed the features of the position before", "drafter_fed"),
    fault("features_of_the_step_before", "eagle", "the head is fed the features of the step before", "drafter_fed"),
    fault("layers_one_lower", "eagle", "the head is fed what enters its layers", "drafter_fed"),
    fault(
        "positions_high_in_decode", "eagle", "the head's positions are one high while it decodes", "rotary_positions"
    ),
    fault("positions_high_in_decode model", "model", "likewise, of a draft model", "rotary_positions"),
    fault(
        "kv_stale_after_rejection",
        "eagle",
        "after a rejection the head's KV of the last position stays the rejected draft's",
        "drafter_kv",
    ),
    fault(
        "kv_stale_after_full",
        "eagle",
        "after a full acceptance the head's KV of the last position is not written",
        "drafter_kv",
    ),
    fault(
        "slots_one_block_off",
        "eagle",
        "while it drafts the head writes its KV one block further on",
        proposed="drafter_kv_slots",
    ),
    fault(
        "target_positions_high_after_rejection",
        "eagle",
        "after a rejection the target's positions are one high",
        "rotary_positions",
        proposed="target_positions",
    ),
    fault("token_lost", "eagle", "every sixth step the first request's last token is lost", "token_lost"),
    Run(
        "chunk_ends",
        "eagle chunks",
        "vLLM's own: behind a chunk of a prompt the head is fed the prompt's last token",
        ("drafter_fed",),
        prompt=150,
    ),
    Run(
        "min_tokens",
        "eagle",
        "vLLM's own: behind drafts that reach min_tokens stop tokens are still refused",
        ("rules_wrong", "rules_wrong"),
        params={"min_tokens": 40, "stop_token_ids": STOPS, "ignore_eos": False},
        requests=24,
    ),
    Run(
        "min_tokens sampled",
        "model sampled",
        "likewise, sampled",
        ("rules_wrong", "rules_wrong"),
        params=WARM | {"min_tokens": 40, "stop_token_ids": STOPS, "ignore_eos": False},
        requests=24,
    ),
    # The default model, with the head that comes with it
    fault(
        "one_more_greedy default", "default", "one draft more is accepted than is the target's choice", "accepted_count"
    ),
    fault(
        "first_tokens_only default", "default", "the drafter chooses among the first 2,000 tokens", "draft_vocabulary"
    ),
    fault("features_shifted default", "default", "the head is fed the features of the position before", "drafter_fed"),
    fault(
        "positions_high_in_decode default",
        "default",
        "the head's positions are one high while it decodes",
        "rotary_positions",
    ),
    fault(
        "q_with_a_bias default",
        "default sampled",
        "the q that judges has a bias",
        "q_other_row",
        params=WARM,
        proposed="q_biased",
    ),
    fault(
        "nan_now_and_then default",
        "default sampled",
        "logits of a request are NaN every fifth step",
        "not_a_number",
        params=WARM,
    ),
    Run(
        "chunk_ends default",
        "default chunks",
        "vLLM's own: behind a chunk of a prompt the head is fed the prompt's last token",
        ("drafter_fed",),
    ),
)

HEALTHY = (
    Run("healthy eagle", "eagle", "greedy"),
    Run("healthy eagle sampled", "eagle sampled", "sampled", params=WARM),
    Run("healthy eagle top-p", "eagle sampled", "top-p and top-k", params=WARM | {"top_p": 0.8, "top_k": 5}),
    Run("healthy model", "model", "greedy"),
    Run("healthy model sampled", "model sampled", "sampled", params=WARM),
    Run("healthy model hot", "model sampled", "sampled at a high temperature", params=HOT),
    Run("healthy model top-p", "model sampled", "top-p and top-k", params=WARM | {"top_p": 0.8, "top_k": 5}),
    Run("healthy ngram", "ngram", "greedy"),
    Run("healthy ngram sampled", "ngram", "sampled", params=WARM),
    Run(
        "healthy penalties",
        "eagle",
        "penalties with a greedy head",
        params={"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.5},
    ),
    Run(
        "healthy penalties sampled",
        "model sampled",
        "penalties, sampled",
        params=WARM | {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.5},
    ),
    Run(
        "healthy choice",
        "eagle",
        "structured output: a choice",
        params={
            "ignore_eos": False,
            "structured_outputs": {"choice": ["anna saw the red cat near the sea.", "bob met the old house."]},
        },
    ),
    Run(
        "healthy json",
        "eagle sampled",
        "structured output: JSON",
        params=WARM
        | {
            "ignore_eos": False,
            "structured_outputs": {
                "json": PERSON,
            },
        },
    ),
    Run(
        "healthy allowed tokens",
        "model sampled",
        "allowed_token_ids",
        params=WARM | {"allowed_token_ids": list(range(60, 160))},
    ),
    Run(
        "healthy allowed tokens greedy",
        "eagle",
        "allowed_token_ids",
        params={"allowed_token_ids": list(range(60, 160))},
    ),
    Run("healthy bad words", "eagle", "bad_words", params={"bad_words": ["the", "anna", "cat"]}),
    Run("healthy bad words sampled", "model sampled", "bad_words", params=WARM | {"bad_words": ["the", "anna", "cat"]}),
    Run(
        "healthy min tokens",
        "eagle",
        "min_tokens and stop tokens, vLLM's own fault mended",
        faults=("min_tokens_mended",),
        params={"min_tokens": 40, "stop_token_ids": STOPS, "ignore_eos": False},
        requests=24,
    ),
    Run(
        "healthy min tokens sampled",
        "model sampled",
        "min_tokens and stop tokens, vLLM's own fault mended",
        faults=("min_tokens_mended",),
        params=WARM | {"min_tokens": 40, "stop_token_ids": STOPS, "ignore_eos": False},
        requests=24,
    ),
    Run(
        "healthy default json",
        "default",
        "structured output: JSON, of the default model",
        params={"ignore_eos": False, "structured_outputs": {"json": PERSON}},
    ),
    Run("healthy default", "default", "greedy, of the default model"),
    Run("healthy default sampled", "default sampled", "sampled, of the default model", params=WARM),
    Run(
        "healthy chunks",
        "eagle chunks",
        "prompts in chunks, vLLM's own fault mended",
        faults=("chunk_ends_mended",),
        prompt=150,
    ),
    Run(
        "healthy chunks model",
        "model chunks",
        "prompts in chunks, of a draft model",
        faults=("chunk_ends_mended",),
        prompt=150,
    ),
)
RUNS = (*FAULTY, *HEALTHY)
