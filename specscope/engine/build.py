"""From an EngineConfig to the parts of an engine, and what one on a GPU does before its first request.

Every variant of every kernel that a run launches is compiled, and no other: which these are is the launchers' to say
(specscope.kernels.launch), and what is done here is what a run does, once for each size that makes a difference to
them. Then passes are captured as CUDA graphs.
"""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

import specscope
from specscope.engine import chat_template
from specscope.engine.config import EngineConfig, models_given
from specscope.errors import UserError, first_line
from specscope.model.fast.linear import disabled
from specscope.model.graphs import Capture, CudaCapture, Shape, powers, shapes
from specscope.model.heads.dflash import DFlashRunner, load_dflash
from specscope.model.heads.head_runner import HeadRunner, load_head
from specscope.model.heads.mtp import MtpRunner, load_mtp
from specscope.model.kv_cache import BLOCK_SIZE, KVCache
from specscope.model.loader import LoadedModel, find_model, load_model, load_tokenizer, pick_device, pick_dtype
from specscope.model.places import Backend, check_context, check_layers, pick_backend
from specscope.model.runner import ModelRunner
from specscope.plans.kinds import model_part
from specscope.plans.plan import StaticPlan, parse_plan
from specscope.speculate.drafters.base import Drafter
from specscope.speculate.drafters.dflash import DFlash
from specscope.speculate.drafters.eagle import Eagle, ParallelEagle
from specscope.speculate.drafters.model_drafter import DraftModel, ModelDrafter
from specscope.speculate.drafters.mtp import Mtp
from specscope.speculate.drafters.own import DrafterSetup, OwnDrafter
from specscope.speculate.drafters.text import NgramDrafter, SuffixDrafter
from specscope.speculate.named import NamedCode
from specscope.speculate.verify.verifier import warm_up_verdicts
from specscope.trace.record.draft_vocabulary import pack
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import RunInfo
from specscope.trace.record.rules import STANDARD
from specscope.trace.record.tree import ROOT
from specscope.trace.record.vocabulary import Vocabulary, read_vocabulary

GIB = 2**30


@dataclass
class Parts:
    """What an engine is made of. Its phases and its intake share them."""

    runner: ModelRunner
    drafter: Drafter
    tokenizer: Any  # a Hugging Face tokenizer
    vocabulary: Vocabulary
    run_info: RunInfo


