"""Taps inside vLLM: what each operation of its models gave, and what each forward was fed, for `specscope diagnose`.

TABLE names the places: modules by the end of their names, and what of them is an operation. A new family of models
needs none, as far as its modules have these names. Off, nothing is hooked. Rows are copied as they are computed, of
every request of the batch; what is written is read by specscope/measure/locate/tapped.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from specscope.trace.inside.hooking import ErrorGuard, HookedCall, log, names_of, wrap
from specscope.trace.inside.on_import import at_exit
from specscope.trace.inside.settings import TapSettings
from specscope.vllm.code import DRAFTER, TARGET, functions_of, inputs_code
from specscope.vllm.known import REJECTION, RUNNER, V2_RUNNER, parameters_of, rank_of_worker
from specscope.vllm.kv_layout import KvReader
from specscope.vllm.witness import BlockLists

TOP = 32  # of a row of logits, the likeliest tokens are kept
PIECE = 64 * 2**20  # bytes of a file
NUMBERED = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)$")

Given = Mapping[str, Any]  # a call's arguments by name
Named = Iterator[tuple[str, Tensor]]
# What of a module's call is an operation: (its name, the module, its first argument, its output) to tensors by name
Read = Callable[[str, Any, Any, Any], Named]


def _first(output: Any) -> Tensor:
    """A linear layer of vLLM gives its bias beside its rows."""
    rows: Tensor = output[0] if isinstance(output, tuple) else output
    return rows


def _linear(name: str, module: Any, given: Any, output: Any) -> Named:
    yield f"{name}:in", given
    yield name, _first(output)


def _norm(name: str, module: Any, given: Any, output: Any) -> Named:
    """A norm that adds the residual stream first gives the sum too: that is what it normed."""
    yield from _linear(name, module, output[1] if isinstance(output, tuple) else given, output)


def _qkv(name: str, module: Any, given: Any, output: Any) -> Named:
    keys, values = module.head_size, getattr(module, "v_head_size", module.head_size)
    sizes = [module.num_heads * keys, module.num_kv_heads * keys, module.num_kv_heads * values]
    for part, rows in zip(("q_proj", "k_proj", "v_proj"), torch.split(_first(output), sizes, dim=-1), strict=True):
        yield f"{name.removesuffix('qkv_proj')}{part}", rows


def _gate_up(name: str, module: Any, given: Any, output: Any) -> Named:
    for part, rows in zip(("gate_proj", "up_proj"), _first(output).chunk(2, dim=-1), strict=True):
        yield f"{name.removesuffix('gate_up_proj')}{part}", rows


def _whole(name: str, module: Any, given: Any, output: Any) -> Named:
    yield name.replace("embed_tokens", "embedding"), _first(output)


def _border(name: str, module: Any, given: Any, output: Any) -> Named:
    """A decoder layer's output and the residual stream, which the next one adds."""
    yield name, output[0] + output[1] if isinstance(output, tuple) and output[1] is not None else _first(output)


# The end of a module's name, and what of it is an operation. `attn` and logits have their own hooks below.
TABLE: Mapping[str, Read] = {
    "qkv_proj": _qkv,
    "gate_up_proj": _gate_up,
    **dict.fromkeys(("embed_tokens", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), _whole),
    **dict.fromkeys(("o_proj", "down_proj", "fc"), _linear),
    "norm": _norm,  # q_norm, k_norm, hidden_norm, input_norm, input_layernorm, ...
}
ATTENTION, LOGITS = "attn", "logits_processor"
EXPANDED = ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")  # of expand_batch_to_tokens


def read_of(name: str) -> Read | None:
    """How a module of that name is read; None where the table has none."""
    last = name.rsplit(".", 1)[-1]
    if NUMBERED.search(name):
        return _border
    if last in TABLE:
        return TABLE[last]
    return TABLE["norm"] if last.endswith("norm") or ".fc_norm." in f".{name}" else None


@dataclass
class Pass:
    """One forward of a model."""

    who: str  # TARGET or DRAFTER
    step: int  # of the engine, among those that were tapped
    number: int  # of the drafter's passes in this step, from 0
    facts: dict[str, Any]  # plain values: requests, what was scheduled, what attention was told
    tensors: dict[str, Tensor] = field(default_factory=dict)


