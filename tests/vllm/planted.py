"""What is run in the real vLLM: engines, faults planted in them and which causes would be right, and healthy runs.

tests/vllm/record.py runs it; faults/ holds the faults.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specscope.measure.prompts import COPYING, PLAIN
from specscope.model.places import bundled_model
from tests.faults.models import story
from tests.vllm.faults import FAULTS
from tests.vllm.models import DRAFT, HEAD, TARGET

HERE = Path(__file__).parent
BUNDLED_HEAD = HERE.parents[1] / "specscope" / "heads" / "SmolLM2-135M-Instruct"
SAMPLED = {"draft_sample_method": "probabilistic"}


def eagle(length: int, head: Path = HEAD, **more: Any) -> dict[str, Any]:
    """vLLM's `speculative_config`."""
    return {"method": "eagle3", "model": str(head), "num_speculative_tokens": length, **more}


def drafting(length: int, model: Path = DRAFT, **more: Any) -> dict[str, Any]:
    """Likewise, with a draft model."""
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": length, **more}


def ngram(length: int, most: int) -> dict[str, Any]:
    """Likewise, with n-grams of two to `most` tokens."""
    lookup = {"prompt_lookup_max": most, "prompt_lookup_min": 2}
    return {"method": "ngram", "num_speculative_tokens": length, **lookup}


@dataclass(frozen=True)
class Engine:
    """A vLLM. One of V2 runs under Triton's interpreter, and its prompts are few."""

    speculation: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    is_bundled: bool = False  # with the default model
    v2: bool = False
    chunk: int | None = None  # rows of logits that one call of V2's `_verify` takes; by default vLLM's own number

    @property
    def target(self) -> Path:
        """The folder of its target."""
        return bundled_model(lambda text: None) if self.is_bundled else TARGET

    @property
    def draft(self) -> Path | None:
        """The folder of its draft model or head."""
        return None if "model" not in self.speculation else Path(self.speculation["model"])

    def job(self) -> dict[str, Any]:
        """For inside.py."""
        small = {"max_model_len": 256, "max_num_batched_tokens": 256} if self.v2 else {}
        own = {"speculation": self.speculation, "v2": self.v2, "chunk": self.chunk}
        return {"model": str(self.target), "engine": small | self.options, **own}


def bundled(speculation: dict[str, Any], **more: Any) -> Engine:
    """With the default model."""
    return Engine(speculation, {"max_num_seqs": 4, **more}, is_bundled=True)


def v2(speculation: dict[str, Any], chunk: int | None = None, **more: Any) -> Engine:
    """With V2's runner."""
    return Engine(speculation, more, v2=True, chunk=chunk)


# Five blocks, where four requests would take eight
FEW_BLOCKS = {"block_size": 32, "num_gpu_blocks_override": 6, "max_model_len": 128, "max_num_batched_tokens": 128}
BLOCK_RULE = {"rejection_sample_method": "block"}
ENGINES: Mapping[str, Engine] = {
    "eagle": Engine(eagle(4)),
    "eagle sampled": Engine(eagle(4, **SAMPLED)),
    "eagle chunks": Engine(eagle(4), {"max_num_batched_tokens": 48}),
    "model": Engine(drafting(3)),
    "model sampled": Engine(drafting(3, **SAMPLED)),
    "model chunks": Engine(drafting(3), {"max_num_batched_tokens": 64}),
    "ngram": Engine(ngram(5, 4)),
    "default": bundled(eagle(3, BUNDLED_HEAD)),
    "default sampled": bundled(eagle(3, BUNDLED_HEAD, **SAMPLED)),
    "default chunks": bundled(eagle(3, BUNDLED_HEAD), max_num_batched_tokens=16),
    "default long": bundled(eagle(5, BUNDLED_HEAD)),
    "default ngram": bundled(ngram(5, 4)),
    "v2 ngram": v2(ngram(3, 3)),
    "v2 model": v2(drafting(3)),
    "v2 model sampled": v2(drafting(3, **SAMPLED)),
    "v2 eagle": v2(eagle(3)),
    "v2 eagle sampled": v2(eagle(3, **SAMPLED)),
    "v2 in chunks": v2(eagle(3, **SAMPLED), chunk=5),
    "v2 block": v2(drafting(3, **SAMPLED, **BLOCK_RULE)),
    "v2 block, drafts greedy": v2(drafting(3, **BLOCK_RULE)),
    "v2 preempted": v2(drafting(3, **SAMPLED), **FEW_BLOCKS),
    "v2 asynchronous": v2(drafting(3), async_scheduling=True),
    "v2 prompts in chunks": v2(eagle(3), max_num_batched_tokens=32),
}


