"""`python -m benchmarks cpu`: the engine beside transformers' generate(), on the same weights, in one run."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.paired import PairedSides, Side, measure_paired, show, write_json
from specscope.engine.config import EngineConfig
from specscope.engine.engine import Engine
from specscope.measure.device import COPY_BYTES, seconds
from specscope.measure.prompts import COPYING, PLAIN, unseen_prompts
from specscope.measure.step_costs import machine_info
from specscope.model.batch import Segment
from specscope.model.heads.head_runner import HeadRunner
from specscope.model.kv_cache import BlockTable
from specscope.speculate.drafters.eagle import Eagle
from specscope.terminal import text_console
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import StepRecord
from specscope.trace.record.tree import DraftTree
from specscope.trace.wire.outputs import OutputOptions, Outputs
from specscope.trace.wire.spans import SpanLevel

READS = 9  # of a measure of bandwidth
TOKENS = 64
COPY_TOKENS = 128
ROWS, CONTEXT = 16, 200  # of a verification step
LOOKUP = 10  # prompt_lookup_num_tokens: transformers' documented choice
NGRAM_TREE = "8"
EAGLE_PROMPTS = 10  # of the unseen ones, evenly over their kinds


def read_bandwidth(device: torch.device, size: int = COPY_BYTES // 4) -> float:
    """Bytes per second that a sum reads: memory's speed, where the size exceeds the caches."""
    source = torch.ones(size // 4, device=device)
    return size / seconds(source.sum, device, READS)


def without_drafting(config: EngineConfig) -> EngineConfig:
    """The same engine that drafts nothing: what others are measured beside."""
    return dataclasses.replace(config, drafter="none", draft_model=None, tree=None)


def run_cpu(config: EngineConfig, rounds: int, json_file: str | None) -> None:
    """Measure and print: no speculation at batch 1 and 8, n-gram on copy-heavy prompts, the head on unseen ones."""
    console = text_console()
    console.print("loading the engine for each drafter, and generate()", style="dim")
    bare = without_drafting(config)
    plain = Engine(bare)
    ngram = Engine(dataclasses.replace(bare, drafter="ngram", tree=NGRAM_TREE))
    own = Engine(config) if config.drafter == "eagle" else None
    peer = Peer(config)
    comparisons = [
        _batch(1, plain, peer, rounds, console),
        _batch(8, plain, peer, rounds, console),
        _rows(plain, rounds, console),
        *_copying(plain, ngram, own, peer, rounds, console),
    ]
    phases = PhaseTimes()
    if own is not None:
        comparisons.append(_unseen(plain, own, phases, rounds, console))
    machine = machine_info(plain.run_info.dtype, torch.get_num_threads())
    show(comparisons, console, machine)
    phases.show(console)
    if own is not None:
        show_pass(own, phases, console)
    write_json(json_file, "cpu", comparisons, machine)


class Peer:
    """transformers' generate() as its users call it: SDPA attention, its own cache."""

    def __init__(self, config: EngineConfig) -> None:
        from transformers import AutoModelForCausalLM

        from specscope.model.loader import find_model, load_tokenizer, pick_device, pick_dtype

        source, extra, _ = find_model(config.target, lambda _: None)
        device = pick_device(config.device)
        dtype = pick_dtype(config.dtype, device)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=False, **extra)
        self.model = model.to(device).eval()
        self.tokenizer = load_tokenizer(config.target)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, *, eos: bool, **how: Any) -> int:  # noqa: ANN401
        """Greedy tokens for one left-padded batch; how many were made."""
        longest = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id or 0
        rows = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        if not eos:
            how["eos_token_id"] = None
        with torch.inference_mode():
            out = self.model.generate(
                rows, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=pad, **how
            )
        return int(out.shape[1] - longest) * len(prompts)


def encode(engine: Engine, prompts: Sequence[str]) -> list[list[int]]:
    """Prompts as token ids of chat turns."""
    return [engine.encode(engine.turn(prompt))[1] for prompt in prompts]


