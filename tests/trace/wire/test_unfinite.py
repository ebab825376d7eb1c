"""Wrong numbers are evidence: each that an engine computed is written and read back as it was, whatever it is."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from opentelemetry.sdk.resources import Resource

from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.sending.export import readable
from specscope.trace.wire.spans import Encoder, resource_attributes
from specscope.trace.wire.unspan import Decoder
from tests.support.commands import specscope
from tests.trace.damage import SAMPLES, TRACES, small, with_wrong_numbers
from tests.trace.look_at import look_at
from tests.trace.samples import records
from tests.trace.strategies import RUN
from tests.trace.wire.test_capture import write

NAN, INF = float("nan"), float("inf")
WRONG = [NAN, INF, -INF, -0.25, 1.25]
ARRAYS = ("p", "p_trial", "q_trial", "accept_prob", "coin", "residual_mass")


def with_wrong(value, name):
    """The sample run, where one number of its third step is that."""
    found = []
    for record in records():
        [part] = record.requests
        if record.step == 2:
            verdict, tree = part.verdict, part.tree
            if name == "q":
                tree = dataclasses.replace(tree, q=np.array([value, 1], np.float32))
            elif name in ARRAYS:
                values = getattr(verdict, name).copy()
                values[0] = value
                verdict = dataclasses.replace(verdict, **{name: values})
            else:
                verdict = dataclasses.replace(verdict, **{name: value})
            record = dataclasses.replace(record, requests=(dataclasses.replace(part, tree=tree, verdict=verdict),))
        found.append(record)
    return found


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("name", ["q", *ARRAYS, "final_p", "final_coin", "final_margin"])
def test_a_wrong_number_is_written_and_read_back(tmp_path, value, name):
    planted = with_wrong(value, name)
    write(tmp_path / "run.jsonl", planted)
    reader = read_capture(tmp_path / "run.jsonl")
    assert reader.warnings == []
    assert reader.history.steps == planted
    back = reader.history.steps[2].requests[0]
    told = np.ravel(back.tree.q if name == "q" else getattr(back.verdict, name))[0]
    assert told == value or (np.isnan(told) and np.isnan(value))


@pytest.mark.parametrize("kind", ["application/x-protobuf", "application/json"])
@pytest.mark.parametrize("value", WRONG)
def test_a_wrong_number_comes_over_the_network(value, kind):
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    from specscope.remote.otlp import parse
    from specscope.trace.wire.capture import line_json

    planted = with_wrong(value, "p")
    spans = [span for record in planted for span in Encoder(RUN, Vocabulary()).encode(record)]
    resource = Resource(resource_attributes(RUN))
    if kind == "application/json":
        body = line_json(resource.attributes, spans)
    else:
        body = encode_spans([readable(span, resource) for span in spans]).SerializeToString()
    decoder = Decoder()
    back = [record for span in parse(body, kind) for record in decoder.feed(*span.read())]
    assert decoder.faults.lines() == []
    assert back + decoder.flush() == planted


def test_what_json_has_no_form_for_is_a_text_as_protobuf_has_it(tmp_path):
    write(tmp_path / "run.jsonl", with_wrong(-INF, "p"))
    text = (tmp_path / "run.jsonl").read_text()
    assert '{"doubleValue":"-Infinity"}' in text
    assert '"doubleValue":null' not in text
    for line in text.splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


# Under everything that looks at a capture


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_wrong_numbers_are_shown_and_nothing_is_left_out(tmp_path, name, seed):
    path = tmp_path / "run.jsonl"
    path.write_bytes(with_wrong_numbers(small(name), seed, share=0.2))
    whole = tmp_path / "whole.jsonl"
    whole.write_text("".join(json.dumps(line) + "\n" for line in small(name)))
    assert look_at(path, page=True) == len(read_capture(whole).history.steps)
    assert not [line for line in read_capture(path).warnings if "left out" in line]


VERBS = {
    "report": ["report", "{}", "--json"],
    "verify": ["verify", "{}"],
    "compare": ["compare", "{}", "{whole}"],
    "compare itself": ["compare", "{}", "{again}"],
    "compare back": ["compare", "{whole}", "{}", "--json"],
    "tune": ["tune", "{}", "--costs", str(TRACES.parent / "tests" / "data" / "costs.json")],
    "export": ["export", "{}", "-o", "{out}"],
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["sampled", "evidence", "eagle"])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_every_verb_ends_well(tmp_path, name, verb):
    lines = [json.loads(line) for line in (TRACES / f"{name}.jsonl").read_text().splitlines()]
    path = tmp_path / "run.jsonl"
    path.write_bytes(with_wrong_numbers(lines, 1))
    again = shutil.copy(path, tmp_path / "again.jsonl")
    files = {"whole": TRACES / f"{name}.jsonl", "again": again, "out": tmp_path / "tables"}
    words = [word.format(path, **files) for word in VERBS[verb]]
    done = specscope(*words, COLUMNS="120")
    assert done.returncode in (0, 1, 2), done.stderr
    assert "Traceback" not in done.stderr
    if verb == "verify":
        assert done.returncode == 1
