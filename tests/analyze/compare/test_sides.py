"""What a side holds, which requests are paired, text that stays text; and real engines compared."""

import dataclasses
import pickle

import numpy as np
import pytest

from specscope.analyze.compare import side as sides
from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.figures import clustered, figures
from specscope.analyze.compare.result import Sameness
from specscope.analyze.compare.side import from_history, read_side, read_sides
from specscope.analyze.compare.tables import details, render_text
from specscope.analyze.table import NONE
from specscope.errors import UserError
from specscope.trace.record.params import SamplingParams
from specscope.trace.wire.reading import read_capture
from tests.analyze.audit.runs import drained
from tests.analyze.compare.runs import Made, make, side
from tests.analyze.edits import TRACES, rebuilt, replaced, sample
from tests.analyze.histories import write
from tests.analyze.texts import comparison, page, shown
from tests.engines import DRAFTERS, PROMPTS, each_drafter, fresh
from tests.faults.planted import FAULTS


@pytest.mark.parametrize("name", ["eagle", "ngram", "sampled", "planted"])
def test_requests_are_read_one_by_one_and_figures_agree_with_the_report(name):
    path = TRACES / f"{name}.jsonl"
    one, history = read_side(str(path)), read_capture(path).history
    assert [request.id for request in one.requests] == list(history.requests)
    for request, known in zip(one.requests, history.requests.values(), strict=True):
        steps = [step for step in known.steps if step.verdict is not None]
        assert one.steps(request) == steps
        assert one.tokens(request).tolist() == [token for token, _ in known.output()]
        begins = [sum(step.emitted for step in steps[:number]) for number in range(len(steps))]
        assert one.place[one.rows(request)].tolist() == begins
        mine = one.columns.depth_reached[one.rows(request)]
        assert (request.info, int(mine.sum())) == (known.info, known.acceptance.accepted)
    told = {figure.name: figure.a for figure in figures(*clustered(one, one, []))}
    total = history.acceptance
    assert (told["tau"], told["rate"]) == pytest.approx((total.tau, total.rate))
    assert told["tokens per step"] == pytest.approx(total.emitted / total.steps)
    for depth, rate in enumerate(total.per_position, 1):
        if total.drafts >= 30:
            assert told[f"depth {depth} rate"] == pytest.approx(rate)


def test_large_captures_are_read_in_processes_of_their_own(tmp_path, monkeypatch):
    paths = [write(make(Made(seed=seed, requests=4)), tmp_path / f"{seed}.jsonl") for seed in (1, 2, 3)]
    names = [str(path) for path in paths]
    here = read_sides(names[:2], names[2:])
    monkeypatch.setattr(sides, "LARGE", 0)
    shares = []
    apart = read_sides(names[:2], names[2:], shares.append)
    for one, other in zip(here, apart, strict=True):
        assert one.columns.parts == other.columns.parts
        assert len(pickle.dumps(one)) < len(pickle.dumps(one.columns.parts))  # it is sent as its columns lie
        assert np.array_equal(one.batch, other.batch)
        assert [capture.source for capture in one.captures] == [capture.source for capture in other.captures]
        assert one.vocabulary.pieces == other.vocabulary.pieces
    paths[1].write_text("nothing\n")
    with pytest.raises(UserError, match="not a capture"):
        read_sides(names[:2], names[2:])


def test_large_sides_hold_few_columns_at_a_time(monkeypatch):
    whole, again = ([read_side(str(TRACES / f"{name}.jsonl")) for name in ("eagle", "planted")] for _ in range(2))
    found = compare(*whole)
    monkeypatch.setattr(sides, "MANY", 0)
    assert compare(*again) == found
    for one, other in zip(whole, again, strict=True):
        assert len(vars(other.columns)) < len(vars(one.columns))
        other.forget()
        assert vars(other.columns).keys() == {"picked", *other.columns.__dataclass_fields__}
        assert np.array_equal(other.columns.p, one.columns.p)


def test_where_greedy_outputs_part_the_decisions_show_raw_p_and_no_coin():
    """The same capture with another final token after r2's first rejection."""
    a = sample("eagle")
    step = next(step for step in a.requests["r2"].steps if step.verdict and step.verdict.kind.value == "recovered")
    other = replaced(step, verdict__token=step.verdict.token + 1)

    def change(record):
        parts = tuple(other if part == step else part for part in record.requests)
        return dataclasses.replace(record, requests=parts)

    compared = compare(from_history(a, "a"), from_history(rebuilt(a, change), "b"))
    detail = next(table for table in details(compared) if table.title.startswith("r2 "))
    rows = [dict(zip(detail.columns, row, strict=True)) for row in detail.rows]
    assert {row["what"] for row in rows} == {"rejected", "recovered"}
    tried = [node for node in range(len(step.tree)) if step.verdict.outcome[node]]
    told = [(f"{step.parents.raw_p[node]:.4f}", f"{step.notes.prob[node]:.4f}") for node in tried]
    assert [(row["raw p"], row["draft p"]) for row in rows if row["what"] == "rejected"][: len(tried)] == told
    assert {row[name] for row in rows for name in ("p", "coin", "a")} == {NONE}


