"""A run whose every text is HTML, script, a closing tag, bidi controls and a lone surrogate."""

import dataclasses
from pathlib import Path

from specscope.page.write import PageRun
from specscope.trace.wire.reading import read_capture

BAD = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x1b[31m]]>-->\udcff&amp;"


def hostile():
    history = read_capture(Path(__file__).parents[2] / "traces" / "sampled.jsonl").history
    history.run = dataclasses.replace(history.run, target=BAD, drafter=BAD, versions={BAD: BAD})
    history.vocabulary.pieces.update(dict.fromkeys(history.vocabulary.pieces, BAD.encode("utf-8", "surrogateescape")))
    for request in history.requests.values():
        request.info = dataclasses.replace(request.info, prompt=BAD, title=BAD, labels={"kind": BAD})
    return PageRun(BAD, history, [BAD])
