"""Captures that are damaged or hostile: named, left out, and the rest is shown. Wrong numbers are evidence."""

import dataclasses
import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from specscope.errors import UserError
from specscope.trace.record.notes import MethodNotes
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinishReason
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.otlp_json import ReadSpan
from specscope.trace.wire.reading import CaptureReader, read_capture
from specscope.trace.wire.unspan import STEPS_BEHIND, Decoder
from tests.support.commands import run_here
from tests.sweep import RAW, wrong_with
from tests.trace.damage import DEPTH, SAMPLES, TRACES, set_value, small, spans_of, with_wrong_numbers
from tests.trace.look_at import look_at
from tests.trace.samples import decode, encoded, records, written
from tests.trace.strategies import RUN

# Faults that were seen, each in one span of a run of four steps.

ARRAY, WORDS = "specscope.tree.parent", Vocabulary({i: b"x%d" % i for i in range(100)})
# What a drafter that is a model notes of the sample's tree of two nodes.
FED = {
    "specscope.draft.dropped": 0,
    "specscope.draft.prob": [0.5, 0.5],
    "specscope.draft.score": [-1.0, -1.0],
    "specscope.draft.fed_token": [1, 2],
    "specscope.draft.fed_position": [3, 4],
    "specscope.draft.fed_norms": [1.0, 2.0],
    "specscope.draft.draw_margin": [0.5, 1.0],
    "specscope.draft.coin": [0.5, 0.25],
    "specscope.draft.low": [0.25, 0.0],
}


def logprobs(logprob, top, top_logprob):
    return {"specscope.logprobs": json.dumps({"logprob": logprob, "top": top, "top_logprob": top_logprob})}


FAULTS = {
    "cycle": ({ARRAY: [1, 0]}, "`specscope.tree.parent`: node 1 cannot be the parent of node 0"),
    "own parent": ({ARRAY: [-1, 1]}, "node 1 cannot be the parent of node 1"),
    "parent of -5": ({ARRAY: [-5, 0]}, "Expected `int` >= -1 in `specscope.tree.parent[0]`"),
    "outcome of 3": ({"specscope.verdict.outcome": [3, 1]}, "Invalid enum value 3 in `specscope.verdict.outcome[0]`"),
    "drawn in no way": ({"specscope.tree.drawn": [0, 9]}, "Invalid enum value 9"),
    "token of 2**31": ({"specscope.tree.token": [2**31, 1]}, "in `specscope.tree.token[0]`"),
    "path of others": ({"specscope.verdict.path": [1]}, "not a path of accepted nodes"),
    "path too deep": ({"specscope.verdict.path": [0, 9], "specscope.accepted": 2}, "not a path of accepted nodes"),
    "no final token": ({"specscope.final.token": None}, "specscope.final.token"),
    "final kind": ({"specscope.final.kind": "luck"}, "Invalid enum value 'luck'"),
    "text one short": ({"specscope.tree.text": ["a"]}, "`specscope.tree.text` holds 1 texts for 3 tokens"),
    "text not escaped": ({"specscope.tree.text": ["\\xzz", "a", "b"]}, "`specscope.tree.text` is not escaped"),
    "forced nowhere": ({"specscope.forced": [7]}, "`specscope.forced` names node 7 of 2"),
    "step of -1": ({"specscope.step": -1}, "Expected `int` >= 0 in `specscope.step`"),
    "step of 2**62": ({"specscope.step": 2**62}, "in `specscope.step`"),
    "logprobs": (logprobs([0], [[1], [2]], [[0], [0]]), "logprob holds 1 values, not 2"),
    "logprob rows": (logprobs([0, 0], [[1], [1, 2]], [[0], [0, 0]]), "top has rows that do not hold 1 values"),
    "logprob ids": (logprobs([0, 0], [[1], [-1]], [[0], [0]]), "`int` >= 0"),
    "confidence": ({"specscope.method": '{"confidence":[0.5]}'}, "confidence holds 1 values, not 2"),
    "confidence of null": ({"specscope.method": '{"confidence":[0.5,null]}'}, "got `null`"),
    "confidence of text": ({"specscope.method": '{"confidence":[0.5,"much"]}'}, "Invalid enum value 'much'"),
    "source of 3": ({"specscope.method": '{"source":[0,3]}'}, "`int` <= 2"),
    "no JSON": ({"specscope.method": "{x}"}, "specscope.method"),
}
SAMPLED = {"specscope.sampling.reason": "ratio", "specscope.sampling.early": False}
OF_OTHERS = {
    "labels": ("queue", {"specscope.request.labels": "[1, 2]"}, "`specscope.request.labels`: Expected `object`"),
    "deep labels": ("queue", {"specscope.request.labels": "[" * DEPTH + "]" * DEPTH}, "`specscope.request.labels`"),
    "params": ("queue", {"specscope.request.params": '{"top_p": 7}'}, "top_p"),
    "phases": ("engine_step", {"specscope.phase.times": [1, 2, 3]}, "holds 3 times for 5 names"),
    "phase that ends first": ("engine_step", {"specscope.phase.times": [2, 1] * 5}, "ends before it starts"),
    "names twice": ("engine_step", {"specscope.requests": ["r0", "r0"]}, "names a request twice"),
    "no phases": ("engine_step", {"specscope.phase.names": [], "specscope.phase.times": []}, "of length >= 1"),
    "reason": ("text_completion a/model", {"gen_ai.response.finish_reasons": ["luck"]}, "Invalid enum value 'luck'"),
    "no reason": ("text_completion a/model", {"gen_ai.response.finish_reasons": []}, "of length >= 1"),
    "ratio": ("text_completion a/model", SAMPLED | {"specscope.sampling.ratio": float("nan")}, "sampling.ratio`"),
    "stop": ("text_completion a/model", {"specscope.finish.stop": "\\x"}, "`specscope.finish.stop` is not escaped"),
}


