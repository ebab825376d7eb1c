"""What vLLM 0.32.0 itself does wrong, mended: on where a run is to be healthy."""

from __future__ import annotations

from .drafts import BASE, RUNNER
from .switch import fault


@fault(f"{BASE}.prepare_next_token_ids_padded")
def chunk_ends_mended(original):
    """Behind a chunk of a prompt the head is fed the prompt's next token. vLLM feeds it the prompt's last."""

    def prepare(self, sampled, requests, batch, discarded):
        ends = batch.num_tokens_no_spec.copy()
        for row, name in enumerate(batch.req_ids):
            if discarded[row]:  # the token at the chunk's end, one more than the row that vLLM looks at
                batch.num_tokens_no_spec[row] = batch.num_computed_tokens_cpu[row] + SCHEDULED[name] + 1
        try:
            return original(self, sampled, requests, batch, discarded)
        finally:
            batch.num_tokens_no_spec[:] = ends

    return prepare


@fault("vllm.v1.sample.rejection_sampler:RejectionSampler.forward")
def min_tokens_mended(original):
    """Stop tokens may be drawn behind drafts that reach min_tokens. vLLM masks them there until the step after."""

    def forward(self, metadata, q, logits, sampling):
        kept = []
        for one in sampling.logitsprocs.non_argmax_invariant:
            if type(one).__name__ == "MinTokensLogitsProcessor" and one.min_toks:
                kept.append((one, one.logits_slice))
                rows, tokens = one.logits_slice
                early = [
                    row in one.min_toks
                    and len(one.min_toks[row][1]) + metadata.num_draft_tokens[row] < one.min_toks[row][0]
                    for row in rows.tolist()
                ]
                one.logits_slice = (rows[early], tokens[early])
        try:
            return original(self, metadata, q, logits, sampling)
        finally:
            for one, both in kept:
                one.logits_slice = both

    return forward


SCHEDULED: dict[str, int] = {}


@fault(f"{RUNNER}.execute_model")
def chunk_ends_mended(original):  # noqa: F811 - the same in another place
    """How many tokens each request is fed."""

    def execute_model(self, scheduled, *args, **kwargs):
        SCHEDULED.update(scheduled.num_scheduled_tokens)
        return original(self, scheduled, *args, **kwargs)

    return execute_model
