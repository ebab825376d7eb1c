"""What is left out at each level: no text and no id that a field declares is in what is written of a record."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.errors import UserError
from specscope.trace.record.notes import FormNotes, Logprobs, MethodNotes
from specscope.trace.record.privacy import LEFT_OUT, NO_TOKEN, Privacy, strip, withheld
from specscope.trace.record.records import (
    DraftNotes,
    ParentNotes,
    RequestEnd,
    RequestInfo,
    RequestStep,
    RunInfo,
    SamplingParams,
    StepRecord,
    Verdict,
)
from specscope.trace.record.tree import DraftTree
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.capture import line_json
from specscope.trace.wire.reading import CaptureReader, read_capture
from specscope.trace.wire.spans import SpanLevel, resource_attributes
from specscope.trace.wire.unspan import Decoder, run_info
from tests.trace.samples import encoded
from tests.trace.strategies import RUN, runs, vocabularies

# Texts and whole numbers in arrays that are neither written by anybody nor ids of tokens
OURS = {
    StepRecord: {"speculation_off", "preempted"},
    RequestStep: {"request", "drafter", "sizing", "blocks", "moved"},
    RequestInfo: {"id", "traceparent"},
    RequestEnd: set(),
    RunInfo: {
        *("run_id", "target", "revision", "drafter", "draft_model", "tree", "device", "dtype", "backend", "versions"),
        *("aux_layers", "evidence", "speculation", "rule", "costs", "sampling", "target_path", "target_digest"),
        *("draft_path", "draft_digest", "settings"),
    },
    SamplingParams: {"left_out"},
    Verdict: {"path", "forced", "rule"},
    DraftTree: {"parent"},
    DraftNotes: {"dropped_parent", "rows", "fed_position"},
    ParentNotes: {"node", "choice_rank", "rank", "q_rank"},
    MethodNotes: {"module", "source", "match_source"},
    FormNotes: {"node"},
    Logprobs: set(),
}


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_text_and_every_array_of_ids_says_which_it_is(kind):
    """A field that is added is declared, or named above as neither."""
    hints, marks = get_type_hints(kind), withheld(kind)
    may_tell = {name for name in marks if any(word in str(hints[name]) for word in ("str", "int32", "Structured"))}
    assert {name for name in may_tell if marks[name] is None} == OURS[kind]


SECRET, FIRST = "quokka", 1_900_000_000


class Planted:
    """A run's records with a secret in every text, and a number that is found nowhere else in place of every id."""

    def __init__(self):
        self.ids = []

    def id(self):
        self.ids.append(FIRST + len(self.ids))
        return self.ids[-1]

    def value(self, value):
        if isinstance(value, SamplingParams):
            form = {"regex": SECRET}
            bias, stops = {self.id(): 1.0}, (self.id(),)
            return dataclasses.replace(
                value, stop=(SECRET,), logit_bias=bias, stop_token_ids=stops, structured_outputs=form, left_out=()
            )
        if isinstance(value, np.ndarray):
            return np.array([self.id() for _ in range(value.size)], np.int32).reshape(value.shape)
        if isinstance(value, Mapping):
            return {"kind": SECRET, SECRET: "a", "bad_words": SECRET, "seed": SECRET}
        return self.id() if isinstance(value, int) else SECRET

    def of(self, value):
        if isinstance(value, tuple):
            return tuple(map(self.of, value))
        if not dataclasses.is_dataclass(value):
            return value
        marks = withheld(type(value))
        changed = {name: self.value(getattr(value, name)) for name, mark in marks.items() if mark is not None}
        plain = {name: self.of(getattr(value, name)) for name, mark in marks.items() if mark is None}
        return dataclasses.replace(value, **plain, **changed)


@given(runs(max_steps=2), st.sampled_from((SpanLevel.TREES, SpanLevel.STEPS, SpanLevel.REQUESTS)))
@settings(max_examples=15)
def test_nothing_that_is_left_out_is_written(records, level):
    """And all of it is where nothing is left out, which is how the search is known to find it."""
    planted = Planted()
    records = [planted.of(record) for record in records]
    params = planted.value(SamplingParams())
    run = dataclasses.replace(RUN, params=params.to_dict(), eos_tokens=(planted.id(),))
    vocabulary = Vocabulary({token: SECRET.encode() for token in planted.ids})
    for privacy in Privacy:
        told = dataclasses.replace(run, privacy=privacy)
        text = line_json(resource_attributes(told), encoded(records, told, vocabulary, level)).decode()
        ids = {token for token in planted.ids if str(token) in text}
        assert (SECRET in text) is (privacy is Privacy.EVERYTHING)
        if privacy is Privacy.NO_TOKENS:
            assert not ids
        elif level is SpanLevel.TREES and any(part.verdict for record in records for part in record.requests):
            assert len(ids) > len(params.logit_bias)


