"""Several tests at once, Student's t, and a binomial's tail: what every judge takes for chance."""

from __future__ import annotations

import math
from collections.abc import Sequence


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which are rejected when all are tested with a family-wise error of alpha (Holm 1979)."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def t_two_sided(t: float, degrees: float) -> float:
    """The probability that Student's t is at least so far from 0."""
    return _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def t_quantile(p: float, degrees: int) -> float:
    """Student's t below which it lies with probability p, above 1/2: by bisection."""
    low, high = 0.0, 1000.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - t_two_sided(middle, degrees) / 2 < p else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function, by its continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        before = fraction
        for term in (even, odd):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            fraction *= c * d
        if abs(fraction - before) < 1e-14 * abs(fraction):
            break
    return front * fraction


def tail_of_binomial(hits: int, total: int, share: float) -> float:
    """An upper bound (Chernoff's) on the chance of so many hits or more in `total` trials of chance `share`."""
    mean = hits / total
    if mean <= share:
        return 1.0
    distance = mean * math.log(mean / share) + ((1 - mean) * math.log((1 - mean) / (1 - share)) if mean < 1 else 0.0)
    return math.exp(-total * distance)
