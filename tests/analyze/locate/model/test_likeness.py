"""Each planted structure is recognised over random sizes; differences without structure are not taken for any."""

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.analyze.locate.located import FedRow
from specscope.analyze.locate.model.block import relative_errors
from specscope.analyze.locate.model.likeness import looks

SEEDS = st.integers(0, 10**6)
SHAPES = st.tuples(st.integers(8, 48), st.integers(2, 9), st.sampled_from([16, 32, 64]))


def fed(count, first=0):
    return [FedRow(first + place, 1000 + place) for place in range(count)]


def right_values(seed, count, width):
    """With the jitter that another order of summation leaves."""
    torch.manual_seed(seed)
    right = torch.randn(count, width) * torch.rand(count, 1).add(0.5)
    return right, right * (1 + 1e-6 * torch.randn(count, width))


def rotary(values, positions, base=10000.0, heads=1, scale=1.0):
    """Rotary embedding by halves of each head, in double precision."""
    count, width = values.shape
    size = width // heads
    speeds = base ** (-torch.arange(size // 2).double() * 2 / size)
    angles = (torch.as_tensor(positions).double() * scale)[:, None] * speeds
    turned = values.double().reshape(count, heads, size)
    low, high = turned[..., : size // 2], turned[..., size // 2 :]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([low * cos - high * sin, low * sin + high * cos], -1).reshape(count, width).float()


@given(SEEDS, SHAPES, st.floats(-2.5, 1))  # all rows lie far above what is allowed: no place is told
@settings(max_examples=60)
def test_what_agrees_looks_like_nothing_and_noise_like_noise_or_nothing(seed, shape, power):
    count, heads, size = shape
    right, ours = right_values(seed, count, heads * size)
    assert looks(ours, right, rows=fed(count), heads=heads) == ""
    ours = ours + 10**power * torch.randn_like(right)
    phrase = looks(ours, right, rows=fed(count), heads=heads, others=torch.randn(20, heads * size))
    assert phrase == "" or phrase.startswith("noise of the size of")


def head_of_zeros(x):
    x[:, 1] = 0
    return x


# What is planted in rows by heads [count, heads, size], and how the phrase begins; {n} rows, {h} heads
PLANTED = {
    "one factor": (lambda x: x * 3**-0.5, "a factor of 0.577 = 1/sqrt(3) at {n} of {n} rows"),
    "a half": (lambda x: x * 0.5, "a factor of 0.5 = 1/2 at"),
    "the sign": (lambda x: -x, "the sign is flipped at {n} of {n} rows"),
    "a factor of each row": (lambda x: x * (0.5 + torch.rand(len(x), 1, 1) * 2), "a factor of its own in each row ("),
    "a factor of each head": (
        lambda x: x * torch.linspace(0.3, 0.9, x.shape[1])[:, None],
        "a factor of its own in each head (0.3 to 0.9)",
    ),
    "one head": (head_of_zeros, "only in head 1 of {h}, the other"),
    "half of each head": (
        lambda x: torch.cat([x[..., : x.shape[2] // 2], -x[..., x.shape[2] // 2 :]], 2),
        "only in the second half (channels",
    ),
    "halves of each head": (lambda x: x.roll(x.shape[2] // 2, 2), "the halves are swapped in each head at {n} of {n}"),
    "other heads": (
        lambda x: x[:, torch.arange(x.shape[1]).roll(1)],
        "heads are of other places at {n} of {n} rows (head 0 has that of head",
    ),
    "one row for all": (lambda x: x[:1].expand_as(x), "right up to position"),
    "nodes": (lambda x: x.roll(1, 0), "each row is that of the position 1 before, at"),
    "the same vector": (lambda x: x + torch.randn(1, *x.shape[1:]), "the same vector is added at {n} of {n} rows"),
    "int8": (
        lambda x: (x / x.abs().amax((1, 2), keepdim=True) * 127).round() * x.abs().amax((1, 2), keepdim=True) / 127,
        "rounded to int8 with a scale of each row:",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
@given(seed=SEEDS, shape=SHAPES)
@settings(max_examples=8)
def test_a_planted_structure_is_told(name, seed, shape):
    count, heads, size = shape
    right, ours = right_values(seed, count, heads * size)
    change, begins = PLANTED[name]
    wrong = change(ours.reshape(count, heads, size).clone()).reshape(count, -1)
    phrase = looks(wrong, right, rows=fed(count), heads=heads)
    begins = begins.format(n=count, h=heads)
    assert begins in phrase or (name == "one row for all" and "the row of position 0 stands" in phrase), phrase


@pytest.mark.parametrize("count", [1, 2, 20])
@pytest.mark.parametrize("order", [(1, 0), *list(permutations(range(3)))[1:]])
def test_parts_of_a_row_in_another_order(count, order):
    right, ours = right_values(5, count, 3 * 64)
    moved = torch.cat([ours.chunk(len(order), 1)[part] for part in order], 1)
    phrase = looks(moved, right, rows=fed(count))
    wanted = "the halves are swapped" if len(order) == 2 else f"stand in the order {', '.join(map(str, order))}"
    assert wanted in phrase
    assert "rotat" not in phrase


def rows_of(wrong, **named):
    """40 rows of which some are noise."""
    right, ours = right_values(3, 40, 64)
    ours[wrong] += torch.randn_like(ours[wrong])
    return looks(ours, right, **{"rows": fed(40), **named})


def test_which_rows_differ():
    assert rows_of(slice(12, None)) == "right up to position 11, wrong from 12 on: 28 of 28 rows"
    assert rows_of(slice(16, 32)) == "only at positions 16 to 31: 16 of 16 rows, 0 of 24 others"
    assert rows_of(slice(1, None, 4)) == "only at every 4th position (1, 5, ...): 10 of 10 rows"
    assert rows_of(17) == "only at position 17 (1 of 40 rows)"
    tokens = [FedRow(place, 77 if place in (3, 8, 30) else place) for place in range(40)]
    assert rows_of([3, 8, 30], rows=tokens) == "only rows of token 77: 3 of 3, 0 of 37 others"
    nodes = [*fed(37), *(FedRow(37, 7, node) for node in range(3))]
    assert rows_of(slice(37, None), rows=nodes) == "only at tree nodes: 3 of 3, 0 of 37 rows of the text"
    experts = torch.stack([torch.arange(40) % 3, 3 + torch.arange(40) % 5], 1)
    takes = (experts == 4).any(1)
    phrase = rows_of(takes, rows=[FedRow(place // 2, place) for place in range(40)], groups={"expert": experts})
    assert phrase == "only rows of expert 4: 8 of 8, 0 of 32 others"


def test_which_channels_differ():
    right, ours = right_values(3, 37, 4 * 32)
    wrong = ours.clone()
    wrong[:, 30:64] += torch.randn(37, 34)
    assert looks(wrong, right, rows=fed(37)) == "only in channels 30 to 63 of 128"
    wrong = ours.clone()
    wrong[:, ::2] *= 3
    assert looks(wrong, right, rows=fed(37)) == "only in the even channels: a factor of 3 at 37 of 37 rows"
    wrong = ours.clone()
    wrong[:, 5] += torch.randn(37)
    assert looks(wrong, right, rows=fed(37)) == "only in channel 5 of 128"
    wrong[:, 3:] = wrong[:, torch.randperm(125) + 3]
    assert "channels are permuted" in looks(right[:, torch.randperm(128)], right, rows=fed(37))


def test_values_of_tokens_are_told_by_the_tokens_and_not_by_their_places():
    right, ours = right_values(4, 12, 32)
    tokens = torch.stack([torch.randperm(49152)[:32] for _ in range(12)])
    phrase = looks(torch.where(tokens >= 30000, ours * 0.9, ours), right, rows=fed(12), tokens=tokens)
    first = int(tokens[tokens >= 30000].min())
    assert phrase.startswith(f"only tokens from {first:,} on: ")
    assert looks(ours * 0.9, right, rows=fed(12), tokens=tokens).startswith("a factor of 0.9 at 12 of 12 rows")
    assert "channel" not in looks(ours + torch.randn_like(ours), right, rows=fed(12), tokens=tokens)


@given(SEEDS, SHAPES)
@settings(max_examples=15)
def test_known_vectors_and_rows_of_others(seed, shape):
    count, heads, size = shape
    right, ours = right_values(seed, count, heads * size)
    bias, rows = torch.randn(heads * size), fed(count)
    known = {"the bias": bias, "the input": torch.randn_like(right)}
    for wrong, begins in (
        (ours + bias, "the bias is added once more at"),
        (ours - bias, "the bias is missing at"),
        (ours - known["the input"], "the input is missing at"),
        (known["the input"], "equal to the input at"),
    ):
        assert looks(wrong, right, rows=rows, vectors=known).startswith(begins)
    others = torch.randn_like(right)
    phrase = looks(others, right, rows=rows, others=others, heads=heads)
    assert phrase == f"rows of the others given stand at {count} of {count} rows"


@given(SEEDS, SHAPES, st.integers(-500, 500).filter(bool), st.sampled_from([10000.0, 500000.0, 1000000.0]))
@settings(max_examples=20)
def test_rotary_of_another_position(seed, shape, off, base):
    count, heads, size = shape
    values, again = right_values(seed, count, heads * size)
    positions = torch.arange(count) + 600
    right = rotary(values, positions, base, heads)
    phrase = looks(rotary(again, positions + off, base, heads), right, rows=fed(count, 600), heads=heads)
    side = f"{abs(off)} {'after' if off > 0 else 'before'}"
    assert phrase == f"rotary as of the position {side} (base {base:g}) at {count} of {count} rows"


@given(SEEDS, SHAPES, st.sampled_from([0.25, 0.5, 0.9, 1.5]), st.integers(0, 300))
@settings(max_examples=20)
def test_rotary_scaled_left_out_or_of_another_base(seed, shape, scale, first):
    count, heads, size = shape
    values, again = right_values(seed, count, heads * size)
    positions, rows = torch.arange(count) + first, fed(count, first)
    right = rotary(values, positions, heads=heads)
    scaled = looks(rotary(again, positions, heads=heads, scale=scale), right, rows=rows, heads=heads)
    assert f"rotary angles are scaled by {scale:.3g}" in scaled
    assert "no rotary is applied" in looks(again, right, rows=rows, heads=heads)
    other = looks(rotary(again, positions, 500000.0, heads), right, rows=rows, heads=heads)
    assert "rotary of base 500000 in place of 10000" in other


def test_rotary_in_a_part_of_each_head_and_rows_of_a_tree_by_their_order():
    values, again = right_values(1, 40, 4 * 64)
    positions, rows = torch.arange(40) + 30, fed(40, 30)

    def part(side, places):
        heads = side.reshape(40, 4, 64).clone()
        heads[..., :32] = rotary(heads[..., :32].reshape(40, -1), places, heads=4).reshape(40, 4, 32)
        return heads.reshape(40, -1)

    phrase = looks(part(again, positions + 5), part(values, positions), rows=rows, heads=4)
    assert phrase.startswith("rotary as of the position 5 after (base 10000) in the first 32 channels of each head")
    values, again = right_values(2, 5, 256)
    nodes = [FedRow(90 + depth, 5, node) for node, depth in enumerate([0, 1, 1, 2, 2])]
    right = rotary(values, [node.position for node in nodes], heads=4)
    phrase = looks(rotary(again, 92 + torch.arange(5), heads=4), right, rows=nodes, heads=4)
    assert phrase.startswith("rotary as of other positions (position 90 as 92, position 91 as 93, position 91 as 94")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16])
@given(seed=SEEDS, shape=SHAPES)
@settings(max_examples=8)
def test_rounded_to_a_dtype(dtype, seed, shape):
    count, heads, size = shape
    right, ours = right_values(seed, count, heads * size)
    name = str(dtype).removeprefix("torch.")
    phrase = looks(ours.to(dtype).float(), right, rows=fed(count), heads=heads, allowed=2e-5)
    assert phrase.startswith(f"rounded to {name}:")
    part = ours.clone().reshape(count, heads, size)
    part[:, 0] = part[:, 0].to(dtype).float()
    phrase = looks(part.reshape(count, -1), right, rows=fed(count), heads=heads, allowed=2e-5)
    assert phrase.startswith(f"only in head 0 of {heads}")
    assert f"rounded to {name}:" in phrase


def test_a_product_in_bfloat16_and_values_that_are_not_finite():
    torch.manual_seed(1)
    values, weight = torch.randn(64, 256), torch.randn(256, 128) / 16
    ours = values.bfloat16().float() @ weight.bfloat16().float()
    assert "noise of the size of bfloat16's rounding" in looks(ours, values @ weight, rows=fed(64))
    right, ours = right_values(1, 20, 32)
    ours[12:, 3] = torch.nan
    phrase = looks(ours, right, rows=fed(20))
    assert phrase == "right up to position 11, wrong from 12 on: 8 of 8 rows: NaN at 8 of 8 rows (3% of their values)"


@given(SEEDS, SHAPES, st.floats(-3, -1))
@settings(max_examples=10)
def test_rounding_in_proportion_under_one_large_channel_is_of_no_channel(seed, shape, power):
    count, heads, size = shape
    right, _ = right_values(seed, count, heads * size)
    right[:, 3] *= 500
    ours = right * (1 + 10**power * torch.randn_like(right))
    assert "channel" not in looks(ours, right, rows=fed(count), heads=heads)


@given(SEEDS, st.integers(0, 5), st.integers(0, 5), st.integers(0, 4))
def test_odd_shapes_say_something_or_nothing(seed, count, width, heads):
    torch.manual_seed(seed)
    ours, right = torch.randn(count, width), torch.randn(count, width)
    for side in (ours, torch.zeros_like(ours), right * 2, right.flip(0)):
        assert isinstance(looks(side, right, rows=fed(count), heads=heads, others=torch.randn(2, 3)), str)
        assert isinstance(looks(right, side, rows=fed(count), heads=heads), str)
    assert looks(ours, right, rows=fed(count + 1)) == looks(ours[None], right, rows=fed(count)) == ""


def test_relative_errors_of_rows_near_zero():
    right = torch.ones(11, 8)
    right[3] = 1e-9
    ours = right.clone()
    ours[3] += 1e-7
    ours[5, 4:] = 2
    errors = relative_errors(ours, right, 2)
    assert float(errors[3].max()) < 1e-5
    assert errors[5].tolist() == [0, 1]
    assert relative_errors(torch.full((1, 4), -torch.inf), torch.full((1, 4), -torch.inf)).item() == 0
    assert relative_errors(torch.full((1, 4), torch.nan), torch.ones(1, 4)).item() == torch.inf
