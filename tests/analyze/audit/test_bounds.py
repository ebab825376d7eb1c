"""What rounding allows for p where tokens are left out: at a border other tokens may be in, in the place of some."""

import numpy as np
import pytest
import torch

from specscope.analyze.audit.model.rules import Rules
from specscope.analyze.audit.tally import span
from specscope.trace.record.params import SamplingParams

SLACK = 0.5  # of logits against each other
CUTS = {
    "top-p": {"top_p": 0.5},
    "top-k": {"top_k": 4},
    "min-p": {"min_p": 0.2},
    "top-k and top-p": {"top_k": 10, "top_p": 0.6, "temperature": 1.4},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7},
}


@pytest.mark.parametrize("name", CUTS)
def test_whatever_rounding_makes_of_logits_is_allowed(name):
    params = SamplingParams(**{"temperature": 1.0, **CUTS[name]})
    rules, slack = Rules(params, []), SLACK / params.temperature
    for seed in range(200):
        draw = np.random.default_rng(seed)
        row = torch.tensor(draw.normal(0, draw.choice([0.5, 2.0]), 40), dtype=torch.float32)
        low, high = rules.bounds(row, SLACK)
        rounded = row + torch.tensor(draw.uniform(-SLACK / 2, SLACK / 2, 40), dtype=torch.float32)
        p = rules.scores(rounded[None]).softmax(-1)[0]
        for token in range(40):
            allowed = span(float(low[token]), slack)[0], span(float(high[token]), slack)[1]
            assert allowed[0] <= float(p[token]) <= allowed[1], (seed, token, float(p[token]), allowed)


def test_a_token_far_from_the_border_keeps_its_bounds():
    """One that is surely in is never allowed to be out, and one that is surely out never to be in."""
    rules = Rules(SamplingParams(temperature=1.0, top_k=2), [])
    low, high = rules.bounds(torch.tensor([10.0, 8.0, 2.0, 1.0]), SLACK)
    assert low[:2].min() > 0.1
    assert high[2:].max() == 0
    assert float(high[0]) == pytest.approx(float(low[0]))
