"""Sampling rules and verdicts: what is planted is located at its operation; where nothing is, nothing is."""

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specscope.analyze.audit.audit import audit
from specscope.analyze.audit.model.rows import Models, rows_of
from specscope.analyze.audit.model.rules import Rules
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.locate.decided import decide
from specscope.analyze.locate.formulas import located_cut, located_draws, located_formulas
from specscope.analyze.locate.located import Stage
from specscope.analyze.locate.model.rules import located_verdicts, search_sampling
from specscope.analyze.locate.model.sampling import RIGHT, Places, RuledRows
from specscope.measure.judges import audit_options
from specscope.trace.record.records import FinalKind
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from tests.analyze.edits import case_of
from tests.analyze.locate import planted
from tests.faults.fault import Fault
from tests.faults.models import TARGET, tokens_of
from tests.faults.planted.drafts import FAULTS as DRAFTS
from tests.faults.planted.rules import params_of
from tests.faults.planted.trials import tried
from tests.faults.settings import DRAFTERS, STOP, Setting, capture, history, short
from tests.support import records

WARM = {"temperature": 0.9}
BIASED = {**WARM, "logit_bias": {tokens_of(letter)[0]: 2.0 for letter in "aeiou"}}
CUTS = {"temperature": 1.3, "top_k": 6, "top_p": 0.9}
ALL = {
    "temperature": 1.1,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {tokens_of("e")[0]: 1.0},
}


def located(drafter, params, install=None, **more):
    """Of a run with a fault: what is located, of the target, the drafter, and the verdict."""
    setting = Setting(drafter, params, **{"requests": 4, "tokens": 50, **more})
    fault = None if install is None else Fault("planted", Cause.RULES_WRONG, install, "")
    run = history(capture(setting, fault))
    options = audit_options(run, str(TARGET), DRAFTERS[drafter].get("draft_model"), 400)
    case, judged, models = case_of(run), audit(run, "run", options), Models(options)
    sampled = [search_sampling(case, judged, models, drafter=drafter) for drafter in (False, True)]
    return [*(one.located for one in sampled if one is not None), *located_verdicts(case, judged, models)]


TOP_P = {"temperature": 1.4, "top_p": 0.8}
MIN_P = {"temperature": 1.5, "min_p": 0.2}
PENALISED = {**WARM, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
warmer = params_of(lambda params: {"temperature": 1.05 * params.temperature})
odd_higher = planted.logits(lambda rows: rows + torch.arange(rows.shape[1]) % 2)
halves = planted.logits(lambda rows: (2 * rows).round() / 2)
banned = planted.logits(lambda rows: rows.index_fill(1, torch.tensor([STOP]), -torch.inf))
PLANTED = {  # by the words of the variant: drafter, parameters, what is planted, and the operation
    "min-p by the largest p of the root": ("early tree", MIN_P, planted.min_p_by_the_first_row, "min-p"),
    "the temperature times 1.05": ("early chain", {"temperature": 1.2}, warmer, "temperature"),
    "bfloat16": ("early chain", WARM, planted.in_bfloat16, "softmax"),
    "top-p before top-k": ("early tree", CUTS, planted.top_k_last, "top-p"),
    "the penalties applied twice": ("model chain", PENALISED, planted.penalties_twice, "penalties"),
    "the inverse of the repetition penalty": (
        *("model chain", {**WARM, "repetition_penalty": 1.4}),
        *(params_of(lambda params: {"repetition_penalty": 1 / params.repetition_penalty}), "repetition penalty"),
    ),
    "the frequency penalty with the other sign": (
        *("model chain", {**WARM, "frequency_penalty": 0.4}),
        *(params_of(lambda params: {"frequency_penalty": -params.frequency_penalty}), "frequency penalty"),
    ),
    "an offset of each token on the logits, up to 1 apart": ("model chain", {}, odd_higher, "logits"),
    "logits rounded to multiples of 0.5": ("model chain", {}, halves, "logits"),
    f"token {STOP} left out": ("model chain", {}, banned, "logits"),
    "logit bias left out": ("early chain", BIASED, planted.no_bias_in_the_draft, "logit bias"),
    "top-p left out": ("early tree", TOP_P, planted.no_top_p_in_some_rows, "top-p"),
    "top-p left out, where the token is bonus": ("model chain", TOP_P, planted.bonus_without_top_p, "top-p"),
}


@pytest.mark.every(9)
@pytest.mark.parametrize("words", PLANTED)
def test_a_rule_that_is_applied_wrongly_is_located(words):
    drafter, params, install, operation = PLANTED[words]
    (found,) = located(drafter, params, install)
    assert found.operation.stage is Stage.SAMPLING
    assert found.operation.name == operation
    assert words in found.looks, found.sentence
    assert found.certain
    assert found.explained >= 0.9 * found.differing
    assert found.differing >= 3
    assert found.smallest
    assert found.runner_up
    assert str(found.where) in found.smallest


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("install", "looks"),
    [
        (planted.accepted_by_p_alone, "p instead of p / q"),
        (tried(accept=lambda coin, a, q: coin < a * a), "the coin below the square of p / q"),
    ],
)
def test_what_a_verdict_takes_in_place_of_its_ratio_is_located(install, looks):
    found = located("early chain", {"temperature": 1.2}, install, requests=9, tokens=60)
    (found,) = [one for one in found if one.operation.stage is Stage.VERDICT]
    assert found.operation.name == "acceptance"
    assert looks in found.looks, found.sentence
    assert found.explained >= 0.9 * found.differing


