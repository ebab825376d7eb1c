"""Where the measured costs of an engine are kept: a file in the user's cache, or one that the user names. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from specscope.errors import UserError
from specscope.speculate.costs import KIND, Costs
from specscope.trace.checked import decoded
from specscope.trace.files import read_whole
from specscope.user_cache import LARGEST, is_good, place

MOST_ROWS = 2**31  # of a point


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
    try:
        found = decoded(read_whole(path, "the costs", LARGEST), Costs)
    except ValueError:
        found = None
    if found is None or not _is_sound(found):
        raise UserError(
            f"{path} holds no costs: name a file that --costs of this version wrote, or one that does not exist"
        )
    return found


def _is_sound(found: Costs) -> bool:
    """Whether it holds seconds by rising numbers of rows, and batches by rising sizes."""
    if found.kind != KIND or not all((found.step, *found.batches)):
        return False
    curves = (found.step, *found.batches, found.passes)
    sizes = [1, *(curve[0].rows for curve in found.batches)]
    rows = [[point.rows for point in curve] for curve in curves]
    points = [point for curve in curves for point in curve]
    return (
        all(size < further for rising in (sizes, *rows) for size, further in pairwise(rising))
        and all(1 <= point.rows <= MOST_ROWS and 0 <= point.seconds < math.inf for point in points)
        and all(point.seconds > 0 for curve in (found.step, *found.batches) for point in curve)
        and all(0 <= seconds < math.inf for seconds in (found.first, found.first_request))
    )
