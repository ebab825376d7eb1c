"""What goes wrong in a hook is logged: with a traceback, but for what is said to people."""

import logging

import pytest

from specscope.errors import UserError
from specscope.trace.inside.hooking import ErrorGuard


@pytest.mark.parametrize(("error", "traced"), [(KeyError("a row"), True), (UserError("the disk is full"), False)])
def test_an_error_that_is_for_people_has_no_traceback(caplog, error, traced):
    def hook():
        raise error

    with caplog.at_level(logging.WARNING, "specscope"):
        assert ErrorGuard().safely(hook) is None
    [line] = caplog.records
    assert bool(line.exc_info) is traced
    assert str(error) in line.getMessage()
