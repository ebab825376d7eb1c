"""A real HTTP server of one page, which a test changes as it goes."""

from tests.remote.store import NONE, Answer, Store


class Page(Store):
    """Serves `pages` one after the other, the last of them again and again, until `close`."""

    def __init__(self, *pages):
        super().__init__({})
        self.pages, self.served, self.status = list(pages), 0, 200
        self.url += "/metrics"

    def answer(self, path):
        if path != "/metrics":
            return NONE
        self.served += 1
        return Answer(self.pages[min(self.served, len(self.pages)) - 1].encode(), self.status)
