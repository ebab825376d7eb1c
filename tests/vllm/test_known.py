"""What the hooks wrap is named; where vLLM is another, they say so and touch nothing."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from specscope.trace.inside.hooking import ErrorGuard
from specscope.vllm import known
from specscope.vllm.plugin import _checked

ROOT = Path(__file__).parents[2]
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
    assert known.differences(module(**ALL)) == []


def test_what_differs_is_named():
    def rejection_sample(draft_token_ids, new): ...

    (one,) = known.differences(module(**ALL | {"rejection_sample": rejection_sample}))
    assert one.startswith(f"{known.REJECTION}.rejection_sample takes (draft_token_ids, new), not (draft_token_ids, num")
    gone = {name: one for name, one in ALL.items() if name != "generate_uniform_probs"}
    assert known.differences(module(**gone)) == [f"{known.REJECTION}.generate_uniform_probs is gone"]


def test_a_function_of_somebody_else_s_is_passed_over():
    """Another plugin, or a planted fault, may have put its own there: vLLM calls it as it calls its own."""
    there = module(**ALL)
    there.generate_uniform_probs = lambda *args: None
    assert known.differences(there) == []


def test_a_version_that_fits_and_was_not_tried_is_told():
    assert known.remark("0.33.0+cu129") == known.remark("0.32.0") == ""
    for version in ("0.32.1", "0.33.0.post1", "0.34.0.dev12+g1234", "unknown"):
        assert known.remark(version).startswith(
            f"vLLM {version} is none of 0.32.0, 0.33.0, which were tried, but is as"
        )


def test_nothing_is_touched_where_something_differs(caplog):
    """Once said, and every hook that depends on it steps aside."""
    guards, installed = (ErrorGuard(), ErrorGuard()), []
    check = _checked(installed.append, guards, "0.33.0")
    gone = {name: one for name, one in ALL.items() if name != "rejection_sample"}
    check(module(**gone))
    check(module(**gone))
    assert installed == []
    assert [guard.is_off for guard in guards] == [True, True]
    assert sum("rejection_sample is gone" in line for line in caplog.messages) == len(guards)
    fine, there = ErrorGuard(), module(**ALL)
    _checked(installed.append, (fine,), "0.32.0")(there)
    assert installed == [there]


PARTS = {
    "shared": (known._SHARED, known._SHARED_READ),
    "v1": (known._V1, known._V1_READ),
    "v2": (known._V2, known._V2_READ),
}


def write(root, newest=True, leave_out=(), parts=PARTS):
    """Sources that hold what is wrapped and read, but for `leave_out`: Class.name, or a function."""
    modules: dict[str, dict[str, list[str]]] = {}
    for wrapped, read in (PARTS[part] for part in parts):
        for module, functions in wrapped.items():
            for function, known_as in functions.items():
                owner, _, method = function.rpartition(".")
                parameters = known_as if isinstance(known_as, str) else known_as[-1 if newest else 0]
                if function not in leave_out:
                    line = f"def {method}({', '.join(parameters.split())}): pass"
                    modules.setdefault(module, {}).setdefault(owner, []).append(line)
        for module, owners in read.items():
            for owner, names in owners.items():
                lines = [f"{name}: int" for name in names.split() if f"{owner}.{name}" not in leave_out]
                modules.setdefault(module, {}).setdefault(owner, []).extend(lines)
    for module, classes in modules.items():
        lines = classes.pop("", [])
        for owner, members in classes.items():
            lines += [f"class {owner}:", *(f"    {member}" for member in members or ["pass"])]
        path = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))


@pytest.mark.parametrize("newest", [True, False])
def test_sources_are_read_as_text(tmp_path, newest):
    write(tmp_path, newest)
    assert known.fit(tmp_path) == known.Fit((), (), ())


def test_what_differs_in_one_runner_is_no_matter_to_the_other(tmp_path):
    write(tmp_path, leave_out=["RejectionSampler._verify", "Sampler.sampling_states"])
    there = known.fit(tmp_path)
    assert there.v2 == (
        f"{known.V2_PLAIN}.Sampler.sampling_states is gone",
        f"{known.V2_REJECTION}.RejectionSampler._verify is gone",
    )
    assert (there.shared, there.v1, there.lacking) == ((), (), "")


def test_a_runner_that_is_no_more(tmp_path):
    """vLLM calls its V1 runner deprecated."""
    write(tmp_path, parts=["shared", "v2"])
    there = known.fit(tmp_path)
    assert f"{known.RUNNER}.GPUModelRunner._sample is gone" in there.v1
    assert (there.v2, there.lacking) == ((), "")


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (["Scheduler.schedule"], f"{known.SCHEDULER}.Scheduler.schedule is gone"),
        (["Request.arrival_time"], "vllm.v1.request.Request.arrival_time is gone"),
        (
            ["GPUModelRunner._sample", "SamplingStates.seeds"],
            "vllm.v1.worker.gpu.sample.states.SamplingStates.seeds is gone",
        ),
    ],
)
def test_without_either_runner_there_is_no_evidence(tmp_path, missing, named):
    write(tmp_path, leave_out=missing)
    assert known.fit(tmp_path).lacking == named


def test_what_a_method_sets_is_an_attribute(tmp_path):
    write(tmp_path, leave_out=["BlockPool.num_gpu_blocks"])
    path = tmp_path / "v1" / "core" / "block_pool.py"
    source = path.read_text()
    path.write_text(source + "\n    def __init__(self, other):\n        other.num_gpu_blocks = 1\n")
    assert known.fit(tmp_path).shared == ("vllm.v1.core.block_pool.BlockPool.num_gpu_blocks is gone",)
    path.write_text(source + "\n    def __init__(self):\n        self.num_gpu_blocks = 1\n")
    assert known.fit(tmp_path).shared == ()


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (PARTS, ["vLLM 0.32.1 is none of 0.32.0, 0.33.0"]),
        (["shared", "v2"], ["vLLM 0.32.1 is none of 0.32.0, 0.33.0", "the V1 runner of vLLM 0.32.1 is not as it is"]),
        (["v1", "v2"], ["vLLM 0.32.1 is not as it is known", "`specscope watch` reads a server's counters"]),
    ],
)
def test_what_the_plugin_says_of_another_version(tmp_path, parts, said):
    write(tmp_path / "vllm", parts=parts)
    (tmp_path / "vllm" / "__init__.py").touch()
    metadata = tmp_path / "vllm-0.32.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.1\n")
    variables = {"SPECSCOPE_CAPTURE": str(tmp_path / "a.jsonl"), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    code = "from specscope.vllm.plugin import register; register()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables)
    lines = done.stderr.splitlines()
    assert len(lines) == len(said) - (said[0] == "vLLM 0.32.1 is not as it is known")
    for text in said:
        assert text in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not SOURCES, reason="SPECSCOPE_VLLM_SOURCE=FOLDER[:FOLDER] names no sources of vLLM")
@pytest.mark.parametrize("root", SOURCES.split(os.pathsep))
def test_the_sources_of_vllm(root):
    """Folders named vllm, of 0.32.0 and 0.33.0; of a newer one, what differs is in the message."""
    assert known.fit(Path(root)) == known.Fit((), (), ())