def run_prompts(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> int:
    """Run prompts one by one; the tokens made."""
    return sum(_together(engine, [prompt], params) for prompt in prompts)


def _together(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> int:
    return sum(len(result.token_ids) for result in engine.generate(prompts, params))


def _batch(size: int, engine: Engine, peer: Peer, rounds: int, console: Console) -> PairedSides:
    prompts = encode(engine, PLAIN[:size])
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    sides: dict[str, Side] = {
        "specscope": lambda: _together(engine, prompts, params),
        "generate()": lambda: peer.generate(prompts, TOKENS, eos=False),
    }
    goal = 1.6 if size == 1 else 2.0
    rates = measure_paired(sides, rounds, console, f"batch {size}")
    return PairedSides(f"no speculation, batch {size}", "specscope", "generate()", goal, rates)


def _rows(engine: Engine, rounds: int, console: Console) -> PairedSides:
    """Steps/s of the target alone: a verification of 16 rows over a single row, behind 200 tokens of context."""
    runner, table = engine.runner, BlockTable()
    runner.cache.reserve(table, CONTEXT + ROWS, 0)

    def steps(rows: int) -> Side:
        tree = DraftTree.build(list(range(rows - 1)), list(range(-1, rows - 2)))
        segment = Segment.of_tree(table, CONTEXT, [0], tree, logits=True)

        def run() -> int:
            for _ in range(TOKENS):
                runner.forward([segment])
            return TOKENS

        return run

    sides = {f"{ROWS} rows": steps(ROWS), "1 row": steps(1)}
    rates = measure_paired(sides, rounds, console, "rows of a step")
    runner.cache.truncate(table, 0)
    return PairedSides("forward passes, 16 rows over 1", f"{ROWS} rows", "1 row", 1 / 1.35, rates)


def _copying(
    plain: Engine, ngram: Engine, own: Engine | None, peer: Peer, rounds: int, console: Console
) -> list[PairedSides]:
    prompts = encode(plain, COPYING)
    params = SamplingParams(max_tokens=COPY_TOKENS)

    def lookup() -> int:
        return sum(peer.generate([p], COPY_TOKENS, eos=True, prompt_lookup_num_tokens=LOOKUP) for p in prompts)

    sides: dict[str, Side] = {
        "ngram": lambda: run_prompts(ngram, prompts, params),
        "no speculation": lambda: run_prompts(plain, prompts, params),
        "prompt lookup": lookup,
    }
    if own is not None:
        sides[own.drafter.name] = lambda: run_prompts(own, prompts, params)
    rates = measure_paired(sides, rounds, console, "copying, batch 1")
    found = [
        PairedSides("ngram on copying, batch 1", "ngram", "no speculation", 1.5, rates),
        PairedSides("", "ngram", "prompt lookup", 1.1, rates),
    ]
    if own is not None:
        found.append(PairedSides("default on copying, batch 1", own.drafter.name, "no speculation", 2.5, rates))
    return found


def _unseen(plain: Engine, own: Engine, phases: PhaseTimes, rounds: int, console: Console) -> PairedSides:
    """The default drafter with everything recorded, over no speculation with nothing recorded."""
    prompts = encode(plain, unseen_prompts(EAGLE_PROMPTS))
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    drafts = f"{own.drafter.name}, recorded"
    sides: dict[str, Side] = {
        drafts: lambda: watched(own, phases, prompts, params),
        "no speculation": lambda: run_prompts(plain, prompts, params),
    }
    rates = measure_paired(sides, rounds, console, "unseen prompts, batch 1")
    return PairedSides("default on unseen prompts, batch 1", drafts, "no speculation", 1.3, rates)


def watched(engine: Engine, phases: PhaseTimes, prompts: Sequence[Sequence[int]], params: SamplingParams) -> int:
    """Run prompts one by one with everything recorded, to a file and to `phases`; the tokens made."""
    with tempfile.TemporaryDirectory() as folder:
        options = OutputOptions(str(Path(folder) / "run.jsonl"), None, None, SpanLevel.TREES, 0)
        outputs = Outputs(options, engine.bus, engine.run_info, engine.vocabulary, params)
        engine.subscribe(phases, lossless=True)
        try:
            return run_prompts(engine, prompts, params)
        finally:
            outputs.close()


class PhaseTimes:
    """A sink that keeps where the time of steps with drafts goes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # of each step
        self.ns: dict[str, list[int]] = {}  # by phase, and by drafting pass; a pass is not in every step

    def __call__(self, record: StepRecord) -> None:
        """Take a record."""
        if not any(len(part.tree) for part in record.requests):
            return
        self.tokens.append(sum(part.emitted for part in record.requests))
        for phase in (*record.phases, *record.passes):
            name = f"  {phase.name}" if phase in record.passes else phase.name
            self.ns.setdefault(name, []).append(phase.end_ns - phase.start_ns)

    def show(self, console: Console) -> None:
        """Print the median milliseconds of each phase and pass."""
        if not self.tokens:
            return
        title = f"a step with drafts: {sum(self.tokens) / len(self.tokens):.2f} tokens"
        table = Table(title=title, title_justify="left")
        for column in ("phase", "ms", "of steps"):
            table.add_column(column, justify="left" if column == "phase" else "right")
        for name, ns in self.ns.items():
            share = f"{len(ns) / len(self.tokens):.0%}"
            table.add_row(name, f"{median(ns) / 1e6:.2f}", share, style="dim" if name.startswith(" ") else "")
        console.print(table)


def show_pass(engine: Engine, phases: PhaseTimes, console: Console) -> None:
    """Print what a drafting pass after the first takes, beside the time that reading its weights takes."""
    ns, drafter = phases.ns.get("  pass 2", []), engine.drafter
    if not ns or not isinstance(drafter, Eagle) or not isinstance(drafter.runner, HeadRunner):
        return
    read = (drafter.runner.head.midlayer, drafter.runner.head.layers, drafter.runner.lm_head)
    size = 2 * sum(weight.numel() for part in read for weight in part.parameters())  # repacked in 16 bits
    bandwidth = read_bandwidth(engine.runner.loaded.device)
    console.print(
        f"a drafting pass takes {median(ns) / 1e6:.2f} ms, {median(ns) / 1e9 / (size / bandwidth):.1f} times what its "
        f"{size / 1e6:.1f} MB take at {bandwidth / 1e9:.0f} GB/s",
        highlight=False,
    )
