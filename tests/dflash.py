"""DFlash heads as others publish them: random weights on disk, and what they compute in plain torch.

A reading of vLLM 0.32's model_executor/models/qwen3_dflash.py and v1/spec_decode/dflash.py, without specscope: dense,
no cache, one sequence at a time, float32.
"""

import json

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

LAYER = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
}
LEAVING = (1, 3, 4)  # the layers of the target whose outputs feed a head
BLOCK, MASK = 5, 7


def dflash_tensors(layers=2, width=48, target=48, mlp=80, vocab=300, draft=None, bias=False, own=False, seed=0, aux=3):
    """Random tensors by their published names: 4 query heads and 2 key heads of 16. `draft`: a reduced vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator) * 0.2  # noqa: E731
    tensors = {"fc.weight": normal(width, aux * target)}
    tensors |= {f"{name}.weight": 1 + normal(width) for name in ("hidden_norm", "norm")}
    for layer in (f"layers.{i}" for i in range(layers)):
        rows = {"q": (64, width), "k": (32, width), "v": (32, width), "o": (width, 64)}
        tensors |= {f"{layer}.self_attn.{part}_proj.weight": normal(*shape) for part, shape in rows.items()}
        if bias:
            tensors |= {f"{layer}.self_attn.{part}_proj.bias": normal(shape[0]) for part, shape in rows.items()}
        tensors |= {f"{layer}.self_attn.{part}_norm.weight": 1 + normal(16) for part in "qk"}
        tensors |= {f"{layer}.mlp.{part}_proj.weight": normal(mlp, width) for part in ("gate", "up")}
        tensors |= {f"{layer}.mlp.down_proj.weight": normal(width, mlp)}
        tensors |= {f"{layer}.{norm}_layernorm.weight": 1 + normal(width) for norm in ("input", "post_attention")}
    if own:
        tensors |= {"embed_tokens.weight": normal(vocab, width), "lm_head.weight": normal(vocab, width)}
    if draft is not None:
        known = torch.randperm(vocab, generator=generator)[:draft].sort().values
        tensors |= {"lm_head.weight": normal(draft, width), "d2t": known - torch.arange(draft)}
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, known, True)
    return tensors


def write_dflash(folder, tensors=None, block=BLOCK, inside=None, mask=None, leaving=LEAVING, **config):
    """A head's folder in z-lab's layout. `inside`: more of dflash_config; `mask`: a mask embedding of its own."""
    tensors = dflash_tensors() if tensors is None else tensors
    told = {
        **LAYER,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": block,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [*leaving], **(inside or {})},
        "num_hidden_layers": sum(name.endswith("q_proj.weight") for name in tensors),
        "num_target_layers": 7,
        **config,
    }
    return _write(folder, told, tensors, mask)


def write_speculators(folder, tensors=None, block=BLOCK, mask=None, layer=None, leaving=LEAVING, **config):
    """The same in speculators' layout. `layer`: more of transformer_layer_config."""
    tensors = dflash_tensors(draft=60) if tensors is None else tensors
    told = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [layer + 1 for layer in leaving],
        "block_size": block,
        "mask_token_id": MASK,
        "draft_vocab_size": len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else 300,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": block - 1}],
            "verifier": {"name_or_path": "some/model"},
        },
        "transformer_layer_config": {
            **LAYER,
            "num_hidden_layers": sum(name.endswith("q_proj.weight") for name in tensors),
            **(layer or {}),
        },
        **config,
    }
    return _write(folder, told, tensors, mask)


def _write(folder, told, tensors, mask):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in told.items() if value is not None}))
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    if mask is not None:
        torch.save(mask, folder / "mask_embedding.pt")
    return folder


