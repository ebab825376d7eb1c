"""Captures as people keep them: several runs in a file, a run in several, a request alone, texts that a store cut.

And addresses of traces: which are known, what is asked for each, and what is shown of them.
"""

import json
import pickle
from collections import Counter
from pathlib import Path

import pytest

from specscope.errors import UserError
from specscope.trace.record.draft_vocabulary import draft_tokens
from specscope.trace.stored import CaptureSource, StoreAddress, as_runs, every_run
from specscope.trace.wire.reading import CaptureReader, read_capture, split_reference
from tests.support.commands import specscope
from tests.trace.damage import spans_of

TRACES = Path(__file__).parents[2] / "traces"
PLANTED = TRACES / "planted.jsonl"


def lines(path=PLANTED):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, documents):
    path.write_text("".join(json.dumps(document, separators=(",", ":")) + "\n" for document in documents))
    return str(path)


def changed(documents, name, change):
    """With the text of an attribute changed wherever it stands."""
    for document in documents:
        resources = [part["resource"] for part in document["resourceSpans"]]
        for pair in (pair for holder in (*resources, *spans_of(document)) for pair in holder["attributes"]):
            if pair["key"] == name:
                pair["value"]["stringValue"] = change(pair["value"]["stringValue"])
    return documents


@pytest.fixture
def two(tmp_path):
    """Two runs in one file, the second once more under another id."""
    other = changed(lines(), "specscope.run.id", lambda text: "f" * len(text))
    return write(tmp_path / "two.jsonl", [*lines(), *other])


def test_of_several_runs_in_a_file_one_can_be_named_and_report_takes_all(two):
    known = read_capture(PLANTED).history.steps
    assert [(each.files, read_capture(each).history.steps) for each in every_run(two)] == [((Path(two),), known)] * 2
    with pytest.raises(
        UserError, match=r"more than one run: add --run ID with one of [0-9a-f]{12}, f{12} \(`report` shows each\)$"
    ):
        read_capture(two)
    assert specscope("verify", two).returncode == 2
    one, sent = specscope("verify", two, "--run", "ffff"), specscope("verify", PLANTED)
    assert (one.returncode, one.stdout) == (sent.returncode, sent.stdout.replace(str(PLANTED), two))
    assert "(run ffffffffffff)" in specscope("report", two, COLUMNS="200").stdout
    assert "Figures" in specscope("compare", two).stdout
    assert "has no run abc; there are: " in specscope("verify", two, "--run", "abc").stderr


def test_files_of_one_run_are_one_run_in_whatever_order(tmp_path):
    whole = lines(TRACES / "ngram.jsonl")
    parts = [write(tmp_path / "b.jsonl", whole[2:]), write(tmp_path / "a.jsonl", whole[:2])]
    [source] = as_runs(parts)
    reader = read_capture(source)
    assert reader.history.steps == read_capture(TRACES / "ngram.jsonl").history.steps
    assert (reader.warnings, reader.progress) == ([], 1.0)
    assert len(as_runs([str(PLANTED), str(TRACES / "ngram.jsonl")])) == 2


@pytest.mark.parametrize("name", ["parents", "request.params", "run.versions", "run.params"])
def test_of_a_text_that_a_store_cut_only_that_is_lost(name, tmp_path):
    cut = changed(lines(), f"specscope.{name}", lambda text: text[:30])
    reader, sent = read_capture(write(tmp_path / "cut.jsonl", cut)), read_capture(PLANTED).history
    assert reader.history.acceptance == sent.acceptance
    outputs = ([request.output() for request in each.requests.values()] for each in (reader.history, sent))
    assert next(outputs) == next(outputs)
    assert any(f"`specscope.{name}` was cut short" in warning for warning in reader.warnings)
    assert not reader.history.lost


