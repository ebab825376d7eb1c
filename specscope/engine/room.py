"""KV room: what a request holds of the target's blocks and of its drafter's, and what it finds there.

With a prefix cache the full blocks of committed tokens can be found by later requests. They are published when a step
is committed and its accepted path was moved, never before: what a block holds is then final. A request takes them up
when it is admitted, so that requests of one step never see each other's blocks.

A drafter that is a model shares its own blocks in the same way. An EAGLE head's KV is made of the target's features:
it takes up no more than the target, and the target no more than the head, so that no feature is missing. Its last slot
of a block depends on the token behind it, which is part of the block's hash there (vLLM 50438).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from specscope.engine.request import Request
from specscope.errors import UserError
from specscope.model.kv_cache import BLOCK_SIZE, KVCache, OutOfBlocksError
from specscope.model.runner import ModelRunner
from specscope.speculate.drafters.base import Drafter
from specscope.speculate.drafters.combined import model_of


class Room:
    """The KV caches of the target and of a drafter that is a model, as the scheduler hands them out."""

    def __init__(self, runner: ModelRunner, drafter: Drafter, *, prefix_cache: bool) -> None:
        self.runner = runner
        self.cache: KVCache = runner.cache
        self.model = model_of(drafter)
        self.max_nodes = drafter.max_nodes
        self.needs_features = bool(drafter.aux_layers)
        self.prefix_cache = prefix_cache
        # Of a step that is run again: the tokens that each request found the first time. What is cached by now is
        # something else, and the step shall come out as it did.
        self.found_then: Mapping[str, int] | None = None

    def check(self, prompt: int, max_tokens: int, max_context: int) -> None:
        """Raise UserError for a request that would not fit even alone."""
        total = min(prompt + max_tokens, max_context)
        needed, pool = total - 1 + self.max_nodes, self.cache.pool  # the last token is never fed
        if _blocks(needed) > pool.blocks:
            raise UserError(_too_large(prompt, total, self.max_nodes, _blocks(needed), pool.blocks, "the KV cache"))
        if self.model is not None:
            max_fed, blocks = self.model.plan.max_fed, self.model.cache.pool.blocks
            if _blocks(total - 1 + max_fed) > blocks:
                of = "the drafter's KV cache"
                raise UserError(_too_large(prompt, total, max_fed, _blocks(total - 1 + max_fed), blocks, of))

    def reserve(self, request: Request, rows: int, *, drafts: bool) -> bool:
        """Room for so many rows after what is computed, and for the drafter where the request `drafts`.

        False where there are too few blocks; nothing is held then but what was.
        """
        try:
            self.cache.reserve(request.table, request.computed + rows, request.computed)
        except OutOfBlocksError:
            return False
        if drafts and self.model is not None and not self.model.make_room(request.context):
            self.give_back(request)
            return False
        return True

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
        request.found = 0
        request.kv_life += 1

    def held(self, request: Request) -> set[tuple[bool, int]]:
        """The blocks that a request holds: (whether it is the drafter's, block)."""
        drafter_blocks = set() if self.model is None else {(True, block) for block in self.model.blocks_of(request.id)}
        return drafter_blocks | {(False, block) for block in request.table.blocks}

    def publish(self, requests: Iterable[Request]) -> None:
        """Let others find what these have computed. Called when a step's paths were moved."""
        if not self.prefix_cache:
            return
        for request in requests:
            length = min(request.computed, len(request.tokens))  # what lies behind an EOS in a path is no token of it
            self.cache.publish(request.table, request.tokens, length)
            if self.model is not None:
                self.model.publish(request.id, request.tokens)

    def waited_then(self, request: Request) -> bool:
        """Of a step that is run again: whether the request was left in the queue the first time."""
        return self.prefix_cache and self.found_then is not None and request.id not in self.found_then

    def adopt(self, request: Request) -> None:
        """Begin with what others left of its tokens. One is always fed, which gives the root's logits.

        Raises OutOfBlocksError where a step that is run again has to compute what it found, and finds no room.
        """
        if not self.prefix_cache or request.table.blocks:
            return
        if self.found_then is None:
            request.computed = self._take_up(request, len(request.tokens))
        else:
            request.computed = self.found_then.get(request.id, 0)
            self._fill(request, request.computed)
        request.found = request.computed

    def restore(self, wanted: Sequence[tuple[Request, int]]) -> None:
        """Requests that lost their KV get that of so many of their first tokens again, as when they were there first.

        Raises OutOfBlocksError.
        """
        for request, _ in wanted:
            self.free(request)
        for request, length in wanted:  # before anything is written where others' blocks are
            self._take_up(request, length)
        for request, length in wanted:
            self._fill(request, length)

    def _take_up(self, request: Request, length: int) -> int:
        """Hold what others left of the first `length` tokens; how many have their KV then."""
        if not self.prefix_cache:
            return 0
        # A head needs a pair to be fed as well, or it could not draft when a request comes back: the root's.
        limit = min(len(request.tokens) - (2 if self.needs_features else 1), length)
        adopted = self.cache.adopt(request.table, request.tokens, limit)
        if self.model is not None:
            drafter_adopted = self.model.adopt(request.id, request.tokens, adopted if self.needs_features else limit)
            if self.needs_features and drafter_adopted < adopted:
                self.cache.truncate(request.table, drafter_adopted)
                adopted = drafter_adopted
        return adopted

    def _fill(self, request: Request, length: int) -> None:
        """The KV of a request's first `length` tokens, and their features where the drafter wants them."""
        self.free(request)
        adopted = self._take_up(request, length)
        self.cache.reserve(request.table, length, adopted)
        for start, features in self.runner.compute(request.table, request.tokens[:length], adopted):
            if features is not None and self.model is not None:
                self.model.observe(request.id, start, features, request.tokens)
        if self.prefix_cache:
            self.cache.publish(request.table, request.tokens, length)
            if self.model is not None and adopted < length:
                self.model.catch_up(request.id, request.tokens)
                self.model.publish(request.id, request.tokens)


def _blocks(slots: int) -> int:
    return -(-slots // BLOCK_SIZE)


def _too_large(prompt: int, total: int, draft: int, needed: int, blocks: int, of: str) -> str:
    """What does not fit, with its figures."""
    drafts = f" (with {draft} slots for drafts)" if draft else ""
    return (
        f"the request does not fit: {prompt:,} prompt tokens may grow to {total:,} tokens{drafts}, which need "
        f"{needed:,} KV blocks, but {of} has {blocks:,}: raise --kv-memory, or lower max_tokens"
    )
