import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned():
    """Tensors that nobody filled hold NaN: what memory held before must not decide whether a kernel is right."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
