"""Cached KV beside KV computed afresh: equal in healthy runs, and planted faults are found; what is shown of a node."""

import dataclasses

import pytest

from specscope import Engine, SamplingParams
from specscope.debug.kv_check import KVCheck, KVCompared, KVPlace, kv_check_text
from specscope.debug.show import FED
from specscope.debug.views import view_text
from specscope.errors import UserError
from specscope.live.check_kv import check_kv
from specscope.live.local import commands_over
from specscope.trace.record.draft_vocabulary import draft_id
from specscope.trace.record.vocabulary import Vocabulary
from tests.engines import PROMPTS, fresh
from tests.faults.models import with_modules
from tests.faults.planted import FAULTS
from tests.faults.settings import DRAFTERS, SETTINGS, TARGET, prompts
from tests.heads import DRAFT_VOCAB

HEALTHY = [
    ("float32", "ngram"),
    ("float32", "model tree"),
    ("bfloat16", "eagle tree"),
    *(("float32", name) for name in ("none", "eagle dynamic", "mtp tree", "dflash chain")),
]


def engine(drafter, dtype="float32", blocks=18, params=None, requests=4, tokens=32):
    """A run that has not begun; so few blocks that somebody is preempted."""
    how = {key: value for key, value in drafter.items() if key != "modules"}
    target = with_modules(drafter["modules"]) if "modules" in drafter else TARGET
    made = Engine(target=str(target), dtype=dtype, kv_memory=0.02, max_batch=3, threads=1, **how)
    made.runner.cache.pool.__init__(blocks)
    setting = dataclasses.replace(SETTINGS["ngram"], requests=requests)
    for seed, prompt in enumerate(prompts(setting)):
        made.add(prompt, SamplingParams(max_tokens=tokens, seed=seed, temperature=0.8, **(params or {})))
    return made


def outputs(engine, every=0):
    """All output tokens, and every request's KV as it was found after each `every` steps."""
    found, checks, preempted, moved = {}, [], 0, 0
    while engine.busy:
        record = engine.step()
        found |= {end.info.id: end.output.tolist() for end in record.finished}
        preempted += len(record.preempted)
        moved += sum(len(part.moved) > 0 for part in record.requests)
        if every and record.step % every == 0:
            checks += [check_kv(engine, name) for name in engine.requests]
    return found, checks, preempted, moved


@pytest.mark.every(5)
@pytest.mark.parametrize(("dtype", "name"), HEALTHY)
def test_a_healthy_run_agrees_at_every_place_and_goes_on_as_before(dtype, name):
    drafter = {"drafter": "none"} if name == "none" else DRAFTERS[name]
    looked, checks, preempted, moved = outputs(engine(drafter, dtype), every=2)
    assert looked == outputs(engine(drafter, dtype))[0]
    assert preempted > 0
    assert moved > 0 or "tree" not in name
    for check in checks:
        for one in check.compared:
            assert not one.differ, kv_check_text(check, Vocabulary())
            assert one.largest < one.tolerance / 2
    compared = [one for check in checks for one in check.compared]
    assert sum(one.places for one in compared if one.model == "target") > 1000
    of_drafter = sum(one.places for one in compared if one.model.startswith("drafter"))
    assert of_drafter > 500 if name.startswith(("model", "eagle", "mtp", "dflash")) else of_drafter == 0


def first_wrong(fault):
    """The first check of a run with a fault that finds something, with the step that went before."""
    setting = SETTINGS[FAULTS[fault].setting]
    made = engine(DRAFTERS[setting.drafter], blocks=setting.blocks or 64, requests=6 if setting.blocks else 3)
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault].install(patch, made)
        while made.busy:
            record = made.step()
            for name in made.requests:
                check = check_kv(made, name)
                if any(one.differ for one in check.compared):
                    return record, next((p for p in record.requests if p.request == name), None), check
    raise AssertionError("nothing was found")


@pytest.mark.parametrize("fault", ["KV not moved", "KV not moved, sampled"])
def test_kv_that_was_not_moved_is_found_in_the_target_at_its_place(fault):
    _, part, check = first_wrong(fault)
    target, drafter = check.compared
    assert target.model == "target"
    assert not drafter.differ
    wrong = [place.position for place in target.differ]
    lay = [node != at for at, node in enumerate(part.verdict.path.tolist())]
    assert wrong == [part.position + 1 + at for at, node_lay in enumerate(lay) if node_lay]
    tokens = part.tree.token[part.verdict.path].tolist()
    assert [place.token for place in target.differ] == [t for t, moved in zip(tokens, lay, strict=True) if moved]


def test_a_leaf_that_was_never_run_is_found_in_the_drafter():
    _, part, check = first_wrong("leaf taken for run")
    target, drafter = check.compared
    assert not target.differ
    (place,) = drafter.differ
    assert drafter.model == "drafter draft_model"
    assert place.position == part.position + part.verdict.accepted
    assert place.token == int(part.tree.token[part.verdict.path[-1]])


def test_kv_that_a_drafter_remembers_after_preemption_is_found_in_the_drafter():
    record, _, check = first_wrong("drafter remembers too much")
    target, drafter = check.compared
    assert check.request in record.preempted
    assert not target.differ
    assert len(drafter.differ) == drafter.places > 0
    assert all(place.slot is None for place in drafter.differ)
    assert "counted as computed, but in no block" in kv_check_text(check, Vocabulary())


