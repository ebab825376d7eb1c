"""Engines of their own over one tiny target, for tests that need other settings than the shared ones have."""

import pytest

from tests.analyze.audit.runs import Bench


@pytest.fixture(scope="module")
def make(deep, tmp_path_factory):
    """Of the name of a drafter, and of further settings."""
    return Bench(deep, tmp_path_factory.mktemp("heads")).fresh
