"""The forward of vLLM's speculators as the reference, by the class that it publishes: where that package is at hand."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from specscope.errors import UserError, first_line
from specscope.measure.trainer.folders import weight_of
from specscope.measure.trainer.taps import FIRST, LATE, Calls, Pass, flat, in_order
from specscope.measure.trainer.training import ForcedText
from specscope.model.heads.head_loader import LoadedHead, published_tensors

INSTALL = "pip install speculators"
OF_VERIFIER = ("verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t")  # for the loss alone
PARTS = (  # the modules of a layer, which have our names
    *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
    *("input_layernorm", "hidden_norm", "post_attention_layernorm"),
)


def speculators() -> ModuleType:
    """The package's models. Raises UserError where it is not installed."""
    try:
        models = import_module("speculators.models")
    except ImportError as error:
        missing = error.name or ""
        why = f" (it needs {missing})" if missing and not missing.startswith("speculators") else ""
        raise UserError(
            f"a checkpoint of speculators is judged by that package's own forward{why}: {INSTALL}"
        ) from None
    return models


class SpeculatorsTraining:
    """The forward that speculators trains with, over a checkpoint's weights."""

    name = "speculators' training forward"

    def __init__(self, folder: str, loaded: LoadedHead, rows: Tensor) -> None:
        """`rows`: of the target's head, [draft vocabulary, width]. Raises UserError."""
        models = speculators()
        self.config = loaded.head.config
        try:
            self.model = _model(models, folder, loaded, rows)
        except UserError:
            raise
        except Exception as error:  # pydantic, transformers and torch each say it in their own way
            raise UserError(f"speculators cannot read {folder}: {first_line(error)}") from error

    def passes(self, text: ForcedText, depths: int, dtype: torch.dtype) -> list[Pass]:
        """The operations of each depth, teacher-forced; computed in `dtype`."""
        model = self.model if dtype is torch.float32 else copy.deepcopy(self.model).to(dtype)
        pairs = len(text.tokens) - 1
        given: dict[str, Any] = {
            "hidden_states": text.features[None, :pairs].to(dtype),
            "input_ids": torch.tensor([list(text.tokens[1:])]),
            "document_ids": torch.zeros(1, pairs, dtype=torch.long),
        }
        with torch.no_grad(), _partly_turned(), _taps(model) as calls:
            if self.config.parallel is None:
                model(**given, position_ids=torch.arange(pairs)[None], ttt_steps=depths)
                return list(self._depths(calls, text, depths))
            final = text.final[None, 1:].to(dtype)
            with _every_anchor(pairs, depths):
                model(**given, verifier_last_hidden_states=final, num_depths=depths, loss_config=_plain_loss())
            return list(self._one_pass(calls, text, depths))

    def _depths(self, calls: Calls, text: ForcedText, depths: int) -> Iterator[Pass]:
        """EAGLE-3: each layer runs once a depth over the whole sequence."""
        pairs = len(text.tokens) - 1
        fed = calls.pop("hidden")
        for depth in range(depths):
            values = {name: made[depth] for name, made in calls.items() if depth < len(made)}
            if depth:
                values["fed back"] = fed[depth]
            rows = {name: _chosen(name, x, depth, text.places, pairs) for name, x in values.items()}
            yield in_order(rows, self.config)

    def _one_pass(self, calls: Calls, text: ForcedText, depths: int) -> Iterator[Pass]:
        """P-EAGLE: every module runs once over the text's pairs, and behind them each depth's mask rows."""
        pairs, start = len(text.tokens) - 1, 0
        calls.pop("hidden")
        for depth in range(depths):
            part = {name: made[0][start : start + pairs - depth] for name, made in calls.items()}
            rows = {name: _chosen(name, x, depth, text.places, pairs) for name, x in part.items()}
            yield in_order(rows, self.config)
            start += pairs - depth


def _model(models: ModuleType, folder: str, loaded: LoadedHead, rows: Tensor) -> Any:  # noqa: ANN401
    """The package's class with a checkpoint's weights."""
    parallel = loaded.head.config.parallel is not None
    kind = models.PEagleSpeculatorConfig if parallel else models.Eagle3SpeculatorConfig
    config = kind.from_pretrained(folder)
    layer = config.transformer_layer_config
    layer._attn_implementation = "eager"
    if config.eagle_aux_hidden_state_layer_ids is None:
        config.eagle_aux_hidden_state_layer_ids = list(loaded.head.config.aux_layers)
    model = (models.PEagleDraftModel if parallel else models.Eagle3DraftModel)(config)
    tensors = {name.replace("midlayer.", "layers.0."): x for name, x in published_tensors(loaded.head).items()}
    tensors["embed_tokens.weight"] = weight_of(loaded.embedding)
    tensors["verifier_lm_head.weight"] = rows
    missing, extra = model.load_state_dict(tensors, strict=False)
    wrong = [name for name in (*missing, *extra) if name not in OF_VERIFIER]
    if wrong:
        raise UserError(f"speculators' class has not the tensors of {folder}: {wrong[0]}")
    return model.float().eval()


