"""From an EngineConfig to the parts of an engine, and what one on a GPU does before its first request.

Every variant of every kernel that a run launches is compiled, and no other: which these are is the launchers' to say
(specscope.kernels.launch), and what is done here is what a run does, once for each size that makes a difference to
them. Then passes are captured as CUDA graphs.
"""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

import specscope
from specscope.engine import chat_template
from specscope.engine.config import EngineConfig, models_given
from specscope.errors import UserError
from specscope.model.device import pick_device, pick_dtype
from specscope.model.fast.fast_paths import disabled
from specscope.model.graphs import Capture, CudaCapture, Shape, powers, shapes
from specscope.model.heads.dflash import DFlashRunner, LoadedDFlash, load_dflash
from specscope.model.heads.head_loader import LoadedHead, load_head
from specscope.model.heads.head_runner import HeadRunner
from specscope.model.heads.mtp import LoadedMtp, MtpRunner, load_mtp
from specscope.model.kv_cache import BLOCK_SIZE, KVCache
from specscope.model.loader import LoadedModel, find_model, load_model, load_tokenizer
from specscope.model.places import Backend, check_context, check_layers, pick_backend
from specscope.model.runner import ModelRunner
from specscope.plans.kinds import model_part
from specscope.plans.plan import StaticPlan, TreePlan, parse_plan
from specscope.speculate.drafters.base import Drafter, DraftRunner
from specscope.speculate.drafters.dflash import DFlash
from specscope.speculate.drafters.draft_model import DraftModel
from specscope.speculate.drafters.eagle import Eagle
from specscope.speculate.drafters.model_drafter import ModelDrafter
from specscope.speculate.drafters.mtp import Mtp
from specscope.speculate.drafters.ngram import NgramDrafter
from specscope.speculate.drafters.own import DrafterSetup, OwnDrafter
from specscope.speculate.drafters.parallel import ParallelEagle
from specscope.speculate.drafters.suffix import SuffixDrafter
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
    max_context: int
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
    check_memory(config.kv_memory, device)
    find_model(config.target, progress)  # converts the default model where that was never done
    with ThreadPoolExecutor(2) as pool:  # the tokenizer is read, and the files are hashed, while the weights are loaded
        reading, hashing = pool.submit(_read_tokenizer, config.target), pool.submit(models_given, config)
        target = load_model(config.target, device, dtype, progress)
        tokenizer, given = reading.result(), hashing.result()
    max_context = target.max_context if config.max_context is None else config.max_context
    check_context(max_context, target.max_context, target.name)
    blocks = count_blocks(target, config.kv_memory)
    drafter = make_drafter(config, target, tokenizer, blocks, backend, progress)
    runner = ModelRunner(target, blocks, drafter.aux_layers, backend)
    runner.cache.pool.keep_apart(config.max_batch)
    ran_by = backend.value
    if device.type == "cuda" and backend is Backend.TRITON:
        progress("compiling kernels")
        warm_up(runner, drafter, max_context)
    if device.type == "cuda" and backend is Backend.TRITON and config.graphs != "off":
        ran_by += ", " + capture_graphs(config, runner, drafter, max_context, CudaCapture, progress)
    if backend is Backend.TRITON and config.rule != STANDARD:
        ran_by += f", rule {config.rule} on the host"
        progress(f"rule {config.rule} has no GPU kernel: verdicts are computed on the host")
    if not given["target_digest"] or (given["draft_path"] and not given["draft_digest"]):
        given = models_given(config)  # a hub name's files may have come only now
    if isinstance(drafter, OwnDrafter):
        given = given | {"draft_digest": drafter.source + given["draft_digest"]}  # of its code, then of its model
    return Parts(
        runner=runner,
        drafter=drafter,
        tokenizer=tokenizer,
        vocabulary=read_vocabulary(tokenizer),
        max_context=max_context,
        run_info=_run_info(config, target, drafter, max_context, blocks, ran_by, given),
    )


def _read_tokenizer(target: str | None) -> Any:  # noqa: ANN401
    tokenizer = load_tokenizer(target)
    chat_template.start(tokenizer)
    return tokenizer


