"""What is shown of a node: what fed its drafter, and what a form removed there."""

import pytest

from specscope import SamplingParams
from specscope.debug.show import FED
from specscope.debug.views import view_text
from specscope.live.local import commands_over
from specscope.trace.record.draft_vocabulary import draft_id
from tests.engines import PROMPTS, fresh
from tests.heads import DRAFT_VOCAB


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
