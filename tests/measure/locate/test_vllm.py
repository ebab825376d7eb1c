"""Inside vLLM: what it is told when it runs a capture again, and where what its forwards gave differs first.

Over the stand-in of tests/vllm/stand_in.py with faults put into it.
"""

from dataclasses import replace

import pytest
import torch

from specscope.analyze.audit.options import ModelSource
from specscope.analyze.locate.located import Stage
from specscope.errors import UserError
from specscope.measure.locate.tapped import TARGET, Fed, FedText, TappedForward, choices, parameters, read_taps
from specscope.measure.locate.vllm import Again, ComparedForwards, WalkedModels, job_of
from specscope.trace.record.params import SamplingParams
from specscope.vllm.again import arguments_of
from tests.analyze import histories
from tests.support import records as made
from tests.vllm import stand_in
from tests.vllm.stand_in import GPUModelRunner

NONE = made.chain([])
SPECULATION = {"method": "eagle3", "num_speculative_tokens": 3, "prompt_lookup_max": 0, "draft_sample_method": "greedy"}
SETTINGS = {"runner": "V2", "max_num_batched_tokens": 48, "max_num_seqs": 4, "cache_dtype": "auto"}
MODELS = ModelSource("/models/target", "target"), ModelSource("/models/head", "head")


def vllm_history(*infos):
    run = replace(
        histories.RUN,
        backend="vllm",
        speculation=SPECULATION,
        settings=SETTINGS,
        draft_path="/gone",
        versions={"vllm": "0.32.0"},
    )
    parts = [replace(histories.step(info.id), emitted=2) for info in infos]
    return histories.history([made.record(0, parts, admitted=infos)], run)


def test_the_job_is_the_captures_own_configuration_in_float32():
    history = vllm_history(made.info("a", "", [5, 6], params=SamplingParams(temperature=0.7, seed=4)))
    job = job_of(history.run, list(history.requests.values()), *MODELS)
    assert job["v2"]
    assert (job["model"], job["speculation"]["model"]) == ("/models/target", "/models/head")
    assert job["speculation"] == {"method": "eagle3", "num_speculative_tokens": 3, "draft_sample_method": "greedy"} | {
        "model": "/models/head"
    }
    assert (job["engine"]["dtype"], job["engine"]["max_num_batched_tokens"]) == ("float32", 48)
    (request,) = job["requests"]
    assert (request["prompt"], request["tokens"], request["seeded"]) == ([5, 6], 2, True)
    values = arguments_of(request)
    assert (values["temperature"], values["seed"], values["max_tokens"]) == (0.7, 4, 2)
    assert values["structured_outputs"] is None


def test_a_vllm_that_is_not_named_is_asked_for(monkeypatch):
    monkeypatch.delenv("SPECSCOPE_VLLM_PYTHON", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="name its Python with SPECSCOPE_VLLM_PYTHON="):
        Again.found()
    monkeypatch.setenv("SPECSCOPE_VLLM_PYTHON", "/opt/vllm/bin/python")
    assert Again.found().command[:2] == ("/opt/vllm/bin/python", "-P")


LOGITS = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])


def fed(tensors=None, drafts=((7, 7), (7, 7)), tokens=()):
    """Rows of the second of two requests, behind which tokens were committed."""
    text = FedText("b", 5, [0] * 5 + [*tokens], [5], [5 + len(tokens)], [made.part("b", NONE, None)], [0])
    forward = TappedForward(0, TARGET, 0, 0, ("a", "b"), (3, 3), (4, 4), drafts, ((1,), (2,)), tensors or {})
    rows = torch.arange(3)
    return Fed(forward, text, 0, rows + 3, rows + 4, rows, 0, 3, True)


def left(params, tokens):
    """Which of two tokens committed behind the first two rows are said to be wrong."""
    both = torch.tensor([0, 1])
    (pair,) = choices(fed(tokens=tokens), both, both, params, LOGITS)
    return pair.errors.bool()[:, 0].tolist()


def test_a_token_that_top_k_or_top_p_leaves_out_cannot_have_been_drawn():
    assert left(SamplingParams(1.0), [3, 0]) == [False, False]
    assert left(SamplingParams(1.0, top_k=2), [1, 1]) == [False, True]
    # of 0.64, 0.24, 0.09, 0.03 the first two reach 0.8
    assert left(SamplingParams(1.0, top_p=0.8), [1, 1]) == [False, True]
    assert left(SamplingParams(1.0, top_p=0.6), [1, 3]) == [True, False]
    assert left(SamplingParams(2.0, top_p=0.6), [1, 3]) == [False, False]  # warmer, it takes two to reach 0.6


def test_drafted_rows_have_the_parameters_of_their_request():
    tensors = {
        "parameters.0.rows": torch.tensor([0.5, 0.5, 0.9, 123.0]),
        "parameters.0.of": torch.tensor([0.5, 0.9]),
        "parameters.0.ends": torch.tensor([2, 4]),
    }
    (pair,) = parameters(fed(tensors))
    assert pair.errors.tolist() == [[0], [1]]
    assert [row.position for row in pair.rows] == [4, 5]  # what judges a draft is the row before it


