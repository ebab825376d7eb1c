"""Parts of captures: what was chosen is read back as it was sent, and nothing of another request is in the file."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specscope.trace.extract import STRETCH, part_of, write_part
from specscope.trace.record.privacy import Privacy
from specscope.trace.wire.otlp_json import read_line
from specscope.trace.wire.reading import read_capture
from tests.analyze.histories import history as history_of
from tests.test_traces import TRACES
from tests.trace.sampled_runs import sampled_runs
from tests.trace.strategies import RUN, runs, vocabularies

TOKEN = 77_000_000
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # a busy machine draws few runs in a second
any_run = settings(max_examples=15, suppress_health_check=SLOW, deadline=None)


def cut(folder, history, places, privacy=Privacy.EVERYTHING, vocabulary=None):
    """A part, written; (the file, what it is read as)."""
    path = folder / "part.jsonl"
    part = part_of(history, places, privacy)
    assert write_part(part, vocabulary or history.vocabulary, str(path)) == path.stat().st_size
    return path, read_capture(path)


def steps_of(history, name):
    """A request's steps on its path, each with the number of the engine's."""
    request = history.requests[name]
    return [(history.steps[at].step, part) for part, at in zip(request.steps, request.engine_steps, strict=True)]


def named(records, like="<{}>"):
    """The records with what each request asked in words and ids of its own, so that they can be searched for."""

    def info(asked):
        number = int(asked.id[1:])
        tokens = np.arange(5, dtype=np.int32) + TOKEN + 100 * number
        texts = {"prompt": f"<prompt {number}>", "title": f"<title {number}>", "labels": {"kind": f"<label {number}>"}}
        return replace(asked, id=name(asked.id), prompt_tokens=tokens, traceparent="", **texts)

    name = like.format

    return [
        replace(
            record,
            admitted=tuple(map(info, record.admitted)),
            requests=tuple(replace(part, request=name(part.request)) for part in record.requests),
            preempted=tuple(map(name, record.preempted)),
            finished=tuple(replace(end, info=info(end.info), error="", stop="") for end in record.finished),
        )
        for record in records
    ]


@given(sampled_runs(), st.data())
@any_run
def test_of_any_run_a_part_is_what_was_sent_and_nothing_else(tmp_path, records, data):
    history = history_of(named(records), RUN)
    everyone = {info.id for record in records for info in record.admitted}
    if not history.requests:
        return
    chosen = data.draw(st.sampled_from(sorted(history.requests)))
    request = history.requests[chosen]
    sent, end = steps_of(history, chosen), request.end
    place, wanted = chosen, sent
    if sent and data.draw(st.booleans()):
        first, last = sorted(data.draw(st.integers(0, len(sent) - 1)) for _ in range(2))
        place, wanted = f"{chosen}@{first}:{last}", sent[first : last + 1]
    path, reader = cut(tmp_path, history, [place])
    back = reader.history
    assert steps_of(back, chosen) == wanted if wanted else not back.requests[chosen].steps
    assert (back.requests.keys(), back.requests[chosen].end) == ({chosen}, end)
    assert back.requests[chosen].info == request.info
    assert all(record.absent is not None and record.absent.engine for record in back.steps)
    for record in back.steps:
        whole = history.knows(record.step)
        assert record.branch == whole.branch
        assert not record.requests or (record.batch, record.phases) == (whole.batch, whole.phases)
    assert not [text for text in reader.warnings if "left out" in text]
    written = path.read_bytes()
    for other in everyone - {chosen[1:-1]}:
        secrets = [f"<{other}>", f"prompt {other[1:]}>", f"title {other[1:]}>", f"label {other[1:]}>"]
        assert not [secret for secret in (*secrets, f'"{TOKEN + 100 * int(other[1:])}"') if secret.encode() in written]


@given(runs(max_steps=5), vocabularies, st.data())
@any_run
def test_whatever_a_step_holds_goes_along(tmp_path, records, vocabulary, data):
    records = [replace(record, branch=0, after=None, aggregate=None) for record in records]
    history = history_of(records, RUN)
    if not history.requests:
        return
    chosen = data.draw(st.lists(st.sampled_from(sorted(history.requests)), min_size=1, unique=True))
    path, reader = cut(tmp_path, history, chosen, vocabulary=vocabulary)
    for name in chosen:
        assert [part for _, part in steps_of(reader.history, name)] == history.requests[name].steps
        assert reader.history.requests[name].end == history.requests[name].end
    spans = [span for line in path.read_bytes().splitlines() for _, spans in read_line(line) for span in spans]
    roots = {f"text_completion {RUN.target}", f"chat {RUN.target}"}
    assert {span.name for span in spans} <= {"queue", "prefill", "decode_step", *roots}
    assert {span.attributes["specscope.request.id"] for span in spans} <= {*chosen}


def test_a_requests_figures_are_of_all_its_steps(tmp_path):
    history = read_capture(TRACES / "sampled.jsonl").history
    whole = history.requests["r1"].acceptance
    for place in ("r1", "r1@0:4", "r1@5"):
        _, reader = cut(tmp_path, history, [place])
        figures = reader.history.requests["r1"].end.figures
        assert (figures.steps, figures.drafts, figures.accepted) == (whole.steps, whole.drafts, whole.accepted)
        _, again = cut(tmp_path, reader.history, ["r1"])
        assert again.history.requests["r1"].end.figures == figures


@pytest.mark.parametrize("level", [Privacy.NO_TEXT, Privacy.NO_TOKENS])
def test_what_is_left_out_is_not_in_it(level, tmp_path):
    history = read_capture(TRACES / "eagle.jsonl").history
    info, end = history.requests["r1"].info, history.requests["r1"].end
    path, reader = cut(tmp_path, history, ["r1@2:5"], level)
    written, back = path.read_text(), reader.history.requests["r1"]
    assert info.prompt not in written
    assert "gen_ai.output.messages" not in written
    assert "specscope.tree.text" not in written
    assert (back.info.prompt, len(back.info.prompt_tokens)) == ("", len(info.prompt_tokens))
    assert (back.end.output == end.output).all() == (level is Privacy.NO_TEXT)
    assert len(back.end.output) == len(end.output)
    assert reader.history.run.privacy is level
    assert np.array_equal(back.steps[0].verdict.p, history.requests["r1"].step(2).verdict.p)
    again = part_of(reader.history, ["r1"])  # what was left out stays left out
    assert again.run.privacy is level


@pytest.mark.parametrize(
    ("text", "stretch"),
    [
        ("r3", None),
        ("r3@17", ("r3", "17", None, None)),
        ("r3@10:", ("r3", "10", ":", None)),
        ("a@b@2:3", ("a@b", "2", ":", "3")),
        ("@3", None),
        ("r3@:4", None),
    ],
)
def test_steps_as_they_are_written(text, stretch):
    found = STRETCH.fullmatch(text)
    assert (found and found.groups()) == stretch
