"""EAGLE and DFlash heads and next-token modules through the engine: their references' drafts token for token.

References: tests/heads.py and dflash.py, and for modules transformers' own generator and model class. Nothing stays.
"""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.modeling_outputs import CausalLMOutputWithPast

from specscope import Engine, SamplingParams
from specscope.errors import UserError
from specscope.speculate.drafters import eagle
from specscope.trace.record.tree import ROOT, Drawn
from tests.dflash import VARIANTS, assistant, dflash_tensors, write_dflash
from tests.engines import PROMPTS, tiny_engine
from tests.heads import head_tensors, write_head
from tests.model.test_architectures import build
from tests.mtp import Reference, add_modules, write_mtp_model
from tests.tiny import write_tiny_model


def make(target, head, **more):
    drafting = {"drafter": "dflash", "draft_model": str(head)}
    return Engine(target=str(target), dtype="float32", **{"kv_memory": 0.01, **drafting, **more})


def params(**more):
    return SamplingParams(max_tokens=24, ignore_eos=True, **more)


def test_the_notes_say_that_it_was_one_pass(tmp_path, deep):
    engine, records = make(deep, write_dflash(tmp_path), tree="3"), []
    engine.subscribe(records.append, lossless=True)
    results = engine.generate(PROMPTS[:2], params())
    engine.close()
    assert (engine.run_info.drafter, engine.run_info.aux_layers) == ("dflash", ("2", "4", "5"))
    for record in records:
        assert [p.name for p in record.passes] == ["pass 1"] * any(len(part.tree) for part in record.requests)
    for result in results:
        steps = [step for step in result.steps if len(step.tree)]
        assert all(step.method.one_pass and len(step.method.confidence) == len(step.tree) for step in steps)
        fed = np.concatenate([step.notes.fed_position for step in steps])  # each committed position once
        assert fed.tolist() == list(range(len(fed)))
        assert all(step.notes.rows.tolist() == [len(step.notes.fed_token) + 4] for step in steps)


def test_the_default_tree_is_the_blocks_chain_and_no_tree_is_deeper(tmp_path, deep):
    head = write_dflash(tmp_path)
    assert str(make(deep, head).config.plan) == "4"
    assert str(make(deep, VARIANTS["from the anchor"](tmp_path / "anchor")).config.plan) == "5"
    with pytest.raises(UserError, match=r"the tree 5 is 5 deep, but a block of .* drafts 4 tokens: use --tree 4"):
        make(deep, head, tree="5")


LOW = (0, 1, 2)  # of four layers
FIVE = ("llama", "qwen3", "gemma3_mixed", "mistral_sliding", "granite")


@pytest.mark.every(2)
@pytest.mark.parametrize("name", FIVE)
def test_drafts_are_those_of_transformers_own_generator(tmp_path, name):
    """Its generator is given what the target made of the accepted tokens, step by step, and keeps its own cache."""
    target = write_tiny_model(tmp_path / "target")
    model, tensors = build(name, vocab=300), dflash_tensors(width=64, target=64)
    model.save_pretrained(target)
    head = write_dflash(tmp_path / "head", tensors, leaving=LOW, hidden_size=64, num_target_layers=4)
    engine = make(target, head)
    (result,), prompt = engine.generate([PROMPTS[3]], params()), engine.encode(PROMPTS[3]).tokens
    with torch.inference_mode():
        wanted = model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert result.token_ids == wanted[0, len(prompt) :].tolist()
    generator = DFlashTokenCandidateGenerator(
        assistant(tensors, target_layer_ids=[*LOW]),
        model.get_input_embeddings(),
        model.get_output_embeddings(),
        GenerationConfig(max_length=500),
    )
    tokens, known, drafted = prompt + result.token_ids, 0, 0
    for step in (step for step in result.steps if len(step.tree)):
        context = step.context_len + step.prefill_tokens
        with torch.inference_mode():
            states = model(torch.tensor([tokens[:context]]), output_hidden_states=True).hidden_states
            ids = torch.tensor([tokens[: context + 1]])
            places = {"position_ids": torch.arange(context + 1)[None], "attention_mask": torch.ones_like(ids)}
            fed = CausalLMOutputWithPast(hidden_states=tuple(state[:, known:] for state in states))
            made, logits = generator.get_candidates(ids, places, fed, False, context - known - 1)
        assert step.tree.token.tolist() == made[0, context + 1 :].tolist()
        q = logits[0].float().softmax(-1)
        assert np.allclose(step.notes.prob, q[range(4), step.tree.token.tolist()], atol=1e-5)
        known, drafted = context, drafted + 1
    assert drafted > 5


PROMPT = [50 + i * i % 7 for i in range(20)]
MODELS = [("deepseek_v3", 3), ("glm4_moe", 1), ("mellum", 1)]  # of their own kind; the others are like one of these
LIKE_THEM = [("deepseek_v3", 1), ("glm4_moe", 2), ("llama", 3), ("qwen3", 2)]
NEAR = 1e-5  # of a coin to the border between two tokens


