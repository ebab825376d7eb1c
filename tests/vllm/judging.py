"""The evidence of one request of V1's sampler, read on the host."""

from specscope.vllm.v1.here import judge_here


def judge(call, request, drafter, *, full):
    """Of a request's place in the batch. `drafter`: its logits [V] for each draft, or none."""
    passes = {request: ([row[None] for row in drafter], 0)}
    return judge_here(call, passes, full=full).of(request)
