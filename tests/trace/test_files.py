"""Files that are read and written whole, what each may replace; captures as people keep them, and traces' addresses."""

import json
import os
import pickle
import stat
from collections import Counter
from pathlib import Path

import pytest

from specscope.errors import UserError
from specscope.trace.files import CAPTURE, Existing, TakenError, check_output, open_capture
from specscope.trace.record.draft_vocabulary import draft_tokens
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.stored import CaptureSource, StoreAddress, as_runs, every_run
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.reading import CaptureReader, read_capture, split_reference
from specscope.whole_file import read_whole, write_whole
from tests.processes import room_for
from tests.support.commands import run_here, said, specscope
from tests.support.samples import PLANTED
from tests.trace.damage import spans_of
from tests.trace.strategies import RUN
from tests.trace.wrappings import WRAPPINGS


def test_a_file_within_the_limit_is_read_and_one_beyond_it_is_not(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 2**20)
    assert len(read_whole(tmp_path / "a", "the data", 2**20)) == 2**20
    (tmp_path / "a").write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(UserError, match=r"cannot read the data .*a: it is larger than 1 MiB, the limit"):
        read_whole(tmp_path / "a", "the data", 2**20)


@pytest.mark.parametrize("name", ["/dev/zero", "pipe", "."])
def test_what_has_no_end_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    code, _, err = run_here(["tune", PLANTED, "--costs", name])
    assert (code, err) == (2, f"specscope: error: cannot read the costs {name}: it is no regular file\n")


# Captures that are there already

OLD = Path(PLANTED).read_bytes()
REFUSED = "refused"
NEW = "run.2.jsonl"
# What is there, and what becomes of it by each rule: the name that is written, or why none is
CONTENTS = {
    "nothing": (None, "run.jsonl", "run.jsonl", "run.jsonl"),
    "an empty file": (b"", "run.jsonl", "run.jsonl", "run.jsonl"),
    "a capture": (OLD, "run.jsonl", REFUSED, NEW),
    "something else": (b"my notes\n", REFUSED, REFUSED, NEW),
    "spans of another program": (b'{"resourceSpans":[{"resource":{"attributes":[]}}]}\n', REFUSED, REFUSED, NEW),
    "JSON": (b'{"a": 1}\n', REFUSED, REFUSED, NEW),
}


@pytest.mark.parametrize("existing", Existing)
@pytest.mark.parametrize("content", CONTENTS)
def test_what_becomes_of_a_file_that_is_there(content, existing, tmp_path):
    before, *names = CONTENTS[content]
    name = names[list(Existing).index(existing)]
    path = tmp_path / "run.jsonl"
    if before is not None:
        path.write_bytes(before)
    if name == REFUSED:
        for write in (
            lambda: check_output(str(path), "-o", (), CAPTURE, existing),
            lambda: CaptureWriter(path, RUN, Vocabulary(), existing=existing),
        ):
            with pytest.raises(TakenError, match=r"run.jsonl exists"):
                write()
    else:
        check_output(str(path), "-o", (), CAPTURE, existing)
        writer = CaptureWriter(path, RUN, Vocabulary(), existing=existing)
        writer.close()
        assert writer.path == tmp_path / name
        assert writer.renamed == ("" if name == "run.jsonl" else f"{path} exists: capturing to {writer.path}")
        assert read_capture(writer.path).history.run == RUN
    if name != "run.jsonl":
        assert path.read_bytes() == before
    assert {one.name for one in tmp_path.iterdir()} == {"run.jsonl", name} - {REFUSED}


def test_a_new_name_is_the_first_that_is_free(tmp_path, monkeypatch):
    for number in (1, 2, 4):
        path = tmp_path / ("run.jsonl" if number == 1 else f"run.{number}.jsonl")
        path.write_bytes(OLD)
    writer = CaptureWriter(tmp_path / "run.jsonl", RUN, Vocabulary(), existing=Existing.NEW_NAME)
    other = CaptureWriter(tmp_path / "run.jsonl", RUN, Vocabulary(), existing=Existing.NEW_NAME)
    assert (writer.path.name, other.path.name) == ("run.3.jsonl", "run.5.jsonl")
    writer.close()
    other.close()
    monkeypatch.setattr("specscope.trace.files.MOST_NAMES", 4)
    (tmp_path / "run.3.jsonl").write_bytes(OLD)
    with pytest.raises(TakenError, match=r"run.jsonl exists, and so do 2 names like it"):
        open_capture(tmp_path / "run.jsonl", Existing.NEW_NAME)


