import os
import sys

import pytest

from specscope.sglang import plugin
from specscope.trace.inside import settings
from specscope.trace.wire.reading import read_capture
from tests.sglang import stand, wheel


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Runs requests in a stand with the plugin; its history, and the engine. `ends`: their ends are recorded too."""
    closers = []
    monkeypatch.setattr(plugin, "at_exit", closers.append)

    def record(spec, requests, *, environment=(), on_cpu=False, modules=(), run=stand.Engine.run, ends=True, **engine):
        for name in [name for name in os.environ if name.startswith("SPECSCOPE_")]:
            monkeypatch.delenv(name, raising=False)
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        for name, value in {settings.CAPTURE: str(path), **dict(environment)}.items():
            monkeypatch.setenv(name, value)
        stand.install(monkeypatch, spec, on_cpu, **dict(modules))
        plugin.register()
        sys.modules[plugin.REGISTRY].HookRegistry.apply_hooks()
        made = stand.Engine(spec, **engine)
        run(made, requests)
        while closers:
            closers.pop()()
        if not path.exists():
            return None, made
        capture = read_capture(path)
        known = ("recorded with --no-", "1 of 1 request failed: no room") if ends else ("4 of 4 requests did not end",)
        assert [line for line in capture.warnings if not line.startswith(known)] == []
        return capture.history, made

    return record


@pytest.fixture(params=[None, *wheel.SOURCES], ids=lambda source: source.name if source else "stand")
def anywhere(request, recorded, monkeypatch):
    """Likewise in the stand, and with SGLang's own registry, eagle_sample, chain kernel and host side (wheel.py)."""
    source = request.param

    def record(spec, requests, **options):
        if spec.speculative_use_block_verification and source.name == "sglang-0.5.21":
            pytest.skip("0.5.21 has no block verification")
        modules = wheel.install(monkeypatch, source, spec)
        requests[:] = [wheel.WheelReq(req.rid, req.origin_input_ids, req.sampling_params) for req in requests]
        return recorded(spec, requests, modules=modules, processor=wheel.processor, result=wheel.result, **options)

    return recorded if source is None else record
