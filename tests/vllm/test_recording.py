"""What the plugin records of a small vLLM: each number from its tables, the same of both runners and of a device, where
nothing waits; and what a client's headers say of its span."""

import dataclasses
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specscope.analyze.findings import CheckResult
from specscope.analyze.verify.trial import judge
from specscope.trace.inside import gather
from specscope.trace.inside.chain import of_step, uniform
from specscope.trace.inside.recorder import Recorder
from specscope.trace.record.aggregate import Reason
from specscope.trace.record.params import SamplingParams, unknown_limits
from specscope.trace.record.records import FinalKind, FinishReason, Outcome, Preceded, RequestInfo
from specscope.trace.record.rules import is_lossy
from specscope.trace.record.tree import Drawn
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.sampling import ratio_keeps
from specscope.vllm.run_info import ended, known
from specscope.vllm.scheduling import Arrival, Ended
from tests.trace.strategies import RUN
from tests.vllm import small
from tests.vllm.small import PROMPT, Request, Speculation, params, parts, record
from tests.waiting import until

SAMPLED = Speculation(draft_sample_method="probabilistic")
BLOCK = dataclasses.replace(SAMPLED, rejection_sample_method="block")
HEATS = (0.0, 0.7, 1.3, 1.0)
# Speculation, temperatures, top-p, of the engine
CASES = {
    "greedy": (Speculation(), (0.0,) * 3, 1, {}),
    "drafts greedy": (Speculation(), HEATS, 1, {}),
    "drafts sampled": (SAMPLED, HEATS, 1, {"varied": True}),
    "top-p": (SAMPLED, HEATS, 0.6, {"seed": 1}),
    "top-p, drafts greedy": (Speculation(), HEATS, 0.6, {"varied": True, "seed": 1}),
    "a reduced vocabulary": (SAMPLED, HEATS, 1, {"knows": 7}),
    "a block drafter": (dataclasses.replace(SAMPLED, parallel_drafting=True), HEATS, 1, {}),
    "n-grams": (Speculation("ngram", ""), HEATS, 1, {"varied": True}),
    "prompts in chunks": (SAMPLED, HEATS, 1, {"chunk": 4}),
    "a host that runs ahead": (SAMPLED, HEATS, 1, {"ahead": True, "varied": True}),
    "longer chains": (Speculation(num_speculative_tokens=5), HEATS, 1, {"seed": 5}),
}


def requests(heats=HEATS, **given):
    """`given`: parameters of all, but top-p of a greedy one."""
    return [Request(f"r{i}", params(temperature=heat, **(given if heat else {}))) for i, heat in enumerate(heats)]


def of(case, **more):
    speculation, heats, top_p, engine = CASES[case]
    return record(requests(heats, top_p=top_p), speculation, **engine, **more)


def failed(history):
    return [check.name for check in judge(history, source="x").checks if check.result is CheckResult.FAILED]


def assert_same(a, b, at, rough="-"):
    """Dataclasses of numbers and arrays: integers are equal, floats but for rounding, 50 times as much in `rough`."""
    if dataclasses.is_dataclass(a):
        assert type(a) is type(b), at
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name), f"{at}.{field.name}", rough)
    elif isinstance(a, tuple):
        for place, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_same(one, other, f"{at}[{place}]", rough)
    elif isinstance(a, np.ndarray | float):
        assert (np.asarray(a).dtype, np.shape(a)) == (np.asarray(b).dtype, np.shape(b)), at
        many = 50 if rough in at else 1
        np.testing.assert_allclose(a, b, rtol=many * 2e-5, atol=many * 2e-6, err_msg=at)
    else:
        assert a == b, at


def assert_same_steps(a, b):
    assert len(a.steps) == len(b.steps) > 3
    for one, other in zip(a.steps, b.steps, strict=True):
        assert_same(tuple(one.requests), tuple(other.requests), f"step {one.step}")
        assert (one.preempted, [i.id for i in one.admitted]) == (other.preempted, [i.id for i in other.admitted])