@pytest.mark.parametrize("existing", [Existing.REPLACE, Existing.REFUSE])
def test_a_second_writer_of_a_file_is_refused(existing, tmp_path):
    path = tmp_path / "run.jsonl"
    writer = CaptureWriter(path, RUN, Vocabulary())
    first = path.read_bytes()
    with pytest.raises(TakenError, match=r"run.jsonl is being written by another process: give another name"):
        CaptureWriter(path, RUN, Vocabulary(), existing=existing)
    code, _, err = run_here(["capture", "abc", "-o", str(path), "--target", "/no/such/model"])
    assert (code, err) == (
        2, f"specscope: error: {path} is being written by another process: give another name\n"
    )  # fmt: skip
    assert path.read_bytes() == first
    writer.close()
    CaptureWriter(path, RUN, Vocabulary()).close()


@pytest.mark.parametrize("before", [None, 0o644])
def test_a_capture_is_read_by_nobody_else(before, tmp_path):
    path = tmp_path / "run.jsonl"
    if before is not None:
        path.write_bytes(OLD)
        path.chmod(before)
    old = os.umask(0)
    try:
        CaptureWriter(path, RUN, Vocabulary()).close()
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("older", ["<!doctype html><title>specscope older", None])
def test_a_page_on_a_full_disk_leaves_what_was_there(older, tmp_path, monkeypatch):
    name = "page.html"
    monkeypatch.chdir(tmp_path)
    if older is not None:
        (tmp_path / name).write_text(older)
    with room_for(1000):
        code, _, err = run_here(["export", PLANTED, "-o", name])
    assert (code, err) == (2, f"specscope: error: cannot write {name}: File too large\n")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == ({} if older is None else {name: older})


def test_a_file_is_replaced_with_its_mode_and_behind_its_link(tmp_path):
    (tmp_path / "page").write_text("older")
    (tmp_path / "page").chmod(0o640)
    (tmp_path / "link").symlink_to("page")
    write_whole(tmp_path / "link", b"newer")
    assert (tmp_path / "link").is_symlink()
    assert ((tmp_path / "page").read_bytes(), (tmp_path / "page").stat().st_mode & 0o777) == (b"newer", 0o640)
    write_whole(tmp_path / "new", b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "new", "page"]


TRACES = Path(__file__).parents[2] / "traces"
SAMPLE = TRACES / "planted.jsonl"


def lines(path=SAMPLE):
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
                ((kind, value),) = pair["value"].items()
                pair["value"] = {kind: change(value)}
    return documents


@pytest.fixture
def two(tmp_path):
    """Two runs in one file, the second once more under another id."""
    other = changed(lines(), "specscope.run.id", lambda text: "f" * len(text))
    return write(tmp_path / "two.jsonl", [*lines(), *other])


def test_of_several_runs_in_a_file_one_can_be_named_and_report_takes_all(two):
    known = read_capture(SAMPLE).history.steps
    assert [(each.files, read_capture(each).history.steps) for each in every_run(two)] == [((Path(two),), known)] * 2
    with pytest.raises(
        UserError, match=r"more than one run: add --run ID with one of [0-9a-f]{12}, f{12} \(`report` shows each\)$"
    ):
        read_capture(two)
    assert specscope("verify", two).returncode == 2
    one, sent = specscope("verify", two, "--run", "ffff"), specscope("verify", SAMPLE)
    assert (one.returncode, one.stdout) == (sent.returncode, sent.stdout.replace(str(SAMPLE), two))
    assert "(run ffffffffffff)" in specscope("report", two, COLUMNS="200").stdout
    assert "Figures" in specscope("compare", two).stdout
    assert "has no run abc; there are: " in specscope("verify", two, "--run", "abc").stderr
    assert (
        "holds more than one run: add --run ID" in run_here(["export", two, "-o", str(Path(two).parent / "a.html")])[2]
    )


@pytest.mark.parametrize("form", ["protobuf", "proto of the file exporter", "compressed proto", "compressed JSON"])
def test_runs_in_what_a_collector_writes_are_found_by_their_first_characters(two, form):
    Path(two).write_bytes(WRAPPINGS[form](lines(Path(two))))
    assert [each.run[:4] for each in every_run(two)] == [read_capture(SAMPLE).history.run.run_id[:4], "ffff"]
    assert run_here(["verify", two, "--run", "ffff"])[0] == run_here(["verify", str(SAMPLE)])[0]


