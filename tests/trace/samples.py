"""A small fixed run: prefill, a chain with a rejection, a tree with a bonus, an end. And the spans of any run."""

import numpy as np

from specscope.trace.record.records import FinalKind
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.spans import Encoder, SpanLevel
from specscope.trace.wire.unspan import Decoder
from tests.support import records as made
from tests.trace.strategies import RUN

NS = 1_700_000_000_000_000_000


def verdict(tree, outcome, path, token, kind):
    n = len(tree)
    rising = np.linspace(0.1, 0.9, n)
    numbers = {"accept_prob": np.linspace(0.2, 1.0, n), "coin": np.linspace(0.05, 0.95, n), "final_p": 0.25}
    return made.verdict(outcome, path, token, kind, p=rising, p_trial=rising, q_trial=np.full(n, 0.5), **numbers)


def part(index, tree, judged, emitted, prefill=0):
    more = {"index": index, "context": 5 + index, "prefill": prefill, "drafter": "ngram" if len(tree) else "none"}
    return made.part("r0", tree, judged, emitted=emitted, **more)


def record(step, parts, admitted=(), finished=()):
    during = made.phases(NS + step * 10**8, (10,) * 5)
    change = {"running": 1, "blocks_used": 2, "blocks_free": 98, "admitted": admitted, "finished": finished}
    return made.record(step, parts, during, requests=parts, **change)


def records():
    info = made.info("r0", "say it", [11, 12, 13], {"kind": "chat"}, arrived=NS - 10**6, admitted=NS)
    chain = DraftTree.build([20, 21], [ROOT, 0])
    tree = DraftTree.build([30, 31, 32], [ROOT, ROOT, 1], [0.5, 0.25, 0.5], Drawn.WITHOUT_REPLACEMENT)
    rejected = verdict(chain, [1, 2], [0], 22, FinalKind.RECOVERED)
    bonus = verdict(tree, [2, 1, 1], [1, 2], 33, FinalKind.BONUS)
    end = made.end(info, [19, 20, 22, 31, 32, 33], finished=NS + 10**9)
    empty = DraftTree.empty()
    return [
        record(0, (part(0, empty, None, 0, prefill=2),), admitted=(info,)),
        record(1, (part(1, empty, verdict(empty, [], [], 19, FinalKind.TARGET), 1),)),
        record(2, (part(2, chain, rejected, 2),)),
        record(3, (part(3, tree, bonus, 3),), finished=(end,)),
    ]


def written(path, told=None, run=RUN, vocabulary=None, **more):
    """The capture of a run: of these records, or of those above."""
    writer = CaptureWriter(path, run, vocabulary or Vocabulary(), **more)
    for one in records() if told is None else told:
        writer(one)
    writer.close()
    return path


def encoded(records, run=RUN, vocabulary=None, level=SpanLevel.TREES):
    """The spans of a run."""
    encoder = Encoder(run, vocabulary or Vocabulary(), level)
    return [span for record in records for span in encoder.encode(record)]


def decode(spans):
    """(the decoder, what it makes of spans that come one by one)."""
    decoder = Decoder()
    records = [record for span in spans for record in decoder.feed(span)]
    return decoder, records + decoder.flush()
