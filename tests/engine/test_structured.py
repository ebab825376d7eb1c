"""A grammar, min_tokens and stop tokens inside drafted trees: the same output as without drafts, whatever happens."""

import dataclasses
import json
from collections import Counter
from concurrent.futures import wait

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from specscope import Engine, SamplingParams
from specscope.errors import UserError
from specscope.live.fork import forked
from specscope.speculate.allowed import allows
from specscope.speculate.changes import Changes
from specscope.trace.record.records import FinishReason
from specscope.trace.record.tree import ROOT, Drawn
from tests.engines import DRAFTERS, PROMPTS, each_drafter, fresh
from tests.waiting import until

pytest.importorskip("xgrammar")
EOS = 2  # of the tiny tokenizer
PROPERTIES = {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}, "c": {"type": "array", "maxItems": 2}}
JSON = {"json": {"type": "object", "properties": PROPERTIES, "required": ["a", "b"]}}


def each(form, params=None, **more):
    return [
        SamplingParams(max_tokens=24, structured_outputs=form, seed=i, **(params or {}), **more)
        for i in range(len(PROMPTS))
    ]


def ids(engine, text):
    return engine.tokenizer(text, add_special_tokens=False)["input_ids"]


def is_legal(engine, params, tokens):
    """Whether a grammar made anew allows these output tokens."""
    state = engine.forms.allowed(params).grammar
    state.follow(tokens)
    return not state.refused


@pytest.mark.every(5)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("name", each_drafter(DRAFTERS))
def test_every_drafted_token_is_allowed_behind_its_own_path(engines, name, temperature):
    """Flat (chain) rows in a tree would let siblings' children through; and nothing is drafted behind the end."""
    engine, drafted = engines[name], 0
    params = each({"regex": "([!-@]|[a-z]{2}[A-Z])*"}, temperature=temperature)[:3]
    for result, own in zip(engine.generate(PROMPTS[:3], params), params, strict=True):
        output = []
        for step in result.steps:
            tree = step.tree
            for node, above in enumerate(tree.parent.tolist()):
                path = tree.token[tree.path_to(above)].tolist() if above != ROOT else []
                rows = engine.forms.allowed(own).rows(output, [path])
                assert allows(rows[0], int(tree.token[node])), (result.id, step.index, node)
                drafted += 1
            output += step.output()
    assert drafted or name == "none"


CHOICES = ("ab", "ac", "bca", "bcb", "c")


