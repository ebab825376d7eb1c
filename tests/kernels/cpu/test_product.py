"""Products from panels against float64, whatever rows, widths, threads and bias; a row's result depends on no other."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specscope.kernels.cpu.product import PANEL, Panels
from specscope.kernels.cpu.tiles import PAIRED
from tests.kernels.cpu.threads import threads

KINDS = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
LARGE = 1000.0  # a bias, beside the sum that it is added to
SIZES = st.tuples(st.integers(1, 40), st.integers(1, 70), st.integers(1, 7))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(SIZES, st.one_of(KINDS, st.just("pairs")) if PAIRED else KINDS, st.booleans(), st.integers(1, 3))
def test_a_product_is_float64s(sizes, kind, bias, count):
    """Pairs of bfloat16 too, where the processor multiplies them: x is rounded as well."""
    (rows, length, panels), pairs = sizes, kind == "pairs"
    kind = torch.bfloat16 if pairs else kind
    weight, x = random(PANEL * panels, length).to(kind).float(), random(rows, length, seed=2)
    x = x.bfloat16().float() if pairs else x
    start = LARGE * random(PANEL * panels, seed=1) if bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if start is None else start.double())
    with threads(count):
        product = Panels.of(weight, start, kind, pairs=pairs)
        got = product(x)
    assert product.pairs == (pairs and length % 2 == 0)
    assert got.shape == exact.shape
    terms = x.double().abs() @ weight.double().abs().T  # a bias is added to their sum, and rounds no term
    assert ((got - exact).abs() <= torch.finfo(torch.float32).eps * ((length + 2) * terms + exact.abs())).all()
