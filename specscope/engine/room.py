"""KV room: what a request holds of the target's blocks and of its drafter's."""

from __future__ import annotations

from collections.abc import Sequence

from specscope.engine.prompt_encoder import TooLargeError
from specscope.engine.request import Request
from specscope.engine.state import Turn
from specscope.model.kv_cache import BLOCK_SIZE, KVCache, OutOfBlocksError
from specscope.model.runner import ModelRunner
from specscope.speculate.drafters.base import Context, Drafter
from specscope.speculate.drafters.model_drafter import ModelDrafter


class Room:
    """The KV caches of the target and of a drafter that is a model, as the scheduler hands them out."""

    def __init__(self, runner: ModelRunner, drafter: Drafter, max_context: int) -> None:
        self.runner = runner
        self.cache: KVCache = runner.cache
        self.model = drafter if isinstance(drafter, ModelDrafter) else None
        self.max_nodes, self.max_depth, self.max_context = drafter.max_nodes, drafter.max_depth, max_context

    def nodes(self, context: Context) -> int:
        """What is kept for a request's draft: the largest, where the longest fits into its context; else 0."""
        return self.max_nodes if len(context.tokens) + self.max_depth < self.max_context else 0

    def check(self, prompt: int, max_tokens: int) -> None:
        """Raise TooLargeError for a request that would not fit even alone."""
        total = min(prompt + max_tokens, self.max_context)
        needed, pool = total - 1 + self.max_nodes, self.cache.pool  # the last token is never fed
        if _blocks(needed) > pool.blocks:
            raise TooLargeError(_too_large(prompt, total, self.max_nodes, _blocks(needed), pool.blocks, "the KV cache"))
        if self.model is not None:
            max_fed, blocks = self.model.plan.max_fed, self.model.cache.pool.blocks
            if _blocks(total - 1 + max_fed) > blocks:
                of = "the drafter's KV cache"
                raise TooLargeError(_too_large(prompt, total, max_fed, _blocks(total - 1 + max_fed), blocks, of))

    def reserve(self, turn: Turn, *, drafts: bool = True) -> bool:
        """Room for a turn's rows behind what is computed, and for the drafter where the turn `drafts`.

        False where there are too few blocks; nothing is held then but what was.
        """
        request = turn.request
        try:
            self.cache.reserve(request.table, request.computed + turn.cost, request.computed)
        except OutOfBlocksError:
            return False
        if drafts and turn.nodes and self.model is not None and not self.model.make_room(turn.context):
            self.give_back(request)
            return False
        return True

    def keep(self, turn: Turn) -> None:
        """Give back the rows that its draft left free."""
        self.cache.truncate(turn.request.table, turn.request.computed + turn.feed + len(turn.draft.tree))

    def give_back(self, request: Request) -> None:
        """Give back what is kept for drafts: all behind the committed tokens."""
        self.cache.truncate(request.table, request.computed)
        if self.model is not None:
            self.model.give_back(request.id)

    def free(self, request: Request) -> None:
        """Give back everything."""
        self.cache.truncate(request.table, 0)
        if self.model is not None:
            self.model.release(request.id)
        request.kv_life += 1

    def restore(self, wanted: Sequence[tuple[Request, int]]) -> None:
        """Requests that lost their KV get that of so many of their first tokens again, as when they were there first.

        Raises OutOfBlocksError.
        """
        for request, _ in wanted:
            self.free(request)
        for request, length in wanted:
            self._fill(request, length)

    def _fill(self, request: Request, length: int) -> None:
        """The KV of a request's first `length` tokens, and their features where the drafter wants them."""
        self.cache.reserve(request.table, length, 0)
        for start, features in self.runner.compute(request.table, request.tokens[:length]):
            if features is not None and self.model is not None:
                self.model.observe(request.id, start, features, request.tokens)


def _blocks(slots: int) -> int:
    return -(-slots // BLOCK_SIZE)


def _too_large(prompt: int, total: int, draft: int, needed: int, blocks: int, of: str) -> str:
    """What does not fit, with its figures."""
    drafts = f" (with {draft} slots for drafts)" if draft else ""
    return (
        f"the request does not fit: {prompt:,} prompt tokens may grow to {total:,} tokens{drafts}, which need "
        f"{needed:,} KV blocks, but {of} has {blocks:,}: raise --kv-memory, or lower max_tokens"
    )
