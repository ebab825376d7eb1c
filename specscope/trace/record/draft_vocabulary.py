"""Which of the target's tokens a drafter with a reduced vocabulary knows, as compact text in a run's header.

`set:` and a bitmap over the target's tokens, where the drafter has them in ascending order, as trained heads do; else
`map:` and the target's token behind each of the drafter's. Both compressed, in base64. It is told once: wherever else a
run is named, `digest:` and a hash of the tokens stand for it, and a reader that saw nothing else does not know them.
"""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np

import specscope
from specscope.plans.kinds import draft_tokens_of
from specscope.trace.record.records import RunInfo
from specscope.trace.record.tree import Ints

MOST = 2**22  # tokens of a vocabulary
DRAFT_TOKENS = "specscope.run.draft_tokens"  # the attribute
DIGEST = "digest:"
NOT_TOLD = "the draft vocabulary is not in this file"


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
    tokens = _tokens(text)
    if len(tokens) != size:
        raise ValueError(f"holds {len(tokens)} tokens, not {size}")
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= 8 * MOST or len(np.unique(tokens)) < size):
        raise ValueError("names a token twice, or one outside the vocabulary")
    tokens.flags.writeable = False
    return tokens


def _tokens(text: str) -> Ints:
    kind, _, packed = text.partition(":")
    if kind not in ("set", "map"):
        raise ValueError("is neither a set nor a map")
    try:
        reader = zlib.decompressobj()
        data = reader.decompress(base64.b64decode(packed, validate=True), 4 * MOST)
    except (ValueError, zlib.error):
        raise ValueError("is not valid zlib data") from None
    if not reader.eof or (kind == "map" and len(data) % 4):
        raise ValueError("is cut short or too long")
    if kind == "set":
        return np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")).astype(np.int32)
    return np.frombuffer(data, "<i4").astype(np.int32)


def digest(packed: str) -> str:
    """What stands for a packed vocabulary, by its tokens: what compresses them differs. A digest stands for itself."""
    if not packed or packed.startswith(DIGEST):
        return packed
    try:
        return DIGEST + blake2b(_tokens(packed).astype("<i4").tobytes(), digest_size=16).hexdigest()
    except ValueError:
        return old_digest(packed)


def old_digest(packed: str) -> str:
    """As captures had it before: half as long, and of the compressed text."""
    told = not packed or packed.startswith(DIGEST)
    return packed if told else DIGEST + blake2b(packed.encode(), digest_size=8).hexdigest()


def is_old_digest(text: str) -> bool:
    return text.startswith(DIGEST) and len(text) == len(DIGEST) + 16


def lacks_draft_tokens(run: RunInfo | None) -> bool:
    """Whether the drafter knows some of the target's tokens only, and it is not told which."""
    return run is not None and run.draft_tokens.startswith(DIGEST)


def completed(run: RunInfo, packed: object) -> RunInfo:
    """The run with its draft vocabulary, where it lacks that and this is it. Raises ValueError where it is damaged."""
    if not lacks_draft_tokens(run) or not isinstance(packed, str) or packed.startswith(DIGEST):
        return run
    if run.draft_tokens not in (digest(packed), old_digest(packed)):
        return run
    unpack(packed, run.draft_vocab)
    return dataclasses.replace(run, draft_tokens=packed)


def completed_here(run: RunInfo) -> RunInfo:
    """The run with its draft vocabulary, where it lacks that and the head on this machine is the one that it names."""
    beside = Path(specscope.__file__).parent / "heads" / Path(run.draft_model).name
    for folder in (Path(run.draft_path), beside):
        if lacks_draft_tokens(run) and (folder / "config.json").is_file():
            tokens = draft_tokens_of(folder)
            run = run if tokens is None else completed(run, pack(tokens))
    return run


def draft_tokens(run: RunInfo | None) -> Ints | None:
    """[draft vocabulary] the target's token behind each draft token; None where all are known, or it is not told."""
    if run is None or not run.draft_tokens or lacks_draft_tokens(run):
        return None
    return unpack(run.draft_tokens, run.draft_vocab)


def draft_id(run: RunInfo | None, token: int) -> int | None:
    """The drafter's number of a target's token; None for none. Not to be asked where the vocabulary is not told."""
    known = draft_tokens(run)
    if known is None:
        return token
    places = np.flatnonzero(known == token)
    return int(places[0]) if len(places) else None
