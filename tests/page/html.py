"""What a browser would read of a page, and a run whose every text is HTML, script, bidi controls and surrogates."""

import dataclasses
from html.parser import HTMLParser
from pathlib import Path

from specscope.page.write import PageRun
from specscope.trace.wire.reading import read_capture


class Page(HTMLParser):
    """`held`: the text of each script and style by its tag and id, "code" where it has none."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.rows, self.words, self.held = [], [], [], [], {}
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append((tag, given))
        self.open += [] if tag in ("br", "meta") else [(tag, given.get("id", "code"))]
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append([int(given.get("rowspan", 1)), ""])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1][0] in ("script", "style"):
            self.held[self.open[-1]] = self.held.get(self.open[-1], "") + data
        if any(tag == "td" for tag, _ in self.open):
            self.rows[-1][-1][1] += data


BAD = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x1b[31m]]>-->\udcff&amp;"


def hostile():
    history = read_capture(Path(__file__).parents[2] / "traces" / "sampled.jsonl").history
    history.run = dataclasses.replace(history.run, target=BAD, drafter=BAD, versions={BAD: BAD})
    history.vocabulary.pieces.update(dict.fromkeys(history.vocabulary.pieces, BAD.encode("utf-8", "surrogateescape")))
    for request in history.requests.values():
        request.info = dataclasses.replace(request.info, prompt=BAD, title=BAD, labels={"kind": BAD})
    return PageRun(BAD, history, [BAD])