@pytest.mark.every(3)
@pytest.mark.parametrize("evidence", ["full", "lean"])
@pytest.mark.parametrize("case", CASES)
def test_both_runners_and_a_device_tell_the_same_and_verify_passes(case, evidence):
    asked = {"variables": {"EVIDENCE": evidence}}
    here, engine, _ = of(case, **asked)
    there, _, said = of(case, gather=nullcontext, **asked)
    v2, other, _ = of(case, v2=True, **asked)
    assert engine.outputs == other.outputs
    assert_same_steps(here, there)
    assert_same_steps(here, v2)
    assert failed(here) == []
    assert any("bytes copied per step" in line for line in said)
    made = {end.info.id: end.output.tolist() for step in here.steps for end in step.finished}
    assert made == engine.outputs
    kinds = Counter(part.verdict.kind for part in parts(here) if part.verdict)
    assert min(kinds[FinalKind.RECOVERED], kinds[FinalKind.TARGET]) > 0
    assert kinds[FinalKind.BONUS] > 0 or case == "a block drafter"
    assert {part.parents is None for part in parts(here) if len(part.tree)} == {evidence == "lean"}


@pytest.mark.parametrize("case", CASES)
def test_every_number_is_the_sampler_s_own(case):
    """From the engine's tables, in plain float64."""
    history, engine, _ = of(case)
    text = {name: list(PROMPT) for name in engine.requests}
    for part in parts(history):
        request, own = engine.requests[part.request], text[part.request]
        at = part.context_len + part.prefill_tokens
        last = at + len(part.tree) - (part.verdict is None)
        assert part.blocks.tolist() == request.blocks[part.context_len // small.BLOCK : last // small.BLOCK + 1]
        if part.verdict is None:
            assert at < len(PROMPT)
            continue
        assert own[at:] == own[-1:]  # what is fed last is the root
        check(engine, request, part, at, own[-1])
        own += part.tokens()


def check(engine, request, part, at, root):
    tree, verdict, notes, heat = part.tree, part.verdict, part.parents, request.heat
    drafts, n, accepted = tree.token.astype(np.int64), len(tree), verdict.accepted
    above, tried, rows = np.array([root, *drafts]), min(accepted + 1, n), np.arange(n)
    raw = engine.target[above].double().softmax(-1)
    p = torch.stack([distribution(engine.target[token], heat, request.sampling_params.top_p) for token in above])
    own = engine.draft[(root + rows) % small.V if engine.spec.parallel_drafting else above[:n]].double()
    sampled = engine.spec.samples and heat > 0
    q = (own / heat).softmax(-1) if sampled else torch.eye(small.V).double()[drafts]
    near, of_p, of_q = np.testing.assert_allclose, p[rows, drafts], q[rows, drafts]
    assert tree.parent.tolist() == list(range(-1, n - 1))
    assert set(tree.drawn.tolist()) <= {Drawn.WITH_REPLACEMENT if sampled else Drawn.DETERMINISTIC}
    assert verdict.kind is (FinalKind.TARGET if not n else FinalKind.BONUS if accepted == n else FinalKind.RECOVERED)
    outcomes = [Outcome.ACCEPTED] * accepted + [Outcome.REJECTED] + [Outcome.UNTRIED] * n
    assert verdict.outcome.tolist() == outcomes[:n]
    near(verdict.coin, uniform(np.full(n, request.seed), at + rows) if heat else np.zeros(n), rtol=1e-6)
    near(verdict.p, of_p, rtol=1e-5, atol=1e-7)
    near(tree.q, of_q, rtol=1e-5)
    near(verdict.accept_prob[:tried], (of_p / of_q).clamp(max=1)[:tried], rtol=1e-5, atol=1e-7)
    assert notes.node.tolist() == list(range(-1, tried - 1))
    if tried:
        top = raw[:tried].topk(4)
        assert notes.top[:tried].tolist() == top.indices.tolist()
        near(notes.top_p[:tried], top.values, rtol=1e-5)
        near(notes.raw_p[:tried], raw[rows, drafts][:tried], rtol=1e-5)
    if tried and engine.spec.has_model:
        near(part.notes.prob, own.softmax(-1)[rows, drafts], rtol=1e-5)
        assert notes.draft_top[:tried].tolist() == own[:tried].topk(4).indices.tolist()
        near(notes.outside[:tried], (raw[:n] * (own == -torch.inf)).sum(1)[:tried], rtol=1e-4)
    assert notes.final_target_p == pytest.approx(float(p[accepted][verdict.token]), rel=1e-5, abs=1e-7)
    left = p[accepted]
    if heat and accepted < n:
        left = (p[accepted] - q[accepted]).clamp(min=0)
        assert verdict.residual_mass[accepted] == pytest.approx(float(left.sum()), rel=1e-4)
    drawn = left / left.sum()
    assert verdict.final_p == pytest.approx(float(drawn[verdict.token]), rel=1e-4)
    if heat:
        assert notes.final_entropy == pytest.approx(float(torch.special.entr(drawn).sum()), rel=1e-4)


def distribution(logits, heat, top_p):
    """[V] after every rule."""
    if heat == 0:
        return torch.eye(small.V).double()[logits.argmax()]
    p, order = (logits.double() / heat).softmax(-1), logits.argsort()
    gone = order[:-1][p[order].cumsum(0)[:-1] <= 1 - top_p]
    p[gone] = 0
    return p / p.sum()


@pytest.mark.parametrize("step_seeds", [True, False], ids=["0.33", "0.32"])
@pytest.mark.parametrize("sampled", [True, False])
def test_block_verification_accepts_by_h_with_its_coins(monkeypatch, sampled, step_seeds):
    if step_seeds:
        monkeypatch.setattr(small, "spec_step_seed", None, raising=False)
    speculation = BLOCK if sampled else dataclasses.replace(BLOCK, draft_sample_method="greedy")
    history, engine, _ = record(requests(), speculation, v2=True)
    assert failed(history) == []
    roots = dict.fromkeys(engine.requests, PROMPT[-1])
    for part in parts(history):
        request, drafts, n = engine.requests[part.request], part.tree.token.tolist(), len(part.tree)
        root, roots[part.request] = roots[part.request], part.tokens()[-1]
        if not (request.heat and n):
            continue
        above = torch.tensor([root, *drafts])
        p, q = ((table[above] / request.heat).double().softmax(-1) for table in (engine.target, engine.draft))
        h, _ = small.block(p, q if sampled else torch.eye(small.V).double()[drafts], drafts)
        tried = part.verdict.outcome > 0
        np.testing.assert_allclose(part.verdict.accept_prob[tried], np.array(h)[tried], rtol=1e-4)
        seeds = of_step(np.full(n, request.seed), np.arange(n) * step_seeds)
        at = part.context_len + part.prefill_tokens
        np.testing.assert_array_equal(part.verdict.coin, uniform(seeds, at + np.arange(n)))
        passed = [place for place in range(n) if part.verdict.coin[place] <= h[place]]
        assert part.verdict.accepted == max(passed, default=-1) + 1


@pytest.mark.parametrize(
    ("method", "rule"), [("", "standard"), ("fly", "lossy:fly"), ("of tomorrow", "lossy:of tomorrow")]
)
def test_rules_and_block_drafters_are_told(method, rule):
    """Nothing is called lossless that is not known to be."""
    history, _, _ = record(requests(), Speculation("dspark", rejection_sample_method=method))
    assert {part.verdict.rule for part in parts(history)} == {rule}
    assert is_lossy(rule) is rule.startswith("lossy:")
    assert all(part.method.one_pass for part in parts(history) if len(part.tree))


@pytest.mark.parametrize("engine", [{}, {"gather": nullcontext}, {"v2": True}], ids=["V1", "a device", "V2"])
def test_invalid_drafts_are_left_out_and_counted(engine):
    """V1 takes q away behind them, where drafts were sampled; V2 nothing."""
    for speculation in (SAMPLED, Speculation()):
        history, made, _ = record(requests(), speculation, invalid=(2, 3), **engine)
        takes = speculation is SAMPLED and "v2" not in engine
        assert failed(history) == (["share of the final token"] if takes else [])  # vLLM's own: it is not lossless
        cut = [part for step in history.steps[2:4] for part in step.requests]
        assert {(len(part.tree), part.sizing) for part in cut} == {(1, "2 invalid drafts left out")}
        ended = [part for part in cut if part.verdict.accepted and made.requests[part.request].heat]
        assert ended
        for part in ended:
            heat, draft = made.requests[part.request].heat, part.tree.token[0]
            p, q = ((table[draft] / heat).softmax(-1) for table in (made.target, made.draft))
            left = (p - q).clamp(min=0) if takes else p
            assert part.verdict.final_p == pytest.approx(float((left / left.sum())[part.verdict.token]), rel=1e-4)


def test_coins_of_0_were_tossed(monkeypatch):
    """As a dead generator gives them: every draft is accepted."""

    def generate_uniform_probs(count, *_):
        return torch.zeros(count, dtype=torch.float64)

    monkeypatch.setattr(small, "generate_uniform_probs", generate_uniform_probs)
    history, _, _ = record(requests((1.0, 0.9)), SAMPLED)
    verdicts = [part.verdict for part in parts(history)]
    assert all((verdict.coin[verdict.outcome != Outcome.UNTRIED] > 0).all() for verdict in verdicts)
    assert "coins unequal" in failed(history)


@pytest.mark.parametrize("engine", [{}, {"gather": nullcontext}, {"v2": True}], ids=["V1", "a device", "V2"])
@pytest.mark.parametrize("speculation", [Speculation(), SAMPLED], ids=["drafts greedy", "drafts sampled"])
def test_what_is_no_number_stays_none(speculation, engine):
    """Of logits that are NaN there is no p, greedy or sampled: min(1, NaN) is 1 to Python, and argmax gives a token."""

    def run(made):
        made.spoil = lambda step, logits: logits[:1].fill_(torch.nan) if step == 2 else None
        made.run()

    for heats in ((0.0, 0.8), (0.8, 0.0)):
        history, _, _ = record(requests(heats), speculation, run=run, **engine)
        first, *others = history.steps[2].requests
        verdict = first.verdict
        assert np.isnan([verdict.p[0], verdict.p_trial[0], verdict.accept_prob[0], first.parents.raw_p[0]]).all()
        assert np.isfinite(verdict.p[1:]).all()
        assert all(np.isfinite(other.verdict.p).all() for other in others)


@pytest.mark.parametrize("engine", [{}, {"gather": nullcontext}, {"v2": True}], ids=["V1", "a device", "V2"])
def test_the_target_s_choice_is_its_own_whatever_was_accepted(engine):
    """An engine that accepts a wrong draft was said to have chosen it; of a wrong final token p is 0."""
    seen = []

    def run(made):
        def wrong(tokens):
            drafts = made.requests["r0"].drafts
            if drafts:
                seen.append(len(tokens[0]) - 1)
                tokens[0] = [*drafts[: seen[-1] + 1], 10]

        made.wrong = wrong
        made.run()

    history, made, _ = record(requests((0.0,)), run=run, **engine)
    judged = [part for part in parts(history) if len(part.tree)]
    root = {part.index: history.steps[part.index - 1].requests[0].tokens()[-1] for part in judged}
    wrongly = 0
    for part, right in zip(judged, seen, strict=True):
        above = [root[part.index], *part.tree.token.tolist()]
        choices = [int(made.target[token].argmax()) for token in above]
        assert part.parents.choice.tolist() == choices[: len(part.parents.choice)]
        assert part.verdict.final_p == part.parents.final_target_p == float(choices[part.verdict.accepted] == 10)
        if right < len(part.tree):
            wrongly += 1
            assert part.verdict.p[right] == 0
    assert wrongly
    assert failed(history)


# Requests from their arrival to their end


def test_a_step_and_its_requests_are_told_from_arrival_to_end():
    history, engine, _ = record(requests(), chunk=4)
    first, last = history.steps[0], history.steps[-1]
    assert (first.running, first.waiting, first.blocks_used, first.blocks_free) == (4, 0, 4, small.BLOCKS - 5)
    assert [info.id for info in first.admitted] == list(engine.requests)
    assert all(info.arrival_ns == 2_500_000_000 < info.admitted_ns == first.start_ns for info in first.admitted)
    assert {phase.name for phase in history.steps[2].phases} == {"schedule", "forward", "verify", "draft", "commit"}
    own = [part for part in parts(history) if part.request == "r0"]
    fed = [(part.context_len, part.prefill_tokens, part.verdict is None) for part in own[:2]]
    assert fed == [(0, 4, True), (4, 1, False)]
    assert [part.preceded for part in own[1:3]] == [Preceded.PREFILL, Preceded.NO_DRAFT]
    assert {end.reason for end in last.finished} == {FinishReason.LENGTH}


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_a_request_that_was_preempted_comes_back_as_itself(v2):
    """V2 forgets it, and is given its prompt and output as one prompt."""

    def run(engine):
        for _ in range(2):
            engine.step()
        engine.scheduler._preempt_request(engine.requests["r1"], 0.0)
        engine.run()

    history, engine, _ = record(requests(), run=run, v2=v2)
    assert failed(history) == []
    assert [step.preempted for step in history.steps[:4]] == [(), (), ("r1",), ()]
    assert [info.id for step in history.steps[1:] for info in step.admitted] == []
    back = next(part for part in history.steps[2].requests if part.request == "r1")
    there = len(PROMPT) + sum(part.emitted for part in parts(history) if part.request == "r1" and part.index < 2)
    assert (back.preceded, back.index, back.context_len) == (Preceded.PREEMPTION, 2, 0)
    assert back.prefill_tokens == there - 1
    assert {len(output) for output in engine.outputs.values()} == {12}


@pytest.mark.every(2)
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH, FinishReason.EOS])
@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_an_end_cuts_what_a_step_gives_out(reason, v2):
    def asked(**more):
        return [Request(f"r{seed}", params(**{"seed": seed, "max_tokens": 40} | more)) for seed in range(1, 7)]

    inside = Counter(token for part in parts(record(asked())[0]) for token in part.tokens()[:-1])
    stop = {"stop_token_ids": [inside.most_common(1)[0][0]]}
    how = {FinishReason.STOP: stop, FinishReason.LENGTH: {"max_tokens": 5}, FinishReason.EOS: {"ignore_eos": False}}
    history, engine, _ = record(asked(**how[reason]), v2=v2)
    assert failed(history) == []
    ends = {end.info.id: end for step in history.steps for end in step.finished}
    assert reason in {end.reason for end in ends.values()}
    assert {name: end.output.tolist() for name, end in ends.items()} == engine.outputs
    last = {part.request: part for part in parts(history)}
    assert any(part.emitted <= part.verdict.accepted for part in last.values())


