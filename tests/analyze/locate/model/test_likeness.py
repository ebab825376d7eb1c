"""Each planted structure is recognised over random sizes; differences without structure are not taken for any."""

import pytest
import torch
from hypothesis import assume, given, settings
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


@given(SEEDS, SHAPES)
@settings(max_examples=30)
def test_what_agrees_looks_like_nothing(seed, shape):
    count, heads, size = shape
    right, ours = right_values(seed, count, heads * size)
    assert looks(ours, right, rows=fed(count), heads=heads) == ""


@given(SEEDS, SHAPES, st.floats(-2.5, 1))  # all rows lie far above what is allowed: no place is told
@settings(max_examples=60)
def test_differences_without_structure_are_noise_or_nothing(seed, shape, power):
    count, heads, size = shape
    right, ours = right_values(seed, count, heads * size)
    ours = ours + 10**power * torch.randn_like(right)
    phrase = looks(ours, right, rows=fed(count), heads=heads, others=torch.randn(20, heads * size))
    assert phrase == "" or phrase.startswith("noise of the size of")


@given(
    SEEDS, SHAPES, st.sampled_from([(3**-0.5, "= 1/sqrt(3)"), (0.5, "= 1/2"), (2.0, "factor of 2 "), (1.37, "1.37")])
)
@settings(max_examples=30)
def test_a_factor(seed, shape, planted):
    count, heads, size = shape
    right, ours = right_values(seed, count, heads * size)
    phrase = looks(ours * planted[0], right, rows=fed(count), heads=heads)
    assert phrase.startswith("a factor of")
    assert planted[1] in phrase
    assert f"at {count} of {count} rows" in phrase


@given(SEEDS, SHAPES, st.data())
@settings(max_examples=30)
def test_one_head(seed, shape, data):
    count, heads, size = shape
    right, ours = right_values(seed, count, heads * size)
    head = data.draw(st.integers(0, heads - 1))
    ours.reshape(count, heads, size)[:, head] = 0
    phrase = looks(ours, right, rows=fed(count), heads=heads)
    assert phrase.startswith(f"only in head {head} of {heads}")
    assert f"all zero at {count} of {count} rows" in phrase


@given(SEEDS, SHAPES, st.data())
@settings(max_examples=30)
def test_a_prefix_that_is_right(seed, shape, data):
    count, heads, size = shape
    right, ours = right_values(seed, count, heads * size)
    end = data.draw(st.integers(1, count - 2))
    ours[end:] = torch.randn(count - end, heads * size)
    phrase = looks(ours, right, rows=fed(count, 5), heads=heads)
    assert phrase.startswith(f"right up to position {end + 4}, wrong from {end + 5} on: {count - end} of {count - end}")


@given(SEEDS, st.integers(6, 40))
def test_only_tree_nodes(seed, count):
    right, ours = right_values(seed, count, 64)
    rows = [*fed(count - 3), *(FedRow(count - 3, 7, node) for node in range(3))]
    ours[-3:] *= -1
    phrase = looks(ours, right, rows=rows)
    assert (
        phrase == f"only at tree nodes: 3 of 3, 0 of {count - 3} rows of the text: the sign is flipped at 3 of 3 rows"
    )