MODELS += [pytest.param(each, marks=pytest.mark.slow) for each in LIKE_THEM]


@pytest.fixture(scope="module", params=MODELS, ids=lambda given: f"{given[0]}, {given[1]}")
def folder(request, tmp_path_factory):
    kind, modules = request.param
    return write_mtp_model(tmp_path_factory.mktemp("model"), kind, modules)


def steps_of(folder, tree=None, prompts=(PROMPT,), tokens=40, **params):
    """(the context's tokens, the step) of each step that drafted, and the outputs."""
    engine = Engine(target=str(folder), drafter="mtp", tree=tree, dtype="float32", kv_memory=0.01, max_batch=2)
    contexts, steps, outputs = {}, [], {}
    for seed, prompt in enumerate(prompts):
        name = engine.add(list(prompt), SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed, **params))
        contexts[name] = list(prompt)
    while engine.busy:
        record = engine.step()
        for part in record.requests:
            context = contexts[part.request]
            if len(part.tree):
                steps.append((list(context), part))
            if part.verdict is not None:
                context += [*part.tree.token[part.verdict.path].tolist(), part.verdict.token]
        outputs |= {end.info.id: end.output.tolist() for end in record.finished}
    engine.close()
    return steps, outputs


def test_greedy_drafts_are_transformers_own(folder):
    reference = Reference(folder)
    wanted, rounds = reference.generate(PROMPT, 60)
    steps, outputs = steps_of(folder, tokens=60)
    assert [*outputs.values()] == [wanted]
    assert sum(part.verdict.accepted for _, part in steps) > 1, "where nothing is accepted nothing is told of the KV"
    compared = 0
    for context, part in steps:
        drafted, rows = rounds[len(context)]
        assert part.tree.token.tolist() == drafted
        q = rows.softmax(-1)[range(len(drafted)), drafted]
        torch.testing.assert_close(torch.tensor(part.notes.prob), q, rtol=1e-4, atol=1e-6)
        assert part.method.module.tolist() == list(range(reference.count))
        compared += 1
    assert compared > 10


@pytest.mark.every(3)
@pytest.mark.parametrize("tree", [None, "[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]"])
def test_sampled_drafts_are_our_coins_in_the_references_distribution(folder, tree):
    reference, iterated = Reference(folder), tree is not None
    steps, _ = steps_of(folder, tree, (PROMPT, PROMPT[:7]), 24, temperature=0.9)
    assert steps
    for context, part in steps[:12]:
        for parent in sorted({*part.tree.parent.tolist()}):
            path = part.tree.token[part.tree.path_to(parent)].tolist() if parent != ROOT else []
            q = (reference.row(context, path, iterated) / 0.9).double().softmax(-1).numpy()
            whole = q.copy()
            for node in part.tree.children(parent):
                assert part.tree.drawn[node] == Drawn.WITHOUT_REPLACEMENT
                coin, token = part.notes.coin[node], int(part.tree.token[node])
                assert part.tree.q[node] == pytest.approx(whole[token], rel=1e-4)
                ends = q.cumsum() / q.sum()
                if np.abs(ends - coin).min() > NEAR:
                    assert int(ends.searchsorted(coin, "right")) == token
                q[token] = 0  # drawn without putting back


def test_what_is_no_module_is_refused(tmp_path):
    plain = write_mtp_model(tmp_path, "llama").parent / "plain"
    with pytest.raises(UserError, match=r"plain .LlamaForCausalLM. has no next-token modules"):
        steps_of(plain)
    lacking = add_modules(plain, tmp_path / "lacking", 1)
    config = (lacking / "config.json").read_text().replace('"num_mtp_layers": 1', '"num_mtp_layers": 2')
    (lacking / "config.json").write_text(config)
    with pytest.raises(UserError, match=r"cannot load the next-token modules of lacking .*missing"):
        steps_of(lacking)