@pytest.mark.parametrize(("text", "reason"), [(b"the end", FinishReason.STOP), (b"abc", FinishReason.CANCELLED)])
def test_an_abort_is_a_stop_where_the_stop_string_stands_in_the_text(text, reason):
    info = RequestInfo("r0", 0, 0, "", np.zeros(1, np.int32), SamplingParams(stop=("end",)))
    told = Ended("r0", 1, "abort", "", [5])
    assert ended(told, info, (), Vocabulary({5: text})).reason is reason
    assert ended(told, info, (), Vocabulary()).reason is FinishReason.STOP  # nothing tells it apart


def test_vllm_s_own_output_settles_what_the_last_step_gave_out():
    """A stop that the plugin does not know of, such as a repetition, may cut it."""

    def run(engine):
        engine.step()
        engine.step()
        request = engine.requests["r0"]
        del request.output_token_ids[1:]
        request.reason = "repetition"
        engine.scheduler._free_request(request)
        engine.step()

    history, _, _ = record(requests((1.0,)), run=run)
    assert [part.emitted for part in parts(history)] == [1, 0]
    assert history.steps[-1].finished[0].reason is FinishReason.STOP


@pytest.mark.parametrize("engine", [{}, {"v2": True}], ids=["V1", "V2"])
def test_nothing_is_held_back_while_vllm_has_nothing_to_do(tmp_path, engine):
    """Its server may be killed then, and nothing follows."""

    def ended():
        steps = read_capture(capture).history.steps if capture.exists() and capture.stat().st_size else []
        return {end.info.id: end.output.tolist() for step in steps for end in step.finished}

    capture = tmp_path / "run.jsonl"
    with small.installed(CAPTURE=capture):
        made = small.Engine(requests(), **engine)
        made.run()
        until(lambda: ended() == made.outputs)


