"""Faults in what becomes of a verdict."""

from __future__ import annotations

from .switch import fault


@fault("vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync")
def token_lost(original):
    """Every sixth step the first request's last token is lost where it has more than one."""
    steps = [0]

    def bookkeep(self, *args, **kwargs):
        found = list(original(self, *args, **kwargs))
        steps[0] += 1
        tokens = found[3]
        if steps[0] % 6 == 0 and tokens and len(tokens[0]) > 1:
            found[3] = [tokens[0][:-1], *tokens[1:]]
        return tuple(found)

    return bookkeep
