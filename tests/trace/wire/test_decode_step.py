"""Decode steps are read many at once: what is damaged is said of its own step, and arrays in any form are the same."""

import json
import math
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue
from typing_extensions import TypeAliasType

from specscope.trace.record.privacy import Privacy
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.codec import unaliased
from specscope.trace.wire.otlp_json import ReadSpan, all_elements, elements
from specscope.trace.wire.otlp_proto import LateArray
from specscope.trace.wire.spans import Encoder
from specscope.trace.wire.unspan import Decoder
from tests.trace.samples import records
from tests.trace.strategies import RUN

SPECIAL = {math.inf: "Infinity", -math.inf: "-Infinity"}


def array(values):
    """An array as the official exporter writes it."""
    each = [
        {"intValue": str(value)}
        if isinstance(value, int)
        else {"doubleValue": value if math.isfinite(value) else SPECIAL.get(value, "NaN")}
        for value in values
    ]
    return Raw(json.dumps({"values": each}, separators=(",", ":")).encode())


@given(st.lists(st.lists(st.floats()) | st.none(), max_size=5), st.lists(st.lists(st.integers(0, 9)), max_size=5))
def test_arrays_that_are_read_together_are_what_each_is(floats, ints):
    for is_float, arrays in ((True, floats), (False, ints)):
        raws = [None if each is None else array(each) for each in arrays if each != []]
        values, counts = all_elements(raws, floats=is_float)
        alone = [[] if raw is None else elements(raw) for raw in raws]
        assert counts.tolist() == list(map(len, alone))
        assert json.dumps(values) == json.dumps([value for each in alone for value in each])  # NaN is NaN
        late = [None if each is None else LateArray(proto_array(each)) for each in arrays]
        values, counts = LateArray.all_elements(late, floats=is_float)
        assert counts.tolist() == [len(each or ()) for each in arrays]
        assert json.dumps(values) == json.dumps([value for each in late if each for value in each.elements()])


def proto_array(values):
    name = {float: "double_value", int: "int_value", str: "string_value"}
    return ArrayValue(values=[AnyValue(**{name[type(value)]: value}) for value in values])


@pytest.mark.parametrize("values", [[1, 2], [0.5, 1], ["0.5"], [0.5, "a"]])
def test_an_array_of_protobuf_that_holds_others_is_left_to_the_one_that_reads_any(values):
    late = LateArray(proto_array(values))
    assert LateArray.all_elements([LateArray(proto_array([0.5])), late], floats=True) is None
    assert LateArray.all_elements([late, [0.5]], floats=True) is None
    assert late.elements() == values


@pytest.mark.parametrize(
    "text",
    [
        '{"values":[{"doubleValue":{"doubleValue":1}}]}',
        '{"values":[{"doubleValue":1,"intValue":"2"}]}',
        '{"values":[{"doubleValue":1},{"intValue":"2"}]}',
        '{"values":[{"doubleValue":"much"}]}',
        '{"values":[{"doubleValue":1},{"doubleValue":null}]}',
        '{"values":[ {"doubleValue":1}]}',
        '{"values":[{"stringValue":"1"}]}',
        '{"values":[]}',
        "{}",
        "null",
    ],
)
def test_an_array_in_another_form_is_left_to_the_one_that_reads_any(text):
    assert all_elements([array([0.5]), Raw(text.encode())], floats=True) is None


@pytest.mark.parametrize("nameless", [False, True])
def test_what_is_damaged_among_many_is_named_and_the_others_are_read(nameless):
    """Three of forty steps are damaged, each in another way; what stands beside them is as it was sent."""
    change = {
        7: {"specscope.verdict.p": [0.5]},
        8: {"specscope.accepted": 9},
        30: {"specscope.parents": '{"node":[7]}'},
    }
    sent = next(record for record in records() if record.requests and len(record.requests[0].tree) == 2)
    spans = [each for each in Encoder(RUN, Vocabulary()).encode(sent) if each.name == "decode_step"]
    many = [
        ReadSpan("decode_step", 0, 1, spans[0].attributes | {"specscope.request.id": f"r{i}"} | change.get(i, {}))
        for i in range(40)
    ]
    decoder = Decoder(Privacy.NO_TOKENS if nameless else Privacy.EVERYTHING)
    [record] = [*decoder.feed(*many), *decoder.flush()]
    assert [part.request for part in record.requests] == [f"r{i}" for i in range(40) if i not in change]
    assert decoder.faults.total == 3
    alone = []
    for i in change:
        other = Decoder(decoder.privacy)
        other.feed(many[i])
        alone += other.faults.lines()
    assert sorted(decoder.faults.lines()) == sorted(alone)
    for part in record.requests:
        assert part.verdict.coin.tolist() == sent.requests[0].verdict.coin.tolist()
        assert (part.tokens() == sent.requests[0].tokens()) is not nameless


Scalar = TypeVar("Scalar", bound=np.generic)
AsOfNumpy25 = TypeAliasType("AsOfNumpy25", np.ndarray[tuple[Any, ...], np.dtype[Scalar]], type_params=(Scalar,))


def test_an_array_is_one_where_numpy_declares_it_as_an_alias_and_other_types_stay_what_they_are():
    for dtype in (np.int32, np.float32, np.bool_):
        assert unaliased(AsOfNumpy25[dtype]) == np.ndarray[tuple[Any, ...], np.dtype[dtype]]
    for kind in (int, str | None, tuple[int, ...], np.ndarray, np.ndarray[tuple[Any, ...], np.dtype[np.int32]]):
        assert unaliased(kind) == kind
