"""Addresses of traces: which are known, what is asked for each, and what is shown of them."""

import pickle
from pathlib import Path

import pytest

from specscope.errors import UserError
from specscope.trace.stored import CaptureSource, StoreAddress
from specscope.trace.wire.reading import CaptureReader, split_reference

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
    with pytest.raises(UserError, match="is no address of a trace: write http://HOST:16686/trace/ID") as caught:
        StoreAddress.read(text)
    assert "sec" not in str(caught.value)


def test_what_was_fetched_is_called_by_its_address_everywhere(tmp_path):
    path = tmp_path / "x"
    path.write_bytes((Path(__file__).parents[2] / "traces" / "planted.jsonl").read_bytes())
    capture = CaptureSource(f"http://h/trace/{ID}", path, place="r0@2", notes=("a note",))
    assert split_reference(capture) == (f"http://h/trace/{ID}", "r0@2")
    reader = CaptureReader(split_reference(capture)[0])
    reader.read()
    assert (reader.name, reader.warnings[0]) == (f"http://h/trace/{ID}", "a note")
    again = pickle.loads(pickle.dumps(capture))  # compare reads large captures in processes of their own
    assert (again, again.files, again.place) == (capture, (path,), "r0@2")


def test_what_could_not_be_fetched_is_told_by_whoever_reads_it():
    with pytest.raises(UserError, match=r"^it is gone$"):
        CaptureReader(CaptureSource("http://h/trace/ab", error="it is gone"))
