"""Which models judge a capture; `specscope diagnose` and `specscope why`: text, JSON, and exit codes."""

import json
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from specscope.analyze.why import Typical
from specscope.cli import captures
from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.errors import UserError
from specscope.measure.judges import audit_options, engine_config_of
from specscope.trace.history.history import History
from specscope.trace.wire.reading import read_capture
from tests.engines import tiny_engine
from tests.faults.settings import Setting, record
from tests.heads import head_tensors, write_head
from tests.support.commands import run_here, specscope
from tests.support.samples import EAGLE, NGRAM, PLANTED, SAMPLED
from tests.waiting import until


@pytest.fixture
def model(deep, tmp_path):
    """A target of its own, which a test may change."""
    return shutil.copytree(deep, tmp_path / "model")


@pytest.fixture
def head(tmp_path):
    return write_head(tmp_path / "head", head_tensors())


def run_of(target, **config):
    return tiny_engine(target, **config).run_info


@pytest.fixture(scope="module")
def recorded(deep, tmp_path_factory):
    """What a run tells of its target and its head."""
    head = write_head(tmp_path_factory.mktemp("recorded") / "head", head_tensors())
    return run_of(deep, drafter="eagle", draft_model=str(head), tree="3")


@pytest.fixture
def history(recorded, model, head):
    """The same run over models that a test may change."""
    return History(replace(recorded, target="model", target_path=str(model), draft_path=str(head)))


def change(folder):
    """Other weights of the same size."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    tensors[name] = tensors[name] + 0.5
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_capture_tells_where_its_models_lay_and_what_they_were(recorded, deep, model, head, history):
    run = history.run
    assert recorded.target_path == str(deep)
    assert recorded.draft_path.endswith("/head")
    assert len(run.target_digest) == len(run.draft_digest) == 32
    options = audit_options(history, None, None, None)  # and they are used where they are that still
    assert (options.target.path, options.draft.path) == (str(model), str(head))
    assert (options.notes, options.why_no_draft) == ((), "")
    again = engine_config_of(run, None, None)
    assert (again.target, again.draft_model) == (str(model), str(head))
    some = run_of(model, drafter="draft_model", draft_model="self:2", tree="3")
    assert (some.draft_path, some.draft_digest) == ("self:2", f"{run.target_digest}:2")
    none = run_of(model, drafter="none")
    assert (none.target_digest, none.draft_path, none.draft_digest) == (run.target_digest, "", "")


def test_a_head_of_another_kind_is_refused_as_what_it_is(head, history):
    (head / "config.json").write_text('{"architectures": ["DFlash2DraftModel"]}')
    said = f"{head} holds a drafter of the kind DFlash2: audit judges EAGLE, EAGLE-3, P-EAGLE and DFlash heads"
    options = audit_options(history, None, None, None)
    assert (options.draft, options.why_no_draft) == (None, said)
    with pytest.raises(UserError, match="holds a drafter of the kind DFlash2"):
        audit_options(history, None, str(head), None)


def test_another_target_in_its_place_is_not_used(model, history):
    change(model)
    with pytest.raises(UserError, match=r"^the capture's model model at .* has other weights.*give --target MODEL$"):
        audit_options(history, None, None, None)
    options = audit_options(history, str(model), None, None)  # as given, and it is said
    assert len(options.notes) == 1
    assert "--target" in options.notes[0]
    assert "has other weights or settings than the capture's model model (digest" in options.notes[0]


def test_another_head_in_its_place_is_not_used(head, history):
    change(head)
    options = audit_options(history, None, None, None)
    assert options.draft is None
    assert options.why_no_draft.startswith(f"the capture's head head at {head} has other weights or settings now (dig")
    assert options.why_no_draft.endswith("give --draft-model HEAD")
    assert "\n" not in options.why_no_draft
    given = audit_options(history, None, str(head), None)
    assert given.draft.path == str(head)
    assert "--draft-model" in given.notes[0]


def test_what_is_gone_is_named_with_its_flag(model, head, history):
    shutil.rmtree(head)
    said = "the head head was not found: give --draft-model HEAD"
    assert audit_options(history, None, None, None).why_no_draft == said
    shutil.rmtree(model)
    with pytest.raises(UserError, match="the capture's model model was not found: give --target MODEL"):
        audit_options(history, None, None, None)


def test_what_a_capture_names_is_never_fetched(recorded, monkeypatch):
    """A hub name is looked for in the cache alone, even where the hub could be asked."""
    import specscope.model.loader as loader

    def ask(name):
        raise AssertionError(f"the hub is asked for {name}")

    monkeypatch.setattr(loader, "hub_arguments", ask)
    for told in ({"target": "some/model", "target_path": ""}, {"target": "model", "target_path": "some/model"}):
        history = History(replace(recorded, target_digest="", **told))
        with pytest.raises(UserError, match="was not found: give --target MODEL"):
            audit_options(history, None, None, None)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A capture of a small model."""
    return record(Setting("ngram", requests=2, tokens=30), tmp_path_factory.mktemp("own") / "run.jsonl").read_text()


def test_the_planted_bug_of_the_readme_is_named_and_healthy_captures_have_no_fault():
    code, out, _ = run_here(["diagnose", PLANTED, "--no-audit"])
    assert code == 1
    assert "1. the drafts are shifted in position" in out
    assert f"specscope open '{PLANTED}#r0@" in out
    assert "! the audit was skipped: you gave --no-audit" in out
    assert re.search(r"recorded by specscope \S+, torch \S+, .*; judged by specscope \d", out)
    for name in (NGRAM, EAGLE, SAMPLED):
        code, out, _ = run_here(["diagnose", name, "--no-audit"])
        assert (code, "No fault found by verify over" in out) == (0, True), out


