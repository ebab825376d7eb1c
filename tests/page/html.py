"""What a browser would read of a page: its tags, its words, the cells of its tables, and what its scripts hold."""

from html.parser import HTMLParser


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
