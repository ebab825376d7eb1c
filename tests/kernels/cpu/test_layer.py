"""A compiled layer against float64, over ragged batches, trees, windows, scattered blocks and any number of threads."""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specscope.kernels.cpu.flat_batch import PART, FlatBatch
from specscope.kernels.cpu.layer import CompiledLayers, LayerParts, Norm
from specscope.kernels.cpu.product import Panels
from specscope.kernels.cpu.tiles import LANES, PAIRED
from specscope.kernels.tree_batch import BLOCK_SIZE, Part

BLOCKS = 80
UNUSED = float("nan")  # in slots that no row may see


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class Case:
    """A layer, a batch and what goes in."""

    parts: LayerParts
    weights: dict  # float64, by name
    batch: list  # Part
    slots: np.ndarray
    x: torch.Tensor
    projected: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    store: torch.Tensor

    def run(self):
        """(what comes out, the cache behind it)."""
        store = self.store.clone()
        slabs = FlatBatch.slabs(self.batch, self.slots)
        return CompiledLayers([self.parts])(self.x, self.projected, self.cos, self.sin, slabs, [store])[0], store

    def alone(self, part, rows):
        """These rows of one sequence, without the others."""
        tensors = {name: getattr(self, name)[rows] for name in ("slots", "x", "cos", "sin")}
        return replace(self, batch=[part], **tensors).run()[0]