def test_only_one_expert():
    right, ours = right_values(3, 241, 64)
    experts = torch.stack([torch.arange(241) % 3, 3 + torch.arange(241) % 5], 1)
    takes = (experts == 4).any(1)
    ours[takes] = torch.randn(int(takes.sum()), 64)
    phrase = looks(ours, right, rows=[FedRow(place // 2, place) for place in range(241)], groups={"expert": experts})
    assert (
        phrase == f"only rows of expert 4: {int(takes.sum())} of {int(takes.sum())}, 0 of {int((~takes).sum())} others"
    )


def test_only_one_token_and_every_kth_position_and_a_stretch():
    right, ours = right_values(3, 40, 64)
    rows = [FedRow(place, 77 if place in (3, 8, 30) else place) for place in range(40)]
    wrong = ours.clone()
    wrong[[3, 8, 30]] += torch.randn(3, 64)
    assert looks(wrong, right, rows=rows) == "only rows of token 77: 3 of 3, 0 of 37 others"
    wrong = ours.clone()
    wrong[1::4] += torch.randn(10, 64)
    assert looks(wrong, right, rows=fed(40)) == "only at every 4th position (1, 5, ...): 10 of 10 rows"
    wrong = ours.clone()
    wrong[16:32] += torch.randn(16, 64)
    assert looks(wrong, right, rows=fed(40)) == "only at positions 16 to 31: 16 of 16 rows, 0 of 24 others"
    wrong = ours.clone()
    wrong[17] += torch.randn(64)
    assert looks(wrong, right, rows=fed(40)) == "only at position 17 (1 of 40 rows)"


def test_a_range_of_channels_half_of_each_head_and_even_ones():
    right, ours = right_values(3, 37, 4 * 32)
    wrong = ours.clone()
    wrong[:, 30:64] += torch.randn(37, 34)
    assert looks(wrong, right, rows=fed(37)) == "only in channels 30 to 63 of 128"
    wrong = ours.clone()
    wrong.reshape(37, 4, 32)[..., 16:] *= -1
    phrase = looks(wrong, right, rows=fed(37), heads=4)
    assert phrase == "only in the second half (channels 16 to 31) of each head: the sign is flipped at 37 of 37 rows"
    wrong = ours.clone()
    wrong[:, ::2] *= 3
    assert looks(wrong, right, rows=fed(37)) == "only in the even channels: a factor of 3 at 37 of 37 rows"
    wrong = ours.clone()
    wrong[:, 5] += torch.randn(37)
    assert looks(wrong, right, rows=fed(37)) == "only in channel 5 of 128"


@given(SEEDS, SHAPES)
@settings(max_examples=20)
def test_factors_of_rows_heads_channels_and_norms(seed, shape):
    count, heads, size = shape
    right, ours = right_values(seed, count, heads * size)
    rows, every = fed(count), f"at {count} of {count} rows"
    of_rows = 0.5 + torch.rand(count, 1) * 2
    assert looks(ours * of_rows, right, rows=rows).startswith("a factor of its own in each row (")
    of_heads = torch.tensor([0.3 + 0.2 * head + 1e-2 for head in range(heads)]).repeat_interleave(size)
    assert "a factor of its own in each head (" in looks(ours * of_heads, right, rows=rows, heads=heads)
    of_channels = 1.5 + torch.rand(heads * size)
    assert looks(ours * of_channels, right, rows=rows) == f"a factor of its own in each channel {every}"
    assert "as of a norm that is left out" in looks(ours * of_channels * of_rows, right, rows=rows)


@given(SEEDS, SHAPES)
@settings(max_examples=20)
def test_a_vector_added(seed, shape):
    count, heads, size = shape
    right, ours = right_values(seed, count, heads * size)
    bias, rows = torch.randn(heads * size), fed(count)
    assert looks(ours + bias, right, rows=rows).startswith(f"the same vector is added at {count} of {count} rows")
    known = {"the bias": bias, "the input": torch.randn_like(right)}
    assert looks(ours + bias, right, rows=rows, vectors=known).startswith("the bias is added once more at")
    assert looks(ours - bias, right, rows=rows, vectors=known).startswith("the bias is missing at")
    assert looks(ours - known["the input"], right, rows=rows, vectors=known).startswith("the input is missing at")
    assert looks(known["the input"], right, rows=rows, vectors=known).startswith("equal to the input at")


@given(SEEDS, SHAPES, st.integers(-3, 3).filter(bool))
@settings(max_examples=30)
def test_rows_of_other_positions(seed, shape, step):
    count, heads, size = shape
    right, ours = right_values(seed, count, heads * size)
    rows = fed(count)
    side = f"{abs(step)} {'before' if step > 0 else 'after'}"
    phrase = looks(ours.roll(step, 0), right, rows=rows, heads=heads)
    assert f"each row is that of the position {side}, at {count - abs(step)} of {count - abs(step)} rows" in phrase
    assert "the row of position 0 stands" in looks(ours[:1].expand_as(right), right, rows=rows, heads=heads)
    order = torch.randperm(count)
    assume(len((order - torch.arange(count)).unique()) > 4 and int((order == torch.arange(count)).sum()) == 0)
    assert f"rows are permuted at {count} of {count} rows" in looks(ours[order], right, rows=rows, heads=heads)
    others = torch.randn_like(right)
    phrase = looks(others, right, rows=rows, others=others, heads=heads)
    assert phrase == f"rows of the others given stand at {count} of {count} rows"


@given(SEEDS, SHAPES)
@settings(max_examples=20)
def test_channels_of_other_places(seed, shape):
    count, heads, size = shape
    right, ours = right_values(seed, count, heads * size)
    of_heads, rows, every = ours.reshape(count, heads, size), fed(count), f"at {count} of {count} rows"
    swapped = of_heads.roll(size // 2, 2).reshape(count, -1)
    assert looks(swapped, right, rows=rows, heads=heads) == f"the halves are swapped in each head {every}"
    moved = of_heads[:, torch.arange(heads).roll(1)].reshape(count, -1)
    assert f"heads are of other places {every} (head 0 has that of head {heads - 1}" in looks(
        moved, right, rows=rows, heads=heads
    )
    shared = of_heads.clone()
    shared[:, 1] = of_heads[:, 0]
    assert "(head 1 has that of head 0)" in looks(shared.reshape(count, -1), right, rows=rows, heads=heads)
    order = torch.randperm(heads * size)
    assert f"channels are permuted {every}" in looks(ours[:, order], right, rows=rows)


@given(SEEDS, SHAPES, st.integers(-500, 500).filter(bool), st.sampled_from([10000.0, 500000.0, 1000000.0]))
@settings(max_examples=30)
def test_rotary_of_another_position(seed, shape, off, base):
    count, heads, size = shape
    values, again = right_values(seed, count, heads * size)
    positions = torch.arange(count) + 600
    right = rotary(values, positions, base, heads)
    ours = rotary(again, positions + off, base, heads)
    side = f"{abs(off)} {'after' if off > 0 else 'before'}"
    phrase = looks(ours, right, rows=fed(count, 600), heads=heads)
    assert phrase == f"rotary as of the position {side} (base {base:g}) at {count} of {count} rows"


@given(SEEDS, SHAPES, st.sampled_from([0.25, 0.5, 0.9, 1.5]), st.integers(0, 300))
@settings(max_examples=30)
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


def test_rotary_scaled_past_a_position():
    values, again = right_values(4, 128, 9 * 64)
    positions = torch.arange(128)
    right = rotary(values, positions, heads=9)
    scaled = torch.where(positions < 96, positions.double(), positions * 0.5)
    phrase = looks(rotary(again, scaled, heads=9), right, rows=fed(128), heads=9)
    assert phrase.startswith(
        "right up to position 95, wrong from 96 on: 32 of 32 rows: rotary angles are scaled by 0.5"
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16])
@given(seed=SEEDS, shape=SHAPES)
@settings(max_examples=15)
def test_rounded_to_a_dtype(dtype, seed, shape):
    count, heads, size = shape
    right, ours = right_values(seed, count, heads * size)
    name = str(dtype).removeprefix("torch.")
    phrase = looks(ours.to(dtype).float(), right, rows=fed(count), heads=heads, allowed=2e-5)
    assert phrase.startswith(f"rounded to {name}:")
    assert f"at {count} rows" in phrase
    part = ours.clone().reshape(count, heads, size)
    part[:, 0] = part[:, 0].to(dtype).float()
    phrase = looks(part.reshape(count, -1), right, rows=fed(count), heads=heads, allowed=2e-5)
    assert phrase.startswith(f"only in head 0 of {heads}")
    assert f"rounded to {name}:" in phrase


@given(SEEDS, SHAPES)
@settings(max_examples=15)
def test_rounded_with_a_scale(seed, shape):
    count, heads, size = shape
    right, ours = right_values(seed, count, heads * size)
    scale = ours.abs().amax(1, keepdim=True) / 127
    phrase = looks((ours / scale).round() * scale, right, rows=fed(count), heads=heads)
    assert phrase.startswith("rounded to int8 with a scale of each row:")
    scale = ours.abs().max() / 448
    phrase = looks((ours / scale).to(torch.float8_e4m3fn).float() * scale, right, rows=fed(count), heads=heads)
    assert phrase.startswith("rounded to float8_e4m3fn with one scale:")


def test_a_product_in_bfloat16_is_noise_of_its_size():
    torch.manual_seed(1)
    values, weight = torch.randn(64, 256), torch.randn(256, 128) / 16
    ours = (values.bfloat16().float() @ weight.bfloat16().float()) * 1.0
    assert "noise of the size of bfloat16's rounding" in looks(ours, values @ weight, rows=fed(64))


def test_values_that_are_not_finite():
    right, ours = right_values(1, 20, 32)
    ours[12:, 3] = torch.nan
    phrase = looks(ours, right, rows=fed(20))
    assert phrase == "right up to position 11, wrong from 12 on: 8 of 8 rows: NaN at 8 of 8 rows (3% of their values)"


@given(SEEDS, st.integers(0, 5), st.integers(0, 5), st.integers(0, 4))
def test_odd_shapes_say_something_or_nothing(seed, count, width, heads):
    torch.manual_seed(seed)
    ours, right = torch.randn(count, width), torch.randn(count, width)
    for side in (ours, torch.zeros_like(ours), right * 2, right.flip(0)):
        assert isinstance(looks(side, right, rows=fed(count), heads=heads, others=torch.randn(2, 3)), str)
        assert isinstance(looks(right, side, rows=fed(count), heads=heads), str)
    assert looks(ours, right, rows=fed(count + 1)) == ""
    assert looks(ours[None], right, rows=fed(count)) == ""


def test_relative_errors_of_rows_near_zero():
    right = torch.ones(11, 8)
    right[3] = 1e-9
    ours = right.clone()
    ours[3] += 1e-7
    ours[5, 4:] = 2
    errors = relative_errors(ours, right, 2)
    assert errors.shape == (11, 2)
    assert float(errors[3].max()) < 1e-5
    assert errors[5].tolist() == [0, 1]
    assert relative_errors(torch.full((1, 4), -torch.inf), torch.full((1, 4), -torch.inf)).item() == 0
    assert relative_errors(torch.full((1, 4), torch.nan), torch.ones(1, 4)).item() == torch.inf


@given(SEEDS, SHAPES, st.floats(-3, -1))
@settings(max_examples=20)
def test_rounding_in_proportion_under_one_large_channel_is_of_no_channel(seed, shape, power):
    count, heads, size = shape
    right, _ = right_values(seed, count, heads * size)
    right[:, 3] *= 500
    ours = right * (1 + 10**power * torch.randn_like(right))
    assert "channel" not in looks(ours, right, rows=fed(count), heads=heads)


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
    assert phrase.startswith(
        "rotary as of other positions (position 90 as 92, position 91 as 93, position 91 as 94, ..."
    )