def test_the_command_on_a_live_engine():
    commands = commands_over(engine(DRAFTERS["eagle tree"], blocks=64))
    with pytest.raises(UserError, match="nothing has run yet"):
        commands.run("check kv")
    commands.run("next 4")
    said = commands.run("check kv").splitlines()
    assert [line.split(":")[0] for line in said] == ["target", "drafter eagle"]
    assert all("places agree (largest difference" in line for line in said)
    commands.run("step 3")  # in the middle of a step
    assert commands.run("check kv").splitlines()[0].startswith("target: ")
    assert "DIFFER" not in commands.run("check kv")
    with pytest.raises(UserError, match="write check kv"):
        commands.run("check")
    commands.run("continue")
    with pytest.raises(UserError, match="is not running: its KV was freed"):
        commands.run("check kv")


def test_kv_that_is_written_over_between_steps_is_told_with_the_steps():
    made = engine(DRAFTERS["model tree"], blocks=64, tokens=90)
    commands = commands_over(made)
    commands.run("next 6")
    request = commands.session.current_request.id
    right, last = commands.run("check kv"), made.steps - 1
    assert "DIFFER" not in right
    made.runner.cache.key[1][:, made.requests[request].table.slots(3, 4)] += 1
    said = commands.run("check kv").splitlines()  # behind this step and before the next
    assert said[1].startswith("  position 3 ")
    assert said[2] == f"  changed between steps {last} and {last + 1}: 1 place, the first at position 3"
    commands.run("next")
    commands.run(f"request {request}")
    assert "changed" not in commands.run("check kv")  # it was wrong before


def test_what_is_wrong_is_shown_place_by_place():
    places = tuple(KVPlace(at, 65 + at, 160 + at, 3, 0.5) for at in range(10))
    check = KVCheck("r0", (KVCompared("target", 90, 0.5, 1e-4, places),), "the drafter (ngram) keeps no KV")
    said = kv_check_text(check, Vocabulary({65: b"A"})).splitlines()
    assert said[0] == "target: 10 of 90 places DIFFER from recomputed KV (largest difference 0.5, tolerance 0.0001)"
    assert said[1] == "  position 0 A: slot 160, most in layer 3, by 0.5"
    assert said[-2:] == ["  and 2 more places", "the drafter (ngram) keeps no KV"]


def test_info_drafter_shows_what_fed_a_head_and_node_the_draft_id(engines):
    engine = engines["eagle dynamic"]
    fresh(engine, 64)
    commands = commands_over(engine)
    engine.add(PROMPTS[3], SamplingParams(max_tokens=8, seed=1, ignore_eos=True))
    while commands.session.part is None or not len(commands.session.part.tree):
        commands.run("next")
    part, run, said = commands.session.part, engine.run_info, commands.run("info drafter").splitlines()
    assert f"it knows {DRAFT_VOCAB} tokens of the target's, with ids from " in said[2]
    rows, layers = len(part.notes.fed_token), ", ".join(f"layer {name}" for name in run.aux_layers)
    assert said[4].startswith(f"fed in the first pass, the last {FED} of {rows} rows: position, norms of the features")
    assert f"({layers})" in said[4]
    assert len(said) == 5 + FED
    last = said[-1].split()
    assert int(last[0]) == part.notes.fed_position[-1]
    assert [float(norm) for norm in last[1:4]] == pytest.approx(part.notes.fed_norms[-1].tolist(), rel=1e-3)
    token = int(part.tree.token[0])
    assert engine.drafter.runner.d2t[draft_id(run, token)] == token
    assert f"draft id: {draft_id(run, token)} of the draft vocabulary" in commands.run("node 0").splitlines()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_form_removed_is_shown_at_any_node_and_step(engines, temperature):
    """Its mass and likeliest tokens; p is the masked one, of the step's own tensors and of those computed again."""
    pytest.importorskip("xgrammar")
    engine = engines["draft tree"]
    fresh(engine, 64)
    commands = commands_over(engine)
    form = {"regex": "([!-@]|[a-z]{2}[A-Z])+"}
    for seed, prompt in enumerate(PROMPTS[:2]):
        engine.add(prompt, SamplingParams(temperature=temperature, seed=seed, max_tokens=12, structured_outputs=form))
    commands.run("next 4")
    session, judged = commands.session, {}
    for record in session.history.steps:
        judged |= {(record.step, part.request): part for part in record.requests if part.verdict is not None}
    assert len(judged) > 4
    for (step, name), part in judged.items():
        for node in range(len(part.tree)):
            view = commands.what_if.look(session, step, name, node)
            gone = view.removed[0]
            assert gone.rule == "structured output (regex)"
            assert 0 < gone.mass < 1
            assert [top.prob for top in gone.likeliest] == sorted((t.prob for t in gone.likeliest), reverse=True)
            assert view.p.prob == pytest.approx(float(part.verdict.p[node]), abs=1e-5)
            assert not {top.token for top in gone.likeliest} & {top.token for top in view.p.top}
            assert not view.notes
            assert "structured output (regex) removes" in view_text(view, session.history.vocabulary)
            assert view.computed == (step < session.history.steps[-1].step)
    fresh(engine, 64)
