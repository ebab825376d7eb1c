"""Captures by their address in a trace store: every verb reads them as it reads a file, and tells no password."""

import json
import os
import sys

import pytest

from specscope.trace.stored import StoreAddress
from tests.processes import SPECSCOPE, ended
from tests.remote.store import PLANTED, Answer, Store, jaeger, traces_of
from tests.support.commands import specscope
from tests.waiting import HANG_SECONDS

REQUEST, TRACES = traces_of()

EAGLE = PLANTED.with_name("eagle.jsonl")
ID = f"/trace/{REQUEST}"


@pytest.fixture
def store():
    with Store(jaeger(TRACES), login="Basic bWU6c2VjcmV0") as store:
        store.address = f"{store.url}{ID}"  # as it is shown
        store.given = f"{store.url.replace('//', '//me:secret@')}{ID}"
        yield store


def told(*words, code=0, stdin=""):
    done = specscope(*words, stdin=stdin)
    assert done.returncode == code, done.stderr
    assert "secret" not in done.stdout + done.stderr
    return done


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["verify", "IT"], 0),
        (["why", "IT#r0@3"], 0),
        (["compare", str(PLANTED), "--with", "IT"], 0),
        (["diagnose", "IT", "--no-audit"], 1),
        (["tune", "IT", "--no-costs", "--nodes", "4"], 0),
    ],
    ids=lambda words: " ".join(words).replace(str(PLANTED), "FILE") if isinstance(words, list) else "",
)
def test_a_verb_says_of_an_address_what_it_says_of_the_file(store, words, code):
    by_file, by_address = (
        told(*(word.replace("IT", name) for word in words), "--json", code=code).stdout
        for name in (str(PLANTED), store.given)
    )
    assert store.address in by_address
    assert json.loads(by_address.replace(store.address, str(PLANTED))) == json.loads(by_file)


@pytest.mark.parametrize("has_engine_steps", [True, False])
def test_a_request_of_a_batch_is_read_whole_with_its_engine_steps_and_without(has_engine_steps):
    request, traces = traces_of(EAGLE)
    kept = traces if has_engine_steps else {request: traces[request]}
    with Store(jaeger(kept)) as store:
        ((alone,), whole) = (
            json.loads(told("report", name, "--json").stdout)["captures"][0]["requests"]
            for name in (f"{store.url}/trace/{request}", EAGLE)
        )
        if not has_engine_steps:  # which alone tell of preemptions
            assert [request.pop("preempted") for request in (alone, *whole)] == [None, 0, 0, 0]
        assert alone in whole
        told("verify", f"{store.url}/trace/{request}")


def test_headers_are_sent_and_not_printed():
    with Store(jaeger(TRACES), login="Bearer secret") as store:
        headers = ("--header", "authorization:Bearer secret", "--header", "X-Scope-OrgID: 7")
        told("report", f"{store.url}{ID}", *headers)
        assert {headers["X-Scope-OrgID"] for _, headers in store.asked} == {"7"}
        for bad in ("secret", ": secret", "a b: secret", "a: b\nsecret", "ä: secret"):
            assert (
                "write a name and a value in ASCII"
                in told("report", f"{store.url}{ID}", "--header", bad, code=2).stderr
            )
    assert "--header goes to a trace store" in told("report", PLANTED, "--header", "a: secret", code=2).stderr
    assert "--header goes to a trace store" in told("debug", "--header", "a: secret", "hi", code=2).stderr


def test_tables_are_written_of_it_and_what_is_missing_or_refused_is_said(store, tmp_path):
    assert "1 request, 11 steps" in told("export", store.given, "-o", tmp_path / "tables").stderr
    done = told("report", store.address, "--json", code=2)
    assert "401 Unauthorized: give a login with --header" in done.stderr
    assert json.loads(done.stdout)["error"] in done.stderr
    step = next(trace for trace in TRACES if trace != REQUEST)
    store.answers[f"/api/v3/traces/{step}"] = Answer(b"", 503)
    note = f"1 of {len(TRACES) - 1} engine steps that the trace links to were not fetched: the store answered 503"
    assert note in told("report", store.given).stdout


@pytest.mark.parametrize("words", [["open"], ["open", "", ""], ["verify", "#r0@3"], ["run", "--otlp-endpoint", "x:/"]])
def test_a_password_is_not_in_a_refusal_either(store, words):
    verb, *ends = words
    told(verb, *(f"{store.given}{end}" for end in ends or [""]), code=2)


def test_a_screen_shows_it_and_a_bar_meanwhile_and_nothing_is_left(terminal, store, tmp_path):
    shown = terminal(*SPECSCOPE, "open", f"{store.given}#r0@3", TMPDIR=str(tmp_path))
    for word in (b"fetching", b"r0"):
        shown.wait_for(lambda word=word: word in shown.screen)
    assert len(os.listdir(tmp_path)) == 1
    shown.type("q")
    assert ended(shown.process, HANG_SECONDS)
    assert b"secret" not in shown.screen
    assert os.listdir(tmp_path) == []


def test_of_a_trace_that_several_engines_took_part_in_the_first_is_read():
    """A caller's trace: a client asked two servers, each of which is a run."""
    other, other_traces = traces_of(EAGLE)
    both = {**TRACES, REQUEST: [*TRACES[REQUEST], *other_traces[other]]}
    with Store(jaeger(both)) as store:
        done = told("report", f"{store.url}{ID}", "--json")
    (capture,) = json.loads(done.stdout)["captures"]
    assert [request["id"] for request in capture["requests"]] == ["r0"]
    assert "requests of 1 other run" in done.stdout


@pytest.mark.parametrize(
    "place", ["localhost:16686/trace", "jaeger.example.com/api/traces", "[::1]:16686/api/v3/traces"]
)
def test_an_address_without_its_scheme_is_told_what_it_lacks(place):
    address = f"{place}/45daff46812af6761e35bf7f76fb6dbb"
    result = specscope("report", address)
    assert result.returncode == 2
    assert result.stderr == (
        f"specscope: error: there is no file {address}; the address of a trace begins with http://\n"
    )
    assert not any(map(StoreAddress.lacks_scheme, ("run.jsonl", "traces/ngram.jsonl", "run.jsonl#r0@3", "/trace/ab")))


def test_a_recording_that_is_piped_in_is_read_and_shown_and_keys_come_from_the_terminal(terminal):
    by_file, by_pipe = (
        json.loads(told("report", name, "--json", stdin=PLANTED.read_text()).stdout)["captures"][0]
        for name in (PLANTED, "-")
    )
    assert (by_file.pop("source"), by_pipe.pop("source")) == (str(PLANTED), "standard input")
    assert by_pipe == by_file
    command = f"cat {PLANTED} | {sys.executable} -m specscope open -"
    shown = terminal("sh", "-c", command)
    shown.wait_for(lambda: b"r0" in shown.screen)
    shown.type("q")
    assert ended(shown.process, HANG_SECONDS)
