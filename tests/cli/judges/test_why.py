"""`specscope why`: of a node, a step, a request and a run, as its user sees it."""

import json

from specscope.analyze.why import Typical
from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.trace.wire.reading import read_capture
from tests.support.commands import run_here
from tests.support.samples import EAGLE


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