def test_files_of_one_run_are_one_run_in_whatever_order(tmp_path):
    whole = lines(TRACES / "ngram.jsonl")
    parts = [write(tmp_path / "b.jsonl", whole[2:]), write(tmp_path / "a.jsonl", whole[:2])]
    [source] = as_runs(parts)
    reader = read_capture(source)
    assert reader.history.steps == read_capture(TRACES / "ngram.jsonl").history.steps
    assert (reader.warnings, reader.progress) == ([], 1.0)
    assert len(as_runs([str(SAMPLE), str(TRACES / "ngram.jsonl")])) == 2
    out = str(tmp_path / "part.jsonl")
    assert run_here(["export", *(f"{part}#r1" for part in parts), "-o", out])[0] == 0
    (request,) = read_capture(out).history.requests.values()
    assert request.steps == reader.history.requests["r1"].steps
    taken = run_here(["export", *(f"{part}#r1" for part in parts), "-o", parts[0]])
    assert (taken[0], "would overwrite the input" in taken[2]) == (2, True)


@pytest.mark.parametrize("name", ["parents", "request.params", "run.versions", "run.params"])
def test_of_a_text_that_a_store_cut_only_that_is_lost(name, tmp_path):
    cut = changed(lines(), f"specscope.{name}", lambda text: text[:30])
    reader, sent = read_capture(write(tmp_path / "cut.jsonl", cut)), read_capture(SAMPLE).history
    assert reader.history.acceptance == sent.acceptance
    outputs = ([request.output() for request in each.requests.values()] for each in (reader.history, sent))
    assert next(outputs) == next(outputs)
    assert any(f"`specscope.{name}` was cut short" in warning for warning in reader.warnings)
    assert not reader.history.lost
    infos = ([each.info.params for each in history.requests.values()] for history in (reader.history, sent))
    assert next(infos) == next(infos)  # the request's own span has them, too


def test_parameters_that_no_span_tells_are_unknown_everywhere(tmp_path):
    cut = changed(lines(), "specscope.request.params", lambda text: text[:30])
    for document in cut:
        for part in document["resourceSpans"]:
            for scope in part["scopeSpans"]:
                scope["spans"] = [span for span in scope["spans"] if span["name"] in ("queue", "decode_step")]
    path = write(tmp_path / "cut.jsonl", cut)
    report = json.loads(run_here(["report", str(path), "--json"])[1])["captures"][0]
    assert {request["params"]["temperature"] for request in report["requests"]} == {None}
    found = run_here(["compare", str(SAMPLE), str(path)])[1]
    assert "temperature" not in found.partition("Configuration")[2].partition("Where")[0]


@pytest.mark.parametrize("name", ["request.prompt_tokens", "output.tokens"])
def test_a_list_that_a_store_cut_convicts_nobody(name, tmp_path):
    def cut(value):
        return {"values": value["values"][:4]}

    path = write(tmp_path / "cut.jsonl", changed(lines(), f"specscope.{name}", cut))
    code, out, err = run_here(["verify", str(path)])
    assert (code, f"`specscope.{name}` was cut short" in out) == (0, True), out + err


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


@pytest.mark.parametrize(("place", "missing"), [("2:4", 22), ("0:4", 20), ("20:24", 20), ("0:24", 0)])
def test_a_part_of_a_request_lacks_what_comes_before_and_behind_it(place, missing, tmp_path):
    """Of its 25 steps, which its own span counts."""
    part = str(tmp_path / "part.jsonl")
    said(["export", f"{TRACES / 'eagle.jsonl'}#r2@{place}", "-o", part])
    words = [f"a part of its run, without {missing} steps of 1 request"] if missing else []
    assert read_capture(part).warnings == words
    err = said(["export", part, "-o", str(tmp_path / "tables")])[1]
    assert all(line in err for line in words)
    assert missing or "a part of" not in err


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
    path.write_bytes(SAMPLE.read_bytes())
    capture = CaptureSource(f"http://h/trace/{ID}", path, place="r0@2", notes=("a note",))
    assert split_reference(capture) == (f"http://h/trace/{ID}", "r0@2")
    reader = CaptureReader(split_reference(capture)[0])
    reader.read()
    assert (reader.name, reader.warnings[0]) == (f"http://h/trace/{ID}", "a note")
    again = pickle.loads(pickle.dumps(capture))  # compare reads large captures in processes of their own
    assert (again, again.files, again.place) == (capture, (path,), "r0@2")
