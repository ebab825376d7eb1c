"""What a client's headers say of its span, as specscope has it."""

from types import SimpleNamespace

import pytest

from specscope.trace.inside.recorder import Recorder
from specscope.trace.record.aggregate import Reason
from specscope.trace.record.params import SamplingParams, unknown_limits
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.sampling import ratio_keeps
from specscope.vllm.run_info import known
from specscope.vllm.scheduling import Arrival
from tests.trace.strategies import RUN

RECORDER = Recorder(RUN, Vocabulary(), lambda record: None)


def told(name="a", asked=None, **headers):
    """The request as a capture has it."""
    return known(RECORDER, name, [1, 2], asked or SamplingParams(), Arrival(1, headers), 2).info


@pytest.mark.parametrize("flags", ["00", "01"])
def test_the_callers_own_sampled_flag_is_told(flags):
    """It was told as 01 whatever it was: every trace of a caller seemed to be sampled."""
    given = f"00-{5:032x}-{9:016x}-{flags}"
    assert told(traceparent=given).traceparent == given
    assert ratio_keeps(1, given, 1.0) is (Reason.PARENT if flags == "01" else None)


@pytest.mark.parametrize(
    ("name", "chat", "served"),
    [("chatcmpl-7-1f", True, True), ("cmpl-7-0-1f", False, True), ("0-1f", False, False), ("completely", False, False)],
)
def test_what_was_asked_is_told_by_the_id_that_vllms_server_gave(name, chat, served):
    assert (told(name).chat, told(name).served) == (chat, served)


def asked(form=None, seed=None, **ours):
    """vLLM's SamplingParams, and its form."""
    none = dict.fromkeys(("structural_tag", "whitespace_pattern", "json", "regex", "choice", "grammar", "json_object"))
    own = {"seed": seed, "structured_outputs": form and SimpleNamespace(**none | form)}
    return SimpleNamespace(**vars(SamplingParams(**ours)) | own)


def test_a_negative_seed_is_a_label_and_the_rest_stay_parameters():
    """All parameters were given up for it, and `verify` took a request that ignores EOS for one that ran past it."""
    info = told(asked=asked(seed=-5, temperature=0.7, ignore_eos=True))
    assert (info.params.temperature, info.params.ignore_eos, info.params.seed) == (0.7, True, 0)
    assert info.labels["seed"] == "-5"


@pytest.mark.parametrize(
    "form",
    [
        *({"choice": ["a", "b"]}, {"json": {"type": "object"}}, {"json": '{"type":"object"}'}),
        *({"regex": "[ab]+"}, {"grammar": 'root ::= "a"'}, {"json_object": True}),
        *({"structural_tag": "{}"}, {"json": "{}", "whitespace_pattern": " ?"}, {"json": "no JSON"}),
    ],
)
def test_a_form_is_a_parameter_or_a_label_and_limits_what_can_be_judged(form):
    info, first = told(asked=asked(form)), next(iter(form))
    has_no_word = first == "structural_tag" or "whitespace_pattern" in form or form.get("json") == "no JSON"
    assert (info.params.structured_outputs is None) is has_no_word
    assert unknown_limits(info.params, info.labels) == ("structured_outputs",)
    if has_no_word:
        assert form[first] in info.labels["structured_outputs"]
    else:
        assert info.params.structured_outputs.kind == first
        assert "structured_outputs" not in info.labels
