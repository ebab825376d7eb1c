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
        caches = [(self.max_nodes, self.cache.pool, "the KV cache")]
        if self.model is not None:
            caches.append((self.model.plan.max_fed, self.model.cache.pool, "the drafter's KV cache"))
        for draft, pool, name in caches:
            needed = -(-(total - 1 + draft) // BLOCK_SIZE)  # the last token is never fed
            if needed > pool.blocks:
                drafts = f" (with {draft} slots for drafts)" if draft else ""
                raise TooLargeError(
                    f"the request does not fit: {prompt:,} prompt tokens may grow to {total:,} tokens{drafts}, which "
                    f"need {needed:,} KV blocks, but {name} has {pool.blocks:,}: raise --kv-memory, or lower max_tokens"
                )

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
            self.cache.reserve(request.table, length, 0)
            for start, features in self.runner.compute(request.table, request.tokens[:length]):
                if features is not None and self.model is not None:
                    self.model.observe(request.id, start, features, request.tokens)