def altered(change):
    """The sample run with some of its spans changed: (decoder, records)."""
    spans = encoded(records(), RUN, WORDS)
    return decode(ReadSpan(span.name, *told) for span in spans for told in change(span))


STEPS = {"queue": 0, "text_completion a/model": 3}  # where there is one; 2 of the others
UNREAD = ("specscope.label.", "specscope.drawing")  # written for people
CASES = [("decode_step", change, text) for change, text in FAULTS.values()] + list(OF_OTHERS.values())


@pytest.mark.parametrize(("name", "change", "text"), CASES, ids=[*FAULTS, *OF_OTHERS])
def test_a_span_that_is_damaged_is_counted_named_and_left_out(name, change, text):
    step = STEPS.get(name, 2)

    def one(span):
        hit = span.name == name and span.attributes["specscope.step"] == step
        yield span.start_ns, span.end_ns, span.attributes | (change if hit else {})

    decoder, back = altered(one)
    assert decoder.faults.total == 1
    [line] = decoder.faults.lines()
    assert line.startswith(f"left out 1×: {name.split()[0]}: ")
    assert text in line
    assert len(line) < 250
    assert [record.step for record in back] == [record.step for record in records()]
    assert [record.step for record in back if record.absent is not None] == [step]
    assert decoder.in_part
    for record, sent in zip(back, records(), strict=True):
        without = {"finished": ()} if name == "queue" else {}  # an end tells of its request what its beginning told
        assert record.step == step or replace(record, **without) == replace(sent, **without)


def wrong_values(key, value):
    """Values of another type; of an array with one for each node also too few."""
    if not isinstance(value, list):
        return [5 if isinstance(value, str) else "x"]
    of_nodes = key.startswith(("specscope.draft.", "specscope.verdict.")) and len(value) == 2
    sets_the_length = key == "specscope.draft.fed_token"
    return ["abc", [*value[:-1], None], *([value[:-1]] if of_nodes and not sets_the_length else [])]


@pytest.mark.parametrize("name", ["queue", "decode_step", "engine_step", "text_completion a/model"])
def test_a_value_of_another_type_or_length_is_named_by_its_key(name):
    """Of every attribute that is read."""
    steps = [span for span in encoded(records(), RUN, WORDS) if span.name == name]
    sent = (FED if name == "decode_step" else {}) | next(
        s.attributes for s in steps if s.attributes["specscope.step"] == STEPS.get(name, 2)
    )
    for key in (key for key in sent if key.startswith("specscope.") and not key.startswith(UNREAD)):
        for wrong in wrong_values(key, sent[key]):
            decoder = Decoder()
            decoder.feed(ReadSpan(name, 1, 2, sent | {key: wrong}))
            decoder.flush()
            assert [line for line in decoder.faults.lines() if f"`{key}" in line], (key, wrong, decoder.faults.lines())


@pytest.mark.parametrize("times", [(-1, 5), (5, 2**63), (10**400, 10**400)])
def test_times_that_are_none(times):
    decoder, _ = altered(lambda span: [(*times, span.attributes)] if span.name == "queue" else [])
    assert "not a time in nanoseconds" in decoder.faults.lines()[0]


