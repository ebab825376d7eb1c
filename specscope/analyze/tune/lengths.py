"""From what single steps would have accepted to a run's acceptance length, with its interval.

A tree decides where its next step begins, so the recorded run did not begin its steps where another tree would have.
Between requests this is put right: each makes its tokens with whatever tree, an easy one in fewer steps. With tokens
n_r that request r made in steps with drafts, and the mean 1 + a_r of what the tree accepts in its recorded steps, it
takes n_r / (1 + a_r) steps, and the acceptance length is

    sum n_r / sum of n_r / (1 + a_r).

Within a request the recorded beginnings stand for the tree's own. (Measured on the default model: tests and
BENCHMARKS.md.) The interval is from a bootstrap over requests, as in analyze/compare/bootstrap.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specscope.analyze.compare.bootstrap import FEWEST, LEVEL, resampled
from specscope.analyze.significance import t_quantile
from specscope.analyze.tune.evidence import RecordedCandidates
from specscope.trace.record.tree import Doubles


@dataclass(frozen=True)
class Length:
    """A figure with its interval; None where too few requests are recorded to give one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def error(self) -> float:
        """Half the interval, relative; 0 where there is none."""
        return 0.0 if self.low is None or self.high is None else (self.high - self.low) / 2 / self.value


def lengths(evidence: RecordedCandidates, accepted: Sequence[Doubles]) -> list[Length]:
    """Of several trees, from what each would have accepted in each step [S]."""
    size = evidence.requests
    count = np.bincount(evidence.request, minlength=size).astype(float)
    tokens = np.bincount(evidence.request, evidence.tokens, minlength=size)
    some = count > 0
    tokens = tokens[some]
    steps = []
    for one in accepted:
        mean = np.bincount(evidence.request, one, minlength=size)[some] / count[some]
        steps.append(tokens / (1 + mean))
    values = [float(tokens.sum() / one.sum()) for one in steps]
    n = len(tokens)
    if n < FEWEST:
        return [Length(value) for value in values]
    drawn = resampled(np.stack([tokens, *steps], axis=1), n)
    t = t_quantile((1 + LEVEL) / 2, n - 1) * math.sqrt(n / (n - 1))
    errors = [t * float(np.std(drawn[:, 0] / drawn[:, at + 1], ddof=1)) for at in range(len(steps))]
    return [Length(v, max(v - error, 1.0), v + error) for v, error in zip(values, errors, strict=True)]
