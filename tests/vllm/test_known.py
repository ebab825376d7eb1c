"""What the hooks wrap is named; where vLLM is another, they say so and touch nothing."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from specscope.trace.inside.hooking import ErrorGuard, signatures, wrap
from specscope.vllm import known
from specscope.vllm.plugin import checked
from tests.support.sources import skeleton

ROOT = Path(__file__).parents[2]
SOURCES = os.environ.get("SPECSCOPE_VLLM_SOURCE", "")


def text_of(module, newest=True, leave_out=()):
    """A module's source that holds what is wrapped, but for `leave_out`: Class.name, or a function."""
    classes: dict[str, list[str]] = {}
    functions = known.WRAPPED[module]
    for function in functions:
        owner, _, method = function.rpartition(".")
        if function not in leave_out:
            parameters = signatures(functions, function)[-1 if newest else 0]
            classes.setdefault(owner, []).append(f"def {method}({', '.join(parameters)}): pass")
    lines = classes.pop("", [])
    for owner, members in classes.items():
        lines += [f"class {owner}:", *(f"    {member}" for member in members)]
    return "\n".join(lines)


def live(**asked):
    """V1's rejection sampler, imported."""
    made = ModuleType(known.REJECTION)
    exec(text_of(known.REJECTION, **asked), vars(made))
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
    for _ in range(2):
        checked([installed.append], guards, live(leave_out=["rejection_sample"]))
    assert (installed, [guard.is_off for guard in guards]) == ([], [True, True])
    assert sum("rejection_sample is missing" in line for line in caplog.messages) == len(guards)
    there = live()
    checked([installed.append], (ErrorGuard(),), there)
    assert installed == [there]


def test_an_error_in_a_method_whose_owner_has_no_repr_goes_no_further():
    class Owner:
        def __repr__(self):
            raise TypeError("a configuration that holds a tensor")

        def fails(self):
            raise RuntimeError("broken")

    guard = ErrorGuard()
    assert guard.safely(Owner().fails) is None
    assert guard.errors == 1


def test_a_function_is_wrapped_once_and_keeps_its_name():
    class Owner:
        def double(self, x):
            """Twice."""
            return 2 * x

    for _ in range(2):
        wrap(Owner, "double", lambda call: call() + 1)
    assert Owner().double(3) == 7
    assert Owner.double.__doc__ == "Twice."


def test_what_the_plugin_says_of_another_version(tmp_path):
    """When vLLM imports its scheduler."""
    file = tmp_path.joinpath(*known.SCHEDULER.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(text_of(known.SCHEDULER, leave_out=["Scheduler.schedule"]))
    metadata = tmp_path / "vllm-0.32.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.1\n")
    variables = {"SPECSCOPE_CAPTURE": str(tmp_path / "a.jsonl"), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    code = f"from specscope.vllm.plugin import register; register(); import {known.SCHEDULER}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables)
    assert "vLLM 0.32.1 was not tried" in done.stderr
    assert f"{known.SCHEDULER}.Scheduler.schedule is missing. `specscope watch` reads" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not SOURCES, reason="SPECSCOPE_VLLM_SOURCE=FOLDER[:FOLDER] names no sources of vLLM")
@pytest.mark.parametrize("root", SOURCES.split(os.pathsep))
@pytest.mark.parametrize("module", known.WRAPPED)
def test_the_sources_of_vllm(root, module):
    """Folders named vllm, of 0.32.0 and 0.33.0; of a newer one, what differs is in the message."""
    assert known.differences(skeleton(Path(root), module)) == []
