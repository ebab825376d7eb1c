import pytest

from specscope.trace.record.rules import is_lossy
from specscope.vllm.witness import rule_of


@pytest.mark.parametrize(
    ("method", "rule", "lossy"),
    [
        (None, "standard", False),
        ("standard", "standard", False),
        ("block", "block", False),
        ("fly", "lossy:fly", True),
        ("synthetic", "lossy:synthetic", True),
        ("of tomorrow", "lossy:of tomorrow", True),  # nothing is called lossless that is not known to be
    ],
)
def test_rules(method, rule, lossy):
    told = {} if method is None else {"rejection_sample_method": method}
    assert rule_of(told) == rule
    assert is_lossy(rule) is lossy
