"""Attention weights as logs: masks, factors, biases and sinks are recognised over random sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.analyze.locate.located import FedRow
from specscope.analyze.locate.model.score_likeness import looks_of_scores

SEEDS = st.integers(0, 10**6)
SHAPES = st.tuples(st.integers(8, 40), st.integers(2, 9))
BEFORE = 20  # keys before the first row
WINDOW = 9


def fed(count, first=0):
    return [FedRow(first + place, 1000 + place) for place in range(count)]


def logs(scores, mask):
    return scores.masked_fill(~mask[:, None, :], -torch.inf).log_softmax(2)


def planted(seed, count, heads):
    """Random scores, the mask by which each row sees the keys up to itself, and by how much each key lies before it."""
    torch.manual_seed(seed)
    scores = torch.randn(count, heads, count + BEFORE) * 2
    distances = torch.arange(count)[:, None] + BEFORE - torch.arange(count + BEFORE)[None, :]
    return scores, distances >= 0, distances


def looked(wrong, right, **named):
    count = len(wrong)
    return looks_of_scores(wrong, right, rows=fed(count, BEFORE), keys=fed(count + BEFORE), **named)


def of_one_head(scores):
    scores = scores.clone()
    scores[:, 1] *= 2
    return scores


def some_keys(scores):
    scores = scores.clone()
    scores[..., 7:11] += torch.randn(*scores.shape[:2], 4)
    return scores


# By how the scores are changed, or the mask [rows, keys] by distances, and what the phrase begins with; {n} rows
SCORES = {
    "a factor of 1/sqrt(3)": (
        lambda s, d: s * 3**-0.5,
        "scores differ by a factor of 0.577 = 1/sqrt(3) at {n} of {n} rows",
    ),
    "a factor of 8": (lambda s, d: s * 8, "scores differ by a factor of 8"),
    "in one head": (lambda s, d: of_one_head(s), "only in head 1 of {h}"),
    "of each head": (
        lambda s, d: s * torch.linspace(0.5, 0.9, s.shape[1])[:, None],
        "scores differ by a factor of its own in each head (0.5 to 0.9)",
    ),
    "by the distance": (
        lambda s, d: s - 0.1 * d[:, None],
        "a bias of -0.1 for each position before is added to the scores",
    ),
    "of some keys": (
        lambda s, d: some_keys(s),
        "scores differ for some keys: only at positions 7 to 10: 4 of 4 keys",
    ),
    "of the key before": (lambda s, d: s.roll(1, 2), "each key has the score of the key 1 before"),
    "of the key 2 after": (lambda s, d: s.roll(-2, 2), "each key has the score of the key 2 after"),
}
MASKS = {
    "a window too narrow": (
        lambda d: d < WINDOW - 1,
        f"weight 0 at the position {WINDOW - 1} before ({{n}} of {{n}} rows), where the reference has weight",
    ),
    "a window too wide": (
        lambda d: d < WINDOW + 2,
        f"weight at positions {WINDOW} to {WINDOW + 1} before ({{n}} of {{n}} rows)",
    ),
    "without itself": (lambda d: (d < WINDOW) & (d != 0), "weight 0 at each row's own position ({n} of {n} rows)"),
}


@pytest.mark.parametrize("name", SCORES)
@given(seed=SEEDS, shape=SHAPES)
@settings(max_examples=8)
def test_changed_scores(name, seed, shape):
    scores, mask, distances = planted(seed, *shape)
    change, begins = SCORES[name]
    phrase = looked(logs(change(scores, distances), mask), logs(scores, mask), size=64)
    assert phrase.startswith(begins.format(n=shape[0], h=shape[1])), phrase


@pytest.mark.parametrize("name", MASKS)
@given(seed=SEEDS, shape=SHAPES)
@settings(max_examples=8)
def test_changed_masks(name, seed, shape):
    scores, mask, distances = planted(seed, *shape)
    change, begins = MASKS[name]
    phrase = looked(logs(scores, mask & change(distances)), logs(scores, mask & (distances < WINDOW)))
    assert phrase.startswith(begins.format(n=shape[0])), phrase


@given(SEEDS, SHAPES)
@settings(max_examples=20)
def test_what_agrees_and_noise_look_like_nothing_and_other_keys_and_sinks_are_told(seed, shape):
    scores, mask, _ = planted(seed, *shape)
    count, heads = shape
    right = logs(scores, mask)
    for size in (1e-6, 1e-2, 0.1, 1.0):
        assert looked(logs(scores + size * torch.randn_like(scores), mask), right) == ""
    unseen = mask.clone()
    unseen[:, 4:8] = False
    phrase = looked(logs(scores, unseen), right)
    assert phrase.startswith(f"weight 0 at positions 4 to 7 ({count} of {count} rows)")
    phrase = looked(logs(scores, torch.ones_like(mask)), right)
    assert phrase.endswith(f"weight at later positions ({count - 1} of {count - 1} rows), where the reference has none")
    masked = scores.masked_fill(~mask[:, None, :], -torch.inf)
    sink = torch.cat([masked, torch.full((count, heads, 1), 2.0)], 2).log_softmax(2)[..., :-1]
    phrase = looked(right, sink)
    assert phrase.startswith("the weights of a row sum to 1 where")
    assert "a sink is left out" in phrase


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_a_dtype(dtype):
    scores, mask, _ = planted(3, 30, 4)
    right = logs(scores, mask)
    phrase = looked(right.exp().to(dtype).float().log(), right)
    assert phrase.startswith(f"the weights hold only values of {str(dtype).removeprefix('torch.')}")


@given(SEEDS, st.integers(0, 4), st.integers(0, 3), st.integers(0, 5))
def test_odd_shapes_say_something_or_nothing(seed, count, heads, keys):
    torch.manual_seed(seed)
    ours, right = torch.randn(count, heads, keys), torch.randn(count, heads, keys)
    for side in (ours, torch.full_like(ours, -torch.inf), right * 2, torch.full_like(ours, torch.nan)):
        assert isinstance(looks_of_scores(side, right, rows=fed(count), keys=fed(keys)), str)
        assert isinstance(looks_of_scores(right, side, rows=fed(count), keys=fed(keys)), str)
    assert looks_of_scores(ours, right, rows=fed(count), keys=fed(keys + 1)) == ""
