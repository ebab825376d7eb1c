"""What is located and what has a name, put together."""

import dataclasses
import io

import pytest
from rich.console import Console

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Diagnosis, Suspect, fits
from specscope.analyze.diagnose.run import examine
from specscope.analyze.diagnose.text import render_diagnosis
from specscope.analyze.findings import Exit
from specscope.analyze.locate.located import Operation, Proof, Stage
from specscope.errors import UserError
from specscope.measure.judges import audit_options
from specscope.trace.wire.reading import read_capture
from tests.analyze.locate.locations import wrong
from tests.faults.models import TARGET
from tests.faults.planted import FAULTS
from tests.faults.settings import DRAFTERS, SETTINGS, record

(LOCATED,) = wrong().located  # the drafter's scores


def at(stage, name, certain=True):
    return dataclasses.replace(LOCATED, operation=Operation(stage, name, name), certain=certain)


def suspect(cause):
    return Suspect(cause, Proof.ROWS, ("evidence",))


def shown(diagnosis):
    out = io.StringIO()
    render_diagnosis(diagnosis, "run.jsonl", Console(file=out, width=80, markup=False))
    return " ".join(out.getvalue().split())


@pytest.mark.parametrize(
    ("cause", "place", "fitting"),
    [
        (Cause.ROTARY_POSITIONS, at(Stage.DRAFTER, "layers.0.self_attn.query"), True),
        (Cause.ROTARY_POSITIONS, at(Stage.DRAFTER, "layers.0.mlp.down_proj"), False),
        (Cause.ROTARY_POSITIONS, at(Stage.DRAFTER, "layers.0.self_attn.q_proj"), False),
        (Cause.DRAFTER_KV, at(Stage.TARGET, "layers.0.self_attn.query"), False),
        (Cause.TARGET_KV, at(Stage.TARGET, "layers.3.self_attn.keys read"), True),
        (Cause.TARGET_KV, at(Stage.TARGET, "layers.3.post_attention_layernorm"), False),
        (Cause.TARGET_KV, at(Stage.TARGET, "layers.3", certain=False), True),
        (Cause.RULES_WRONG, at(Stage.SAMPLING, "top-p"), True),
        (Cause.DRAFT_VOCABULARY, at(Stage.DRAFTER, "vocabulary"), True),
        (Cause.NOT_A_NUMBER, at(Stage.VERDICT, "p"), True),
        (Cause.SIBLINGS_CHANGED, at(Stage.VERDICT, "q"), True),
        (Cause.SIBLINGS_CHANGED, at(Stage.VERDICT, "p"), False),
        (Cause.PAST_THE_END, at(Stage.VERDICT, "ratio"), False),
    ],
)
def test_a_cause_fits_where_it_shows_first(cause, place, fitting):
    assert fits(cause, place) is fitting


def test_a_place_takes_the_likeliest_name_that_fits_and_the_others_of_its_stage_follow():
    faults = [suspect(Cause.DRAFTER_FED), suspect(Cause.MASK_SIBLINGS), suspect(Cause.COINS)]
    first, second = Diagnosis(tuple(faults), located=(LOCATED,)).placed
    assert (first.place, first.cause.cause) == (LOCATED, Cause.MASK_SIBLINGS)
    assert (second.place, second.cause.cause) == (None, Cause.COINS)


def test_the_name_and_the_place_are_shown_together_and_once():
    text = shown(Diagnosis((suspect(Cause.MASK_SIBLINGS),), located=(LOCATED,), steps=3))
    title = f"{Cause.MASK_SIBLINGS.about}: layer 0: scores with the mask"
    assert f"1. {title} (mask_siblings; proven) drafter: layers.0.self_attn.scores" in text
    assert text.count("specscope open") == 1
    assert "2. " not in text
    assert text.endswith(f"Located: {title}.")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose head is fed the features of other layers, and the models that judge it."""
    setting = SETTINGS["eagle chain"]
    path = record(setting, tmp_path_factory.mktemp("places") / "bad.jsonl", FAULTS["layers one lower"])
    history = read_capture(path).history
    draft = DRAFTERS[setting.drafter]["draft_model"]
    return history, audit_options(history, str(TARGET), draft, 60)


def test_the_place_is_asked_for_where_the_models_disagree(run):
    asked = []

    def locate(session, little):
        asked.append(little)
        return wrong()

    found = examine(run[0], "bad.jsonl", run[1], known=False, locate=locate)
    assert asked == [False]  # the whole search, not the few steps where nothing is wrong
    assert (found.suspects, found.remarks, found.located, found.exit) == ((), (), wrong().located, 1)
    assert found.unexplained == ()  # the drafter's place explains all of the drafter's checks
    assert "locate" in found.looked_at


def test_a_search_that_cannot_be_made_is_said(run):
    def locate(*_):
        raise UserError("there is no head at hand")

    found = examine(run[0], "bad.jsonl", run[1], known=False, locate=locate)
    assert "locate: there is no head at hand" in found.left_out
    assert found.exit is Exit.INCONSISTENT
