"""What a head computes by the name of each operation: taken from the modules while training's code, or ours, runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from specscope.analyze.locate.located import Operation, Stage
from specscope.model.fast.decoder import FusedLayer
from specscope.model.heads.eagle_head import EagleHead, in_halves
from specscope.model.heads.head_config import HeadConfig
from specscope.model.heads.head_runner import HeadRunner

Calls = dict[str, list[Tensor]]  # of each operation, what each call gave: rows first
Pass = Mapping[str, Tensor]  # of one depth: each operation's output, [rows, ...]

FIRST = "midlayer"
INNER = {  # of a layer, in the order of computing
    "input_layernorm": "{}: norm of the embedding",
    "hidden_norm": "{}: norm of the feature",
    "residual": "{}: the residual stream that goes in",
    "self_attn.q_proj": "{}: the queries' projection",
    "self_attn.k_proj": "{}: the keys' projection",
    "self_attn.v_proj": "{}: the values' projection",
    "self_attn.query": "{}: the queries after rotary",
    "self_attn.key": "{}: the keys after rotary",
    "self_attn.attention": "{}: attention: scores, mask and values",
    "self_attn.o_proj": "{}: attention's output projection",
    "post_attention_layernorm": "{}: norm after attention",
    "mlp.gate_proj": "{}: the MLP's gate",
    "mlp.up_proj": "{}: the MLP's up projection",
    "mlp.act": "{}: the MLP's activation",
    "mlp.down_proj": "{}: the MLP's down projection",
    "output": "{}: the residual stream that leaves",
}
BEFORE = {
    "embed_tokens": "the tokens' embedding",
    "input_norm": "norm of all features together",
    "fc_norm": "norm of each layer's feature",
    "fc": "the features joined",
    "fed back": "the state fed back from the depth above",
}
AFTER = {"norm": "the last norm", "lm_head": "the logits"}
TURNED = ("q_proj", "k_proj", "query", "key")  # whose channels we may keep in another order than the checkpoint
LATE = ("output", *AFTER)  # computed at the places alone
HEAD, LAYER = "specscope/model/heads/eagle_head.py EagleHead", "specscope/model/fast/decoder.py FusedLayer"
CODE = {
    "embed_tokens": "specscope/model/heads/head_runner.py HeadRunner._run",
    **dict.fromkeys(("input_norm", "fc_norm", "fc"), f"{HEAD}.combine"),
    **dict.fromkeys(("fed back", "norm"), f"{HEAD}.leave"),
    **dict.fromkeys(("input_layernorm", "hidden_norm", "residual"), f"{HEAD}.prepare"),
    **dict.fromkeys(("self_attn.query", "self_attn.key"), "specscope/model/heads/head_runner.py HeadRunner._turns"),
    "self_attn.attention": "specscope/model/attention.py paged_attention",
    "lm_head": "specscope/model/heads/head_runner.py HeadRunner.lm_head",
}


def operation(depth: int, name: str) -> Operation:
    """An operation of a pass, from 1, by its name in a Pass."""
    layer, _, inner = name.partition("/")
    which = f"layer {0 if layer == FIRST else layer.removeprefix('layers.')}"
    words = INNER[inner].format(which) if inner else {**BEFORE, **AFTER}[name.split(".")[0]]
    place = CODE.get(inner or name.split(".")[0], f"{LAYER}.run")
    return Operation(Stage.DRAFTER, f"depth.{depth}.{name.replace('/', '.')}", f"depth {depth}: {words}", place)


def in_order(values: Mapping[str, Tensor], config: HeadConfig) -> dict[str, Tensor]:
    """The values of a pass in the order of computing, channels in the order of the checkpoint."""
    layers = (FIRST, *(f"layers.{i}" for i in range(1, config.layers)))
    order = in_halves(config).argsort()
    turned = {name for name in values if name.endswith(TURNED)}
    values = {name: _ordered(x, order) if name in turned else x for name, x in values.items()}
    names = [name for name in values if name.split(".")[0] in BEFORE]
    names.sort(key=lambda name: (list(BEFORE).index(name.split(".")[0]), name))
    names += [f"{layer}/{inner}" for layer in layers for inner in INNER]
    return {name: values[name] for name in (*names, *AFTER) if name in values}


def _ordered(x: Tensor, order: Tensor) -> Tensor:
    ordered: Tensor = x.unflatten(-1, (-1, len(order)))[..., order].flatten(-2)
    return ordered


def flat(x: Tensor) -> Tensor:
    """A call's output as rows, its own memory: [..., width] to [rows, width]."""
    return x.detach().reshape(-1, x.shape[-1]).clone()


@contextmanager
def module_taps(head: EagleHead) -> Iterator[Calls]:
    """The outputs of a head's modules, call by call, while it runs through them: in training, and where it is plain."""
    calls: Calls = defaultdict(list)
    with ExitStack() as stack:
        for name, module in _modules(head):
            _output(stack, calls, name, module)
        layer = head.midlayer
        _input(stack, calls, f"{FIRST}/self_attn.attention", layer.self_attn.o_proj)
        _input(stack, calls, f"{FIRST}/mlp.act", layer.mlp.down_proj)
        _prepare_taps(stack, calls, head)
        yield calls