@dataclass(frozen=True)
class Run:
    """One run. A healthy one has no cause that would be right."""

    name: str
    engine: str
    params: Mapping[str, Any] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    right: tuple[str, ...] = ()  # labels of causes, of which one is to be named
    subtle: bool = False  # a tenth of a nat a draw: so few draws may not show it
    requests: int = 8
    tokens: int = 64
    prompt: int = 60  # characters of a prompt
    gather: bool = False  # as on a GPU, but that nothing has to come from anywhere

    @property
    def target(self) -> Path:
        """The folder of its target."""
        return ENGINES[self.engine].target

    @property
    def draft(self) -> Path | None:
        """The folder of its draft model or head."""
        return ENGINES[self.engine].draft

    def job(self) -> dict[str, Any]:
        """For inside.py."""
        prompts = [story(10**7 + at, self.prompt) for at in range(self.requests)]
        if ENGINES[self.engine].is_bundled:
            prompts = [*PLAIN, *COPYING][: self.requests]
        seeded = self.params.get("temperature", 0) > 0
        plain = {"temperature": 0, "max_tokens": self.tokens, "ignore_eos": True}
        params = [plain | {"seed": at + 1 if seeded else None} | self.params for at in range(len(prompts))]
        told = {"name": file_name(self), "faults": list(self.faults), "gather": self.gather}
        return {**told, "prompts": prompts, "params": params}


def file_name(run: Run) -> str:
    """Of its capture, without the ending."""
    return run.name.replace(",", "").replace(" ", "-")


WARM, HOT = {"temperature": 0.9}, {"temperature": 1.5}  # hot: rejected often, so that what a rejection does shows
HOTTEST = {"temperature": 2.0}  # the most that vLLM takes
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.5}
UNTIL = {"min_tokens": 40, "stop_token_ids": [84], "ignore_eos": False}  # r: else the text goes on much as before
SAID = {"who": {"enum": ["anna", "bob"]}, "times": {"type": "integer"}}
PERSON = {"type": "object", "properties": SAID, "required": ["who"]}


def faulty(engine: str, params: Mapping[str, Any], *names: str, right: tuple[str, ...] = (), **more: Any) -> list[Run]:
    """Runs with the faults that their names begin with. `right`: where a fault is named otherwise than elsewhere."""
    faults = [name.split(" ")[0] for name in names]
    pairs = zip(names, faults, strict=True)
    return [Run(name, engine, params, (own,), right or FAULTS[own].right, **more) for name, own in pairs]


