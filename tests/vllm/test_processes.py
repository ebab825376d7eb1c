"""What vLLM's processes are asked for by our hooks."""

from types import SimpleNamespace

import pytest

from specscope.vllm.processes import GRACE_SECONDS, give_grace


@pytest.mark.parametrize(("asked", "given"), [(0, GRACE_SECONDS), (9, 9), (None, None)])
def test_engines_get_time_to_write_where_vllm_gives_them_none(asked, given):
    calls = []

    def shutdown(procs, timeout=None):
        calls.append((procs, timeout))

    module = SimpleNamespace(shutdown=shutdown)
    give_grace(module)
    module.shutdown(["engine"], timeout=asked)
    module.shutdown(["engine"], asked)
    assert calls == [(["engine"], given)] * 2
    give_grace(SimpleNamespace())  # of a vLLM that has no such function