def make(seed, *, heads=6, kv_heads=2, size=16, halves=False, sequences=((3, 40, 2),), window=None, **options):
    """sequences: fed rows, context, further slots of the window before the fed rows' own."""
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    width, inner = 48, 64
    dtype = options.get("dtype", torch.float32)
    kind = torch.float16 if halves else dtype
    joined = width * (2 if options.get("projected") else 1)
    weights = {
        "qkv": random((heads + 2 * kv_heads) * size, joined),
        "out": random(width, heads * size),
        "gate_up": random(2 * inner, width),
        "down": random(width, inner),
    }
    weights = {name: (w * 0.3).to(kind).float() for name, w in weights.items()}
    biases = {name: random(len(w)) if options.get("bias") else None for name, w in weights.items()}
    norms = [Norm.of(random(n), eps) for n, eps in ((width, 1e-5), (width, 1e-3), (size, 1e-6), (size, 1e-2))]
    products = {
        name: Panels.of(w, biases[name], kind, pairs=options.get("pairs", False)) for name, w in weights.items()
    }
    parts = LayerParts(
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        scale=size**-0.5,  # as models have it: where scores are far apart, rounding a query tells
        window=window,
        first_norm=None if options.get("projected") else norms[0],
        second_norm=norms[1],
        head_norms=(norms[2], norms[3]) if options.get("head_norms") else None,
        **products,
    )
    rng = np.random.default_rng(seed)
    free = rng.permutation(BLOCKS) if options.get("scattered", True) else np.arange(BLOCKS)
    batch, slots, rows = [], [], []
    store = torch.full((2 * kv_heads, BLOCKS * BLOCK_SIZE, size), UNUSED)
    for fed, context, further in sequences:
        wide = further + fed
        count = -(-(context + wide) // BLOCK_SIZE)
        blocks, free = free[:count], free[count:]
        of = blocks[np.arange(context + wide) // BLOCK_SIZE] * BLOCK_SIZE + np.arange(context + wide) % BLOCK_SIZE
        store[:, of[: context + further]] = random(2 * kv_heads, context + further, size)
        depth = np.cumsum(rng.integers(0, 2, wide))
        mask = rng.random((fed, wide)) < 0.5
        mask[np.arange(fed), further + np.arange(fed)] = True
        mask[:, further:] &= np.tri(fed, dtype=bool)
        batch.append(Part(blocks.tolist(), context, (context + depth).astype(np.int64), mask))
        slots.append(of[context + further :])
        rows.append(context + depth[further:])
    positions = torch.from_numpy(np.concatenate(rows)).float()
    angle = positions[:, None] * (0.1 ** (torch.arange(size // 2) / size))
    cos = torch.cat([angle.cos(), angle.cos()], 1)
    sin = torch.cat([-angle.sin(), angle.sin()], 1)
    if options.get("bias"):  # rows that lie apart
        cos, sin = torch.stack([cos, sin], 1).unbind(1)
    n = len(positions)
    projected = random(n, joined).to(dtype) if options.get("projected") else None
    store, x = store.to(dtype), random(n, width).to(dtype)
    exact = {name: (w.double(), None if biases[name] is None else biases[name].double()) for name, w in weights.items()}
    return Case(parts, exact, batch, np.concatenate(slots), x, projected, cos, sin, store)


def reference(case):
    """(what comes out, the cache behind it) in float64, but for what the cache keeps; row by row."""
    parts, store = case.parts, case.store.double().clone()
    linear = lambda name, x: torch.nn.functional.linear(x, *case.weights[name])  # noqa: E731
    x, cos, sin = case.x.double(), case.cos.double()[:, None], case.sin.double()[:, None]

    def normed(norm, x):
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()

    projected = normed(parts.first_norm, x) if case.projected is None else case.projected.double()
    heads = linear("qkv", projected).unflatten(-1, (-1, parts.size))
    query, key, value = heads.split([parts.heads, parts.kv_heads, parts.kv_heads], dim=1)
    if parts.head_norms is not None:
        query, key = (normed(norm, part) for norm, part in zip(parts.head_norms, (query, key), strict=True))
    turn = lambda part: part * cos + part.roll(parts.size // 2, -1) * sin  # noqa: E731
    query, key = turn(query), turn(key)
    if PAIRED and case.store.dtype is torch.bfloat16 and parts.size % (2 * LANES) == 0:  # multiplied as pairs
        query = query.bfloat16().double()
    kept = torch.cat([key, value], 1).transpose(0, 1)
    store[:, case.slots] = kept.to(case.store.dtype).double()  # as attention finds them
    found, row = [], 0
    for part in case.batch:
        fed, wide = part.mask.shape
        places = np.arange(part.context + wide)
        of = np.array(part.blocks)[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        position = np.concatenate([np.arange(part.context), part.positions])
        for i in range(fed):
            seen = np.concatenate([np.ones(part.context, bool), part.mask[i]])
            if parts.window is not None:
                seen &= position > part.positions[wide - fed + i] - parts.window
            k, v = store[: parts.kv_heads, of[seen]], store[parts.kv_heads :, of[seen]]
            q = query[row].unflatten(0, (parts.kv_heads, -1))
            found.append(((q * parts.scale) @ k.transpose(1, 2)).softmax(-1).matmul(v).flatten())
            row += 1
    x = x + linear("out", torch.stack(found))
    gate, up = linear("gate_up", normed(parts.second_norm, x)).chunk(2, -1)
    return x + linear("down", torch.nn.functional.silu(gate) * up), store


def agrees(case):
    exact, exact_store = reference(case)
    got, store = case.run()
    assert got.dtype is store.dtype is case.x.dtype
    rounded = 4 if case.parts.qkv.pairs else 1  # what enters each product, or what comes out at the end
    most = 1e-5 if got.dtype is torch.float32 else rounded * torch.finfo(got.dtype).eps
    assert (got - exact).norm() <= most * exact.norm()
    assert torch.equal(store.isnan(), exact_store.isnan())
    written = ~exact_store.isnan()
    assert (store[written] - exact_store[written]).norm() <= most * exact_store[written].norm()


LONG = 3 * PART
SEQUENCES = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([0, 1, 15, 16, 17, 100, PART - 1, PART, LONG + 5]), st.integers(0, 4)),
    min_size=1,
    max_size=2,
)


@given(
    seed=st.integers(0, 2**16),
    shape=st.sampled_from([(6, 2, 16), (3, 3, 32), (4, 1, 64), (14, 2, 16), (5, 5, 48)]),
    sequences=SEQUENCES,
    window=st.sampled_from([None, None, 1, 7, 130]),
    kind=st.sampled_from(["float32", "halves", "bfloat16", *(["pairs"] if PAIRED else [])]),
    flags=st.tuples(*[st.booleans()] * 4),
    count=st.integers(1, 3),
)
def test_a_layer_is_float64s(seed, shape, sequences, window, kind, flags, count):
    bias, head_norms, projected, scattered = flags
    heads, kv_heads, size = shape
    with threads(count):
        agrees(
            make(
                seed, heads=heads, kv_heads=kv_heads, size=size, halves=kind == "halves", pairs=kind == "pairs",
                dtype=torch.bfloat16 if kind in ("bfloat16", "pairs") else torch.float32, sequences=sequences,
                window=window, bias=bias, head_norms=head_norms, projected=projected, scattered=scattered,
            )
        )  # fmt: skip


@pytest.mark.parametrize(
    "sequences", [[(40, 30, 3), (1, 100, 0), (37, 0, 0)], [(70, 129, 0)], [(40, 300, 0), (3, 10, 0)]]
)
@pytest.mark.parametrize(("slab", "tall", "found"), [(16, 4, 8192), (10, 10, 40), (32, 32, 8192), (256, 5, 40)])
def test_many_rows_come_out_the_same_however_they_are_cut(monkeypatch, sequences, slab, tall, found):
    """At most so many rows at once, fewer behind long contexts."""
    case = make(7, sequences=sequences)
    agrees(case)
    whole, store = case.run()
    for name, value in (("SLAB", slab), ("TALL", tall), ("FOUND", found)):
        monkeypatch.setattr(f"specscope.kernels.cpu.flat_batch.{name}", value)
    slabs = FlatBatch.slabs(case.batch, case.slots)
    assert len(slabs) > 1 or (slab, found) == (256, 8192)
    assert [one.first for one in slabs] == np.cumsum([0, *(one.rows for one in slabs[:-1])]).tolist()
    assert max(one.rows for one in slabs) <= slab
    assert max(one.partial for one in slabs) <= found or len(max(slabs, key=lambda one: one.partial).segments) == 1
    assert sum(one.rows for one in slabs) == len(case.x)
    got, got_store = case.run()
    assert torch.equal(got, whole)
    assert torch.equal(got_store.nan_to_num(), store.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_and_among_others_on_any_number_of_threads(dtype):
    sequences = [(4, 300, 1), (1, 17, 0), (7, 128, 2)]
    whole = make(3, sequences=sequences, halves=dtype is torch.float32, dtype=dtype, pairs=PAIRED)
    out, store = whole.run()
    row = 0
    for part, (fed, _, _) in zip(whole.batch, sequences, strict=True):
        assert torch.equal(whole.alone(part, slice(row, row + fed)), out[row : row + fed])
        row += fed
    for count in (1, 2, 3):
        with threads(count):
            again, again_store = whole.run()
        assert torch.equal(again, out)
        assert torch.equal(again_store.nan_to_num(), store.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "place"), [(None, 131), (9, 127)])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_only_the_rows_that_see_it(dtype, window, place, wrong):
    """A node's key and value are there for its siblings too, and a window's first for the row behind it."""
    case = make(0, sequences=((6, 130, 3), (2, 20, 1)), window=window, dtype=dtype, size=32)
    part = case.batch[0]
    whole = case.run()[0]
    case.store[:, part.blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE] = wrong
    sees = part.mask[:, place - 130] if place >= 130 else part.positions[3:] - place < window
    sees = torch.from_numpy(np.append(sees, [False, False]))
    assert 0 < sees.sum() < 6
    out = case.run()[0]
    assert not out[sees].isfinite().any()
    assert torch.allclose(out[~sees].float(), whole[~sees].float(), atol=2e-2 if dtype is torch.bfloat16 else 1e-5)
