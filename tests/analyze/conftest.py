import pytest

from tests.analyze.audit.runs import Bench


@pytest.fixture(scope="session")
def bench(deep, tmp_path_factory):
    return Bench(deep, tmp_path_factory.mktemp("heads"))