def test_an_error_in_the_hooks_changes_nothing_and_they_step_aside():
    def run(engine):
        engine.step()
        del engine.runner.use_async_scheduling
        engine.run()

    _, plain, _ = record(requests())
    history, engine, said = record(requests(), run=run, fails=True)
    assert engine.outputs == plain.outputs
    assert len(history.steps) < plain.steps
    assert any("switched off: 5 errors; what was recorded before is kept" in line for line in said)


# V2 alone


@pytest.mark.parametrize("budget", [2, 1, 0])
def test_only_the_device_knows_how_many_drafts_were_verified(budget):
    """Of some requests all, where there is a budget."""

    def run(made):
        made.verified = lambda requests: [r.drafts[: kept(r.slot)] for r in requests]
        made.run()

    def kept(slot):
        return (budget + slot) % 4 if budget else 0

    history, engine, _ = record(requests(), SAMPLED, v2=True, budget=budget, run=run)
    assert failed(history) == []
    for step in history.steps[1:]:
        assert step.budget == sum(len(part.tree) for part in step.requests)
        for part in step.requests:
            slot = engine.requests[part.request].slot
            count = kept(slot)
            assert (len(part.tree), part.method.unverified) == (count, 3 - count)
            np.testing.assert_array_equal(part.method.confidence, engine.confidence[slot, :count])