def test_a_model_that_is_not_at_hand_is_said(tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(Path(NGRAM).read_text().replace("SmolLM2-135M-Instruct", "nobody/has-this"))
    code, out, _ = run_here(["diagnose", str(other)])
    assert code == 2  # what was asked for could not be judged
    assert re.search("not judged: audit: .*nobody/has-this", out)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("tree", "x", "The drafter's lookups were not judged: the capture's tree cannot be read ('x')."),
        ("tree", "", "The drafter's lookups were not judged: the capture's tree cannot be read ('')."),
        ("drafter", "x", "The drafter was not judged: there is no judge for the drafter x."),
    ],
)
def test_a_header_that_names_no_tree_or_drafter_of_ours_says_what_was_not_judged(own, tmp_path, name, value, says):
    file = tmp_path / "header.jsonl"
    file.write_text(re.sub(rf'("specscope\.run\.{name}","value":{{"stringValue":)"[^"]*"', rf'\1"{value}"', own))
    result = specscope("diagnose", file, "--json", "--sample", 2)
    (found,) = json.loads(result.stdout)["captures"]
    assert result.returncode == 2
    walked = ["locate"] if name == "drafter" else []  # of a drafter that is not ours, the target's operations
    assert found["looked_at"] == ["capture", "verify", "audit", *walked]
    assert found["left_out"] == [f"audit: {says}"]


def test_progress_in_a_pipe_is_a_line_every_few_seconds(monkeypatch):
    said = []

    def told(words):
        return lambda: any(line.endswith(f" s: {words}") for line in said)

    monkeypatch.setattr(captures, "EVERY", 0.01)
    monkeypatch.setattr("click.echo", lambda line, err: said.append(line))
    with captures.progress_bar() as progress:
        progress("auditing the target", 3, 120)
        until(told("auditing the target, 3 of 120"))
        progress("looking at the verdict", 0, 0)
        until(told("looking at the verdict"))
    until(lambda: not any("(lines)" in thread.name for thread in threading.enumerate()))


def why(place):
    """The answer as text and as JSON."""
    (code, text, _), (also, told, _) = (run_here(["why", place, *form]) for form in ([], ["--json"]))
    assert code == also == 0
    return text, json.loads(told)


def sentences(place):
    return why(place)[1]["sentences"]


def test_a_node_is_answered_in_words_and_what_is_counted_over_the_run_is_counted():
    told = sentences(f"{EAGLE}#r2@24/0")
    assert told[0].startswith("Target wanted ‘␣for’ (raw p 0.921, 1st; draft p 0.006, 15th), drafted ‘,’ (")
    assert "In this run ‘,’ was drafted 37 times, tried 11 and accepted 3." in told
    assert told[-1].startswith("2 of 42 rejections (5%) are of this kind: at depth 1, after a partly accepted step, ")
    assert told[-1].endswith("; another: r1@7.")
    text = " ".join(why(f"{EAGLE}#r2@24/0")[0].split())
    assert [sentence for sentence in told if sentence not in text] == []
    history = read_capture(EAGLE).history
    steps = [step for request in history.requests.values() for step in request.steps if step.verdict is not None]
    comma = int(next(step for step in history.requests["r2"].steps if step.index == 24).tree.token[0])
    outcomes = [outcome for step in steps for outcome in step.verdict.outcome[step.tree.token == comma].tolist()]
    assert (len(outcomes), sum(o > 0 for o in outcomes), outcomes.count(1)) == (37, 11, 3)


def test_a_step_is_told_from_its_path_on():
    told = sentences(f"{EAGLE}#r2@24")
    assert told[0] == "Accepted 0 of 4 levels."
    assert told[1].startswith("Target wanted ‘␣for’")
    assert sum(sentence.startswith("Then also rejected: ") for sentence in told) == 3


def test_a_run_names_its_costliest_kinds_with_an_example_each():
    text, answer = why(EAGLE)
    kinds = answer["kinds"]
    assert 1 <= len(kinds) <= 5
    assert [kind["tokens_lost"] for kind in kinds] == sorted((kind["tokens_lost"] for kind in kinds), reverse=True)
    assert {kind["of_rejections"] for kind in kinds} == {answer["rejections"]}
    for kind in kinds:
        assert sentences(f"{EAGLE}#{kind['examples'][0]}")[1] == kind["sentence"] + "."
    one = why(f"{EAGLE}#r2")[1]
    assert all(place.startswith("r2@") for kind in one["kinds"] for place in kind["examples"])
    assert one["rejections"] < answer["rejections"]
    assert answer["undrafted"] == {"prompt": 3}  # the first step of each request
    assert one["undrafted"] == {"prompt": 1}
    undrafted = "3 of 63 steps drafted nothing: first token after the prompt 100%."
    assert text.startswith(f"42 of 63 decode steps ended in a rejection. {undrafted}")


def test_the_console_gives_the_same_answer():
    commands = Commands(Session(history=read_capture(EAGLE).history))
    commands.session.typical = Typical(lambda: commands.session.history)
    commands.run("goto r2@24")
    assert commands.run("why").splitlines() == sentences(f"{EAGLE}#r2@24")
    assert commands.run("why 0").splitlines() == sentences(f"{EAGLE}#r2@24/0")
    assert commands.run("why 16").splitlines() == sentences(f"{EAGLE}#r2@24/16")
    commands.run("node 3")
    assert commands.run("why").splitlines() == sentences(f"{EAGLE}#r2@24")
