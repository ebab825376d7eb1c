"""EAGLE heads as others publish them: random weights on disk, and what they compute in plain torch.

Written from the published convention and without specscope, so that its loader, runner and drafter are held against
something else than themselves.
"""

import json
import math

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
}
DRAFT_VOCAB = 60


def head_tensors(
    version=3,
    width=48,
    target=48,
    aux_layers=3,
    draft=DRAFT_VOCAB,
    vocab=300,
    mlp=80,
    bias=False,
    seed=0,
    parallel=False,
    layers=1,
):
    """Random tensors by their published names: 4 query heads and 2 key heads. `parallel`: a P-EAGLE head's."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator) * 0.2  # noqa: E731
    wide, size = width * (2 if version == 3 else 1), width // 4
    rows = {"q": width, "k": 2 * size, "v": 2 * size}
    tensors = {f"midlayer.self_attn.{p}_proj.weight": normal(n, wide) for p, n in rows.items()}
    tensors |= {
        "fc.weight": normal(width, aux_layers * target if version == 3 else 2 * width),
        "midlayer.self_attn.o_proj.weight": normal(width, width),
        "midlayer.mlp.gate_proj.weight": normal(mlp, width),
        "midlayer.mlp.up_proj.weight": normal(mlp, width),
        "midlayer.mlp.down_proj.weight": normal(width, mlp),
        "midlayer.post_attention_layernorm.weight": 1 + normal(width),
    }
    if bias:
        tensors |= {f"midlayer.self_attn.{p}_proj.bias": normal(n) for p, n in rows.items()}
    if version == 1:
        return tensors | ({"fc.bias": normal(width)} if bias else {})
    tensors["midlayer.hidden_norm.weight"] = 1 + normal(width)
    tensors["midlayer.input_layernorm.weight"] = 1 + normal(width)
    tensors["norm.weight"] = 1 + normal(width)
    tensors["lm_head.weight"] = normal(draft, width)
    for layer in (f"layers.{i}" for i in range(1, layers)):
        tensors |= {f"{layer}.self_attn.{p}_proj.weight": normal(n, width) for p, n in rows.items()}
        tensors |= {f"{layer}.self_attn.o_proj.weight": normal(width, width)}
        tensors |= {f"{layer}.mlp.{part}_proj.weight": normal(mlp, width) for part in ("gate", "up")}
        tensors |= {f"{layer}.mlp.down_proj.weight": normal(width, mlp)}
        tensors |= {f"{layer}.{norm}_layernorm.weight": 1 + normal(width) for norm in ("input", "post_attention")}
    if parallel:
        tensors["mask_hidden"] = normal(1, 1, aux_layers * target)
    if draft != vocab:
        known = torch.randperm(vocab, generator=generator)[:draft].sort().values
        tensors["d2t"] = known - torch.arange(draft)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, known, True)
    return tensors


def write_parallel_head(folder, tensors=None, mask_token=7, depths=4, **config):
    """A P-EAGLE head's folder, laid out as vLLM's speculators write it."""
    tensors = head_tensors(parallel=True, layers=2) if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    layer = {key: value for key, value in CONFIG.items() if key != "architectures"}
    layer["num_hidden_layers"] = count_layers(tensors)
    told = {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "speculators_config": {
            "algorithm": "peagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depths}],
            "verifier": {"name_or_path": "some/model", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "mask_token_id": mask_token,
        "norm_before_residual": False,
        **config,
    }
    (folder / "config.json").write_text(json.dumps({key: value for key, value in told.items() if value is not None}))
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return folder


def write_head(folder, tensors, binary=False, **config):
    """A head's folder; `config` is laid over CONFIG, and what is None there is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    head = next((x for name, x in tensors.items() if name.endswith("lm_head.weight")), None)
    if head is not None:
        config = {"draft_vocab_size": len(head), "num_hidden_layers": count_layers(tensors), **config}
    told = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(told))
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def count_layers(tensors):
    return 1 + len({name.split(".")[1] for name in tensors if name.startswith("layers.") and ".0." not in name})


def _normed(aux_layers, width=48, **norms):
    """Norms of features, which are not ones."""
    generator = torch.Generator().manual_seed(7)
    one = lambda count: 1 + 0.5 * torch.randn(count, generator=generator)  # noqa: E731
    together = {"input_norm.weight": one(aux_layers * width)} if "norm_before_fc" in norms else {}
    each = {f"fc_norm.{i}.weight": one(width) for i in range(aux_layers)} if "fc_norm" in norms else {}
    return together | each


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 5000.0}
# What a head's config may say of its arithmetic, beyond EAGLE-3 as its authors wrote it
VARIANTS = {
    "norm_output": {"norm_output": True},
    "norm_before_fc": {"norm_output": True, "norm_before_fc": True},
    "norm_before_fc in eagle_config": {"eagle_config": {"norm_before_fc": True}},
    "fc_norm": {"norm_output": True, "fc_norm": True},
    "sliding": {"layer_types": ["sliding_attention"], "sliding_window": 5, "use_sliding_window": True},
    "yarn": {"rope_scaling": YARN},
    "all": {
        **{"norm_output": True, "fc_norm": True, "norm_before_residual": True},
        **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "hidden_act": "relu"},
    },
}


def write_variant(folder, name, **tensors):
    """A head of VARIANTS; the last one has two layers."""
    told = VARIANTS[name]
    made = head_tensors(layers=len(told.get("layer_types", [0])), **tensors)
    return write_head(folder, made | _normed(3, **told, **told.get("eagle_config", {})), **told)