RECORDER = Recorder(RUN, Vocabulary(), lambda record: None)


def told(name="a", asked=None, **headers):
    """The request as a capture has it."""
    return known(RECORDER, name, [1, 2], asked or SamplingParams(), Arrival(1, headers), 2).info


@pytest.mark.parametrize("flags", ["00", "01"])
def test_the_callers_own_sampled_flag_is_told(flags):
    """It was told as 01 whatever it was: every trace of a caller seemed to be sampled."""
    given = f"00-{5:032x}-{9:016x}-{flags}"
    assert told(traceparent=given).traceparent == given
    assert ratio_keeps(1, given, 1.0) is (Reason.PARENT if flags == "01" else None)


@pytest.mark.parametrize(
    ("name", "chat", "served"),
    [("chatcmpl-7-1f", True, True), ("cmpl-7-0-1f", False, True), ("0-1f", False, False), ("completely", False, False)],
)
def test_what_was_asked_is_told_by_the_id_that_vllms_server_gave(name, chat, served):
    assert (told(name).chat, told(name).served) == (chat, served)


def asked(form=None, seed=None, **ours):
    """vLLM's SamplingParams, and its form."""
    none = dict.fromkeys(("structural_tag", "whitespace_pattern", "json", "regex", "choice", "grammar", "json_object"))
    own = {"seed": seed, "structured_outputs": form and SimpleNamespace(**none | form)}
    return SimpleNamespace(**vars(SamplingParams(**ours)) | own)


