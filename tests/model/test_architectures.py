"""Every supported architecture gives generate()'s greedy tokens through plain and tree steps alike.

Tiny random-weight models in float32, built from the architecture's own configuration class.
"""

import numpy as np
import pytest
import torch
import transformers as t

from specscope.errors import UserError
from specscope.model.batch import Segment
from specscope.model.kv_cache import BlockTable
from specscope.model.loader import adopt, load_model
from specscope.model.runner import ModelRunner
from specscope.speculate.verify import host
from specscope.trace.record.tree import ROOT, DraftTree
from tests.speculate.verify.enumeration import batch_of

VOCAB, TOKENS = 199, 16
SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOW = {"sliding_window": 8, "head_dim": 16}
MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16}
LATENT["num_key_value_heads"] = 4  # each query head has keys of its own
STEP = {**SIZE, **WINDOW, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
STEP |= {"share_expert_dim": 32, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 28,
}
CONFIGS = {
    "llama": lambda: t.LlamaConfig(**SIZE),
    "qwen2": lambda: t.Qwen2Config(**SIZE),
    "qwen3": lambda: t.Qwen3Config(**SIZE, head_dim=16),
    "qwen3_moe": lambda: t.Qwen3MoeConfig(**SIZE, **EXPERTS, head_dim=16),
    "mistral_sliding": lambda: t.MistralConfig(**SIZE, **WINDOW),
    "mixtral_sliding": lambda: t.MixtralConfig(**SIZE, **WINDOW, num_local_experts=4),
    "gemma2_softcap": lambda: t.Gemma2Config(**SIZE, **WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=2.0),
    "gemma3_mixed": lambda: t.Gemma3TextConfig(**SIZE, **WINDOW, query_pre_attn_scalar=16, sliding_window_pattern=2),
    "olmo2": lambda: t.Olmo2Config(**SIZE),
    "olmo3": lambda: t.Olmo3Config(**SIZE, sliding_window=8),
    "phi3": lambda: t.Phi3Config(**SIZE),
    "smollm3": lambda: t.SmolLM3Config(**SIZE),
    "granite": lambda: t.GraniteConfig(**SIZE),
    "cohere2": lambda: t.Cohere2Config(**SIZE, sliding_window=8),
    "glm4": lambda: t.Glm4Config(**SIZE, head_dim=16),
    "starcoder2": lambda: t.Starcoder2Config(**SIZE, sliding_window=8),
    "gpt_neox": lambda: t.GPTNeoXConfig(**{k: v for k, v in SIZE.items() if k != "num_key_value_heads"}),
    "gpt_oss_sinks": lambda: t.GptOssConfig(**SIZE, **WINDOW, num_local_experts=4, num_experts_per_tok=2),
    # Targets that declare next-token modules (MTP) of their own
    "deepseek_v3": lambda: t.DeepseekV3Config(**SIZE | LATENT, **ROUTED),
    "glm4_moe": lambda: t.Glm4MoeConfig(**SIZE, **ROUTED, head_dim=16),
    "mellum": lambda: t.MellumConfig(**SIZE, **EXPERTS, **WINDOW, layer_types=MIXED),
    "step3p7": lambda: t.Step3p7Config(text_config=STEP | {"layer_types": MIXED}, vision_config=VISION),
}


def build(name, vocab=None):
    """A model with weights large enough that its greedy tokens differ from place to place."""
    torch.manual_seed(0)
    auto = t.AutoModelForImageTextToText if name == "step3p7" else t.AutoModelForCausalLM
    config = CONFIGS[name]()
    if vocab is not None:
        config.vocab_size = vocab
    model = auto.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    if name == "gpt_oss_sinks":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=1.0)
    return model.eval()


def decode(runner, prompt, count, guess):
    """Greedy decoding with trees from `guess(tokens) -> DraftTree`; the cache moves accepted paths into place."""
    tokens, table, computed, accepted = list(prompt), BlockTable(), 0, 0
    while len(tokens) < len(prompt) + count:
        tree = guess(tokens)
        feed = tokens[computed:]
        runner.cache.reserve(table, len(tokens) + len(tree), computed)
        (logits,) = runner.forward([Segment.of_tree(table, computed, feed, tree, logits=True)])
        (verdict,), _ = host.verify(batch_of(tree, logits.argmax(-1).tolist(), {}, np.full(len(tree) + 1, 0.5)))
        base, path = len(tokens), verdict.path
        if len(path):
            slots = table.slots(0, base + len(tree))
            runner.cache.move([(slots[base + path], slots[base : base + len(path)])])
        computed = base + len(path)
        accepted += len(path)
        tokens += [*tree.token[path].tolist(), verdict.token]
    return tokens[len(prompt) : len(prompt) + count], accepted


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_generates_own(name):
    model = build(name)
    prompt = torch.randint(3, VOCAB, (1, 21), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    wanted = wanted[0, 21:].tolist()
    assert len(set(wanted)) > 3, "a model that repeats itself proves nothing"
    runner = ModelRunner(adopt(model, name), blocks=16)

    plain, _ = decode(runner, prompt[0].tolist(), TOKENS, lambda tokens: DraftTree.empty())
    assert plain == wanted

    def right_and_wrong(tokens):
        """A tree whose second branch is the truth for two levels, wrong below, beside wrong siblings."""
        truth = wanted[len(tokens) - 21 :][:3]
        if len(truth) < 3:
            return DraftTree.empty()
        wrong = [(token + 5) % VOCAB for token in truth]
        return DraftTree.build([wrong[0], truth[0], wrong[1], truth[1], wrong[2]], [ROOT, ROOT, 1, 1, 3])

    through_trees, accepted = decode(runner, prompt[0].tolist(), TOKENS, right_and_wrong)
    assert through_trees == wanted
    assert accepted >= TOKENS / 2


LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
SHORT = {"swa_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "d_rel": 4, "rel_extent": 32}
SHORT |= {"sliding_window_size": 8, "num_mtp_layers": 1}
REFUSED = {
    "Mamba": lambda: t.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
    "Bloom": lambda: t.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=2),  # positions out of sight
    # Targets with MTP modules, some of whose state is no key or value
    "Qwen3Next": lambda: t.Qwen3NextConfig(**SIZE, **EXPERTS, **LINEAR, head_dim=16, num_nextn_predict_layers=1),
    "BailingHybrid": lambda: t.BailingHybridConfig(**SIZE | LATENT, **EXPERTS, n_group=1, topk_group=1, head_dim=16),
    "Inkling": lambda: t.InklingTextConfig(**SIZE, **SHORT, n_routed_experts=4, num_experts_per_tok=2, head_dim=16),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_recurrent_state_or_positions_that_we_cannot_see_are_refused_by_name(kind):
    reason = "" if kind in ("Mamba", "Bloom") else ": .*keep state"
    with pytest.raises(UserError, match=rf"tiny \({kind}ForCausalLM\) cannot run on the paged cache{reason}"):
        adopt(t.AutoModelForCausalLM.from_config(REFUSED[kind]()), "tiny")


def test_a_model_with_images_is_refused_by_name(tmp_path):
    build("step3p7").save_pretrained(tmp_path / "step")
    with pytest.raises(UserError, match=r"cannot load step: Step3p7 is no text model \(transformers' Auto"):
        load_model(str(tmp_path / "step"), torch.device("cpu"), torch.float32)
