"""From what a user names to a model that runs on the paged cache, or a refusal that says why.

Device and number format are tried before anything is loaded. transformers fills what a checkpoint lacks with random
numbers, and a model of NaN or zeros generates text as well: so whether what lies on disk is a whole model is checked.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import init

from specscope.errors import UserError, first_line, not_loaded
from specscope.model import attention
from specscope.model.batch import Batch, Segment
from specscope.model.fast.decoder import fuse
from specscope.model.fast.linear import has_bfloat16, must_compile
from specscope.model.kv_cache import BlockTable, LayerShape
from specscope.model.places import NAME, bundled_model, check_device, hub_arguments, hush, model_place
from specscope.plans.kinds import modules_in
from specscope.whole_file import read_object

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises UserError for a device that is not there or not supported."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(name)
    device = torch.device(name)
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("found no CUDA device: use --device cpu (specscope doctor shows what was found)")
    count = torch.cuda.device_count()
    if not 0 <= (device.index or 0) < count:
        raise UserError(f"no device {name}: this machine has {count}, counted from cuda:0")
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        raise UserError(f"device {name} cannot be used: {first_line(error)}") from error
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device computes in it, float32 elsewhere. Raises UserError for what is none."""
    if name == "auto":
        cuda = device.type == "cuda"
        fast = torch.cuda.is_bf16_supported(including_emulation=False) if cuda else has_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}: use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


Size = Annotated[int, msgspec.Meta(ge=1, le=2**27)]


class ModelSizes(msgspec.Struct):
    """What most config.json call alike. Some families give one number a layer, and some leave one out."""

    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    hidden_size: Size | None = None
    vocab_size: Size | None = None
    intermediate_size: Size | list[Size] | None = None
    num_attention_heads: Size | list[Size] | None = None
    num_key_value_heads: Size | list[Size] | None = None
    head_dim: Size | list[Size] | None = None
    max_position_embeddings: Size | None = None


def check_config(folder: Path) -> None:
    """Refuse a model whose config.json is damaged. Raises UserError."""
    raw = read_object(folder / "config.json")
    nested = raw.get("text_config")
    for part in (raw, nested if isinstance(nested, dict) else {}):
        try:
            msgspec.convert(part, ModelSizes)
        except msgspec.ValidationError as error:
            raise UserError(f"{folder}/config.json is not usable: {error}") from None


def check_names(info: Mapping[str, Any], model: str, name: str, layers: int | None) -> None:
    """Refuse a checkpoint that lacks weights or has others than its model; `info` is transformers' loading info.

    `layers`: only so many were asked for, and the file may hold the rest, or next-token modules behind them.
    """
    missing = sorted(info["missing_keys"])
    number = {key: re.search(r"\.(\d+)\.", key) for key in info["unexpected_keys"]}  # of its layer
    extra = sorted(key for key, found in number.items() if layers is None or not found or int(found[1]) < layers)
    wrong = sorted(info["mismatched_keys"])
    faults = [f"lacks {_some(missing)}"] if missing else []
    faults += [f"has {_some(extra)}, which this kind of model lacks"] if extra else []
    faults += [f"holds {key} as {list(held)} instead of {list(expected)}" for key, held, expected in wrong[:1]]
    if "fc.weight" in extra:
        faults.append("if it is an EAGLE head, give --drafter eagle")
    if faults:
        raise UserError(f"cannot load {name}: its config says {model}, but the checkpoint " + "; ".join(faults))


def _some(keys: list[str]) -> str:
    return keys[0] + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")


