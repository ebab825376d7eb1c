"""Each planted structure is recognised over random sizes; differences without structure are not taken for any."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.analyze.locate.located import FedRow
from specscope.analyze.locate.model.likeness import looks, looks_of_scores

SEEDS = st.integers(0, 10**6)
SHAPES = st.tuples(st.integers(8, 48), st.integers(2, 9), st.sampled_from([16, 32, 64]))
FIRST = 30  # position of the first row
WINDOW = 9


def fed(count, first=0):
    return [FedRow(first + place, 1000 + place) for place in range(count)]


def right_values(seed, count, width):
    """With the jitter that another order of summation leaves."""
    torch.manual_seed(seed)
    right = torch.randn(count, width) * torch.rand(count, 1).add(0.5)
    return right, right * (1 + 1e-6 * torch.randn(count, width))


def rotary(values, positions, base=10000.0, scale=1.0):
    """Rotary embedding by halves of heads [count, heads, size], in double precision."""
    size = values.shape[2]
    speeds = base ** (-torch.arange(size // 2).double() * 2 / size)
    angles = (torch.as_tensor(positions).double() * scale)[:, None] * speeds
    low, high = values.double().chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([low * cos - high * sin, low * sin + high * cos], -1).float()


@given(SEEDS, SHAPES, st.floats(-2.5, 1))  # all rows lie far above what is allowed: no place is told
@settings(max_examples=60)
def test_what_agrees_looks_like_nothing_and_so_does_noise(seed, shape, power):
    count, heads, size = shape
    right, ours = right_values(seed, count, heads * size)
    assert looks(ours, right, rows=fed(count), heads=heads) == ""
    ours = ours + 10**power * torch.randn_like(right)
    assert looks(ours, right, rows=fed(count), heads=heads) == ""
    right[:, 3] *= 500
    in_proportion = right * (1 + min(10**power, 0.1) * torch.randn_like(right))
    assert "channel" not in looks(in_proportion, right, rows=fed(count), heads=heads)


def part_of(x, change, heads=slice(None), channels=slice(None)):
    x[:, heads, channels] = change(x[:, heads, channels])
    return x


def in_int8(x):
    scale = x.flatten(1).abs().amax(1)[:, None, None] / 127
    return (x / scale).round() * scale


# What is planted in rows by heads [count, heads, size], and how the phrase begins; {n} rows, {h} heads
PLANTED = {
    "one factor": (lambda x: x * 3**-0.5, "a factor of 0.577 at {n} of {n} rows"),
    "a half": (lambda x: x * 0.5, "a factor of 0.5 at"),
    "the sign": (lambda x: -x, "the sign is flipped at {n} of {n} rows"),
    "a factor of each row": (lambda x: x * (0.5 + torch.rand(len(x), 1, 1) * 2), "a different factor in each row ("),
    "a factor of each head": (
        lambda x: x * torch.linspace(0.3, 0.9, x.shape[1])[:, None],
        "a different factor in each head (0.3 to 0.9)",
    ),
    "one head": (lambda x: part_of(x, torch.zeros_like, heads=1), "only in head 1 of {h}, the other"),
    "half of each head": (lambda x: part_of(x, torch.neg, channels=slice(x.shape[2] // 2, None)), "only in channels "),
    "halves of each head": (lambda x: x.roll(x.shape[2] // 2, 2), "the halves are swapped in each head at {n} of {n}"),
    "one row for all": (lambda x: x[:1].expand_as(x), "the row of position 30 is at"),
    "a position late": (lambda x: x.roll(1, 0), "each row is the row of the position 1 before, at"),
    "the same vector": (lambda x: x + torch.randn(1, *x.shape[1:]), "the same vector is added at {n} of {n} rows"),
    "int8": (in_int8, "rounded to int8 with a scale per row:"),
    "float8": (lambda x: x.to(torch.float8_e4m3fn).float(), "rounded to float8_e4m3fn:"),
    "bfloat16 in one head": (
        lambda x: part_of(x, lambda part: part.bfloat16().float(), heads=0),
        "only in head 0 of {h}",
    ),
}
ROTATED = {  # of rows at positions from 30 on
    "five after": (lambda x, p: rotary(x, p + 5), "rotary of the position 5 after (base 10000) at {n} of {n} rows"),
    "400 before": (lambda x, p: rotary(x, p - 400), "rotary of the position 400 before (base 10000)"),
    "scaled": (lambda x, p: rotary(x, p, scale=0.5), "rotary angles are scaled by 0.5 (base 10000)"),
    "another base": (lambda x, p: rotary(x, p, 500000.0), "rotary of base 500000 instead of 10000"),
    "an odd base": (lambda x, p: rotary(x, p, 500.0), "rotary of base 500 instead of 10000"),
    "none": (lambda x, p: x, "no rotary is applied (base 10000)"),
    "of other positions": (lambda x, p: rotary(x, p + p % 2 + 1), "rotary of other positions at {n}"),
}


def planted(seed, shape, change, turned):
    """What a change of rows by heads looks like; `turned`: the right values are after rotary."""
    count, heads, size = shape
    right, ours = (x.reshape(shape) for x in right_values(seed, count, heads * size))
    positions = torch.arange(count) + FIRST
    right, wrong = (rotary(right, positions), change(ours, positions)) if turned else (right, change(ours.clone()))
    return looks(wrong.reshape(count, -1), right.flatten(1), rows=fed(count, FIRST), heads=heads, allowed=2e-5)


@pytest.mark.parametrize("name", [*PLANTED, *ROTATED])
@given(seed=SEEDS, shape=SHAPES)
@settings(max_examples=8)
def test_a_planted_structure_is_told(name, seed, shape):
    change, begins = (PLANTED | ROTATED)[name]
    phrase = planted(seed, shape, change, name in ROTATED)
    assert begins.format(n=shape[0], h=shape[1]) in phrase, phrase


def test_values_of_tokens_are_told_by_the_tokens_and_not_by_their_places():
    right, ours = right_values(4, 12, 32)
    tokens = torch.stack([torch.randperm(49152)[:32] for _ in range(12)])
    phrase = looks(torch.where(tokens >= 30000, ours * 0.9, ours), right, rows=fed(12), tokens=tokens)
    first = int(tokens[tokens >= 30000].min())
    assert phrase.startswith(f"only tokens from {first:,} on: ")
    assert looks(ours * 0.9, right, rows=fed(12), tokens=tokens).startswith("a factor of 0.9 at 12 of 12 rows")
    assert "channel" not in looks(ours + torch.randn_like(ours), right, rows=fed(12), tokens=tokens)


def test_values_that_are_not_finite():
    right, ours = right_values(1, 20, 32)
    ours[12:, 3] = torch.nan
    phrase = looks(ours, right, rows=fed(20))
    assert phrase == "only behind position 11: 8 of 8 rows, 0 of 12 others: NaN at 8 of 8 rows (3% of their values)"


# Attention's scores


def logs(scores, mask):
    return scores.masked_fill(~mask[:, None, :], -torch.inf).log_softmax(2)


# By how the scores [rows, heads, keys] are changed, and what the phrase begins with; {n} rows
SCORES = {
    "a factor of 1/sqrt(3)": (
        lambda s: s * 3**-0.5,
        "scores differ: a factor of 0.577 at {n} of {n} rows",
    ),
    "in one head": (lambda s: part_of(s, lambda x: 2 * x, heads=1), "only in head 1 of {h}"),
    "of each head": (
        lambda s: s * torch.linspace(0.5, 0.9, s.shape[1])[:, None],
        "scores differ: a different factor in each head (0.5 to 0.9)",
    ),
    "of some keys": (
        lambda s: part_of(s, lambda x: x + torch.randn_like(x), channels=slice(7, 11)),
        "scores differ: only in keys 7 to 10 of",
    ),
}
MASKS = {  # and of the mask, by distances [rows, keys]
    "a window too narrow": (
        lambda d: d < WINDOW - 1,
        f"weight 0 at the position {WINDOW - 1} before ({{n}} of {{n}} rows), where the reference has weight",
    ),
    "a window too wide": (
        lambda d: d < WINDOW + 2,
        f"weight at positions {WINDOW} to {WINDOW + 1} before ({{n}} of {{n}} rows)",
    ),
    "without itself": (lambda d: (d < WINDOW) & (d != 0), "weight 0 at each row's own position ({n} of {n} rows)"),
    "later ones": (lambda d: d < WINDOW, "weight at later positions ("),
}


@pytest.mark.parametrize("name", [*SCORES, *MASKS, "noise", "bfloat16", "some keys unseen", "a sink"])
@given(seed=SEEDS, shape=SHAPES)
@settings(max_examples=8)
def test_scores(name, seed, shape):
    count, heads, _ = shape
    torch.manual_seed(seed)
    scores = torch.randn(count, heads, count + 20) * 2
    distances = torch.arange(count)[:, None] + 20 - torch.arange(count + 20)[None, :]
    mask = distances >= 0
    narrow = mask & (distances < WINDOW)
    right, begins = logs(scores, mask), ""
    if name in SCORES:
        change, begins = SCORES[name]
        ours = logs(change(scores.clone()), mask)
    elif name in MASKS:
        change, begins = MASKS[name]
        ours, right = logs(scores, change(distances) & (mask | (name == "later ones"))), logs(scores, narrow)
    elif name == "noise":
        ours = logs(scores + 0.1 * torch.randn_like(scores), mask)
    elif name == "bfloat16":
        ours, begins = right.exp().bfloat16().float().log(), "the weights are rounded to bfloat16"
    elif name == "a sink":
        ours, begins = right, "the weights of a row sum to 1 where"
        sink = torch.cat([scores.masked_fill(~mask[:, None], -torch.inf), torch.full((count, heads, 1), 2.0)], 2)
        right = sink.log_softmax(2)[..., :-1]
    else:
        ours = logs(scores, mask & (torch.arange(count + 20) // 4 != 1))
        begins = "weight 0 at positions 4 to 7 ({n} of {n} rows)"
    phrase = looks_of_scores(ours, right, rows=fed(count, 20), keys=fed(count + 20))
    assert begins.format(n=count, h=heads) in phrase, phrase
    assert begins or not phrase, phrase
