"""What follows from the declarations of a record's fields."""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeAliasType

from specscope.trace.record.aggregate import Sampled
from specscope.trace.record.records import Verdict
from specscope.trace.wire.codec import unaliased, wired

Scalar = TypeVar("Scalar", bound=np.generic)
AsOfNumpy25 = TypeAliasType("AsOfNumpy25", np.ndarray[tuple[Any, ...], np.dtype[Scalar]], type_params=(Scalar,))


def test_an_array_is_one_where_numpy_declares_it_as_an_alias_and_other_types_stay_what_they_are():
    for dtype in (np.int32, np.float32, np.bool_):
        assert unaliased(AsOfNumpy25[dtype]) == np.ndarray[tuple[Any, ...], np.dtype[dtype]]
    for kind in (int, str | None, tuple[int, ...], np.ndarray, np.ndarray[tuple[Any, ...], np.dtype[np.int32]]):
        assert unaliased(kind) == kind
    assert unaliased(NDArray[np.int32]) == np.ndarray[tuple[Any, ...], np.dtype[np.int32]]


def test_a_float_with_bounds_is_not_any_float():
    """Whole numbers are bounds too, and 0 is one: a share lies between 0 and 1."""
    [ratio] = [field for field in wired(Sampled) if field.name == "ratio"]
    assert not ratio.is_any_float
    assert {field.is_any_float for field in wired(Verdict) if field.is_float} == {True}