def test_a_negative_seed_is_a_label_and_the_rest_stay_parameters():
    """All parameters were given up for it, and `verify` took a request that ignores EOS for one that ran past it."""
    info = told(asked=asked(seed=-5, temperature=0.7, ignore_eos=True))
    assert (info.params.temperature, info.params.ignore_eos, info.params.seed) == (0.7, True, 0)
    assert info.labels["seed"] == "-5"


@pytest.mark.parametrize(
    "form",
    [
        *({"choice": ["a", "b"]}, {"json": {"type": "object"}}, {"json": '{"type":"object"}'}),
        *({"regex": "[ab]+"}, {"grammar": 'root ::= "a"'}, {"json_object": True}),
        *({"structural_tag": "{}"}, {"json": "{}", "whitespace_pattern": " ?"}, {"json": "no JSON"}),
    ],
)
def test_a_form_is_a_parameter_or_a_label_and_limits_what_can_be_judged(form):
    info, first = told(asked=asked(form)), next(iter(form))
    has_no_word = first == "structural_tag" or "whitespace_pattern" in form or form.get("json") == "no JSON"
    assert (info.params.structured_outputs is None) is has_no_word
    assert unknown_limits(info.params, info.labels) == ("structured_outputs",)
    if has_no_word:
        assert form[first] in info.labels["structured_outputs"]
    else:
        assert info.params.structured_outputs.kind == first
        assert "structured_outputs" not in info.labels


WAITS = ("item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "masked_select")


def test_nothing_waits_for_the_device():
    """No tensor becomes a number or an array while numbers are gathered: on a GPU each of these would wait."""
    waits, calls = [], []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            name = getattr(function, "__name__", "")
            calls.append(name)
            masked = name in ("__getitem__", "__setitem__") and isinstance(args[1], torch.Tensor)
            if name in WAITS or (masked and args[1].dtype is torch.bool):
                waits.append(name)
            return function(*args, **(kwargs or {}))

    record(requests(), SAMPLED, gather=Watch, varied=True)
    assert len(calls) > 100
    assert waits == []


def test_rows_are_worked_on_in_parts(monkeypatch):
    """A batch of more rows than a part holds gives the same numbers."""
    whole, _, _ = record(requests(), SAMPLED, gather=nullcontext)
    monkeypatch.setattr(gather, "PART", 3 * small.V)
    for runner in ({"gather": nullcontext}, {"v2": True}):
        assert_same_steps(record(requests(), SAMPLED, **runner)[0], whole)


def test_the_first_pass_of_a_drafter_writes_no_more_than_its_rows():
    """It may be one that a graph captures: what it does is then done at each replay, to what other passes wrote."""
    written = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape == (small.SLOTS + 1, 3, small.V):
                written.append(function.overloadpacket.__name__)
            return out

    def run(engine):
        with Watch():
            engine.run()

    record(requests(), v2=True, run=run)
    assert written[0] == "empty"
    assert set(written[1:]) == {"index_put_"}