def _chosen(name: str, x: Tensor, depth: int, places: Sequence[int], pairs: int) -> Tensor:
    return x[list(places)] if depth or name.rpartition("/")[2] in LATE else x[:pairs]


@contextmanager
def _partly_turned() -> Iterator[None]:
    """Queries and keys turned as its trainer has them turned: where tables are short, the first channels alone."""
    from speculators.models.eagle3 import rotary_partial

    rotary_partial.install_partial_neox_rotary()
    try:
        yield
    finally:
        rotary_partial.uninstall_partial_neox_rotary()


def _plain_loss() -> Any:  # noqa: ANN401
    """A loss that runs on a processor: the one-pass forward always works one out."""
    from speculators.losses import resolve_loss_config

    return resolve_loss_config("kl_div", "eager")


@contextmanager
def _every_anchor(pairs: int, depths: int) -> Iterator[None]:
    """Mask rows at every place that a text has room for, instead of those that training draws."""
    from speculators.models.peagle import core

    anchors = torch.cat([torch.arange(pairs - depth) for depth in range(depths)])
    depth = torch.cat([torch.full((pairs - depth,), depth) for depth in range(depths)])
    drawn = core.generate_cod_sample_indices
    core.generate_cod_sample_indices = lambda **_: (anchors, depth)
    try:
        yield
    finally:
        core.generate_cod_sample_indices = drawn


@contextmanager
def _taps(model: Any) -> Iterator[Calls]:  # noqa: ANN401
    """The outputs of the model's modules by our names, call by call."""
    calls: Calls = defaultdict(list)
    layers = {FIRST if not index else f"layers.{index}": layer for index, layer in enumerate(model.layers)}
    tables: list[tuple[Tensor, Tensor]] = []
    with ExitStack() as stack:

        def after(module: nn.Module, take: Any) -> None:  # noqa: ANN401
            stack.callback(module.register_forward_hook(lambda _, given, out: take(given, out)).remove)

        def output(name: str, module: nn.Module) -> None:
            after(module, lambda _, out: calls[name].append(flat(out)))

        output("embed_tokens", model.embed_tokens)
        for name in ("input_norm", "fc", "norm", "lm_head"):
            if getattr(model, name, None) is not None:
                output(name, getattr(model, name))
        for index, norm in enumerate(model.fc_norm or ()):
            output(f"fc_norm.{index}", norm)
        after(model.rotary_emb, lambda _, out: tables.append(out))
        for name, layer in layers.items():
            for part in PARTS:
                if hasattr(layer, part.partition(".")[0]):
                    output(f"{name}/{part}", layer.get_submodule(part))
            _layer_taps(after, calls, name, layer, tables)
        _entering(stack, calls, model.layers[0])
        after(model.layers[-1], lambda _, out: calls[f"{[*layers][-1]}/output"].append(flat(_first(out))))
        yield calls


def _layer_taps(after: Any, calls: Calls, name: str, layer: Any, tables: list[tuple[Tensor, Tensor]]) -> None:  # noqa: ANN401
    """What no module gives by itself: queries and keys after rotary, attention, activation and residual."""
    size = layer.self_attn.head_dim

    def turned(part: str) -> Any:  # noqa: ANN401
        return lambda _, out: calls[f"{name}/self_attn.{part}"].append(flat(_turn(out, size, *tables[-1])))

    after(layer.self_attn.q_proj, turned("query"))
    after(layer.self_attn.k_proj, turned("key"))
    after(layer.self_attn.o_proj, lambda given, _: calls[f"{name}/self_attn.attention"].append(flat(given[0])))
    after(layer.mlp.down_proj, lambda given, _: calls[f"{name}/mlp.act"].append(flat(given[0])))
    if name == FIRST:

        def residual(given: Any, _: Tensor) -> None:  # noqa: ANN401
            calls[f"{name}/residual"].append(flat(given[0]) - calls[f"{name}/self_attn.o_proj"][-1])

        after(layer.post_attention_layernorm, residual)


def _entering(stack: ExitStack, calls: Calls, layer: nn.Module) -> None:
    """The hidden state of each pair as the first layer is given it: behind the embedding, side by side."""
    hook = layer.register_forward_pre_hook(lambda _, given: calls["hidden"].append(flat(given[0].chunk(2, dim=-1)[1])))
    stack.callback(hook.remove)


def _first(out: Any) -> Any:  # noqa: ANN401
    return out[0] if isinstance(out, tuple) else out


def _turn(x: Tensor, size: int, cos: Tensor, sin: Tensor) -> Tensor:
    """[1, N, heads * size] as the function turns it that no hook meets."""
    from transformers.models.llama.modeling_llama import rotate_half

    heads, turns = x.unflatten(-1, (-1, size)), cos.shape[-1]
    part = heads[..., :turns]
    turned = part * cos.unsqueeze(-2) + rotate_half(part) * sin.unsqueeze(-2)
    return torch.cat([turned, heads[..., turns:]], dim=-1).flatten(-2)
