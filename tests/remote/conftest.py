"""A listener with its screen's side, on ports of its own."""

import pytest

from specscope.debug.viewer import Viewer
from specscope.remote.attached import Attached


@pytest.fixture
def attached():
    made = Attached("127.0.0.1", 0, 0)
    made.viewer = Viewer(control=made)
    yield made
    made.close()
