"""Which cases of a test with many of them run in the ordinary suite: see the marker `every` in pyproject.toml."""

import math
import random


def ordinary(cases, every):
    """The places of the cases that are kept: one of `every`, or more. `cases`: the parameters of each.

    The cases are taken in a fixed random order: first those that have a parameter's value which several cases share
    and none yet has, so that a matrix keeps every row and column; then any.
    """
    shared = {value for case in cases for value in case.items() if sum(value in other.items() for other in cases) > 1}
    turns = random.Random(0).sample(range(len(cases)), len(cases))
    kept, seen = set(), set()
    for place in turns:
        if not shared & set(cases[place].items()) <= seen:
            kept.add(place)
            seen |= set(cases[place].items())
    for place in turns:
        if len(kept) < math.ceil(len(cases) / every):
            kept.add(place)
    return sorted(kept)