def build_parts(config: EngineConfig, progress: Callable[[str], None]) -> Parts:
    """Load the models and make the drafter. Raises UserError for what does not fit together."""
    disabled()  # a name in SPECSCOPE_DISABLE that is none is refused before anything is loaded
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    backend = pick_backend(config.backend, device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # launches, streams and events are the current device's
    dtype = pick_dtype(config.dtype, device)
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    if device.type == "cuda":
        has = torch.cuda.get_device_properties(device).total_memory / GIB
    if config.kv_memory > has:
        raise UserError(f"--kv-memory {config.kv_memory:g} GiB is more than the machine has: {has:.1f} GiB")
    find_model(config.target, progress)  # converts the default model where that was never done
    with ThreadPoolExecutor(2) as pool:  # the tokenizer is read, and the files are hashed, while the weights are loaded
        reading, hashing = pool.submit(_read_tokenizer, config.target), pool.submit(models_given, config)
        target = load_model(config.target, device, dtype, progress)
        tokenizer, given = reading.result(), hashing.result()
    max_context = target.max_context if config.max_context is None else config.max_context
    check_context(max_context, target.max_context, target.name)
    blocks = int(config.kv_memory * GIB) // KVCache.block_bytes(target.layers, target.dtype)
    if blocks < 2:
        raise UserError(f"--kv-memory {config.kv_memory} GiB is less than two KV blocks of {target.name}")
    drafter = make_drafter(config, target, tokenizer, blocks, backend, progress)
    runner = ModelRunner(target, blocks, drafter.aux_layers, backend)
    runner.cache.pool.keep_apart(config.max_batch)
    ran_by = backend.value
    if device.type == "cuda" and backend is Backend.TRITON:
        progress("compiling kernels")
        warm_up(runner, drafter, max_context)
        if config.graphs != "off":
            ran_by += ", " + capture_graphs(config, runner, drafter, max_context, CudaCapture, progress)
    if backend is Backend.TRITON and config.rule != STANDARD:
        ran_by += f", rule {config.rule} on the host"
        progress(f"rule {config.rule} has no GPU kernel: verdicts are computed on the host")
    if not given["target_digest"] or (given["draft_path"] and not given["draft_digest"]):
        given = models_given(config)  # a hub name's files may have come only now
    if isinstance(drafter, OwnDrafter):
        given = given | {"draft_digest": drafter.source + given["draft_digest"]}  # of its code, then of its model
    info = _run_info(config, runner, drafter, max_context, given | {"backend": ran_by})
    return Parts(runner, drafter, tokenizer, read_vocabulary(tokenizer), info)


def _read_tokenizer(target: str | None) -> Any:  # noqa: ANN401
    tokenizer = load_tokenizer(target)
    chat_template.start(tokenizer)
    return tokenizer


def drafter_blocks(config: EngineConfig, blocks: int) -> int:
    """KV blocks for the drafter of a target with so many.

    It feeds more nodes than are verified where the tree is dynamic, and must not run out before the target.
    """
    return blocks if config.plan is None else blocks + config.max_batch * (sum(config.plan.fed) // BLOCK_SIZE + 2)


def make_drafter(
    config: EngineConfig,
    target: LoadedModel,
    tokenizer: Any,  # noqa: ANN401
    blocks: int,
    backend: Backend,
    progress: Callable[[str], None],
    other: Drafter | None = None,
) -> Drafter:
    """The drafter that a config asks for. Raises UserError where it does not fit the target.

    `blocks`: the target's of KV; `other`: a drafter that has loaded the same weights, to share them.
    """
    plan, room = config.plan or parse_plan("5"), drafter_blocks(config, blocks)  # of a drafter of somebody's own
    if config.is_own:
        setup = DrafterSetup(target, tokenizer, plan, config.draft_model, room, backend)
        own: Any = config.own.load("--drafter") if isinstance(config.own, NamedCode) else config.own
        return OwnDrafter(own, config.drafter, setup)
    if config.drafter == "none":
        return Drafter()
    if config.drafter == "ngram":
        assert isinstance(plan, StaticPlan)
        return NgramDrafter(plan.max_depth, len(plan.shape.children(ROOT)), shortest=config.ngram_min)
    if config.drafter == "suffix":
        return SuffixDrafter(plan.max_nodes, plan.max_depth)
    loaded = None if other is None or other.runner is None else other.runner.loaded
    drafter: ModelDrafter
    if config.drafter == "draft_model":
        loaded = loaded or _draft_model(config, target, tokenizer, progress)
        drafter = DraftModel(ModelRunner(loaded, room, backend=backend), plan)
    else:
        runner: Any
        kind: Callable[..., ModelDrafter]
        if config.drafter == "mtp":
            runner, kind = MtpRunner(loaded or load_mtp(target), target, room, backend), Mtp
        elif config.drafter == "dflash":
            runner, kind = DFlashRunner(loaded or load_dflash(config.head, target), target, room, backend), DFlash
        else:
            runner = HeadRunner(loaded or load_head(config.head, target), target, room, backend)
            kind = Eagle if runner.head.config.mask_token is None else ParallelEagle
        drafter = kind(runner, plan, target.max_context, notes_features=evidence(config, target) == "full")
    drafter.cache.pool.keep_apart(config.max_batch)
    return drafter


def _draft_model(
    config: EngineConfig,
    target: LoadedModel,
    tokenizer: Any,  # noqa: ANN401
    progress: Callable[[str], None],
) -> LoadedModel:
    """A smaller model, or the target's first layers. Raises UserError where its tokens are not the target's."""
    if (layers := config.draft_layers) is not None:
        check_layers(layers, len(target.layers), target.name)
        return load_model(config.target, target.device, target.dtype, progress, layers)
    draft = load_model(config.draft_model, target.device, target.dtype, progress)
    if target.vocab_size != draft.vocab_size:
        raise UserError(
            f"the draft model's vocabulary ({draft.vocab_size}) is not the target's ({target.vocab_size}): "
            "a draft model needs the target's tokens"
        )
    tells = draft.folder is None or (draft.folder / "tokenizer.json").exists()
    if tells and load_tokenizer(config.draft_model).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"the tokenizers of {draft.name} and {target.name} differ: a draft model needs the target's tokenizer"
        )
    return draft


def evidence(config: EngineConfig, target: LoadedModel) -> str:
    """full or lean: how much the run's records hold."""
    if config.evidence != "auto":
        return config.evidence
    return "lean" if target.device.type == "cuda" else "full"


def _run_info(
    config: EngineConfig, runner: ModelRunner, drafter: Drafter, max_context: int, given: dict[str, Any]
) -> RunInfo:
    """`given`: the fields that its models and its kernels give."""
    target, model, d2t = runner.loaded, drafter.runner, drafter.d2t
    on_gpu = target.device.type == "cuda"
    return RunInfo(
        run_id=uuid.uuid4().hex,
        target=target.name,
        revision=target.revision,
        drafter=drafter.name,
        draft_model="" if model is None else model.loaded.name,
        tree="" if config.plan is None else str(config.plan),
        device=torch.cuda.get_device_name(target.device) if on_gpu else platform.processor() or platform.machine(),
        dtype=str(target.dtype).removeprefix("torch."),
        seed=0,
        eos_tokens=target.eos,
        max_context=max_context,
        blocks=runner.cache.pool.blocks,
        block_size=BLOCK_SIZE,
        params=SamplingParams().to_dict(),
        versions={
            "specscope": specscope.__version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
        aux_layers=tuple(map(str, drafter.aux_layers)),
        draft_vocab=0 if model is None else target.vocab_size if d2t is None else len(d2t),
        draft_tokens="" if d2t is None else pack(d2t.tolist()),
        evidence=evidence(config, target),
        rule=config.rule,
        **given,
    )


def warm_up(runner: ModelRunner, drafter: Drafter, max_context: int) -> None:
    """Launch each variant once. Needs the triton backend."""
    for each in (runner, drafter.runner):
        if each is not None:
            each.graphs.warm_up(each.run_batch, max_context)
    warm_up_verdicts(runner.loaded.vocab_size, runner.cache.device)


def capture_graphs(
    config: EngineConfig,
    runner: ModelRunner,
    drafter: Drafter,
    max_context: int,
    make_capture: Callable[[], Capture],
    progress: Callable[[str], None],
) -> str:
    """Capture them, one after another; what became of it, in words. `make_capture` makes one for each runner.

    A model that reads a tensor on the host while it runs (some mixtures of experts, some rotary tables) cannot be
    captured, and runs as it did before. A drafter that is a model fills its tree; one that looks up text drafts what
    it finds, so that steps of the target have more sizes.
    """
    rows = drafter.max_nodes + 1  # of a request at most
    sizes = [1, rows] if model_part(config.drafter) or rows == 1 else powers(rows)
    wanted: list[tuple[str, Any, list[Shape], int]] = [("target", runner, shapes(config.max_batch, sizes), rows)]
    if drafter.runner is not None and config.plan is not None:
        passes = shapes(config.max_batch, drafter.rows_fed)
        wanted.append(("drafter", drafter.runner, passes, sum(config.plan.fed) + passes[-1].rows))
    announced, refused, count = 0, "", sum(len(these) for *_, these, _ in wanted)
    for name, each, these, window in wanted:
        try:
            for _ in each.graphs.capture(each.run_batch, these, make_capture(), max_context, window):
                announced += 1
                progress(f"capturing CUDA graphs: {announced} of {count}")
        except Exception as error:  # whatever a model, a compiler or a driver has against it
            refused += f"; the {name} could not be captured: {first_line(error.__context__ or error)}"
    return f"{sum(len(each.graphs) for _, each, *_ in wanted)} CUDA graphs{refused}"