def exact(folder, prompt, temperature):
    """The distribution over CHOICES by the masked softmax of a model run apart, token by token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    before, found = tokenizer(prompt)["input_ids"], []
    texts = [[*tokenizer(text)["input_ids"], EOS] for text in CHOICES]
    for text in texts:
        p = 1.0
        for at, token in enumerate(text):
            can = sorted({other[at] for other in texts if other[:at] == text[:at]})
            with torch.no_grad():
                logits = model(torch.tensor([[*before, *text[:at]]])).logits[0, -1].double() / temperature
            p *= float(logits[can].softmax(0)[can.index(token)])
        found.append(p)
    assert sum(found) == pytest.approx(1)
    return found


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("name", "rule"),
    [("draft tree", "standard"), ("draft tree", "traversal"), ("p-eagle chain", "block"), ("ngram", "match")],
)
def test_sampled_output_has_the_masked_targets_distribution(engines, deep, name, rule):
    """150 seeds against the exact probabilities of five texts."""
    engine = engines[name]
    old = engine.verifier.rule
    engine.verifier.rule = rule
    try:
        params = [
            SamplingParams(structured_outputs={"choice": CHOICES}, temperature=1.5, seed=i, max_tokens=9)
            for i in range(150)
        ]
        results = engine.generate(["abcabcabcab"] * len(params), params)
    finally:
        engine.verifier.rule = old
    counts = Counter(result.text for result in results)
    assert set(counts) <= set(CHOICES)
    wanted = np.array(exact(deep, "abcabcabcab", 1.5)) * len(params)
    assert chisquare([counts[text] for text in CHOICES], wanted).pvalue > 1e-3
    if name == "draft tree":
        assert any((step.tree.drawn != Drawn.DETERMINISTIC).any() for step in results[0].steps if len(step.tree))


def test_a_fork_follows_the_form_and_a_token_that_breaks_it_ends_it(engines):
    engine = engines["draft tree"]
    fresh(engine, 60)
    name = engine.add(PROMPTS[0], each(JSON)[0])
    steps = [part for part in engine.step().requests if part.verdict is not None]  # its grammar is compiled by then
    request = engine.requests[name]
    while engine.busy:
        steps += [part for part in engine.step().requests if part.verdict is not None]
    output = request.output
    middle = next(step for step in steps if step.index > 2)

    def run(changes):
        ends = []
        with forked(engine, request, middle, changes) as beside:
            while beside.busy:
                ends += beside.step().finished
        return ends[0]

    assert run(Changes()).output.tolist() == output
    assert is_legal(engine, request.params, run(Changes(params={"temperature": 1.3})).output.tolist())
    broken = run(Changes(tokens={middle.position: 0}))
    assert broken.reason is FinishReason.ERROR
    assert "does not allow" in broken.error
    fresh(engine, 60)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", DRAFTERS)
def test_near_a_dead_end_the_request_ends_with_an_error_and_never_nan(engines, name):
    """The grammar wants a character in the end that no token has: the token of its byte is taken away."""
    engine = engines[name]
    grammars = engine.forms.grammars
    pieces = list(grammars.tokens.pieces)
    pieces[ids(engine, "z")[0]] = b""
    kept = grammars.tokens
    never = frozenset(token for token, piece in enumerate(pieces) if not piece)
    grammars.tokens = dataclasses.replace(kept, digest="without z", pieces=tuple(pieces), never=never)
    try:
        for temperature in (0.0, 1.0):
            params = each({"regex": "ab{2,4}z"}, temperature=temperature, min_tokens=2)[:2]
            for result in engine.generate(PROMPTS[:2], params):
                assert result.finish is FinishReason.ERROR
                assert "no token of the vocabulary" in result.error
                assert result.text == "abbbb"
    finally:
        grammars.tokens = kept


def test_the_end_of_a_form_ends_the_request_also_under_ignore_eos(engines):
    for name in ("none", "draft tree"):
        for ignore in (False, True):
            (result,) = engines[name].generate(
                "abc", SamplingParams(structured_outputs={"choice": ("abab",)}, ignore_eos=ignore, max_tokens=30)
            )
            assert (result.text, result.finish) == ("abab", FinishReason.EOS)
            assert result.token_ids[-1] == EOS


@pytest.mark.every(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_eos_and_stop_tokens_back_along_each_path(engines, temperature):
    """EOS and a stop token are the likeliest by far: they come first where they may, at the exact length."""
    for least, bias in ((0, EOS), (5, EOS), (5, 80), (9, 80)):
        params = [
            SamplingParams(
                min_tokens=least, stop_token_ids=(80,), logit_bias={bias: 80.0}, temperature=temperature, max_tokens=20
            )
        ] * 2
        plain = engines["none"].generate(PROMPTS[:2], params)
        assert {len(r.token_ids) for r in plain} == {least + 1}
        assert {r.finish for r in plain} == {FinishReason.EOS if bias == EOS else FinishReason.STOP}
        for name in ("ngram", "draft tree", "p-eagle dynamic"):
            results = engines[name].generate(PROMPTS[:2], params)
            assert {len(r.token_ids) for r in results} == {least + 1}
            assert not temperature or all(r.token_ids[-1] == bias for r in results)
            if not temperature:
                assert [(r.token_ids, r.finish) for r in results] == [(r.token_ids, r.finish) for r in plain]


def test_a_stop_token_inside_an_accepted_path_ends_the_output_there(engines):
    (free,) = engines["draft tree"].generate("abcabc", SamplingParams(max_tokens=30, ignore_eos=True))
    inside = next(i for i, origin in enumerate(free.origins) if origin == "accepted")
    token = free.token_ids[inside]
    first = free.token_ids.index(token)
    for name in ("none", "draft tree"):
        (cut,) = engines[name].generate(
            "abcabc", SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(token,))
        )
        assert cut.token_ids == free.token_ids[: first + 1]
        assert cut.finish is FinishReason.STOP
        assert cut.text == engines[name].vocabulary.text(free.token_ids[:first])  # without the stop token


# Coming in


def test_other_requests_go_on_while_a_grammar_is_compiled_and_it_may_be_cancelled(engines, monkeypatch):
    engine, ended, other = engines["ngram"], [], None
    fresh(engine, 60)
    slow = engine.forms.grammars.compile

    def compile_last(form):
        until(lambda: other in [name for name, _ in ended])
        return slow(form)

    monkeypatch.setattr(engine.forms.grammars, "compile", compile_last)
    late, gone = (
        engine.add("abc", SamplingParams(structured_outputs={"regex": f"[a-c]{{4}}{text}"}))
        for text in ("late", "gone")
    )
    other = engine.add("hello", SamplingParams(max_tokens=8, ignore_eos=True))
    with pytest.raises(UserError, match="already running"):
        engine.add("abc", name=late)
    engine.cancel(gone)
    while engine.busy:
        ended += [(end.info.id, end.reason) for end in engine.step().finished]
    assert ended == [(gone, FinishReason.CANCELLED), (other, FinishReason.LENGTH), (late, FinishReason.EOS)]
    fresh(engine, 60)


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(engines):
    engine = engines["ngram"]
    fresh(engine, 60)
    bad = engine.add("abc", SamplingParams(structured_outputs={"regex": "a(?=b)"}))
    dead = engine.add("abc", SamplingParams(structured_outputs={"json": {"$ref": "#"}}))
    wait([future for _, future in engine.forms.compiling.values()])  # or they would arrive when the other has ended
    (good,) = engine.generate("hello", SamplingParams(max_tokens=4, ignore_eos=True))
    assert good.finish is FinishReason.LENGTH
    ends, records = {}, []
    engine.rewind(0)  # they arrived, so they arrive again
    while engine.busy:
        records.append(engine.step())
        ends |= {end.info.id: end for end in records[-1].finished}
    for name, why in ((bad, "Lookahead is not supported"), (dead, "allows no first token")):
        assert ends[name].reason is FinishReason.ERROR
        assert why in ends[name].error
    assert engine.timeline.branches == 1
    fresh(engine, 60)


def test_what_is_wrong_at_first_sight_is_refused_at_once(engines):
    for params, why in (
        ({"structured_outputs": {"regex": "a^b"}}, "only at the ends"),
        ({"stop_token_ids": (300,)}, "stop_token_ids: token id 300 is outside the vocabulary"),
    ):
        with pytest.raises(UserError, match=why):
            engines["none"].add("abc", SamplingParams(**params))


# Evidence


def test_the_records_say_what_was_removed_and_pruned(engines, deep):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(deep).eval()
    engine, pruned = engines["suffix"], 0
    params = SamplingParams(structured_outputs={"regex": "(ab|c)+"}, max_tokens=12)
    (result,) = engine.generate("abcabcxyabcxyabc", params)
    text, output = ids(engine, "abcabcxyabcxyabc"), []
    for step in result.steps:
        if step.verdict is None:
            assert step.form is None
            continue
        pruned += step.form.pruned
        assert step.form.node.tolist()[0] == ROOT
        for at, mass in zip(step.form.node.tolist(), step.form.removed.tolist(), strict=True):
            path = [] if at == ROOT else step.tree.token[step.tree.path_to(at)].tolist()
            row = engine.forms.allowed(params).rows(output, [path])[0]
            with torch.no_grad():
                p = model(torch.tensor([[*text, *output, *path]])).logits[0, -1].softmax(0)
            assert mass == pytest.approx(sum(float(p[t]) for t in range(300) if not allows(row, t)), abs=1e-4)
        output += step.output()
    assert pruned > 0
    (free,) = engine.generate("abc", SamplingParams(max_tokens=4))
    assert all(step.form is None and step.logprobs is None for step in free.steps)


@pytest.mark.slow
def test_a_schema_on_the_real_model_gives_json_that_fits():
    properties = {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}}
    form = {"json": {"type": "object", "properties": properties, "required": ["name", "age"]}}
    engine = Engine(dtype="float32", max_batch=2)
    prompts = [engine.turn("Describe a person as JSON."), engine.turn("Who is Ada? Answer in JSON.")]
    params = [SamplingParams(structured_outputs=form, max_tokens=80, temperature=t) for t in (0.0, 0.8)]
    results = engine.generate(prompts, params)
    for result in results:
        assert result.finish is FinishReason.EOS
        found = json.loads(result.text)
        assert isinstance(found["name"], str)
        assert found["age"] <= 120
    row = engine.forms.allowed(SamplingParams(structured_outputs={"regex": ".*"})).rows([], [[]])[0]
    assert [allows(row, token) for token in (0, 1, 2)] == [False, False, True]  # <|im_end|> is its EOS
    assert sum(result.acceptance.accepted for result in results) > 0