@torch.no_grad()
def check_numbers(tensors: Iterable[tuple[str, Tensor]], name: str) -> None:
    """Refuse weights with a NaN or an infinity, and matrices of zeros only. Raises UserError.

    One pass over the memory, without a copy: 30 ms for 135 million weights.
    """
    for key, tensor in tensors:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = (float(value) for value in torch.aminmax(tensor))
        if not (-torch.inf < low and high < torch.inf):  # NaN compares false
            raise UserError(f"cannot use {name}: {key} contains NaN or infinite numbers; the file is damaged")
        if low == high == 0 and tensor.dim() > 1:
            raise UserError(f"cannot use {name}: {key} contains only zeros; the file is damaged or incomplete")


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM ready for ModelRunner. Filled by `load_model`."""

    model: nn.Module
    name: str  # as people know it
    revision: str  # hash of configuration and weight files' sizes
    device: torch.device
    dtype: torch.dtype
    layers: list[LayerShape]  # what each layer keeps of a token
    vocab_size: int
    max_context: int
    eos: tuple[int, ...]
    folder: Path | None  # where it was loaded from; None for a hub name

    @property
    def embedding(self) -> Any:  # noqa: ANN401
        """The module that turns token ids into [..., width]."""
        return self.model.get_input_embeddings()  # type: ignore[operator]

    @property
    def output(self) -> Any:  # noqa: ANN401
        """The module that turns hidden states into logits; its weight is [vocabulary, width]."""
        return self.model.get_output_embeddings()  # type: ignore[operator]

    @property
    def width(self) -> int:
        return int(self.embedding.weight.shape[1])


def find_model(target: str | None, progress: Callable[[str], None]) -> tuple[str, dict[str, Any], str]:
    """(what from_pretrained takes, its further arguments, the name for people) of a --target."""
    if target is None:
        return str(bundled_model(progress)), {}, NAME
    path = model_place(target)
    if path is None:
        return target, hub_arguments(target), target
    if path.is_file():
        from transformers import GgufConfig

        extra = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        return str(path.parent), extra, path.stem
    check_config(path)
    return str(path), {}, path.resolve().name


def load_model(
    target: str | None,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[str], None] = lambda _: None,
    layers: int | None = None,
) -> LoadedModel:
    """Load a model, or its first `layers` layers, and prove that it works on the paged cache.

    Raises UserError with the reason where it cannot.
    """
    from transformers import AutoModelForCausalLM

    hush(gguf=target is not None and target.endswith(".gguf"))
    source, extra, name = find_model(target, progress)
    if layers is not None:
        name, extra = f"{name}, first {layers} layers", {**extra, "num_hidden_layers": layers}
    progress(f"loading {name}")
    extra = {**extra, "dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    read: Callable[[], Any] = partial(AutoModelForCausalLM.from_pretrained, source, trust_remote_code=False, **extra)
    try:
        try:
            with quick_meta():
                model, info = read()
        except RuntimeError:  # a family whose modules cannot be made so
            model, info = read()
    except Exception as error:
        raise not_loaded(name, error) from error
    if layers is None and modules_in(model.config.get_text_config().to_dict()):  # behind the last layer
        layers = int(model.config.get_text_config().num_hidden_layers)
    check_names(info, type(model).__name__, name, layers)
    check_numbers(model.named_parameters(), name)
    model = model.to(device).eval().requires_grad_(False)
    if device.type == "cpu" and must_compile(dtype):
        progress("compiling kernels for this processor, once")
    folder = Path(source) if Path(source).is_dir() else None
    return adopt(model, name, folder)


def adopt(model: Any, name: str, folder: Path | None = None) -> LoadedModel:  # noqa: ANN401
    """Make a transformers model ready for the paged cache: its attention replaced, its layers probed."""
    layers = probe(model, name)
    fuse(model, layers)
    config = model.config.get_text_config()
    return LoadedModel(
        model=model,
        name=name,
        revision=_revision(model, folder),
        device=next(model.parameters()).device,
        dtype=next(model.parameters()).dtype,
        layers=layers,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_context=int(getattr(config, "max_position_embeddings", None) or 2048),
        eos=_eos(model),
        folder=folder,
    )


def load_tokenizer(target: str | None) -> Any:  # noqa: ANN401
    """The tokenizer that belongs to a --target. Raises UserError where there is none."""
    from transformers import AutoTokenizer

    hush()
    source, extra, name = find_model(target, lambda _: None)
    extra.pop("quantization_config", None)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **extra)
    except Exception as error:
        raise not_loaded(f"the tokenizer of {name}", error) from error


class LayerRecorder:
    """Stands in for a KVCache during the probe: keeps what each layer writes, from slot 0 on, for attention to read."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.key, self.value = dict[int, Tensor](), dict[int, Tensor]()

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep what a layer writes. Raises UserError where two layers have one number."""
        if layer in self.layers:
            raise UserError("two attention layers share one layer number")
        self.layers[layer] = LayerShape(key.shape[0], key.shape[2], value.shape[2])
        self.key[layer], self.value[layer] = key, value


@torch.inference_mode()
def probe(model: Any, name: str) -> list[LayerShape]:  # noqa: ANN401
    """Run five tokens through the model's own attention and through ours; return what each layer keeps.

    Refuses, by name and with the reason, a model in which some layer's state does not pass through the attention
    interface (it could not be paged or rewound), or whose logits come out otherwise.
    """
    kind = f"{name} ({type(model).__name__})"
    if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
        raise UserError(f"{kind} is not a decoder-only language model")
    recorder = LayerRecorder()
    try:
        agrees = _agrees(model, recorder)
        if not agrees and model.dtype in (torch.bfloat16, torch.float16):
            dtype = model.dtype  # cut off after some layers, a model may differ by rounding alone
            agrees = _agrees(model.float(), LayerRecorder())
            model.to(dtype)  # exactly as before
    except Exception as error:
        raise UserError(f"{kind} cannot run on the paged cache: {first_line(error)}") from error
    config = model.config.get_text_config()
    wanted, kinds = int(config.num_hidden_layers), getattr(config, "layer_types", None) or ()
    hybrid = {i for i, kind in enumerate(kinds) if kind.startswith("hybrid")}  # convolutions beside attention
    missing = sorted({*range(wanted)} - {*recorder.layers} | hybrid)
    if missing:
        raise UserError(
            f"{kind} cannot run on the paged cache: layers {', '.join(map(str, missing[:5]))} keep state that does "
            "not pass through transformers' AttentionInterface, so it cannot be rewound after a rejection"
        )
    if not agrees:
        raise UserError(f"{kind} cannot run on the paged cache: its logits differ from its own attention's")
    return [recorder.layers[i] for i in range(wanted)]


def _agrees(model: Any, recorder: LayerRecorder) -> bool:  # noqa: ANN401
    """Whether the model's logits after a few tokens are the same with its own attention and with ours."""
    device = next(model.parameters()).device
    tokens = torch.arange(3, 8, device=device)[None] % model.get_output_embeddings().weight.shape[0]
    tree = Segment.of_tree(BlockTable([0]), 0, tokens[0].tolist(), logits=True)
    batch = Batch.build([tree], device)
    model.set_attn_implementation("eager")
    theirs = model(input_ids=tokens, use_cache=False).logits[0, -1].float()
    model.set_attn_implementation(attention.BACKEND)
    ours = model(input_ids=tokens, position_ids=batch.positions, use_cache=False, batch=batch, pages=recorder)
    return bool((theirs - ours.logits[0, -1].float()).norm() <= 0.05 * theirs.norm())


