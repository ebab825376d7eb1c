"""The curves of `specscope bench growth` for looking at long runs: conditions, going back, taking steps in."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np

from specscope.bench.curves import Curve, best
from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.trace.history import History
from specscope.trace.params import SamplingParams
from specscope.trace.records import FinalKind, Phase, RequestInfo, RequestStep, StepRecord, Verdict
from specscope.trace.tree import DraftTree
from specscope.tui.widgets.ledger import Ledger

LONG = (1_000, 10_000, 100_000)
FEW = 50  # steps back


def debug_curves() -> list[Curve]:
    """Over one request of so many steps."""
    return [
        Curve("until tau < 1.1, over a capture", "steps", LONG, _until),
        Curve("reverse-continue to a breakpoint at the start", "steps", LONG, _reverse_continue),
        Curve("reverse-next of a live run, with the screen's figures", "steps", LONG, _reverse_next, 0.3),
        Curve("a history that keeps a bounded number of steps", "steps", LONG, _bounded),
    ]


def _part(index: int) -> RequestStep:
    """A step that accepts one of two nodes."""
    tree = DraftTree.build([1, 2], [-1, 0])
    ones, numbers = np.ones(2, np.float32), np.full(2, 0.5)
    verdict = Verdict(
        outcome=np.array([1, 2], np.uint8),
        p=ones,
        p_trial=ones,
        q_trial=ones,
        accept_prob=numbers,
        coin=numbers,
        residual_mass=numbers,
        path=np.array([0], np.int32),
        token=3,
        kind=FinalKind.RECOVERED,
        final_p=1.0,
        final_coin=0.5,
    )
    return RequestStep("r0", index, 10 + 2 * index, 0, "ngram", tree, verdict, 2)


@cache
def _records(count: int) -> tuple[StepRecord, ...]:
    first, info = _part(0), RequestInfo("r0", 0, 1, "a", np.array([1], np.int32), SamplingParams())
    phases = tuple(Phase(name, 0, 1) for name in ("schedule", "draft", "forward", "verify", "commit"))
    return tuple(
        StepRecord(
            step=step,
            phases=phases,
            running=1,
            waiting=0,
            blocks_used=1,
            blocks_free=9,
            speculation=True,
            speculation_off="",
            admitted=(info,) if not step else (),
            requests=(dataclasses.replace(first, index=step, context_len=10 + 2 * step),),
            preempted=(),
            finished=(),
        )
        for step in range(count)
    )


@cache
def _history(count: int) -> History:
    history = History()
    for record in _records(count):
        history.append(record)
    return history


def _until(count: int) -> float:
    def work() -> None:
        Commands(Session(history=_history(count))).run("until tau < 1.1")

    return best(work)


def _reverse_continue(count: int) -> float:
    commands = Commands(Session(history=_history(count), position=count - 1))
    commands.run("break step if index == 1")

    def work() -> None:
        commands.session.position = count - 1
        commands.run("reverse-continue")

    return best(work)


def _reverse_next(count: int) -> float:
    """One step back and one forward again, as a live run's history and the screen's ledger take them; the mean."""
    history = _history(count)
    ledger = Ledger(history)
    ledger.update()

    def work() -> None:
        for _ in range(FEW):
            history.move(count - 2)
            ledger.update()
            history.move(count - 1)
            ledger.update()

    return best(work) / FEW


def _bounded(count: int) -> float:
    """All steps, into a history that keeps a tenth of them."""

    def work() -> None:
        history = History(limit=count // 10)
        for record in _records(count):
            history.append(record)

    return best(work)
