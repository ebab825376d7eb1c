"""Attention weights as logs: masks, factors, biases, sinks and softcaps are recognised over random sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.analyze.locate.located import FedRow
from specscope.analyze.locate.model.score_likeness import looks_of_scores

SEEDS = st.integers(0, 10**6)
SHAPES = st.tuples(st.integers(8, 40), st.integers(2, 9))


def fed(count, first=0):
    return [FedRow(first + place, 1000 + place) for place in range(count)]


def causal(count, keys):
    """The rows are the last of the keys."""
    return torch.arange(keys)[None, :] <= torch.arange(keys - count, keys)[:, None]


def logs(scores, mask):
    return scores.masked_fill(~mask[:, None, :], -torch.inf).log_softmax(2)


def planted(seed, count, heads, before=20):
    torch.manual_seed(seed)
    scores = torch.randn(count, heads, count + before) * 2
    return scores, causal(count, count + before), fed(count, before), fed(count + before)


@given(SEEDS, SHAPES)
@settings(max_examples=30)
def test_what_agrees_looks_like_nothing_and_noise_like_nothing(seed, shape):
    scores, mask, rows, keys = planted(seed, *shape)
    again = scores + 1e-6 * torch.randn_like(scores)
    assert looks_of_scores(logs(again, mask), logs(scores, mask), rows=rows, keys=keys) == ""
    for size in (1e-2, 0.1, 1.0):
        other = logs(scores + size * torch.randn_like(scores), mask)
        assert looks_of_scores(other, logs(scores, mask), rows=rows, keys=keys) == ""
    assert looks_of_scores(logs(torch.randn_like(scores), mask), logs(scores, mask), rows=rows, keys=keys) == ""


@given(SEEDS, SHAPES)
@settings(max_examples=30)
def test_a_factor(seed, shape):
    scores, mask, rows, keys = planted(seed, *shape)
    count, heads = shape
    phrase = looks_of_scores(logs(scores * 3**-0.5, mask), logs(scores, mask), rows=rows, keys=keys)
    assert phrase == f"scores differ by a factor of 0.577 = 1/sqrt(3) at {count} of {count} rows"
    phrase = looks_of_scores(logs(scores * 8, mask), logs(scores, mask), rows=rows, keys=keys, size=64)
    assert phrase.startswith("scores differ by a factor of 8")
    scaled = scores.clone()
    scaled[:, 1] *= 2
    phrase = looks_of_scores(logs(scaled, mask), logs(scores, mask), rows=rows, keys=keys)
    assert phrase.startswith(f"only in head 1 of {heads}")
    assert phrase.endswith(f"scores differ by a factor of 2 at {count} of {count} rows")
    scaled = scores * torch.linspace(0.5, 0.9, heads)[:, None]
    phrase = looks_of_scores(logs(scaled, mask), logs(scores, mask), rows=rows, keys=keys)
    assert phrase.startswith("scores differ by a factor of its own in each head (0.5 to 0.9)")


@given(SEEDS, SHAPES, st.integers(5, 16))
@settings(max_examples=30)
def test_windows(seed, shape, window):
    scores, mask, rows, keys = planted(seed, *shape)
    count = shape[0]
    distances = torch.arange(count)[:, None] + 20 - torch.arange(count + 20)[None, :]
    right, narrow, wide = (logs(scores, mask & (distances < size)) for size in (window, window - 1, window + 2))
    phrase = looks_of_scores(narrow, right, rows=rows, keys=keys)
    where = f"weight 0 at the position {window - 1} before, where the reference has weight"
    assert phrase == where.replace("before", f"before ({count} of {count} rows)")
    phrase = looks_of_scores(wide, right, rows=rows, keys=keys)
    assert phrase.startswith(f"weight at positions {window} to {window + 1} before ({count} of {count} rows)")
    phrase = looks_of_scores(right, logs(scores, mask), rows=rows, keys=keys)
    assert phrase.startswith(f"weight 0 at all positions {window} or more before ({count} of {count} rows)")


@given(SEEDS, SHAPES)
@settings(max_examples=20)
def test_keys_unseen_or_seen_too_early(seed, shape):
    scores, mask, rows, keys = planted(seed, *shape)
    count = shape[0]
    right = logs(scores, mask)
    own = torch.arange(count)[:, None] + 20 == torch.arange(count + 20)[None, :]
    phrase = looks_of_scores(logs(scores, mask & ~own), right, rows=rows, keys=keys)
    assert phrase.startswith(f"weight 0 at each row's own position ({count} of {count} rows)")
    unseen = mask.clone()
    unseen[:, 4:8] = False
    phrase = looks_of_scores(logs(scores, unseen), right, rows=rows, keys=keys)
    assert phrase.startswith(f"weight 0 at positions 4 to 7 ({count} of {count} rows)")
    later = torch.ones_like(mask)
    phrase = looks_of_scores(logs(scores, later), right, rows=rows, keys=keys)
    end = f"wrong up to position {count + 18}, right from {count + 19} on: {count - 1} of {count - 1} rows"
    seen = f"weight at later positions ({count - 1} of {count - 1} rows), where the reference has none"
    assert phrase == f"{end}: {seen}"


def test_siblings_in_a_tree():
    torch.manual_seed(2)
    nodes = [FedRow(20, 1, 0), FedRow(20, 2, 1), FedRow(20, 3, 2)]
    mask = torch.cat([torch.ones(3, 20, dtype=torch.bool), torch.eye(3, dtype=torch.bool)], 1)
    scores, keys = torch.randn(3, 4, 23), [*fed(20), *nodes]
    phrase = looks_of_scores(logs(scores, torch.ones_like(mask)), logs(scores, mask), rows=nodes, keys=keys)
    assert phrase == "weight at other tree nodes, of the same depth (3 of 3 rows), where the reference has none"
    alone = mask.clone()
    alone[:, 20:] = False
    phrase = looks_of_scores(logs(scores, alone), logs(scores, mask), rows=nodes, keys=keys)
    assert phrase == "weight 0 at each node itself (3 of 3 rows), where the reference has weight"


@given(SEEDS, SHAPES)
@settings(max_examples=20)
def test_sinks_biases_softcaps_and_keys(seed, shape):
    scores, mask, rows, keys = planted(seed, *shape)
    count, heads = shape
    right = logs(scores, mask)
    masked = scores.masked_fill(~mask[:, None, :], -torch.inf)
    sink = torch.cat([masked, torch.full((count, heads, 1), 2.0)], 2).log_softmax(2)[..., :-1]
    phrase = looks_of_scores(right, sink, rows=rows, keys=keys)
    assert phrase.startswith("the weights of a row sum to 1 where")
    assert "a sink is left out" in phrase
    distances = (torch.arange(count)[:, None] + 20 - torch.arange(count + 20)[None, :]).float()
    phrase = looks_of_scores(logs(scores - 0.1 * distances[:, None], mask), right, rows=rows, keys=keys)
    assert phrase.startswith("a bias of -0.1 for each position before is added to the scores")
    amounts = torch.randn(count + 20)
    by_distance = amounts[distances.abs().long()][:, None]
    phrase = looks_of_scores(logs(scores + by_distance, mask), right, rows=rows, keys=keys)
    assert phrase.startswith("an amount that depends on the distance alone")
    phrase = looks_of_scores(logs(scores + amounts, mask), right, rows=rows, keys=keys)
    assert phrase.startswith("the same amount at each key")
    capped = 3 * torch.tanh(scores / 3)
    assert "a softcap is left out" in looks_of_scores(right, logs(capped, mask), rows=rows, keys=keys)
    assert "a softcap too many" in looks_of_scores(logs(capped, mask), right, rows=rows, keys=keys)
    changed = scores.clone()
    changed[..., 7:11] += torch.randn(count, heads, 4)
    phrase = looks_of_scores(logs(changed, mask), right, rows=rows, keys=keys)
    assert phrase.startswith("scores differ for some keys: only at positions 7 to 10: 4 of 4 keys")


@given(SEEDS, SHAPES, st.sampled_from([-2, -1, 1, 2]))
@settings(max_examples=20)
def test_keys_shifted(seed, shape, step):
    scores, mask, rows, keys = planted(seed, *shape)
    phrase = looks_of_scores(logs(scores.roll(step, 2), mask), logs(scores, mask), rows=rows, keys=keys)
    assert phrase.startswith(f"each key has the score of the key {abs(step)} {'before' if step > 0 else 'after'}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_a_dtype(dtype):
    scores, mask, rows, keys = planted(3, 30, 4)
    right = logs(scores, mask)
    phrase = looks_of_scores(right.exp().to(dtype).float().log(), right, rows=rows, keys=keys)
    assert phrase.startswith(f"the weights hold only values of {str(dtype).removeprefix('torch.')}")


@given(SEEDS, st.integers(0, 4), st.integers(0, 3), st.integers(0, 5))
def test_odd_shapes_say_something_or_nothing(seed, count, heads, keys):
    torch.manual_seed(seed)
    ours, right = torch.randn(count, heads, keys), torch.randn(count, heads, keys)
    for side in (ours, torch.full_like(ours, -torch.inf), right * 2, torch.full_like(ours, torch.nan)):
        assert isinstance(looks_of_scores(side, right, rows=fed(count), keys=fed(keys)), str)
        assert isinstance(looks_of_scores(right, side, rows=fed(count), keys=fed(keys)), str)
    assert looks_of_scores(ours, right, rows=fed(count), keys=fed(keys + 1)) == ""
