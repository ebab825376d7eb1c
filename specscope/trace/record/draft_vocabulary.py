"""Which of the target's tokens a drafter with a reduced vocabulary knows, as compact text in a run's header.

`set:` and a bitmap over the target's tokens, where the drafter has them in ascending order, as trained heads do; else
`map:` and the target's token behind each of the drafter's. Both compressed, in base64.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from specscope.trace.record.records import RunInfo
from specscope.trace.record.tree import Ints

MOST = 2**22  # tokens of a vocabulary


def pack(tokens: Sequence[int]) -> str:
    """The target's token behind each draft token, in the drafter's order; `unpack` reads it back."""
    array = np.asarray(tokens, np.int64)
    if len(array) and (np.diff(array) > 0).all():
        bits = np.zeros(int(array[-1]) + 1, np.bool_)
        bits[array] = True
        return "set:" + _text(np.packbits(bits, bitorder="little").tobytes())
    return "map:" + _text(array.astype("<i4").tobytes())


def _text(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


@lru_cache(4)
def unpack(text: str, size: int) -> Ints:
    """[size] what was packed, of a vocabulary of `size` draft tokens. Raises ValueError."""
    kind, _, packed = text.partition(":")
    if kind not in ("set", "map"):
        raise ValueError("is neither a set nor a map")
    try:
        reader = zlib.decompressobj()
        data = reader.decompress(base64.b64decode(packed, validate=True), 4 * MOST)
    except (ValueError, zlib.error):
        raise ValueError("is not compressed as it should be") from None
    if not reader.eof or (kind == "map" and len(data) % 4):
        raise ValueError("is cut short or too long")
    if kind == "set":
        tokens = np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")).astype(np.int32)
    else:
        tokens = np.frombuffer(data, "<i4").astype(np.int32)
    if len(tokens) != size:
        raise ValueError(f"holds {len(tokens)} tokens, not {size}")
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= 8 * MOST or len(np.unique(tokens)) < size):
        raise ValueError("names a token twice, or one that cannot be")
    tokens.flags.writeable = False
    return tokens


def draft_tokens(run: RunInfo | None) -> Ints | None:
    """[draft vocabulary] the target's token behind each draft token; None where all are known, or it is not told."""
    return None if run is None or not run.draft_tokens else unpack(run.draft_tokens, run.draft_vocab)


def draft_id(run: RunInfo | None, token: int) -> int | None:
    """The drafter's own number of a target's token: None where it has none; the same where nothing is reduced."""
    known = draft_tokens(run)
    if known is None:
        return token
    places = np.flatnonzero(known == token)
    return int(places[0]) if len(places) else None