SWA = {"use_swa": True, "swa_window_size": 6}
KINDS = ["full_attention", "sliding_attention"]
# What a config may say of the arithmetic, each by a writer of such a head
VARIANTS = {
    "z-lab": write_dflash,
    "speculators": write_speculators,
    "one layer": lambda folder: write_dflash(folder, dflash_tensors(layers=1)),
    "three layers and biases": lambda folder: write_dflash(folder, dflash_tensors(layers=3, bias=True)),
    "from the anchor": lambda folder: write_dflash(folder, inside={"sample_from_anchor": True}),
    "from the anchor, speculators": lambda folder: write_speculators(folder, sample_from_anchor=True),
    "causal": lambda folder: write_dflash(folder, inside={"causal": True}),
    "is_causal": lambda folder: write_dflash(folder, is_causal=True),
    "causal, speculators": lambda folder: write_speculators(folder, sliding_window_non_causal=False),
    "every layer with a window": lambda folder: write_dflash(folder, inside=SWA),
    "a window narrower than the block": lambda folder: write_dflash(folder, inside={**SWA, "swa_window_size": 3}),
    "full and sliding": lambda folder: write_dflash(
        folder, layer_types=KINDS, sliding_window=7, use_sliding_window=True
    ),
    "full and sliding, none causal": lambda folder: write_dflash(
        folder, layer_types=KINDS, sliding_window=7, use_sliding_window=True, inside={"causal": False}
    ),
    "a mask embedding": lambda folder: write_dflash(folder, mask=_vector()),
    "a mask embedding with its token": lambda folder: write_dflash(
        folder, mask={"mask_token_id": MASK, "embedding": _vector()[None]}
    ),
    "a mask token outside the vocabulary": lambda folder: write_dflash(
        folder, mask=_vector(), inside={"mask_token_id": 300}
    ),
    "its own embedding and head": lambda folder: write_dflash(folder, dflash_tensors(own=True)),
    "yarn": lambda folder: write_dflash(
        folder, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    ),
    "relu": lambda folder: write_dflash(folder, hidden_act="relu"),
    "no rotary base": lambda folder: write_dflash(folder, rope_theta=None),
}


def _vector():
    return torch.randn(48, generator=torch.Generator().manual_seed(5))


NAMES = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}  # of transformers' model class


