"""Shared by all tests: hypothesis without deadlines (machines are shared), and small real models."""

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("specscope", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("specscope")


@pytest.fixture(scope="session")
def default_model():
    """The bundled model in float32, loaded once."""
    import torch

    from specscope.model.loader import load_model

    return load_model(None, torch.device("cpu"), torch.float32)
