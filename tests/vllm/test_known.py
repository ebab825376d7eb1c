"""What the hooks wrap is named; where vLLM is another, they say so and touch nothing."""

import os
import types
from pathlib import Path

import pytest

from specscope.trace.inside.hooking import ErrorGuard
from specscope.vllm import known
from specscope.vllm.plugin import _checked

SOURCES = os.environ.get("SPECSCOPE_VLLM_SOURCE", "")


def module(**functions):
    made = types.ModuleType(known.REJECTION)
    for one in (*functions.values(), RejectionSampler.forward):
        one.__module__ = made.__name__
    vars(made).update(functions)
    return made


class RejectionSampler:
    def forward(self, metadata, draft_probs, logits, sampling_metadata): ...


def rejection_sample(
    draft_token_ids,
    num_draft_tokens,
    max_spec_len,
    cu_num_draft_tokens,
    draft_probs,
    target_logits,
    bonus_token_ids,
    sampling_metadata,
    synthetic_mode=False,
    synthetic_conditional_rates=None,
    use_fp64_gumbel=False,
): ...


def generate_uniform_probs(num_tokens, num_draft_tokens, generators, device): ...


def sample_recovered_tokens(
    max_spec_len,
    num_draft_tokens,
    cu_num_draft_tokens,
    draft_token_ids,
    draft_probs,
    target_probs,
    sampling_metadata,
    device,
    use_fp64_gumbel=False,
): ...


ALL = {one.__name__: one for one in (RejectionSampler, rejection_sample, generate_uniform_probs)}
ALL["sample_recovered_tokens"] = sample_recovered_tokens


def test_a_module_as_it_is_known():
    assert known.differences(module(**ALL), "0.32.0") == []
    assert known.differences(module(**ALL), "0.32.0+cpu") == []


def test_what_differs_is_named():
    (one,) = known.differences(module(**ALL), "0.33.0")  # there the lossy rule has arguments of its own
    assert one.startswith(f"{known.REJECTION}.rejection_sample takes (draft_token_ids, ")
    gone = {name: one for name, one in ALL.items() if name != "generate_uniform_probs"}
    assert known.differences(module(**gone), "0.32.0") == [f"{known.REJECTION}.generate_uniform_probs is gone"]


def test_a_function_of_somebody_else_s_is_passed_over():
    """Another plugin, or a planted fault, may have put its own there: vLLM calls it as it calls its own."""
    there = module(**ALL)
    there.generate_uniform_probs = lambda *args: None
    assert known.differences(there, "0.32.0") == []


def test_other_versions_are_not_known():
    assert known.is_known("0.33.0+cu129")
    assert not known.is_known("0.34.0")
    assert not known.is_known("unknown")


def test_nothing_is_touched_where_something_differs(caplog):
    """Once said, and every hook that depends on it steps aside."""
    guards, installed = (ErrorGuard(), ErrorGuard()), []
    check = _checked(installed.append, guards, "0.33.0")
    check(module(**ALL))
    check(module(**ALL))
    assert installed == []
    assert [guard.is_off for guard in guards] == [True, True]
    assert sum("rejection_sample takes" in line for line in caplog.messages) == len(guards)
    fine, there = ErrorGuard(), module(**ALL)
    _checked(installed.append, (fine,), "0.32.0")(there)
    assert installed == [there]


def write(root, version, leave_out=""):
    """Sources that hold what is known of a version."""
    for name, functions in known.signatures(version).items():
        classes: dict[str, list[str]] = {}
        for function, parameters in functions.items():
            owner, _, method = function.rpartition(".")
            if function != leave_out:
                classes.setdefault(owner, []).append(f"def {method}({', '.join(parameters)}): pass")
        lines = classes.pop("", [])
        for owner, methods in classes.items():
            lines += [f"class {owner}:", *(f"    {method}" for method in methods)]
        path = root.joinpath(*name.split(".")[1:]).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))


def test_sources_are_read_as_text(tmp_path):
    write(tmp_path, "0.33.0", leave_out="RejectionSampler._verify")
    assert known.differences_in_text(tmp_path, "0.33.0") == [f"{known.V2_REJECTION}.RejectionSampler._verify is gone"]
    assert len(known.differences_in_text(tmp_path, "0.32.0")) == 3  # it, and what 0.33 changed
    wrapped = sum(len(functions) for functions in known.signatures("0.32.0").values())
    assert len(known.differences_in_text(tmp_path / "none", "0.32.0")) == wrapped


@pytest.mark.slow
@pytest.mark.skipif(not SOURCES, reason="SPECSCOPE_VLLM_SOURCE=FOLDER[:FOLDER] names no sources of vLLM")
@pytest.mark.parametrize("root", SOURCES.split(os.pathsep))
def test_the_sources_of_vllm(root):
    """One of the known versions is exactly these sources; with a newer one, what differs is in the message."""
    found = {version: known.differences_in_text(Path(root), version) for version in known.KNOWN}
    assert min(map(len, found.values())) == 0, found