LESS = {"temperature": 1.2, "repetition_penalty": 1.3, "frequency_penalty": 0.5}
FAULTY = (
    *faulty("eagle", {}, "one_more_greedy", "counts_of_others", "verdict_late", "outputs_swapped"),
    *faulty("eagle", {}, "p_of_the_next_request greedy", "nan_now_and_then", "one_late eagle", "first_tokens_only"),
    *faulty("eagle", {}, "placeholders eagle", "features_missing", "features_shifted", "features_of_the_step_before"),
    *faulty("eagle", {}, "layers_one_lower", "positions_high_in_decode", "kv_stale_after_rejection"),
    *faulty("eagle", {}, "kv_stale_after_full", "slots_one_block_off", "target_positions_high_after_rejection"),
    *faulty("eagle", {}, "token_lost"),
    *faulty("eagle", {"repetition_penalty": 1.3, "frequency_penalty": 0.5}, "penalties_without_drafts greedy"),
    *faulty("eagle", HOT, "final_from_p deterministic"),
    *faulty("eagle sampled", WARM, "q_of_another_request eagle"),
    *faulty("model", {}, "greedy_rejection_ignored", "bonus_of_the_row_before", "p_of_the_next_row"),
    *faulty("model", {}, "positions_high_in_decode model"),
    *faulty("model sampled", HOT, "one_more_sampled", "counts_of_others sampled", "decided_by_another_p"),
    *faulty("model sampled", HOT, "against_coins", "final_from_q", "bonus_of_the_row_before sampled"),
    *faulty("model sampled", HOT, "p_of_the_next_request", "q_of_another_request", "q_shifted", "q_dropped"),
    *faulty("model sampled", HOT, "q_of_the_step_before", "q_at_another_temperature", "drawn_at_another_temperature"),
    *faulty("model sampled", HOT, "q_with_a_bias", "coins_of_a_request_shared", "coins_of_requests_shared"),
    *faulty("model sampled", HOT, "final_from_p", requests=12),
    *faulty("model sampled", {"temperature": 1.6}, "temperature_left_out"),
    *faulty("model sampled", LESS, "penalties_without_drafts"),
    *faulty("model sampled", HOTTEST, "drawn_with_a_bias", requests=16, tokens=96),
    *faulty("model sampled", HOTTEST, "noise_reused", requests=48, tokens=96, subtle=True),
    *faulty("model sampled", WARM, "nan_now_and_then sampled"),
    *faulty("ngram", {}, "one_late", "placeholders"),
    *faulty("default", WARM, "final_from_p default"),
    *faulty("default", {}, "one_more_greedy default", right=("accepted_count",)),
    *faulty("default", {}, "first_tokens_only default", "features_shifted default", "positions_high_in_decode default"),
    *faulty("default sampled", WARM, "q_with_a_bias default", "nan_now_and_then default"),
    # vLLM's own: behind a chunk of a prompt the head is fed the prompt's last token
    Run("chunk_ends", "eagle chunks", right=("drafter_fed",), prompt=150),
    Run("chunk_ends default", "default chunks", right=("drafter_fed",)),
    # Likewise: behind drafts that reach min_tokens stop tokens are still refused
    Run("min_tokens", "eagle", UNTIL, right=("rules_wrong",), requests=24),
    Run("min_tokens sampled", "model sampled", WARM | UNTIL, right=("rules_wrong",), requests=24),
)
CUT, FEW = WARM | {"top_p": 0.8, "top_k": 5}, {"allowed_token_ids": list(range(60, 160))}
CHOICE = {"choice": ["anna saw the red cat near the sea.", "bob met the old house."]}
JSON, BAD = {"ignore_eos": False, "structured_outputs": {"json": PERSON}}, {"bad_words": ["the", "anna", "cat"]}
MENDED: dict[str, Any] = {"faults": ("min_tokens_mended",), "requests": 24}
CHUNKS: dict[str, Any] = {"faults": ("chunk_ends_mended",), "prompt": 150}
FOUR: dict[str, Any] = {"requests": 4, "tokens": 20, "prompt": 40}
V2_WARM = {"temperature": 0.8}
V2_CUT = V2_WARM | {"top_p": 0.8, "top_k": 12, "repetition_penalty": 1.2}
HEALTHY = (
    Run("healthy eagle", "eagle"),
    Run("healthy eagle sampled", "eagle sampled", WARM),
    Run("healthy eagle top-p", "eagle sampled", CUT),
    Run("healthy model", "model"),
    Run("healthy model sampled", "model sampled", WARM),
    Run("healthy model hot", "model sampled", HOT),
    Run("healthy model top-p", "model sampled", CUT),
    Run("healthy ngram", "ngram"),
    Run("healthy ngram sampled", "ngram", WARM),
    Run("healthy penalties", "eagle", PENALTIES),
    Run("healthy penalties sampled", "model sampled", WARM | PENALTIES),
    Run("healthy choice", "eagle", {"ignore_eos": False, "structured_outputs": CHOICE}),
    Run("healthy json", "eagle sampled", WARM | JSON),
    Run("healthy allowed tokens", "model sampled", WARM | FEW),
    Run("healthy allowed tokens greedy", "eagle", FEW),
    Run("healthy bad words", "eagle", BAD),
    Run("healthy bad words sampled", "model sampled", WARM | BAD),
    Run("healthy min tokens", "eagle", UNTIL, **MENDED),
    Run("healthy min tokens sampled", "model sampled", WARM | UNTIL, **MENDED),
    Run("healthy chunks", "eagle chunks", **CHUNKS),
    Run("healthy chunks model", "model chunks", **CHUNKS),
    Run("healthy default json", "default", JSON),
    Run("healthy default", "default"),
    Run("healthy default sampled", "default sampled", WARM),
    Run("healthy default long", "default long", requests=12, tokens=32),
    Run("healthy default ngram", "default ngram", requests=12, tokens=32),
    Run("healthy default ngram sampled", "default ngram", V2_WARM, requests=12, tokens=32),
    Run("v2 ngram", "v2 ngram", **FOUR),
    Run("v2 ngram warm", "v2 ngram", V2_WARM, **FOUR),
    Run("v2 model", "v2 model", **FOUR),
    Run("v2 model warm", "v2 model", V2_WARM, **FOUR),
    Run("v2 model warm, drafts sampled", "v2 model sampled", V2_WARM, **FOUR),
    Run("v2 head", "v2 eagle", **FOUR),
    Run("v2 head warm", "v2 eagle", V2_WARM, **FOUR),
    Run("v2 head hot, drafts sampled", "v2 eagle sampled", HOT, **FOUR),
    Run("v2 cut, penalised", "v2 eagle sampled", V2_CUT, **FOUR),
    Run("v2 in chunks", "v2 in chunks", V2_WARM, **FOUR),
    Run("v2 block", "v2 block", HOT, **FOUR),
    Run("v2 block, drafts greedy", "v2 block, drafts greedy", HOT, **FOUR),
    Run("v2 preempted", "v2 preempted", V2_WARM, **FOUR | {"prompt": 20}),
    Run("v2 asynchronous", "v2 asynchronous", V2_WARM, **FOUR),
    Run("v2 prompts in chunks", "v2 prompts in chunks", V2_WARM, **FOUR),
)
GATHERED = (  # the same as those whose names they begin with
    Run("healthy model sampled, gathered", "model sampled", WARM, gather=True),
    Run("healthy eagle sampled, gathered", "eagle sampled", WARM, gather=True),
)
RUNS = (*FAULTY, *HEALTHY, *GATHERED)
