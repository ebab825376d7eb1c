"""What a planted fault is."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import attrgetter
from types import SimpleNamespace

import pytest

from specscope import Engine
from specscope.analyze.diagnose.causes import Cause
from specscope.speculate.drafters.tree_builder import StaticTreeBuilder

Install = Callable[[pytest.MonkeyPatch, Engine], None]


@dataclass(frozen=True)
class Fault:
    """A mistake that is put into a running engine.

    `setting` names the run in which it shows (settings.py). `rare`: in how many engine steps, spread over the run, it
    is planted where it is to be rare: the smallest count whose traces chance gives less often than once in a thousand,
    over all causes. 0: it cannot be switched within a run.
    """

    name: str
    cause: Cause
    install: Install
    setting: str
    rare: int = 3


def replaced(target, name):
    """A fault that puts a function in another one's place: it is given the right one, then what that is given."""

    def planted(wrong):
        def install(patch, engine):
            right, is_static = getattr(target, name), isinstance(vars(target).get(name), staticmethod)

            def other(*given, **named):
                return wrong(right, *given, **named)

            patch.setattr(target, name, staticmethod(other) if is_static else other)

        return install

    return planted


def altered(path, change):
    """Something of the engine is `change` of what it is."""
    holder, _, name = path.rpartition(".")

    def install(patch, engine):
        where = attrgetter(holder)(engine) if holder else engine
        patch.setattr(where, name, change(getattr(where, name)))

    return install


def in_phase(name, change, *, before=False):
    """What a phase of a step leaves (`before`: what it is given), changed by `change(engine, now)`."""

    def install(patch, engine):
        run = engine.phases.run[name]

        def changed(now):
            if before:
                change(engine, now)
            run(now)
            if not before:
                change(engine, now)

        patch.setitem(engine.phases.run, name, changed)

    return install


def finished(change):
    """A static tree as it is handed on: `change(draft, places)` of it."""
    return replaced(StaticTreeBuilder, "finish")(lambda finish, self: change(*finish(self)))


def taken(change):
    """What is drawn for a static tree: `change(q, drawn)` of it."""
    return replaced(StaticTreeBuilder, "take")(lambda take, self, q, drawn: take(self, *change(q, drawn)))


def now_and_then(install, active):
    """A fault that comes and goes: what it replaces is in place in the engine's steps of which `active` says so."""

    def planted(patch, engine):
        step, numbers, noted = engine.step, count(1), []
        kinds = {kind: partial(lambda *given: noted.append(given), kind) for kind in ("setattr", "setitem")}
        install(SimpleNamespace(**kinds), engine)

        def switched():
            with pytest.MonkeyPatch.context() as here:
                for kind, *given in noted if active(next(numbers)) else ():
                    getattr(here, kind)(*given)
                return step()

        patch.setattr(engine, "step", switched)

    return planted


@contextmanager
def in_every_engine(install):
    """Every engine that is built meanwhile has the fault, from when it is built until it is closed."""
    with pytest.MonkeyPatch.context() as outer, pytest.MonkeyPatch.context() as patch:

        def faulty(build, self, *given, **named):
            patch.undo()
            build(self, *given, **named)
            install(patch, self)

        def closed(close, self):
            close(self)
            patch.undo()

        for name, other in (("__init__", faulty), ("close", closed)):
            replaced(Engine, name)(other)(outer, None)
        yield