class VllmTaps:
    """One for a process. It never changes what it reads."""

    def __init__(self, guard: ErrorGuard, settings: TapSettings) -> None:
        self._guard, self._settings = guard, settings
        self._folder = Path(settings.folder)
        self._runner: Any = None
        self._batch: Any = None  # V2's InputBatch of the step
        self._scheduled: Any = None  # vLLM's SchedulerOutput of the step; None outside of real steps
        self._passes: list[Pass] = []
        self._step, self._in_step = -1, 0
        self._now: Pass | None = None  # whose modules run
        self._last: dict[str, Pass] = {}  # of each model
        self._early: dict[str, Tensor] = {}  # what the drafter computed before its forward: features made hidden states
        self._blocks = BlockLists()
        self._readers: dict[str, KvReader] = {}
        self._bytes, self._kept, self._files = 0, 0, 0
        self._is_full = False

    def install(self, module: ModuleType) -> None:
        """Into either runner's module."""
        runner = module.GPUModelRunner
        is_v2 = hasattr(runner, "prepare_inputs")
        names = parameters_of(V2_RUNNER if is_v2 else RUNNER, "GPUModelRunner.execute_model")
        self._around(runner, "execute_model", before=self._begin, known=names)
        if is_v2:
            self._around(runner, "prepare_inputs", after=lambda batch, _: setattr(self, "_batch", batch))

    def _around(
        self,
        owner: Any,
        name: str,
        before: Callable[[Given], object] = lambda _: None,
        after: Callable[[Any, Given], object] = lambda *_: None,
        known: tuple[str, ...] = (),
    ) -> None:
        """Tell of a function's calls, whether or not the plugin's hooks are there. `known`: its parameters."""

        def hook(call: HookedCall) -> Any:
            self._guard.safely(before, call.given)
            output = call()
            self._guard.safely(after, output, call.given)
            return output

        wrap(owner, name, hook, known, again=True)

    def _begin(self, given: Given) -> None:
        self._now = self._scheduled = None
        runner, scheduled = given["self"], given["scheduler_output"]
        if given.get("dummy_run") or not scheduled.total_num_scheduled_tokens:
            return
        if self._runner is None:
            self._attach(runner)
        self._blocks.update(scheduled)
        self._step, self._in_step, self._scheduled = self._step + 1, 0, scheduled
        self._write_if(PIECE)

    def _attach(self, runner: Any) -> None:
        """Hook the models, in the first real step: vLLM's warming up has ended."""
        self._runner = runner
        if rank_of_worker() != 0:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        drafter = getattr(proposer, "model", None)
        code: dict[str, Any] = {}
        for who, model in ((TARGET, runner.model), (DRAFTER, drafter)):
            if isinstance(model, torch.nn.Module):
                code[who] = self._hook(who, model) | inputs_code(who, runner, proposer)
        if DRAFTER in code:  # the target's layers are collected by the model that runs them
            code[DRAFTER]["features"] += functions_of(getattr(runner.model, "model", runner.model))
        if proposer is not None and drafter is not None:
            self._around(proposer, "propose", after=self._proposed)
        sampler = sys.modules.get(REJECTION)
        if TARGET in code and not hasattr(runner, "prepare_inputs") and hasattr(sampler, "expand_batch_to_tokens"):
            self._around(sampler, "expand_batch_to_tokens", after=self._expanded, known=EXPANDED)
        sizes = {who: sizes_of(model) for who, model in ((TARGET, runner.model), (DRAFTER, drafter)) if model}
        block_size = int(runner.vllm_config.cache_config.block_size)
        about = {"v2": hasattr(runner, "prepare_inputs"), "block_size": block_size, "code": code, "sizes": sizes}
        (self._folder / "about.json").write_text(json.dumps(about))
        at_exit(lambda: self._guard.safely(self._close))

    def _expanded(self, expanded: Tensor, given: Given) -> None:
        """V1 gives each drafted row the temperature, top-k and top-p of its request in a call of its own."""
        last = self._last.get(TARGET)
        if last is None or self._scheduled is None or last.step != self._step:
            return
        own, most = given["x"], given.get("replace_from", 0)
        own = torch.where(own == most, torch.as_tensor(given.get("replace_to", 0), dtype=own.dtype), own)
        number = sum(name.startswith("parameters.") for name in last.tensors) // 3
        for name, values in (("rows", expanded), ("of", own), ("ends", given["cu_num_tokens"])):
            self._put(last.tensors, f"parameters.{number}.{name}", values)

    def _hook(self, who: str, model: Any) -> dict[str, Any]:
        """Where each of its operations is computed, by name."""
        code: dict[str, Any] = {}
        model.register_forward_pre_hook(partial(self._guard.safely, self._started, who), with_kwargs=True)
        model.register_forward_hook(lambda *_: self._ended(who))
        is_first = True  # of its attention layers: what it was told stands for the others
        for path, module in model.named_modules(remove_duplicate=False):
            name = path.removeprefix("model.")
            last, wanted = name.rsplit(".", 1)[-1], self._settings.wants(who, name)
            if last == LOGITS:
                module.register_forward_hook(self._safe(self._logits, who))
                code["lm_head"] = functions_of(module)
            elif last == ATTENTION:
                if wanted or is_first:
                    module.register_forward_hook(self._safe(self._attention, who, name.removesuffix(".attn"), wanted))
                is_first = False
                code[name.removesuffix("attn") + "attention"] = functions_of(module)
            elif (read := read_of(name)) is not None:
                if wanted:
                    module.register_forward_hook(self._safe(self._module, who, name, read), with_kwargs=True)
                code[name] = functions_of(module)
            elif last == "rotary_emb":
                code[name] = functions_of(module)
        return code

    def _safe(self, function: Callable[..., None], *bound: Any) -> Callable[..., None]:
        """A module's hook that gives nothing back, whatever happens."""

        def hook(*args: Any) -> None:
            if self._scheduled is not None:
                self._guard.safely(function, *bound, *args)

        return hook

    def _started(self, who: str, model: Any, args: Any, kwargs: Any) -> None:
        if self._scheduled is None or self._is_full:
            return
        given = dict(zip(names_of(model.forward), args, strict=False)) | kwargs
        number = self._in_step if who == DRAFTER else 0
        self._in_step += who == DRAFTER
        self._now = self._last[who] = Pass(who, self._step, number, self._facts())
        self._passes.append(self._now)
        if who == DRAFTER:
            self._now.tensors |= self._early
            self._early = {}
        for name, key in (("input_ids", "tokens"), ("positions", "positions"), ("hidden_states", "state")):
            if isinstance(given.get(name), Tensor):
                self._keep(key, given[name])

    def _ended(self, who: str) -> None:
        if self._now is not None and self._now.who == who:
            self._now = None

    def _facts(self) -> dict[str, Any]:
        """What was scheduled, by the scheduler's word: the order of requests is the batch's."""
        scheduled = self._scheduled
        names = list(self._runner.input_batch.req_ids if self._batch is None else self._batch.req_ids)
        names = [name for name in names if name in scheduled.num_scheduled_tokens]
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        return {
            "requests": names,
            "scheduled": [int(scheduled.num_scheduled_tokens[name]) for name in names],
            "computed": [int(computed[name]) for name in names],
            "drafts": [list(map(int, scheduled.scheduled_spec_decode_tokens.get(name, ()))) for name in names],
            "blocks": [list(self._blocks.of(name)) for name in names],
        }

    def _keep(self, name: str, rows: Tensor) -> None:
        self._put(self._early if self._now is None else self._now.tensors, name, rows)

    def _put(self, into: dict[str, Tensor], name: str, rows: Tensor) -> None:
        kept = rows.detach().to("cpu", copy=True).contiguous()
        self._bytes += kept.numel() * kept.element_size()
        if self._kept + self._bytes > self._settings.most:
            if not self._is_full:
                log.warning("specscope: the taps are full: later computations are not tapped")
            self._is_full = True
            return
        into[name] = kept

    def _module(self, who: str, name: str, read: Read, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if (self._now is None and who == TARGET) or (self._now is not None and self._now.who != who):
            return
        given = args[0] if args else next((value for value in kwargs.values() if isinstance(value, Tensor)), None)
        for key, rows in read(name, module, given, output):
            if isinstance(rows, Tensor):
                self._keep(key, rows)

    def _attention(self, who: str, name: str, inside: bool, module: Any, args: Any, output: Any) -> None:
        """Queries, keys and values after rotary, what attention was told, and the cache as it read it."""
        if self._now is None or self._now.who != who:
            return
        if inside:
            for key, rows in zip(("query", "key", "value"), args, strict=False):
                self._keep(f"{name}.{key}", rows)
            self._keep(f"{name}.attention", output)
        metadata, slots = told(module.layer_name)
        if metadata is None or slots is None:
            return
        if "seq_lens" not in self._now.tensors:
            widest = max((len(blocks) for blocks in self._now.facts["blocks"]), default=0) + 1
            for key in ("seq_lens", "query_start_loc", "block_table"):
                if isinstance(rows := getattr(metadata, key, None), Tensor):
                    self._keep(key, rows[:, :widest] if key == "block_table" else rows)
        self._keep(f"{name}.slots", slots)
        if inside:
            self._cache(name, module, metadata)

    def _cache(self, name: str, module: Any, metadata: Any) -> None:
        """Of each request the keys and values of its context, through the block table that attention was told."""
        assert self._now is not None
        if module.layer_name not in self._readers:
            self._readers[module.layer_name] = KvReader(module)
        reader = self._readers[module.layer_name]
        if reader.why:
            self._now.facts["unread"] = reader.why
            return
        for row, _ in enumerate(self._now.facts["requests"]):
            keys, values = reader.read(metadata.block_table[row], int(metadata.seq_lens[row]))
            self._keep(f"{name}.keys read.{row}", keys)
            self._keep(f"{name}.values read.{row}", values)

    def _logits(self, who: str, module: Any, args: Any, output: Any) -> None:
        last = self._last.get(who)
        if last is None or not isinstance(output, Tensor) or self._is_full:
            return
        best = output.float().topk(min(TOP, output.shape[-1]))
        self._put(last.tensors, "lm_head", best.values)
        self._put(last.tensors, "lm_head.tokens", best.indices)

    def _proposed(self, drafts: Any, *_: Any) -> None:
        last = self._last.get(DRAFTER)
        if last is not None and last.step == self._step and isinstance(drafts, Tensor):
            self._put(last.tensors, "drafted", drafts)

    def _write_if(self, limit: int) -> None:
        if self._bytes <= limit or not self._passes:
            return
        from safetensors.torch import save_file

        tensors, lines = dict[str, Tensor](), list[dict[str, Any]]()
        for number, made in enumerate(self._passes):
            tensors |= {f"{number}/{name}": rows for name, rows in made.tensors.items()}
            lines.append({"who": made.who, "step": made.step, "number": made.number, **made.facts})
        save_file(tensors, self._folder / f"taps-{self._files:04}.safetensors")
        (self._folder / f"taps-{self._files:04}.json").write_text(json.dumps(lines))
        self._files, self._passes, self._kept, self._bytes = self._files + 1, [], self._kept + self._bytes, 0

    def _close(self) -> None:
        self._write_if(0)
        (self._folder / "end.json").write_text(json.dumps({"full": self._is_full, "steps": self._step + 1}))


def told(layer: str) -> tuple[Any, Tensor | None]:
    """What an attention layer was told: (its metadata, the slots that it wrote to); None for what is not there."""
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    both = (part[0] if isinstance(part, list) else part for part in (context.attn_metadata, context.slot_mapping))
    metadata, slots = (part.get(layer) if isinstance(part, dict) else None for part in both)
    return metadata, slots


def sizes_of(model: Any) -> dict[str, int]:
    """Heads and their size, of the first attention that it has."""
    module = next((part for name, part in model.named_modules() if name.endswith(".attn")), None)
    names = ("num_heads", "num_kv_heads", "head_size")
    return {} if module is None else {name: int(getattr(module, name)) for name in names}