def test_a_target_with_modules_runs_without_them(tmp_path):
    folder = write_mtp_model(tmp_path, "glm4_moe", 2)
    engine = Engine(target=str(folder), drafter="none", dtype="float32", kv_memory=0.01)
    (result,) = engine.generate([PROMPT], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(result.token_ids) == 4


DYNAMIC = "dynamic:12,depth=4,top=3"
# Random models never agree. Under this bias, which moves both alike, four tokens are left and they agree now and then.
# They are among what the EAGLE-3 head can draft.
KNOWN = (head_tensors()["d2t"] + torch.arange(60)).tolist()
BIAS = dict.fromkeys((KNOWN[11], KNOWN[23], KNOWN[37], KNOWN[48]), 1000)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Folders of heads by name."""
    at = tmp_path_factory.mktemp("heads")
    return {
        "eagle3": write_head(at / "eagle3", head_tensors()),
        "eagle1": write_head(at / "eagle1", head_tensors(version=1, bias=True)),
        "one aux_layer": write_head(
            at / "one", head_tensors(aux_layers=1, draft=300), eagle_aux_hidden_state_layer_ids=[3]
        ),
    }


@pytest.fixture(scope="module")
def eagle_with(deep, heads):
    def eagle_with(head, tree, **more):
        drafting = {"drafter": "eagle", "draft_model": str(heads[head]), "tree": tree}
        return tiny_engine(deep, **drafting, **more)

    return eagle_with


def greedy(bias=False, **more):
    return SamplingParams(max_tokens=24, ignore_eos=True, logit_bias=BIAS if bias else {}, **more)


def most_held(engine, prompt, params):
    """The most numbers of features that were kept of a prompt's request, in rows, and its drafts."""
    engine.add(prompt, params, name="long")
    most, trees = 0, []
    while engine.requests:
        record = engine.step()
        trees += [part.tree.token.tolist() for part in record.requests]
        if "long" in engine.drafter._features:
            rows = engine.drafter._features["long"]._rows
            most = max(most, rows.untyped_storage().nbytes() // (rows.shape[1] * rows.element_size()))
    return most, trees


@pytest.mark.parametrize("head", ["eagle3", "eagle1"])
def test_a_long_prompts_features_are_fed_chunk_by_chunk(eagle_with, monkeypatch, head):
    """Never more than a chunk is kept, as memory and not as a view; and the drafts are what they were."""
    monkeypatch.setattr(eagle, "PREFILL_CHUNK", 16)
    prompt, params = "the cat sat on the mat, " * 6, greedy(bias=True)
    engine = eagle_with(head, DYNAMIC, max_step_tokens=24)
    most, trees = most_held(engine, prompt, params)
    assert 0 < most <= 16
    assert engine.drafter.cache.pool.used == 0
    assert engine.drafter.states == engine.drafter._features == {}
    whole = eagle_with(head, DYNAMIC, max_step_tokens=24)
    keep = lambda self, name, start, rows, _: self._features.setdefault(name, eagle.Features()).put(start, rows)  # noqa: E731
    monkeypatch.setattr(eagle.Eagle, "observe", keep)
    all_of_them, same = most_held(whole, prompt, params)
    assert all_of_them > 100
    assert trees == same
    assert sum(map(len, trees)) > 20


def test_no_room_for_a_draft_costs_the_draft_alone(eagle_with, engines):
    engine = eagle_with("eagle3", DYNAMIC)
    pool = engine.drafter.cache.pool
    pool.take(pool.blocks - 6)
    results = engine.generate(PROMPTS, greedy(bias=True))
    plain = engines["none"].generate(PROMPTS, greedy(bias=True))
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    sizes = [len(step.tree) for r in results for step in r.steps if step.verdict]
    assert 0 < sum(size > 0 for size in sizes) < len(sizes)


@pytest.fixture(scope="module")
def hugging(deep):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(deep, dtype=torch.float32)


@pytest.mark.every(2)
@pytest.mark.parametrize("head", ["eagle3", "eagle1", "one aux_layer"])
def test_the_notes_say_what_fed_the_head(eagle_with, hugging, head):
    """Each row of the first pass once, in order, with the norms of what transformers says of its position."""
    engine = eagle_with(head, "3x3", max_step_tokens=16)
    results = engine.generate(PROMPTS, greedy())
    for prompt, result in zip(PROMPTS, results, strict=True):
        tokens = engine.encode(prompt)[1] + result.token_ids
        with torch.inference_mode():
            states = hugging(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        layers = [states[-1 if layer == "final" else layer][0] for layer in engine.drafter.aux_layers]
        wanted = torch.stack([layer.norm(dim=-1) for layer in layers], dim=-1)
        notes = [step.notes for step in result.steps if len(step.tree)]
        position = np.concatenate([one.fed_position for one in notes])
        assert position.tolist() == list(range(len(position)))
        assert np.concatenate([one.fed_token for one in notes]).tolist() == tokens[1 : len(position) + 1]
        assert [len(one.fed_token) for one in notes] == [one.rows[0] for one in notes]
        assert np.concatenate([one.fed_norms for one in notes]) == pytest.approx(wanted[position].numpy(), rel=1e-4)


def test_norms_of_what_is_not_finite_are_finite():
    features = torch.tensor([[3.0, 4.0, 0.0, 0.0], [torch.nan, 0.0, torch.inf, 1.0]])
    norms = eagle.layer_norms(features, 2)
    assert norms.tolist() == [[5.0, 0.0], [torch.finfo(torch.float32).max] * 2]
    assert eagle.layer_norms(features.bfloat16(), 1).dtype == np.float32