class Reference:
    """What a head in a folder computes, densely: no cache, no trees, one sequence at a time, float32."""

    def __init__(self, folder, embedding, output=None):
        self.t = {
            name: x.float() if x.is_floating_point() else x
            for name, x in load_file(folder / "model.safetensors").items()
        }
        self.t = {name.replace("layers.0.", "midlayer."): x for name, x in self.t.items()}
        told = json.loads((folder / "config.json").read_text())
        self.config = {**told, **told.get("eagle_config", {}), **told.get("transformer_layer_config", {})}
        self.three = "midlayer.hidden_norm.weight" in self.t
        self.embedding = self.t.get("embed_tokens.weight", embedding).float()
        self.output = self.t["lm_head.weight"] if self.three else output.float()
        draft = torch.arange(len(self.output))
        self.d2t = draft + self.t["d2t"] if "d2t" in self.t else draft

    def linear(self, name, x):
        return functional.linear(x, self.t[name + ".weight"], self.t.get(name + ".bias"))

    def norm(self, name, x):
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.t[name + ".weight"]
        )

    def combine(self, features):
        """Features of the target to hidden states of the head."""
        if self.config.get("norm_before_fc"):
            features = self.norm("input_norm", features)
        if self.config.get("fc_norm"):
            parts = features.chunk(3, dim=-1)
            features = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], dim=-1)
        return self.linear("fc", features) if self.three else features

    def forward(self, tokens, hidden):
        """Pairs of a token and a hidden state, [T] and [T, width]: (logits [T, draft], hidden states [T, width]).

        The hidden states are those that the next depth is fed.
        """
        embedding = self.embedding[torch.as_tensor(tokens)]
        if self.three:
            normed = self.norm("midlayer.hidden_norm", hidden)
            projected = torch.cat([self.norm("midlayer.input_layernorm", embedding), normed], dim=-1)
            residual = normed if self.config.get("norm_before_residual") else hidden
        else:
            residual = projected = self.linear("fc", torch.cat([embedding, hidden], dim=-1))
        x = self.layer("midlayer", residual, projected)
        for i in range(1, self.config["num_hidden_layers"]):
            x = self.layer(f"layers.{i}", x, self.norm(f"layers.{i}.input_layernorm", x))
        normed = self.norm("norm", x) if self.three else x
        return normed @ self.output.T, normed if self.config.get("norm_output") else x

    def layer(self, name, residual, projected):
        """One decoder layer's residual stream."""
        x = residual + self.linear(f"{name}.self_attn.o_proj", self.attend(name, projected))
        y = self.norm(f"{name}.post_attention_layernorm", x)
        gate, up = (self.linear(f"{name}.mlp.{part}_proj", y) for part in ("gate", "up"))
        act = getattr(functional, self.config["hidden_act"])
        return x + self.linear(f"{name}.mlp.down_proj", act(gate) * up)

    def attend(self, name, projected):
        """Causal attention with rotated halves; key heads are repeated for their query heads."""
        heads, kv = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (self.linear(f"{name}.self_attn.{part}_proj", projected) for part in "qkv")
        length, size = len(projected), q.shape[-1] // heads
        q, k, v = (x.view(length, -1, size).transpose(0, 1) for x in (q, k, v))
        place = torch.arange(length)
        frequency, scale = self.frequencies(size)
        angle = place[:, None] * frequency
        cos, sin = angle.cos() * scale, angle.sin() * scale

        def turn(x):
            """Channel i with channel i + half."""
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        k, v = (x.repeat_interleave(heads // kv, dim=0) for x in (turn(k), v))
        scores = turn(q) @ k.transpose(1, 2) / size**0.5
        back = place[:, None] - place
        seen = (back >= 0) & (back < self.window(name))
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)

    def window(self, name):
        """How many positions a layer sees, its own among them."""
        index = 0 if name == "midlayer" else int(name.split(".")[1])
        kinds = self.config.get("layer_types", ["full_attention"] * 64)
        return self.config["sliding_window"] if kinds[index] == "sliding_attention" else 10**6

    def frequencies(self, size):
        """Of each pair, and what the tables are multiplied by. YaRN: Peng et al. 2023, section 3.4."""
        base = self.config["rope_theta"]
        plain = base ** (-torch.arange(0, size, 2) / size)
        rope = self.config.get("rope_scaling")
        if not rope:
            return plain, 1.0
        limit = rope["original_max_position_embeddings"]
        pair = lambda turns: size * math.log(limit / (turns * 2 * math.pi)) / (2 * math.log(base))  # noqa: E731
        low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), size - 1)
        ramp = ((torch.arange(size // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
        return plain / rope["factor"] * ramp + plain * (1 - ramp), 0.1 * math.log(rope["factor"]) + 1

    def full(self, logits):
        """Logits over the draft vocabulary [D] as logits over the target's."""
        out = torch.full((self.config["vocab_size"],), -torch.inf)
        out[self.d2t] = logits
        return out

    def one_pass(self, tokens, features, length, mask_token):
        """The logits [length, draft] of a P-EAGLE head's one pass below tokens[-1], mask rows behind the true pairs."""
        masked = self.t["mask_hidden"].view(1, -1).expand(length - 1, -1)
        hidden = self.combine(torch.cat([features[: len(tokens) - 1], masked]))
        return self.forward([*tokens[1:], *[mask_token] * (length - 1)], hidden)[0][-length:]

    def chain(self, tokens, features, length, bias=None):
        """The greedy chain below tokens[-1]: the target's true features of the tokens before it, then guesses."""
        tokens, hidden, drafted = list(tokens[1:]), self.combine(features[: len(tokens) - 1]), []
        for _ in range(length):
            logits, out = self.forward(tokens, hidden)
            row = self.full(logits[-1])
            for token, value in (bias or {}).items():
                row[token] += value
            drafted.append(int(row.argmax()))
            tokens, hidden = [*tokens, drafted[-1]], torch.cat([hidden, out[-1:]])
        return drafted