def _eos(model: Any) -> tuple[int, ...]:  # noqa: ANN401
    value = getattr(model.generation_config, "eos_token_id", None)
    value = model.config.get_text_config().eos_token_id if value is None else value
    return tuple(value) if isinstance(value, list) else (() if value is None else (int(value),))


def _revision(model: Any, folder: Path | None) -> str:  # noqa: ANN401
    commit = getattr(model.config, "_commit_hash", None)
    if commit:
        return str(commit)
    sizes = sorted((f.name, f.stat().st_size) for f in folder.iterdir() if f.is_file()) if folder else []
    text = json.dumps([model.config.to_dict(), sizes], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


INITIAL = ("normal_", "uniform_", "zeros_", "ones_", "constant_", "trunc_normal_", "kaiming_uniform_")


@contextmanager
def quick_meta() -> Iterator[None]:
    """Inside, tensors on the meta device get no initial values, and numbers in a row come from the CPU.

    The outcome is the same: such a tensor holds no values. But torch makes these in Python, through its compiler, whose
    import is a second and a half of a start.
    """
    arange = torch.arange

    def skip(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(function)
        def unless_meta(tensor: Tensor, *given: Any, **named: Any) -> Tensor:  # noqa: ANN401
            return tensor if tensor.is_meta else function(tensor, *given, **named)

        return unless_meta

    def row(*given: Any, device: Any = None, **named: Any) -> Tensor:  # noqa: ANN401
        wanted = torch.device(device) if device is not None else torch.get_default_device()
        if wanted.type != "meta":
            return arange(*given, device=device, **named)
        return arange(*given, device="cpu", **named)

    skipping: dict[str, Any] = {name: skip(getattr(init, name)) for name in INITIAL}
    with patch.object(torch, "arange", row), patch.multiple(init, **skipping):
        yield
