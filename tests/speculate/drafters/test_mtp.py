"""A target's next-token modules as drafter: transformers' own drafts, in its tokens and in its distributions."""

import numpy as np
import pytest
import torch

from specscope import Engine, SamplingParams
from specscope.errors import UserError
from specscope.trace.record.tree import ROOT, Drawn
from tests.mtp import Reference, add_modules, write_mtp_model

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