def test_steps_far_ahead_neither_loop_nor_grow():
    last = records()[-1]
    alone = [replace(last, step=step, requests=(), finished=()) for step in (0, 2**40, 2**52)]
    decoder, back = decode(encoded(alone))
    assert [record.step for record in back] == [0, 2**40, 2**52]
    assert decoder.lost == 2**52 - 2  # counted, not walked


def test_what_comes_twice_counts_once():
    decoder, back = altered(lambda span: [(span.start_ns, span.end_ns, span.attributes)] * 3)
    assert back == records()
    assert decoder.lost == 0


def test_an_engine_step_that_names_others_than_came_is_given_with_those_that_came():
    def other(span):
        names = {"specscope.requests": ["nobody"]} if span.attributes.get("specscope.requests") else {}
        yield span.start_ns, span.end_ns, span.attributes | names

    decoder, back = altered(other)
    assert [record.absent.names for record in back] == [("nobody",)] * 4
    assert [record.requests for record in back] == [record.requests for record in records()]
    assert decoder.lost == 4


def test_an_end_without_a_start_is_told_by_the_root_span():
    decoder, back = altered(
        lambda span: [] if span.attributes["specscope.step"] < 3 else [(span.start_ns, span.end_ns, span.attributes)]
    )
    [record] = back
    assert (record.finished[0].info.id, record.finished[0].info.prompt) == ("r0", "")
    assert decoder.lost == 3


def test_what_a_decoder_holds_is_bounded(monkeypatch):
    """Requests that never end and steps that are never complete, as fast as they come."""
    for bound in ("HELD", "INFOS"):
        monkeypatch.setattr(f"specscope.trace.wire.unspan.{bound}", 2**20)
    decoder = Decoder()
    info, step = records()[0], records()[2]
    queue, part = (
        next(s for s in encoded([of]) if s.name == name) for of, name in ((info, "queue"), (step, "decode_step"))
    )
    big = {"specscope.request.prompt": "x" * 2**14}
    for n in range(300):
        own = {"specscope.request.id": f"q{n}", "specscope.step": n}
        decoder.feed(ReadSpan("queue", 1, 2, queue.attributes | big | own))
        own = {"specscope.request.id": f"d{n}", "specscope.step": 900}
        decoder.feed(ReadSpan("decode_step", 1, 2, part.attributes | own))
        assert decoder.held < 3 * 2**20
    assert len(decoder._pending) <= STEPS_BEHIND + 1


# Files


def test_one_step_without_evidence_does_not_cost_the_file(tmp_path):
    path = tmp_path / "run.jsonl"
    lines = small("planted")
    parts = [span for line in lines for span in spans_of(line) if span["name"] == "decode_step"]
    keep = ("specscope.request", "specscope.step", "specscope.context", "specscope.prefill", "specscope.draft")
    keep += ("specscope.accepted", "specscope.emitted", "specscope.final.kind")
    parts[2]["attributes"] = [pair for pair in parts[2]["attributes"] if pair["key"].startswith(keep)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reader = read_capture(path)
    assert "1 decode step without evidence" in reader.warnings
    assert len(reader.history.steps) > 3


def test_warnings_are_few_however_much_is_damaged(tmp_path):
    path = tmp_path / "run.jsonl"
    written(path)
    noise = [json.dumps({"resourceSpans": {f"{chr(97 + n % 26)}" * n: n}}) for n in range(200)]
    with path.open("a") as stream:
        stream.write("\n".join([*noise, "[" * DEPTH, "\x00", '"' + "x" * 10**6, ""]))
    reader = read_capture(path)
    assert reader.history.steps == records()
    assert len(reader.warnings) <= 22
    assert max(map(len, reader.warnings)) < 250


@pytest.mark.parametrize(
    "change", [{"specscope.run.id": 5}, {"specscope.run.params": "[]"}, {"specscope.run.seed": "x"}]
)
def test_a_first_line_that_tells_of_no_run_is_refused_by_name(tmp_path, change):
    path = tmp_path / "run.jsonl"
    lines = small("planted")
    for pair in lines[0]["resourceSpans"][0]["resource"]["attributes"]:
        if pair["key"] in change:
            value = change[pair["key"]]
            pair["value"] = {"intValue": value} if isinstance(value, int) else {"stringValue": value}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=next(iter(change))):
        CaptureReader(path)


# Text that would take hold of a terminal

HOSTILE = "\x1b[2J\x1b]0;gone\x07\x9b31m\u202eabc\u2066\r\nx\ty"