@contextmanager
def runner_taps(runner: HeadRunner) -> Iterator[Calls]:
    """The same of our engine's head, whose layers run through torch's operators meanwhile."""
    calls: Calls = defaultdict(list)
    head = runner.head
    with ExitStack() as stack:
        for name, module in _norms(head):
            _output(stack, calls, name, module)
        _output(stack, calls, "fc", runner._fc)
        _output(stack, calls, "lm_head", runner.lm_head)
        _prepare_taps(stack, calls, head)
        for name, fused in zip(
            (FIRST, *(f"layers.{i}" for i in head.layers)), (runner.layer, *runner.further), strict=True
        ):
            _fused_taps(stack, calls, name, fused)
        yield calls


def _modules(head: EagleHead) -> Iterator[tuple[str, nn.Module]]:
    yield from _norms(head)
    yield "fc", head.fc
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield f"{FIRST}/self_attn.{part}", head.midlayer.self_attn.get_submodule(part)
    for part in ("gate_proj", "up_proj", "down_proj"):
        yield f"{FIRST}/mlp.{part}", head.midlayer.mlp.get_submodule(part)
    yield "lm_head", head.lm_head


def _norms(head: EagleHead) -> Iterator[tuple[str, nn.Module]]:
    if head.config.norm_before_fc:
        yield "input_norm", head.input_norm
    if head.config.fc_norm:
        yield from ((f"fc_norm.{i}", norm) for i, norm in enumerate(head.fc_norm))
    for name, layer in ((FIRST, head.midlayer), *((f"layers.{i}", layer) for i, layer in head.layers.items())):
        for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            if hasattr(layer, norm):
                yield f"{name}/{norm}", layer.get_submodule(norm)
    yield "norm", head.norm


def _output(stack: ExitStack, calls: Calls, name: str, module: nn.Module) -> None:
    hook = module.register_forward_hook(lambda _, given, out: calls[name].append(flat(out)))
    stack.callback(hook.remove)


def _input(stack: ExitStack, calls: Calls, name: str, module: nn.Module) -> None:
    hook = module.register_forward_pre_hook(lambda _, given: calls[name].append(flat(given[0])))
    stack.callback(hook.remove)


def _prepare_taps(stack: ExitStack, calls: Calls, head: EagleHead) -> None:
    """What goes into the first layer, which no hook meets, and what leaves the last."""
    prepare = head.prepare
    last = f"layers.{head.config.layers - 1}" if head.config.layers > 1 else FIRST

    def prepared(embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        calls["embed_tokens"].append(flat(embedding))
        calls["hidden"].append(flat(hidden))
        residual, both = prepare(embedding, hidden)
        calls[f"{FIRST}/residual"].append(flat(residual))
        return residual, both

    _swap(stack, head, "prepare", prepared)
    _input(stack, calls, f"{last}/output", head.norm)


def _swap(stack: ExitStack, owner: Any, name: str, value: object) -> None:  # noqa: ANN401
    """Set an attribute of an object until the stack is left; one of its class appears again then."""
    had, old = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    stack.callback(lambda: setattr(owner, name, old) if had else delattr(owner, name))


def _fused_taps(stack: ExitStack, calls: Calls, layer: str, fused: FusedLayer) -> None:
    """The products of a layer that runs as one, each beside its neighbours over the same input."""
    qkv, out, gate_up, down = fused.qkv, fused.out, fused.gate_up, fused.down
    rotated: list[Tensor] = []
    sizes = [fused.heads * fused.size, fused.kv_heads * fused.size, fused.kv_heads * fused.size]

    def projected(x: Tensor) -> Tensor:
        rows = qkv(x)
        for part, values in zip(("q_proj", "k_proj", "v_proj"), rows.split(sizes, dim=-1), strict=True):
            calls[f"{layer}/self_attn.{part}"].append(flat(values))
        rotated[:] = [rows]  # turned in place before attention
        return rows

    def attended(x: Tensor) -> Tensor:
        query, key, _ = rotated[0].split(sizes, dim=-1)
        made = out(x)
        for part, values in (("query", query), ("key", key), ("attention", x), ("o_proj", made)):
            calls[f"{layer}/self_attn.{part}"].append(flat(values))
        return made

    def gated(x: Tensor) -> Tensor:
        both = gate_up(x)
        for part, values in zip(("gate_proj", "up_proj"), both.chunk(2, dim=-1), strict=True):
            calls[f"{layer}/mlp.{part}"].append(flat(values))
        return both

    def lowered(x: Tensor) -> Tensor:
        made = down(x)
        calls[f"{layer}/mlp.act"].append(flat(x))
        calls[f"{layer}/mlp.down_proj"].append(flat(made))
        return made

    taps = {"qkv": projected, "out": attended, "gate_up": gated, "down": lowered, "compiled": None}
    for name, value in taps.items():
        _swap(stack, fused, name, value)
