"""What the hooks wrap is as they know it, in each version's source."""

import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from specscope.sglang import hooks as known
from specscope.sglang import plugin
from specscope.trace.inside.hooking import ErrorGuard
from tests.sglang.wheel import SOURCES
from tests.support.sources import skeleton

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_each_known_version_is_as_its_source_has_it(source):
    assert known.difference(skeleton(source / "sglang", name) for name in known.WRAPPED) == ""


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_what_the_plugin_imports_is_there(source):
    imported = {plugin.REGISTRY: ("HookRegistry", "HookType")}
    imported[plugin.CONTEXT] = ("get_parallel", "get_spec", "get_server_args")
    for module, names in imported.items():
        assert set(names) <= set(vars(skeleton(source / "sglang", module)))
    verify = (source / "sglang/srt/speculative/eagle_utils.py").read_text()
    assert all(re.search(rf"^{flag} = ", verify, re.M) for flag in ("_is_cpu", "_is_hip", "_is_xpu"))
    spec = (source / "sglang/srt/speculative/spec_utils.py").read_text()
    assert re.search(r"^SIMULATE_ACC_LEN = ", spec, re.M)


def test_what_is_wrapped_is_what_is_known():
    hooks = known.ServerHooks(plugin, lambda processor, req: None, ErrorGuard(), full=True)
    targets = hooks.targets()
    compared = {name: set(functions) - {"_verify_uses_greedy"} for name, functions in known.WRAPPED.items()}
    assert {name: set(functions) for name, functions in targets.items()} == compared


def test_the_entry_point_is_the_plugins():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (value,) = project["entry-points"]["sglang.srt.plugins"].values()
    assert EntryPoint("specscope", value, "sglang.srt.plugins").load() is plugin.register


def test_a_source_that_lacks_a_module_says_which(tmp_path):
    assert known.difference([skeleton(tmp_path, known.VERIFY)]) == f"{known.VERIFY}.eagle_sample is missing"
