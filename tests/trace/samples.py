"""A small fixed run: prefill, a chain with a rejection, a tree with a bonus, an end."""

import numpy as np

from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import (
    FinalKind,
    FinishReason,
    Phase,
    RequestEnd,
    RequestInfo,
    RequestStep,
    StepRecord,
    Verdict,
)
from specscope.trace.record.tree import ROOT, DraftTree, Drawn

NS = 1_700_000_000_000_000_000


def verdict(tree, outcome, path, token, kind):
    n = len(tree)
    return Verdict(
        outcome=np.array(outcome, dtype=np.uint8),
        p=np.linspace(0.1, 0.9, n, dtype=np.float32),
        p_trial=np.linspace(0.1, 0.9, n, dtype=np.float32),
        q_trial=np.full(n, 0.5, dtype=np.float32),
        accept_prob=np.linspace(0.2, 1.0, n),
        coin=np.linspace(0.05, 0.95, n),
        residual_mass=np.zeros(n),
        path=np.array(path, dtype=np.int32),
        token=token,
        kind=kind,
        final_p=0.25,
        final_coin=0.5,
    )


def part(index, tree, judged, emitted, prefill=0):
    return RequestStep("r0", index, 5 + index, prefill, "ngram" if len(tree) else "none", tree, judged, emitted)


def record(step, parts, admitted=(), finished=()):
    names = ("schedule", "draft", "forward", "verify", "commit")
    start = NS + step * 10**8
    return StepRecord(
        step=step,
        phases=tuple(Phase(name, start + i * 10**7, start + (i + 1) * 10**7) for i, name in enumerate(names)),
        running=1,
        waiting=0,
        blocks_used=2,
        blocks_free=98,
        speculation=True,
        speculation_off="",
        admitted=admitted,
        requests=parts,
        preempted=(),
        finished=finished,
    )


def records():
    info = RequestInfo(
        "r0", NS - 10**6, NS, "say it", np.array([11, 12, 13], np.int32), SamplingParams(), {"kind": "chat"}
    )
    chain = DraftTree.build([20, 21], [ROOT, 0])
    tree = DraftTree.build([30, 31, 32], [ROOT, ROOT, 1], [0.5, 0.25, 0.5], Drawn.WITHOUT_REPLACEMENT)
    rejected = verdict(chain, [1, 2], [0], 22, FinalKind.RECOVERED)
    bonus = verdict(tree, [2, 1, 1], [1, 2], 33, FinalKind.BONUS)
    output = np.array([19, 20, 22, 31, 32, 33], np.int32)
    end = RequestEnd(info, NS + 10**9, FinishReason.LENGTH, "", output)
    empty = DraftTree.empty()
    return [
        record(0, (part(0, empty, None, 0, prefill=2),), admitted=(info,)),
        record(1, (part(1, empty, verdict(empty, [], [], 19, FinalKind.TARGET), 1),)),
        record(2, (part(2, chain, rejected, 2),)),
        record(3, (part(3, tree, bonus, 3),), finished=(end,)),
    ]
