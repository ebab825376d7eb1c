"""Tiny targets with next-token modules of their own (MTP), as their checkpoints are laid out, and transformers' drafts.

A module is laid out as one more layer behind the last, with `enorm`, `hnorm`, `eh_proj` and `shared_head.norm`
(DeepSeek-V3's layout, which GLM-4 and Step share), or as Mellum has it.
"""

import json
import shutil
from unittest.mock import patch

import torch
import transformers as t
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from tests.model import test_architectures as architectures
from tests.tiny import write_tiny_model

VOCAB = 300
WIDTH = 48


def add_modules(folder, to, modules=1, seed=1, **config):
    """A copy of a model's folder whose checkpoint has `modules` next-token modules of random weights."""
    shutil.copytree(folder, to)
    told = json.loads((to / "config.json").read_text())
    text = told.get("text_config", told)
    text |= {"num_mtp_layers": modules, "num_nextn_predict_layers": modules, **config}
    (to / "config.json").write_text(json.dumps(told))
    tensors = load_file(to / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    normal = lambda x, std: torch.randn(x.shape, generator=generator) * std  # noqa: E731
    layers, width = text["num_hidden_layers"], text["hidden_size"]
    prefix, last = next(n.split("layers.")[0] for n in tensors if "layers." in n and "vision" not in n), layers - 1
    for module in range(modules):
        made = {"enorm": width, "hnorm": width, "shared_head.norm": width, "eh_proj": (width, 2 * width)}
        made = {f"{name}.weight": torch.zeros(shape) for name, shape in made.items()}
        of_last = f"{prefix}layers.{last}."
        made |= {name.removeprefix(of_last): x for name, x in tensors.items() if name.startswith(of_last)}
        made = {n: normal(x, 0.15) if x.dim() > 1 else 1 + normal(x, 0.2) for n, x in made.items()}
        tensors |= {_named(prefix, layers + module, name, told): x for name, x in made.items()}
    save_file({name: x.contiguous() for name, x in tensors.items()}, to / "model.safetensors", {"format": "pt"})
    return to


def with_modules(folder, modules=1):
    """The same beside the folder itself, made once."""
    to = folder.with_name(f"{folder.name}-with-{modules}")
    return to if to.exists() else add_modules(folder, to, modules)


MELLUM = {
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "eh_proj.weight": "mtp.fc.weight",
    "shared_head.norm.weight": "mtp.norm.weight",
}


def _named(prefix, number, name, config):
    if config["model_type"] == "mellum":
        return MELLUM.get(name, f"mtp.layers.0.{name}")
    return f"{prefix}layers.{number}.{name}"


def few_tokens(model, count=3):
    """A model that says nothing but a few tokens, so that drafts are accepted now and then."""
    head = model.get_output_embeddings().weight
    keep = torch.zeros(len(head), dtype=torch.bool).index_fill_(0, torch.arange(50, 50 + count), True)
    with torch.no_grad():
        head[~keep] = 0


LAYERS = {
    "mellum": ("sliding_attention", "sparse"),
    "step3p7": ("sliding_attention", "sparse"),
    "qwen3": ("full_attention",),
}


def write_mtp_model(folder, kind, modules=1, seed=0):
    """A tiny target of a kind, with modules and the tiny tokenizer; it says three tokens."""
    write_tiny_model(folder / "plain", seed=seed)
    config = architectures.CONFIGS[kind]()
    config.vocab_size, config.max_position_embeddings = VOCAB, 512
    torch.manual_seed(seed)
    model = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.15)
    few_tokens(model)
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)
    model.save_pretrained(folder / "plain")
    names = zip(("mtp_layer_types", "mtp_mlp_layer_types"), LAYERS.get(kind, ()), strict=False)
    return add_modules(folder / "plain", folder / "mtp", modules, seed, **{name: [x] * modules for name, x in names})


class Reference:
    """A folder's model and modules as transformers runs them, in float32."""

    def __init__(self, folder):
        self.model = t.AutoModelForCausalLM.from_pretrained(folder)
        text = self.model.config
        self.count, first = text.num_mtp_layers, text.num_hidden_layers
        beyond = {rf"\blayers\.{first + module}\." for module in range(self.count)}  # transformers': of published sizes
        self.model._keys_to_ignore_on_load_unexpected = {*self.model._keys_to_ignore_on_load_unexpected, *beyond}
        self.mtp = MtpModel.from_pretrained(self.model)

    def generate(self, prompt, tokens):
        """generate(use_mtp=True)'s output, and of each round by the length of its context the drafts and their rows."""
        rounds, real = {}, MTPCandidateGenerator.get_candidates

        def noted(generator, input_ids, **named):
            ids, logits = real(generator, input_ids, **named)
            if logits is not None:
                rounds[input_ids.shape[1]] = ids[0, input_ids.shape[1] :].tolist(), logits[0]
            return ids, logits

        how = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with patch.object(MTPCandidateGenerator, "get_candidates", noted):
            out = self.model.generate(torch.tensor([prompt]), use_mtp=True, **how)[0, len(prompt) :].tolist()
        assert out == self.model.generate(torch.tensor([prompt]), **how)[0, len(prompt) :].tolist()
        return out, rounds

    @torch.inference_mode()
    def row(self, tokens, path, iterated):
        """The logits below a drafted path, densely: each module in its turn, or the first one once more a token."""
        states = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][:, :-1]
        fed, places = torch.tensor([tokens[1:]]), torch.arange(1, len(tokens))[None]
        given = out = states
        for module in range(len(path) + 1):
            if module and not iterated:
                fed = torch.cat([fed[:, 1:], torch.tensor([[path[module - 1]]])], dim=1)
                places = places + 1
            elif module:
                fed = torch.cat([fed, torch.tensor([[path[module - 1]]])], dim=1)
                places = torch.cat([places, places[:, -1:] + 1], dim=1)
                states = torch.cat([given, out[:, -1:]], dim=1)
            given = states
            cache = MtpCache(config=self.model.config.get_mtp_config())
            states = out = self.mtp.forward_layer(0 if iterated else module, given, places, cache, input_ids=fed)
        return self.model.lm_head(out[0, -1])