def hostile(value):
    """With such text in place of each that is there."""
    if type(value) is str:
        return value if value in ("", "none") else HOSTILE
    if isinstance(value, tuple):
        return tuple(map(hostile, value))
    if isinstance(value, dict):
        return {hostile(name): hostile(inner) for name, inner in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, SamplingParams):
        return value
    return replace(value, **{each.name: hostile(getattr(value, each.name)) for each in dataclasses.fields(value)})


def hostile_records():
    """The sample run with it, and with texts that it lacks."""
    for record in map(hostile, records()):
        parts = [replace(part, sizing=HOSTILE if part.verdict is not None else "") for part in record.requests]
        info = {"title": HOSTILE, "prompt": HOSTILE}
        ends = [
            replace(end, info=replace(end.info, **info), reason=FinishReason.ERROR, error=HOSTILE, stop=HOSTILE)
            for end in record.finished
        ]
        yield replace(
            record,
            admitted=tuple(replace(each, **info) for each in record.admitted),
            requests=tuple(parts),
            passes=record.phases[:2],
            speculation=False,
            speculation_off=HOSTILE,
            preempted=(HOSTILE,) if record.step == 2 else (),
            finished=tuple(ends),
        )


LOOKS = ("where", "tree", "requests", "info step", "info kv", "info request", "node 0", "node 1", "info branch")
SCRIPT = ["break reject if p > 0.1", "continue", "goto 0", *[*LOOKS, "request r0", "request r1", "next"] * 8]
SHOWS = ("report FILE", "verify FILE", "debug FILE --commands SCRIPT")
SHOWS += ("export FILE -o page.html", "export FILE -o tables")


def wrong_with_verbs(verbs):
    """What is wrong with how these end over FILE; what they print, and a page, would stay where it is printed."""
    Path("SCRIPT").write_text("\n".join([*SCRIPT, "reverse-continue"]))
    found = [problem for words in verbs if (problem := wrong_with(words.split()))]
    return found + [match.group() for page in Path().glob("*.html") for match in RAW.finditer(page.read_text("utf-8"))]


def test_text_of_a_capture_never_takes_hold_of_the_terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, sent = Path("FILE"), list(hostile_records())
    run = replace(hostile(RUN), run_id=RUN.run_id, evidence=RUN.evidence)
    written(path, sent, run, Vocabulary({i: HOSTILE.encode() for i in range(100)}))
    assert read_capture(path).history.steps == sent  # exact, all the same
    assert look_at(path) == 4
    assert wrong_with_verbs(SHOWS) == []


@pytest.mark.parametrize("key", ["specscope.context_len", "specscope.prefill_tokens", "specscope.request.step"])
@pytest.mark.parametrize("value", [2**31 - 1, 2**31 - 2])
def test_counts_as_large_as_they_may_be_are_drawn(tmp_path, monkeypatch, key, value):
    monkeypatch.chdir(tmp_path)
    path, lines = Path("FILE"), small("planted")
    for line in lines:
        for span in spans_of(line):
            set_value(span, key, value)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert look_at(path) > 3
    assert wrong_with_verbs(SHOWS[:3]) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_what_a_later_version_notes_is_no_damage():
    def later(span):
        method = {"specscope.method": '{"one_pass":true,"later":1}'} if span.attributes["specscope.step"] == 2 else {}
        yield span.start_ns, span.end_ns, span.attributes | (method if span.name == "decode_step" else {})

    assert [part.method for record in altered(later)[1] for part in record.requests][2] == MethodNotes(one_pass=True)


COSTS = str(TRACES.parent / "tests" / "data" / "costs.json")


VERBS = (
    *SHOWS,
    *("report FILE --json", "compare FILE WHOLE", "compare FILE FILE", "compare WHOLE FILE --json"),
    f"tune FILE --costs {COSTS}",
)


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "seed"), [(name, seed) for seed, name in enumerate(SAMPLES)])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_wrong_numbers_are_shown_nothing_is_left_out_and_every_verb_ends_well(tmp_path, monkeypatch, name, seed):
    monkeypatch.chdir(tmp_path)
    path, whole = Path("FILE"), Path("WHOLE")
    path.write_bytes(with_wrong_numbers(small(name), seed, share=0.2))
    whole.write_text("".join(json.dumps(line) + "\n" for line in small(name)))
    assert look_at(path) == len(read_capture(whole).history.steps)
    assert not [line for line in read_capture(path).warnings if "left out" in line]
    assert wrong_with_verbs(VERBS) == []
    assert run_here(["verify", "FILE"])[0] == 1