def check_memory(gib: float, device: torch.device) -> None:
    """Refuse a KV cache that is larger than the machine."""
    if device.type == "cuda":
        has = torch.cuda.get_device_properties(device).total_memory / GIB
    else:
        has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    if gib > has:
        raise UserError(f"--kv-memory {gib:g} GiB is more than the machine has: {has:.1f} GiB")


def count_blocks(loaded: LoadedModel, gib: float) -> int:
    """KV blocks that fit into `gib` GiB."""
    blocks = int(gib * GIB) // KVCache.block_bytes(loaded.layers, loaded.dtype)
    if blocks < 2:
        raise UserError(f"--kv-memory {gib} GiB is less than two KV blocks of {loaded.name}")
    return blocks


def drafter_blocks(config: EngineConfig, blocks: int) -> int:
    """KV blocks for the drafter of a target with so many.

    It feeds more nodes than are verified where the tree is dynamic, and must not run out before the target.
    """
    return blocks if config.plan is None else blocks + config.max_batch * (config.plan.max_fed // BLOCK_SIZE + 2)


@dataclass(frozen=True)
class Wanted:
    """What a drafter is made from."""

    config: EngineConfig
    target: LoadedModel
    tokenizer: Any  # a Hugging Face tokenizer
    blocks: int  # of KV, for the drafter
    backend: Backend
    progress: Callable[[str], None]
    loaded: object  # the drafter's weights, where somebody has loaded them

    @property
    def plan(self) -> TreePlan:
        """How trees are drafted; a chain of 5 for a drafter of somebody's own, where no tree was given."""
        return self.config.plan or parse_plan("5")


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
    loaded = None if other is None or other.runner is None else other.runner.loaded
    wanted = Wanted(config, target, tokenizer, drafter_blocks(config, blocks), backend, progress, loaded)
    drafter = _own(wanted) if config.is_own else MAKERS[config.drafter](wanted)
    if isinstance(drafter, ModelDrafter):
        drafter.cache.pool.keep_apart(config.max_batch)
    return drafter


def _own(wanted: Wanted) -> Drafter:
    config = wanted.config
    make = config.own.load("--drafter") if isinstance(config.own, NamedCode) else config.own
    assert make is not None
    setup = DrafterSetup(
        wanted.target, wanted.tokenizer, wanted.plan, config.draft_model, wanted.blocks, wanted.backend
    )
    return OwnDrafter(make, config.drafter, setup)


def _ngram(wanted: Wanted) -> Drafter:
    plan, config = wanted.plan, wanted.config
    assert isinstance(plan, StaticPlan)
    return NgramDrafter(plan.max_depth, len(plan.shape.children(ROOT)), config.ngram_max, config.ngram_min)


def _eagle(wanted: Wanted) -> Drafter:
    target, config = wanted.target, wanted.config
    head = wanted.loaded if isinstance(wanted.loaded, LoadedHead) else load_head(config.head, target)
    runner = HeadRunner(head, target.vocab_size, target.max_context, wanted.blocks, wanted.backend)
    make = Eagle if head.head.config.parallel is None else ParallelEagle
    return make(runner, wanted.plan, target.max_context, notes_features=evidence(config, target) == "full")


def _mtp(wanted: Wanted) -> Drafter:
    target, config = wanted.target, wanted.config
    loaded = wanted.loaded if isinstance(wanted.loaded, LoadedMtp) else load_mtp(target)
    runner = MtpRunner(loaded, target, wanted.blocks, wanted.backend)
    return Mtp(runner, wanted.plan, target.max_context, notes_features=evidence(config, target) == "full")


def _dflash(wanted: Wanted) -> Drafter:
    target, config = wanted.target, wanted.config
    head = wanted.loaded if isinstance(wanted.loaded, LoadedDFlash) else load_dflash(config.head, target)
    runner = DFlashRunner(head, target.vocab_size, target.max_context, wanted.blocks, wanted.backend)
    return DFlash(runner, wanted.plan, target.max_context, notes_features=evidence(config, target) == "full")


def _draft_model(wanted: Wanted) -> Drafter:
    target, config, layers = wanted.target, wanted.config, wanted.config.draft_layers
    if isinstance(wanted.loaded, LoadedModel):
        draft = wanted.loaded
    elif layers is None:
        draft = load_model(config.draft_model, target.device, target.dtype, wanted.progress)
        _check_same_vocabulary(target, draft, wanted.tokenizer, config)
    else:
        check_layers(layers, len(target.layers), target.name)
        draft = load_model(config.target, target.device, target.dtype, wanted.progress, layers)
    return DraftModel(ModelRunner(draft, wanted.blocks, backend=wanted.backend), wanted.plan)


MAKERS: Mapping[str, Callable[[Wanted], Drafter]] = {  # by the name of the kind
    "none": lambda _: Drafter(),
    "eagle": _eagle,
    "dflash": _dflash,
    "ngram": _ngram,
    "suffix": lambda wanted: SuffixDrafter(wanted.plan.max_nodes, wanted.plan.max_depth),
    "draft_model": _draft_model,
    "mtp": _mtp,
}


def evidence(config: EngineConfig, target: LoadedModel) -> str:
    """full or lean: how much the run's records hold."""
    if config.evidence != "auto":
        return config.evidence
    return "lean" if target.device.type == "cuda" else "full"


def _check_same_vocabulary(target: LoadedModel, draft: LoadedModel, tokenizer: Any, config: EngineConfig) -> None:  # noqa: ANN401
    if target.vocab_size != draft.vocab_size:
        raise UserError(
            f"the draft model's vocabulary ({draft.vocab_size}) is not the target's ({target.vocab_size}): "
            "a draft model needs the target's tokens"
        )
    if draft.folder is not None and not (draft.folder / "tokenizer.json").exists():
        return  # the sizes agree and there is nothing more to compare
    theirs = load_tokenizer(config.draft_model).get_vocab()
    if theirs != tokenizer.get_vocab():
        raise UserError(
            f"the tokenizers of {draft.name} and {target.name} differ: a draft model needs the target's tokenizer"
        )


def _run_info(
    config: EngineConfig,
    target: LoadedModel,
    drafter: Drafter,
    max_context: int,
    blocks: int,
    ran_by: str,
    given: dict[str, Any],
) -> RunInfo:
    on_gpu = target.device.type == "cuda"
    model, d2t = drafter.runner, drafter.d2t
    return RunInfo(
        run_id=uuid.uuid4().hex,
        target=target.name,
        revision=target.revision,
        drafter=drafter.name,
        draft_model="" if model is None else model.loaded.name,
        tree="" if config.plan is None else str(config.plan),
        device=torch.cuda.get_device_name(target.device) if on_gpu else platform.processor() or platform.machine(),
        dtype=str(target.dtype).removeprefix("torch."),
        backend=ran_by,
        seed=0,
        eos_tokens=target.eos,
        max_context=max_context,
        blocks=blocks,
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
    runner.warm_up(max_context)
    if drafter.runner is not None:
        drafter.runner.warm_up(max_context)
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
    captured, and runs as it did before.
    """
    wanted: list[tuple[DraftRunner, list[Shape], int]] = [
        (runner, verify_shapes(config, drafter.max_nodes), drafter.max_nodes + 1)
    ]
    if drafter.runner is not None and config.plan is not None:
        passes = shapes(config.max_batch, drafter.rows_fed)
        wanted.append((drafter.runner, passes, config.plan.max_fed + passes[-1].rows))
    announced, refused, count = 0, "", sum(len(these) for _, these, _ in wanted)
    for model_runner, these, window in wanted:
        try:
            for _ in model_runner.capture(these, make_capture(), max_context, window):
                announced += 1
                progress(f"capturing CUDA graphs: {announced} of {count}")
        except Exception as error:  # whatever a model, a compiler or a driver has against it
            first = error.__context__ or error  # the end of a capture that was broken off complains as well
            reason = (str(first).strip() or type(first).__name__).splitlines()[0]
            refused += (
                f"; {'the drafter' if model_runner is not runner else 'the target'} could not be captured: {reason}"
            )
    done = sum(len(model_runner.graphs) for model_runner, *_ in wanted)
    return f"{done} CUDA graphs{refused}"


def verify_shapes(config: EngineConfig, nodes: int) -> list[Shape]:
    """The shapes of the target's steps: the root of each request, alone or with its tree of at most `nodes`.

    A drafter that is a model fills its tree; one that looks up text drafts what it finds.
    """
    sizes = [1, nodes + 1] if model_part(config.drafter) or not nodes else powers(nodes + 1)
    return shapes(config.max_batch, sizes)
