"""What vLLM 0.32.0 itself does wrong, mended: on where a run is to be healthy."""

from .drafts import BASE
from .noise import RUNNER
from .rejection import SAMPLER
from .switch import fault

SCHEDULED: dict[str, int] = {}


@fault(f"{RUNNER}.execute_model")
def chunk_ends_mended(original, self, scheduled, *args, **kwargs):
    """How many tokens each request is fed."""
    SCHEDULED.update(scheduled.num_scheduled_tokens)
    return original(self, scheduled, *args, **kwargs)


@fault(f"{BASE}.prepare_next_token_ids_padded")
def chunk_ends_mended(original, self, sampled, requests, batch, discarded):  # noqa: F811 - the same in another place
    """Behind a chunk of a prompt the head is fed the prompt's next token. vLLM feeds it the prompt's last."""
    ends = batch.num_tokens_no_spec.copy()
    for row, name in enumerate(batch.req_ids):
        if discarded[row]:  # the token at the chunk's end, one more than the row that vLLM looks at
            batch.num_tokens_no_spec[row] = batch.num_computed_tokens_cpu[row] + SCHEDULED[name] + 1
    try:
        return original(self, sampled, requests, batch, discarded)
    finally:
        batch.num_tokens_no_spec[:] = ends


@fault(f"{SAMPLER}:RejectionSampler.forward")
def min_tokens_mended(original, self, metadata, q, logits, sampling):
    """Stop tokens may be drawn behind drafts that reach min_tokens. vLLM masks them there until the step after."""
    kept, drafted = [], metadata.num_draft_tokens
    for one in sampling.logitsprocs.non_argmax_invariant:
        if type(one).__name__ == "MinTokensLogitsProcessor" and one.min_toks:
            kept.append((one, one.logits_slice))
            (rows, tokens), own = one.logits_slice, one.min_toks
            early = [row in own and len(own[row][1]) + drafted[row] < own[row][0] for row in rows.tolist()]
            one.logits_slice = (rows[early], tokens[early])
    try:
        return original(self, metadata, q, logits, sampling)
    finally:
        for one, both in kept:
            one.logits_slice = both
