import pytest

from tests.engines import tiny_engine
from tests.serve.running import running

pytest.importorskip("starlette")


@pytest.fixture(scope="session")
def served_engine(tiny):
    """Speculates: the tiny model's own first layers draft."""
    return tiny_engine(tiny, max_batch=3, drafter="draft_model", draft_model="self:2", tree="3")


@pytest.fixture(scope="module")
def server(served_engine):
    with running(served_engine, max_queue=20) as one:
        yield one
