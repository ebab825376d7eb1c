"""Where the measured costs of an engine are kept: a file in the user's cache, or one that the user names. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import msgspec

from specscope.errors import UserError
from specscope.speculate.costs import KIND, Costs
from specscope.user_cache import LARGEST, is_good, place


def cached_file(about: Mapping[str, str]) -> Path:
    """The file in the user's cache for engines of this kind on this machine."""
    return place("costs", about)


def read_cached(about: Mapping[str, str]) -> Costs | None:
    """What was measured before; None where nothing was, or where it cannot be read."""
    try:
        found = _read(cached_file(about))
    except (OSError, UserError):
        return None
    good = dict(found.about) == dict(about) and is_good(cached_file(about), quiet=found.quiet)
    return found if good else None


def read_named(path: str, about: Mapping[str, str]) -> Costs | None:
    """From a file that the user names; None where there is none yet. Raises UserError for costs of another engine.

    What a file does not say of its engine is not checked: costs may be made up.
    """
    try:
        found = _read(Path(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read the costs {path}: {error.strerror}") from error
    for name, here in about.items():
        there = found.about.get(name, here)
        if there != here and name in MODELS:
            raise UserError(
                f"{path} holds the costs of {name} {there or 'none'}, and this engine's is {here or 'none'}"
            )
    return found


MODELS = ("target", "drafter", "draft model", "dtype", "tree")  # what a named file must agree in; machines may differ


def _read(path: Path) -> Costs:
    if path.stat().st_size > LARGEST:
        raise UserError(f"{path} holds no costs: it is too large")
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Costs)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UserError(f"{path} holds no costs: name a file that --costs wrote, or one that does not exist") from None
    steps = [point for curve in (found.step, *found.batches) for point in curve]
    points = (*steps, *found.passes)
    numbers = (found.first, found.first_request, *(p.seconds for p in points))
    sizes = [1, *(curve[0].rows if curve else 0 for curve in found.batches)]
    sound = found.kind == KIND and found.step and all(0 <= x < math.inf for x in numbers)
    rising = all(size < further for size, further in pairwise(sizes))
    if not (sound and rising) or any(p.rows < 1 for p in points) or not all(p.seconds > 0 for p in steps):
        raise UserError(f"{path} holds no costs: name a file that --costs wrote, or one that does not exist")
    return found