PROMPT = [3, 17, 9, 40, 2, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return stand_in.tiny(folder), ModelSource(str(folder), "tiny")


def greedy(model, text):
    """The text, and what the model makes of it token by token."""
    text = list(text)
    with torch.inference_mode():
        for _ in range(3):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text


def history_of(text):
    """A prompt in two chunks, then two steps without drafts."""
    judged = [made.verdict(made.outcomes(0, ()), (), token, made.kind_of((), ())) for token in text[6:]]
    parts = [
        made.part("r", NONE, None, index=0, context=0, prefill=4),
        *(
            made.part("r", NONE, verdict, index=index, context=context, prefill=prefill)
            for verdict, index, context, prefill in zip(judged, (1, 2, 3), (4, 6, 7), (1, 0, 0), strict=True)
        ),
    ]
    info = made.info("r", "", PROMPT)
    records = [made.record(0, parts[:1], admitted=(info,)), *(made.record(i, [parts[i]]) for i in (1, 2, 3))]
    return histories.history(records)


def walked(model, folder, spoil=lambda runner: None, between=lambda runner: None):
    """What was compared of the target: a fault is put in before the run, or before the last step."""
    text, runner = greedy(model[0], PROMPT), GPUModelRunner(model[0])
    spoil(runner)

    class Runner(GPUModelRunner):
        def execute_model(self, scheduler_output, intermediate_tensors=None):
            if self.computed == 7:
                between(self)
            return super().execute_model(scheduler_output, intermediate_tensors)

    runner.__class__ = Runner
    guard = stand_in.run(runner, [text[:4], text[4:6], text[6:7], text[7:8]], folder)
    assert guard.errors == 0
    models = WalkedModels(replace(histories.RUN, drafter="none"), model[1], None)
    return ComparedForwards(read_taps(folder), history_of(text), models, lambda *_: None).target


def test_a_right_engine_agrees_at_every_operation_and_choice(model, tmp_path):
    sheet = walked(model, tmp_path)
    assert list(sheet.located()) == []
    names = {held.operation.name for part in sheet.parts for held in part.compared.held}
    assert {"tokens", "positions", "slots", "keys seen", "block table", "choice", "lm_head", "norm"} <= names
    assert {f"layers.{i}.self_attn.keys read" for i in range(3)} <= names
    forwards, rows, largest = sheet.rows()
    assert forwards == 4
    assert rows > 8 * 60
    assert largest < 1e-5
    walk = sheet.walk("a stand-in", "plain transformers")
    assert walk.operations[-1].operation.name == "choice"
    assert walk.first is None


def scale(runner):
    runner.model.model.layers[1].self_attn.attn.scale *= 2


def norm(runner):
    layers = runner.model.model.layers
    layers[2].input_layernorm.weight = layers[0].input_layernorm.weight


def part_of_the_vocabulary(runner):
    """Nothing that a forward computes: what is chosen of it is not the likeliest."""
    runner.model.lm_head.weight.data[20:] *= 0.5


def off(name, by):
    def spoil(runner):
        runner.off[name] = by

    return spoil


@pytest.mark.parametrize(
    ("spoil", "name", "looks"),
    [
        (scale, "layers.1.self_attn.attention", ""),
        (norm, "layers.2.input_layernorm", "a different factor in each channel"),
        (off("tokens", 1), "tokens", " where it should be "),
        (off("positions", 1), "positions", "+1 at 2 of 2 rows"),
        (off("slots", -1), "slots", "-1 at 2 of 2 rows"),
        (off("keys seen", -2), "keys seen", "-2 at 2 of 2 rows"),
        (part_of_the_vocabulary, "lm_head", ""),
    ],
)
def test_a_fault_is_located_at_the_first_operation_that_differs(model, tmp_path, spoil, name, looks):
    sheet = walked(model, tmp_path, spoil)
    first, *_ = sheet.located()
    assert (first.operation.stage, first.operation.name) == (Stage.TARGET, name)
    assert looks in first.looks
    assert first.explained == first.differing > 0
    walk = sheet.walk("a stand-in", "plain transformers")
    assert walk.operations[walk.first].operation == first.operation
    assert first.operation.code.startswith(("tests.vllm.stand_in.", "torch.", "vllm.")) or name in first.operation.name


def test_a_cache_that_was_spoilt_is_located_where_it_is_read(model, tmp_path):
    def spoil(runner):
        runner.model.model.layers[2].self_attn.attn.kv_cache[5, :3] = 0.5

    first, *_ = walked(model, tmp_path, between=spoil).located()
    assert (first.operation.name, first.where.index) == ("layers.2.self_attn.keys read", 3)


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (["vllm.A.one", "vllm.A.two"], "vllm.A.one or vllm.A.two"),
        (["vllm.A.one", "vllm.A.two (replaced: here.py:3)"], "vllm.A.two (replaced: here.py:3)"),
        ([], ""),
    ],
)
def test_where_it_is_computed_is_what_was_replaced_else_every_candidate(model, tmp_path, told, code):
    sheet = walked(model, tmp_path, off("positions", 1))
    sheet.tapped.code[Stage.TARGET]["positions"] = told
    first, *_ = sheet.located()
    assert first.operation.code == code
