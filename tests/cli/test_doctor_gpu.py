"""`specscope doctor --gpu`: without a GPU one clear line; its checks run on the CPU too, and each can fail."""

import pytest
import torch

from specscope.cli import doctor
from specscope.errors import UserError
from specscope.kernels import tree_verify
from specscope.measure import device as device_module
from specscope.measure import gpu_check
from tests.support.commands import specscope

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def once(monkeypatch):
    monkeypatch.setattr(device_module, "REPEATS", 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line():
    done = specscope("doctor", "--gpu")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "no CUDA GPU here" in done.stderr


def test_every_check_passes_under_the_interpreter(tiny):
    findings = list(doctor.examine_gpu("cpu", str(tiny)))
    assert [finding.text for finding in findings if not finding.good] == []
    names = " ".join(finding.name for finding in findings)
    for kernel in ("tree_attention", "tree_verify", "graph", "engine", "copy"):
        assert kernel in names
    (engine,) = (finding for finding in findings if finding.name == "engine")
    assert engine.text.startswith("triton")


def test_triton_alone_is_refused_without_a_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="needs a CUDA GPU"):
        list(doctor.examine_gpu("cpu"))


@pytest.mark.slow
def test_what_is_wrong_is_named_and_the_rest_goes_on(tiny, monkeypatch):
    """Verdicts with other tokens, a model that cannot be captured."""
    right = tree_verify.tree_verify
    monkeypatch.setattr(tree_verify, "tree_verify", lambda *work, **how: spoiled(right(*work, **how)))
    monkeypatch.setattr(gpu_check, "_keep", None)
    checks = list(gpu_check.check_gpu(CPU, gpu_check.SMALL, str(tiny)))
    failed = {check.name.split()[0]: check.text for check in checks if not check.good}
    assert failed["tree_verify"] == "another token than the reference's"
    assert "graph" in failed
    assert {"tree_attention", "copy"}.isdisjoint(failed)
    assert checks[-1].name == "copy bandwidth"


def spoiled(verdicts):
    verdicts.token.add_(1)
    return verdicts
