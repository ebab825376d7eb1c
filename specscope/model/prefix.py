"""What lies in full KV blocks, so that a later request with the same tokens finds it: the index of the prefix cache.

A block is known by a chain of hashes, as in vLLM (v1/core/kv_cache_utils.py, hash_block_tokens): of all tokens before
it, and of its own. The tokens themselves are compared on a hit as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

DIGEST = 16  # bytes of a hash: 128 bits of BLAKE2b, for which nobody can make two prefixes of one hash


class Content(NamedTuple):
    """What a full block holds. Two are equal where the hash, the hash before it and the tokens are."""

    digest: bytes  # of all tokens up to the block's end
    parent: bytes  # the digest of the block before; b"" for the first
    tokens: tuple[int, ...]  # the block's own, and those behind it that its KV depends on

    @staticmethod
    def of(parent: bytes, tokens: Sequence[int]) -> Content:
        """The content of a block behind the one with the digest `parent`."""
        block_tokens = tuple(tokens)
        return Content(digest(parent, block_tokens), parent, block_tokens)


def digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a block: of the hash before it and of its tokens."""
    return hashlib.blake2b(parent + np.asarray(tokens, np.int64).tobytes(), digest_size=DIGEST).digest()


class PrefixIndex:
    """Which block holds what. A content is in one block at most, and a block has one content."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, tuple[int, Content]] = {}
        self._digests: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, content: Content) -> int | None:
        """The block that holds the content; None where none does."""
        block, known = self._blocks.get(content.digest, (None, None))
        return block if known == content else None

    def holder(self, content: Content) -> int | None:
        """The block that stands in its place, whether it holds the same or not."""
        return self._blocks[content.digest][0] if content.digest in self._blocks else None

    def put(self, block: int, content: Content) -> None:
        """Note that a block holds a content. Neither may be known already."""
        assert block not in self._digests, "a block that is known was written to"
        assert content.digest not in self._blocks
        self._blocks[content.digest] = (block, content)
        self._digests[block] = content.digest

    def forget(self, block: int) -> None:
        """Forget a block whose content is about to be overwritten."""
        if block in self._digests:
            del self._blocks[self._digests.pop(block)]