def assistant(tensors, block=BLOCK, **config):
    """transformers' model class over a head's tensors, whose layers see all."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    layers = sum(name.endswith("q_proj.weight") for name in tensors)
    sizes = {key: value for key, value in LAYER.items() if key not in ("model_type", "vocab_size", "rope_theta")}
    told = {
        **sizes,
        "hidden_size": len(tensors["norm.weight"]),
        "num_hidden_layers": layers,
        "rope_parameters": {"rope_type": "default", "rope_theta": LAYER["rope_theta"]},
        "layer_types": ["full_attention"] * layers,
        "block_size": block,
        "mask_token_id": MASK,
        "target_layer_ids": [*LEAVING],
        **config,
    }
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**told)).eval()
    model.load_state_dict({_renamed(name, NAMES): x for name, x in tensors.items()})
    return model


def published(model):
    """Its tensors by their published names."""
    return {_renamed(name, {new: old for old, new in NAMES.items()}): x for name, x in model.state_dict().items()}


def _renamed(name, names):
    return next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name)


class DFlashReference:
    """What a head in a folder computes. `embed`: token ids to the target's embeddings; `output`: its [V, width]."""

    def __init__(self, folder, embed, output):
        self.t = load_file(folder / "model.safetensors")
        told = json.loads((folder / "config.json").read_text())
        speculators = told.get("speculators_model_type") is not None
        self.c = told.get("transformer_layer_config", told)
        self.inside = told.get("dflash_config") or {
            "mask_token_id": told["mask_token_id"],
            "target_layer_ids": [i - 1 for i in told["aux_hidden_state_layer_ids"]],
            "sample_from_anchor": told.get("sample_from_anchor", False),
            "causal": not told.get("sliding_window_non_causal", True),
        }
        self.is_causal = None if speculators else told.get("is_causal")
        self.mask = self.inside["mask_token_id"]
        own = self.t.get("embed_tokens.weight")
        self.embed = embed if own is None else lambda tokens: own[tokens]
        if (folder / "mask_embedding.pt").exists():
            state = torch.load(folder / "mask_embedding.pt", weights_only=True)
            vector = (state["embedding"] if isinstance(state, dict) else state).reshape(-1)
            table, known = self.embed, lambda tokens: tokens.masked_fill(tokens == self.mask, 0)
            self.embed = lambda tokens: torch.where((tokens == self.mask)[:, None], vector, table(known(tokens)))
        self.output = self.t.get("lm_head.weight", output)
        draft = torch.arange(len(self.output))
        self.d2t = draft + self.t["d2t"] if "d2t" in self.t else draft
        self.layers = range(self.c["num_hidden_layers"])

    def linear(self, name, x):
        return functional.linear(x, self.t[name + ".weight"], self.t.get(name + ".bias"))

    def norm(self, name, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * self.t[name + ".weight"]

    def attention_of(self, layer):
        """(window or None, causal): _resolve_layer_attention."""
        kinds, use_swa = self.c.get("layer_types"), self.inside.get("use_swa", False)
        any_sliding = kinds is not None and "sliding_attention" in kinds
        sliding = use_swa if kinds is None or (use_swa and not any_sliding) else kinds[layer] == "sliding_attention"
        window = self.inside.get("swa_window_size", self.c.get("sliding_window")) if sliding else None
        for override in (self.is_causal, self.inside.get("causal")):
            if override is not None:
                return window, override
        return window, kinds is not None and kinds[layer] == "sliding_attention"

    def turned(self, x, positions):
        """Rotated halves. x [N, heads, size]."""
        size = x.shape[-1]
        frequency, scale = self.frequencies(size)
        angle = positions[:, None].float() * frequency
        cos, sin = (angle.cos() * scale)[:, None], (angle.sin() * scale)[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def frequencies(self, size):
        from transformers import Qwen3Config
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        base, rope = self.c.get("rope_theta", 1e6), self.c.get("rope_scaling")
        if rope is None:
            return base ** (-torch.arange(0, size, 2) / size), 1.0
        config = Qwen3Config(head_dim=size, max_position_embeddings=512, rope_parameters={**rope, "rope_theta": base})
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")

    def keys_and_values(self, layer, x, positions):
        key, value = (self.linear(f"layers.{layer}.self_attn.{part}_proj", x).unflatten(-1, (-1, 16)) for part in "kv")
        return self.turned(self.norm(f"layers.{layer}.self_attn.k_norm", key), positions), value

    def block(self, features, root, rows):
        """The logits [drafts, D] of a block of so many rows that begins with the token `root`, behind the positions of
        features [T, F]."""
        context, length = self.norm("hidden_norm", self.linear("fc", features)), len(features)
        places = torch.arange(length + rows)
        x = self.embed(torch.tensor([root, *[self.mask] * (rows - 1)]))
        for layer in self.layers:
            name, (window, causal) = f"layers.{layer}", self.attention_of(layer)
            y = self.norm(f"{name}.input_layernorm", x)
            known = self.keys_and_values(layer, context, places[:length])
            own = self.keys_and_values(layer, y, places[length:])
            key, value = (torch.cat(both).repeat_interleave(2, dim=1) for both in zip(known, own, strict=True))
            query = self.norm(
                f"{name}.self_attn.q_norm", self.linear(f"{name}.self_attn.q_proj", y).unflatten(-1, (-1, 16))
            )
            scores = torch.einsum("nhd,khd->hnk", self.turned(query, places[length:]), key) / 4
            back = places[length:, None] - places
            seen = back >= 0 if causal else back > -(10**6)
            if window is not None:
                seen = seen & (back < window) & (back > -window)
            mixed = torch.einsum("hnk,khd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value).flatten(1)
            x = x + self.linear(f"{name}.self_attn.o_proj", mixed)
            y = self.norm(f"{name}.post_attention_layernorm", x)
            act = getattr(functional, self.c["hidden_act"])
            gate, up = (self.linear(f"{name}.mlp.{part}_proj", y) for part in ("gate", "up"))
            x = x + self.linear(f"{name}.mlp.down_proj", act(gate) * up)
        first = 0 if self.inside.get("sample_from_anchor") else 1
        return self.norm("norm", x[first:]) @ self.output.T

    def drafts(self, features, root, depth):
        """The logits [depth, V] of a draft so deep, minus infinity where the head does not know a token."""
        rows = self.block(features, root, depth + (not self.inside.get("sample_from_anchor")))
        return torch.full((depth, self.c["vocab_size"]), -torch.inf).index_copy_(1, self.d2t, rows)
