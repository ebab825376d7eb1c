"""What a client's headers say of its span, as specscope has it."""

import pytest

from specscope.trace.params import SamplingParams
from specscope.trace.trace_sampling import Reason, ratio_keeps
from specscope.trace.vocabulary import Vocabulary
from specscope.vllm.requests import known
from specscope.vllm.scheduling import Arrival

TRACE, SPAN = f"{5:032x}", f"{9:016x}"


def caller(headers):
    """The traceparent of a request that came with those headers."""
    arrival = Arrival(arrival_ns=1, trace_headers=headers)
    return known("a", [1, 2], SamplingParams(), arrival, 2, Vocabulary()).info.traceparent


@pytest.mark.parametrize("flags", ["00", "01"])
def test_the_callers_own_sampled_flag_is_told(flags):
    """It was told as 01 whatever it was: every trace of a caller seemed to be sampled."""
    told = caller({"traceparent": f"00-{TRACE}-{SPAN}-{flags}"})
    assert told == f"00-{TRACE}-{SPAN}-{flags}"
    assert ratio_keeps(1, told, 1.0) is (Reason.PARENT if flags == "01" else None)


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}, {"traceparent": f"00-{0:032x}-{SPAN}-01"}])
def test_a_caller_that_sent_none_has_none(headers):
    assert caller(headers) == ""
