import logging

from specscope.trace.inside.hooking import MOST, ErrorGuard, wrap


def fails():
    raise RuntimeError("broken")


def test_an_error_is_counted_and_told_and_goes_no_further(caplog):
    guard = ErrorGuard()
    with caplog.at_level(logging.WARNING):
        assert guard.safely(fails) is None
    assert guard.errors == 1
    assert "the engine continues without it" in caplog.text


def test_an_error_in_a_method_whose_owner_has_no_repr_goes_no_further():
    class Owner:
        def __repr__(self):
            raise TypeError("a configuration that holds a tensor")

        def fails(self):
            raise RuntimeError("broken")

    guard = ErrorGuard()
    assert guard.safely(Owner().fails) is None
    assert guard.errors == 1


def test_after_some_errors_it_steps_aside(caplog):
    guard, calls = ErrorGuard(), []
    for _ in range(MOST):
        guard.safely(fails)
    assert guard.is_off
    assert "switched off" in caplog.text
    guard.safely(calls.append, 1)
    assert calls == []


def test_a_function_is_wrapped_once_and_keeps_its_name():
    class Owner:
        def double(self, x):
            """Twice."""
            return 2 * x

    for _ in range(2):
        wrap(Owner, "double", lambda call: call() + 1)
    assert Owner().double(3) == 7
    assert Owner.double.__doc__ == "Twice."