ASKED = "What is the capital of France?"
CHAT = f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n"


def asking(prompt, *, token=0, **run):
    """A side whose requests have this prompt, each with tokens of its own."""
    made = side(seed=1, requests=4)
    made.captures[0].run = dataclasses.replace(made.captures[0].run, **run)
    for at, request in enumerate(made.requests):
        tokens = np.array([token, at], np.int32)
        request.info = dataclasses.replace(request.info, prompt=prompt, prompt_tokens=tokens)
    return made


def test_why_nothing_is_paired_is_said_with_what_to_type():
    found = compare(asking(CHAT), asking(ASKED, token=9, versions={"vllm": "0.32.0"}))
    assert not found.pairs
    assert found.unpaired.startswith("no request of A has the same prompt as one of B: if a chat template was applied")
    text = shown(render_text, found, width=200)
    assert f"No outputs are compared: {found.unpaired}." in text
    assert "same output" not in text
    assert "pairs part" not in text
    assert "No step of A has the same context as a step of B" in text


def test_requests_with_steps_missing_say_so():
    a, b = asking(ASKED), asking(ASKED)
    for request in b.requests:
        request.whole = False
    assert compare(a, b).unpaired == "no requests are paired: every request of B lacks steps"


def test_the_summary_is_shown_and_no_line_is_too_wide():
    found = comparison()
    assert found.summary in shown(render_text, found)
    for width in (60, 80, 200):
        assert max(map(len, page(render_text, found, width=width).splitlines())) <= width


def test_text_of_models_and_users_stays_text():
    bad = "<script>alert(1)</script>[bold]x[/bold] \x1b[31m https://evil.test"
    run = dataclasses.replace(Made().run, target=bad, drafter=bad, versions={bad: bad}, tree=bad)
    history = make(Made(seed=1, requests=4, run=run))
    history.vocabulary.pieces.update({token: bad.encode() for token in range(12)})
    for request in history.requests.values():
        request.info = dataclasses.replace(request.info, prompt=bad, title=bad, labels={bad: bad})
    history.steps[:] = [
        dataclasses.replace(step, admitted=tuple(history.requests[info.id].info for info in step.admitted))
        for step in history.steps
    ]
    other = from_history(make(Made(seed=1, requests=4, plant={("r1", 0): "coin"})), bad)
    text = page(render_text, compare(from_history(history, bad, [bad]), other), width=120)
    assert "\x1b" not in text
    assert "[bold]x[/bold]" in text.replace("\n", "")


def ran(engine, *, batch=3, temperature=1.0):
    """A run of some prompts as a side."""
    fresh(engine, 64)
    before, engine.scheduler.max_batch = engine.scheduler.max_batch, batch
    for number, prompt in enumerate(PROMPTS[:3]):
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=20, ignore_eos=True)
        engine.add(prompt, params)
    history, engine.scheduler.max_batch = drained(engine), before
    return from_history(history, "run")


@pytest.mark.every(4)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", each_drafter(DRAFTERS))
def test_the_batch_changes_nothing(bench, name, temperature):
    engine = bench.engine(name)
    a = ran(engine, temperature=temperature)
    found = compare(a, ran(engine, batch=1, temperature=temperature))
    assert found.answer is Sameness.SAME, (found.summary, found.reasons)
    assert found.nodes > 50
    assert {field.name for field in found.fields if field.suspect} == set()
    assert any(one.name == "requests in a step, mean" for one in found.differences)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["eagle", "eagle dynamic", "draft tree"])
def test_drafts_at_the_positions_of_their_children_are_different(bench, name, monkeypatch):
    """The outputs are the same, and acceptance hardly is another: the drafter's own probabilities tell."""
    engine = bench.engine(name)
    a = ran(engine, temperature=0.0)
    assert compare(a, ran(engine, temperature=0.0)).answer is Sameness.SAME
    FAULTS["nodes one position further"].install(monkeypatch, engine)
    found = compare(a, ran(engine, temperature=0.0))
    marked = {field.name for field in found.fields if field.suspect}
    assert "draft p" in marked
    assert found.answer is Sameness.DIFFERENT
    assert not marked & {"target p", "target p, raw", "coin", "verdict"}


@pytest.mark.every(2)
@pytest.mark.parametrize("temperature", [0.0, 0.2], ids=["greedy", "sampled"])
def test_other_drafters_have_the_same_target(bench, temperature):
    sides = {
        name: ran(bench.engine(name), temperature=temperature) for name in ("none", "draft tree", "eagle", "ngram")
    }
    for name in ("none", "eagle", "ngram"):
        found = compare(sides["draft tree"], sides[name])
        fields = {field.name: field for field in found.fields}
        assert fields["target p"].compared > 0
        assert fields["target p"].differ == 0
        assert not any(cause.suspect for cause in found.partings)
        assert found.differences[0].name in ("drafts", "drafter")
        if temperature == 0:
            assert all(pair.same for pair in found.pairs)
