"""Recorded pages and lines of vLLM; of SGLang (0.5.23), pages written after its source; and a server of one page."""

import re
import threading
from pathlib import Path

from specscope.watch.source import File
from tests.remote.store import NONE, Answer, Store
from tests.waiting import until

DATA = Path(__file__).parents[1] / "data" / "vllm"
PEOPLE = DATA.parent / "people"
LLAMA = PEOPLE / "llamacpp"


def text(name):
    return (DATA / name).read_text()


def read(path, follow=False):
    """(A file as a source, the intervals that it tells.)"""
    source = File(str(path), follow=follow)
    return source, [one for one in source.run(threading.Event()) if not isinstance(one, str)]


class Looks(threading.Event):
    """Never set while it is waited for; counts how often whoever waits has looked again."""

    count = 0

    def wait(self, timeout=None):
        self.count += 1
        return super().wait(timeout)

    def again(self):
        before = self.count
        until(lambda: self.count >= before + 2)


def changed(page, **values):
    """A page with other counts: drafts, drafted, accepted, emitted, at (a list), created, engine."""
    names = {
        "drafts": "vllm:spec_decode_num_drafts_total",
        "drafted": "vllm:spec_decode_num_draft_tokens_total",
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        "emitted": "vllm:generation_tokens_total",
        "created": "vllm:spec_decode_num_drafts_created",
    }
    for name, value in values.items():
        if name in names:
            page, times = re.subn(rf"(?m)^({names[name]}\{{.*\}}) .*$", rf"\1 {value}", page)
            assert times == 1, name
    for position, value in enumerate(values.get("at", ())):
        page, times = re.subn(rf'(per_pos_total\{{.*position="{position}"\}}) .*', rf"\1 {value}", page)
        assert times == 1
    if "engine" in values:
        page = page.replace('engine="0"', f'engine="{values["engine"]}"')
    return page


def two_engines(page, other):
    """One page of two engines, as data parallel vLLM writes it: each family once, with samples of both."""
    lines, more = page.splitlines(), changed(other, engine=1).splitlines()
    both = []
    for line, second in zip(lines, more, strict=True):
        both += [line] if line.startswith("#") or line == second else [line, second]
    return "\n".join(both) + "\n"


LABELS = '{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"}'
GAUGES = {"num_running_reqs": 12.0, "num_queue_reqs": 3.0, "token_usage": 0.28}
GAUGES |= {"spec_accept_length": 2.31, "spec_accept_rate": 0.4367, "gen_throughput": 812.5}
SGLANG = "".join(f"# TYPE sglang:{name} gauge\nsglang:{name}{LABELS} {value}\n" for name, value in GAUGES.items())


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