def test_a_request_by_its_trace_alone_lacks_nothing_of_its_own(tmp_path):
    """Nor its draft vocabulary, which another trace holds: the head on this machine is the one that it names."""
    alone = lines(TRACES / "eagle.jsonl")
    every = [span for document in alone for span in spans_of(document)]
    told = {span["traceId"] for span in every if "specscope.run.draft_tokens" in json.dumps(span)}
    counts = Counter(span["traceId"] for span in every if span["traceId"] not in told)
    trace = counts.most_common(1)[0][0]
    for document in alone:
        for part in document["resourceSpans"]:
            for scope in part["scopeSpans"]:
                scope["spans"] = [span for span in scope["spans"] if span["traceId"] == trace]
    reader = read_capture(write(tmp_path / "alone.jsonl", alone))
    assert reader.warnings == []
    assert reader.history.in_part
    assert draft_tokens(reader.history.run) is not None
    steps = [span for document in alone for span in spans_of(document) if span["name"] == "decode_step"]
    for span in steps[1:3]:
        span["name"] = "lost"
    [words] = read_capture(write(tmp_path / "alone.jsonl", alone)).warnings
    assert words == "a part of its run, without 2 steps of 1 request"


ID = "45daff46812af6761e35bf7f76fb6dbb"


GRAFANA = "/api/datasources/proxy/uid/P21"


JAEGER = ["api/v3/traces", "api/traces"]


@pytest.mark.parametrize(
    ("text", "root", "apis", "query"),
    [
        (f"http://h:16686/trace/{ID}", "http://h:16686", JAEGER, ""),
        (f"HTTPS://h/trace/{ID.upper()}/", "https://h", JAEGER, ""),
        (f"http://h/jaeger/trace/{ID}?uiFind=x#foo", "http://h/jaeger", JAEGER, ""),
        (f"http://h/api/v3/traces/{ID}", "http://h", JAEGER, ""),
        (f"http://h/api/traces/{ID}?start=1", "http://h", JAEGER, "?start=1"),
        (f"http://h:3200/api/v2/traces/{ID}", "http://h:3200", ["api/v2/traces", "api/traces"], ""),
        (f"https://h{GRAFANA}/api/traces/{ID}", f"https://h{GRAFANA}", JAEGER, ""),
        (f"http://h/trace/api/traces/{ID}", "http://h/trace", JAEGER, ""),
        (f"http://me:x@[::1]:1/trace/{ID}", "http://me:x@[::1]:1", JAEGER, ""),
    ],
)
def test_an_address_is_known_by_its_end(text, root, apis, query):
    address = StoreAddress.read(text)
    assert list(address.apis) == [f"{root}/{api}/" for api in apis]
    assert (address.query, address.trace) == (query, ID)


@pytest.mark.parametrize(
    ("after", "place"),
    [
        ("#r3@17/4", "r3@17/4"),
        ("#r3@10:40", "r3@10:40"),
        ("?a=a@1#r3@0", "r3@0"),
        ("#r3", ""),
        ("#a=b@c", ""),
        ("?x@1", ""),
    ],
)
def test_a_step_after_it_is_a_reference_and_anything_else_is_the_pages(after, place):
    address = StoreAddress.read(f"http://h/trace/{ID}{after}")
    assert (address, address.place) == (f"http://h/trace/{ID}", place)


@pytest.mark.parametrize(
    "text",
    [
        "http://h", "http://h/", "http://h/search?service=x", "http://h/trace/", "http://h/trace/xyz", "http:///trace/ab",
        f"http://h/trace/{ID}{ID}", f"http://h/trace/{ID}...{ID}", "http://h:99999/trace/ab", "http://h/trace/ab cd",
        f"http://h/traces/{ID}", "http://me:secret@h/search", "http://me:secret@h:0/trace/ab", "http://me:sec/ret@h/trace/ab",
    ],
)  # fmt: skip
def test_an_address_of_no_trace_is_refused_and_tells_no_password(text):
    with pytest.raises(UserError, match="is not a trace's address: write http://HOST:16686/trace/ID") as caught:
        StoreAddress.read(text)
    assert "sec" not in str(caught.value)


def test_what_was_fetched_is_called_by_its_address_everywhere(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(PLANTED.read_bytes())
    capture = CaptureSource(f"http://h/trace/{ID}", path, place="r0@2", notes=("a note",))
    assert split_reference(capture) == (f"http://h/trace/{ID}", "r0@2")
    reader = CaptureReader(split_reference(capture)[0])
    reader.read()
    assert (reader.name, reader.warnings[0]) == (f"http://h/trace/{ID}", "a note")
    again = pickle.loads(pickle.dumps(capture))  # compare reads large captures in processes of their own
    assert (again, again.files, again.place) == (capture, (path,), "r0@2")