def test_a_cut_is_located_by_what_is_recorded():
    setting = Setting("early tree", {"temperature": 1.1, "top_k": 6}, requests=4, tokens=30)
    fault = Fault("planted", Cause.RULES_WRONG, params_of(lambda params: {"top_k": params.top_k + 2}), "")
    found = located_cut(case_of(history(capture(setting, fault))))
    assert (found.operation.name, found.looks) == ("top-k", "top-k with 8 tokens, not 6")
    assert found.explained == found.differing > 0
    assert located_cut(case_of(history(capture(setting)))) is None


@pytest.mark.slow
def test_a_draw_beside_its_coin_is_located():
    fault = next(fault for fault in DRAFTS if fault.name == "draws one token early")
    found = located_draws(case_of(history(capture(short("early chain warm", requests=6), fault))))
    assert found[0].operation.name == "draft draw"


def test_a_ratio_without_its_paths_product_is_told_under_block(monkeypatch):
    monkeypatch.setitem(DRAFTERS, "block", {**DRAFTERS["early chain"], "rule": "block"})
    setting = Setting("block", {"temperature": 1.2}, requests=6, tokens=40)
    fault = Fault("planted", Cause.RATIO_TEST, planted.ratios_without_their_path, "")
    found = located_formulas(case_of(history(capture(setting, fault))))
    assert [one.looks for one in found if one.operation.name == "acceptance"] == [
        "the draft's own ratio, without its path's"
    ]
    assert located_formulas(case_of(history(capture(setting)))) == []


@pytest.mark.every(2)
@pytest.mark.parametrize("drafter", ["early tree", "eagle chain"])
def test_healthy_runs_with_all_rules_have_nothing_located(drafter):
    assert located(drafter, ALL) == []


def by_transformers(place):
    """p [V] at a place by transformers' own processors; it has no presence and frequency penalty."""
    contexts = place.asked.contexts
    params, output = contexts.params, contexts.output(place.asked.judged.rows[place.node])
    seen = torch.tensor([[*contexts.text[: contexts.prompt_len], *output]])
    row = SequenceBiasLogitsProcessor({(token,): v for token, v in params.logit_bias.items()})(seen, place.logits[None])
    row = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(seen, row).clone()
    for token, times in Counter(output).items():
        row[0, token] -= params.frequency_penalty * times + params.presence_penalty
    for warper in (
        TemperatureLogitsWarper(params.temperature),
        MinPLogitsWarper(params.min_p),
        TopKLogitsWarper(params.top_k),
        TopPLogitsWarper(params.top_p),
    ):
        row = warper(seen, row)
    return row.softmax(-1)[0]


def test_the_right_recipe_is_transformers_and_the_audits():
    run = history(capture(Setting("early tree", ALL, requests=3, tokens=30)))
    case, models = case_of(run), Models(audit_options(run, str(TARGET), "self:4", 100))
    places = Places(rows_of(case, models, "p", case.drafting[:12]))
    made = RuledRows(places, "p", None).distributions(RIGHT, range(len(places.every)))
    for place, row in zip(places.every, made, strict=True):
        contexts = place.asked.contexts
        torch.testing.assert_close(row, by_transformers(place), atol=2e-6, rtol=1e-4)
        rules = Rules(contexts.params, contexts.text[: contexts.prompt_len])
        shaped = rules.shaped(place.logits[None], [contexts.output(place.asked.judged.rows[place.node])])
        torch.testing.assert_close(row, rules.scores(shaped).softmax(-1)[0], atol=2e-6, rtol=1e-4)


def test_where_the_rule_goes_on_and_nobody_computed_what_follows_the_rest_is_not_judged():
    """The engine rejected a draft that p, q and its coin accept, so p below it was never needed."""
    tree = DraftTree.build([1, 2], [ROOT, 0], [0.5, 0.5], Drawn.WITHOUT_REPLACEMENT)
    numbers = {"p": [0.7, 0.1], "p_trial": [0.7, 0.0], "q_trial": [0.5, 0.0], "accept_prob": [1.0, 0.0]}
    outcomes = records.outcomes(2, (), (0,))
    wrong = records.verdict(outcomes, (), 3, FinalKind.RECOVERED, coin=[0.4, 0.4], **numbers)
    p, q = np.array([0.1, 0.7, 0.1, 0.1]), np.array([0.2, 0.5, 0.2, 0.1])
    found = decide(wrong, tree, {ROOT: p}, {ROOT: q, 0: q})
    assert [figure.what for figure in found.figures if figure.differs] == ["outcome"]
    assert found.left is None