@given(runs(max_steps=3), vocabularies, st.sampled_from([*Privacy, Privacy.EVERYTHING]), st.booleans(), st.randoms())
@settings(max_examples=15)
def test_the_rest_survives_the_trip_in_any_order(records, vocabulary, privacy, in_order, chance):
    """Only the run's header says that ids were left out: to lose them otherwise is damage."""
    run = dataclasses.replace(RUN, privacy=privacy)
    spans, decoder, unaware = encoded(records, run, vocabulary), Decoder(privacy), Decoder()
    if not in_order:
        chance.shuffle(spans)
    back = [record for span in spans for record in decoder.feed(span)] + decoder.flush()
    assert back == [strip(record, privacy) for record in records]
    assert (decoder.faults.total, decoder.lost) == (0, 0)
    known = Vocabulary() if privacy else Vocabulary(vocabulary.pieces, vocabulary.special & vocabulary.pieces.keys())
    for token in (token for record in records for part in record.requests for token in part.tokens()):
        assert decoder.vocabulary.pieces.get(token) == known.pieces.get(token)
        assert (token in decoder.vocabulary.special) == (token in known.special)
    assert run_info(resource_attributes(run)) == strip(run, privacy)
    unaware.feed(*spans)
    lost = privacy is Privacy.NO_TOKENS and any(span.name == "decode_step" for span in spans)
    assert bool(unaware.faults.total) is lost


def test_that_something_was_asked_for_stays():
    """A judge must not take a request with a form for one without."""
    params = SamplingParams(stop=("a",), structured_outputs={"regex": "b"}, logit_bias={3: 1.0}, stop_token_ids=(4,))
    silent, nameless = params.kept(Privacy.NO_TEXT), params.kept(Privacy.NO_TOKENS)
    assert (silent.left_out, silent.logit_bias) == (("stop", "structured_outputs"), {3: 1.0})
    assert set(nameless.left_out) == {"stop", "structured_outputs", "logit_bias", "stop_token_ids"}
    for kept in (silent, nameless):
        assert (kept.moved, kept.limited, kept.heeds_eos) == (True, True, True)
        assert kept.kept(Privacy.NO_TOKENS) == nameless
        assert SamplingParams(**json.loads(json.dumps(kept.to_dict()))) == kept
    with pytest.raises(UserError, match="unknown sampling parameter 'left_out'"):
        SamplingParams.from_dict({"left_out": ["stop"]})


def test_of_labels_only_what_a_judge_goes_by_stays():
    labels = {"kind": "code", "bad_words": "['fie']", "seed": "none", "tracestate": "a=b"}
    info = RequestInfo("r", 0, 0, "a", np.zeros(0, np.int32), SamplingParams(), labels)
    assert strip(info, Privacy.NO_TEXT).labels == {"bad_words": LEFT_OUT, "seed": "none"}
    assert strip(dataclasses.replace(info, labels={"seed": "fie"}), Privacy.NO_TEXT).labels == {}


def test_how_many_tokens_there_were_takes_no_memory(tmp_path):
    """A file says how long a prompt was: that decides no allocation."""
    source = read_capture("traces/ngram.jsonl").history
    run = dataclasses.replace(source.run, privacy=Privacy.NO_TOKENS)
    path = tmp_path / "a.jsonl"
    text = line_json(resource_attributes(run), encoded(source.steps, run, Vocabulary())).decode()
    path.write_text(text.replace('prompt_length","value":{"intValue":"', 'prompt_length","value":{"intValue":"9999'))
    reader = CaptureReader(path)
    reader.read()
    prompts = [request.info.prompt_tokens for request in reader.history.requests.values()]
    assert all(len(prompt) > 10**5 and prompt.strides == (0,) and prompt[0] == NO_TOKEN for prompt in prompts)


def test_a_step_of_a_run_in_memory_is_left_out_like_one_that_comes():
    """Its requests lie in the run's columns, and are no tuple."""
    history = read_capture(Path(__file__).parents[3] / "traces" / "sampled.jsonl").history
    for record in history.steps:
        for part in strip(record, Privacy.NO_TOKENS).requests:
            assert set(part.tree.token.tolist()) == {part.verdict.token} == {NO_TOKEN}
