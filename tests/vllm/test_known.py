"""What the hooks wrap is named; where vLLM is another, they say so and touch nothing."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from specscope.trace.inside.hooking import ErrorGuard
from specscope.trace.inside.known import signatures
from specscope.vllm import known
from specscope.vllm.plugin import _checked

ROOT = Path(__file__).parents[2]
SOURCES = os.environ.get("SPECSCOPE_VLLM_SOURCE", "")
PARTS = {
    "shared": (known._SHARED, known._SHARED_READ),
    "v1": (known._V1, known._V1_READ),
    "v2": (known._V2, known._V2_READ),
}


def sources(newest=True, leave_out=(), parts=PARTS):
    """By module the text that holds what is wrapped and read, but for `leave_out`: Class.name, or a function."""
    modules: dict[str, dict[str, list[str]]] = {}
    for wrapped, read in (PARTS[part] for part in parts):
        for module, functions in wrapped.items():
            for function in functions:
                owner, _, method = function.rpartition(".")
                parameters = signatures(functions, function)[-1 if newest else 0]
                if function not in leave_out:
                    line = f"def {method}({', '.join(parameters)}): pass"
                    modules.setdefault(module, {}).setdefault(owner, []).append(line)
        for module, owners in read.items():
            for owner, names in owners.items():
                lines = [f"{name}: int" for name in names.split() if f"{owner}.{name}" not in leave_out]
                modules.setdefault(module, {}).setdefault(owner, []).extend(lines)
    for module, classes in modules.items():
        lines = classes.pop("", [])
        for owner, members in classes.items():
            lines += [f"class {owner}:", *(f"    {member}" for member in members or ["pass"])]
        yield module, "\n".join(lines)


def write(root, **asked):
    for module, text in sources(**asked):
        path = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def live(**asked):
    """V1's rejection sampler, imported."""
    made = ModuleType(known.REJECTION)
    exec(dict(sources(**asked))[known.REJECTION], vars(made))
    return made


def test_what_differs_in_a_module_is_named():
    assert known.differences(live()) == known.differences(live(newest=False)) == []
    there = live()
    exec("def rejection_sample(draft_token_ids, new): pass", vars(there))
    (one,) = known.differences(there)
    assert one.startswith(f"{known.REJECTION}.rejection_sample takes (draft_token_ids, new), not (draft_token_ids, num")
    gone = known.differences(live(leave_out=["generate_uniform_probs"]))
    assert gone == [f"{known.REJECTION}.generate_uniform_probs is missing"]


def test_nothing_is_touched_where_something_differs(caplog):
    """Once said, and every hook that depends on it steps aside."""
    guards, installed = (ErrorGuard(), ErrorGuard()), []
    check = _checked(installed.append, guards, "0.33.0")
    for _ in range(2):
        check(live(leave_out=["rejection_sample"]))
    assert (installed, [guard.is_off for guard in guards]) == ([], [True, True])
    assert sum("rejection_sample is missing" in line for line in caplog.messages) == len(guards)
    there = live()
    _checked(installed.append, (ErrorGuard(),), "0.32.0")(there)
    assert installed == [there]


V2_GONE = (
    f"{known.V2_PLAIN}.Sampler.sampling_states is missing",
    f"{known.V2_REJECTION}.RejectionSampler._verify is missing",
)


@pytest.mark.parametrize(
    ("asked", "lacking", "v2"),
    [
        ({}, "", ()),
        ({"newest": False}, "", ()),
        ({"leave_out": ["RejectionSampler._verify", "Sampler.sampling_states"]}, "", V2_GONE),  # no matter to V1
        ({"parts": ["shared", "v2"]}, "", ()),  # vLLM calls its V1 runner deprecated
        ({"leave_out": ["Scheduler.schedule"]}, f"{known.SCHEDULER}.Scheduler.schedule is missing", ()),
        ({"leave_out": ["Request.arrival_time"]}, "vllm.v1.request.Request.arrival_time is missing", ()),
        (
            {"leave_out": ["GPUModelRunner._sample", "SamplingStates.seeds"]},
            "vllm.v1.worker.gpu.sample.states.SamplingStates.seeds is missing",
            ("vllm.v1.worker.gpu.sample.states.SamplingStates.seeds is missing",),
        ),
    ],
)
def test_sources_are_read_as_text(tmp_path, asked, lacking, v2):
    """Without either runner there is no evidence."""
    write(tmp_path, **asked)
    there = known.fit(tmp_path)
    assert (there.lacking, there.v2) == (lacking, v2)
    sample = f"{known.RUNNER}.GPUModelRunner._sample is missing"
    has_v1 = "parts" not in asked and "GPUModelRunner._sample" not in asked.get("leave_out", ())
    assert (sample in there.v1) is not has_v1


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (PARTS, ["vLLM 0.32.1 was not tried"]),
        (
            ["shared", "v2"],
            ["vLLM 0.32.1 was not tried", "the V1 runner of vLLM 0.32.1 is unknown to specscope"],
        ),
        (["v1", "v2"], ["vLLM 0.32.1 is unknown to specscope", "`specscope watch` reads a server's counters"]),
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
    assert len(lines) == len(said) - (said[0] == "vLLM 0.32.1 is unknown to specscope")
    for text in said:
        assert text in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not SOURCES, reason="SPECSCOPE_VLLM_SOURCE=FOLDER[:FOLDER] names no sources of vLLM")
@pytest.mark.parametrize("root", SOURCES.split(os.pathsep))
def test_the_sources_of_vllm(root):
    """Folders named vllm, of 0.32.0 and 0.33.0; of a newer one, what differs is in the message."""
    assert known.fit(Path(root)) == known.Fit((), (), ())
