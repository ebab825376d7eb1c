"""`python -m benchmarks figures`: what reading, starting, decoding and recording take, in one checkout or in several.

Each checkout runs in processes of its own, by what it offers to everyone: the command line, `Engine`, and its own
`benchmarks observe` and `benchmarks inside`. So another version is measured by the same lines, in turn with this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cpu import Peer
from benchmarks.figures import child
from benchmarks.paired import PairedSides, Side, measure_paired
from benchmarks.replay import lengthen
from specscope.engine.config import EngineConfig
from specscope.errors import UserError
from specscope.measure.prompts import unseen_prompts
from specscope.model.places import bundled_model
from specscope.terminal import text_console
from specscope.trace.wire.reading import read_capture

ROOT = Path(__file__).parents[2]
COMMIT = "5301d291"  # whose samples are read: later ones may be made anew
GENERATE = "generate()"
DRAFTING: dict[str, dict[str, Any]] = {"plain": {"drafter": "none"}, "drafting": {}}
TOKENS, LONG = 48, 500  # decoded of each prompt; tokens of a long prompt
Rows = dict[str, dict[str, float]]  # figures of each row
Part = dict[str, Rows]  # rows of each checkout


@dataclass(frozen=True)
class Plan:
    """What to measure, and how often."""

    checkouts: dict[str, Path]  # by name
    rounds: int
    steps: int  # of requests, in a long capture
    prompts: int
    target: str | None
    dtype: str
    busy: bool  # while engines start
    vllm: str | None  # bin/python of an environment with vLLM and the plugin

    def engine(self, drafting: str) -> dict[str, Any]:
        """The settings of an engine, plain or drafting."""
        return {**DRAFTING[drafting], "target": self.target, "dtype": self.dtype}


def run_figures(folder: str, of: Sequence[str], parts: Sequence[str], against: str | None, **how: Any) -> None:  # noqa: ANN401
    """Measure, print, and write DIR/figures.json after each part; parts that are there and not asked for stay."""
    named = {name: Path(place).resolve() for name, _, place in (one.partition("=") for one in of)}
    plan = Plan(named or {"this": ROOT}, **how)
    console, path = text_console(), Path(folder) / "figures.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = json.loads(path.read_text()) if path.exists() else {}
    before = {} if against is None else json.loads(Path(against).read_text())
    for part in parts:
        console.print(f"measuring {part}", style="dim")
        whole[part] = PARTS[part](plan, console)
        whole["of"] = {name: _commit(checkout) for name, checkout in plan.checkouts.items()}
        path.write_text(json.dumps(whole, indent=1) + "\n")
        _show(part, whole[part], {f"{name}, before": rows for name, rows in before.get(part, {}).items()}, console)


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=8"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def _show(part: str, now: Part, before: Part, console: Console) -> None:
    """Each figure by checkout, and the first one's over the last one's."""
    sides = {**now, **before}
    table = Table(title=part, title_justify="left", title_style="dim")
    for column in ("", "", *sides, "first over last"):
        table.add_column(column, justify="right" if column else "left")
    for row, name in dict.fromkeys((row, name) for rows in sides.values() for row, of in rows.items() for name in of):
        values = [rows.get(row, {}).get(name) for rows in sides.values()]
        ratio = f"{values[0] / values[-1]:.3f}" if len(values) > 1 and values[0] and values[-1] else ""
        table.add_row(row, name, *("" if value is None else f"{value:.4g}" for value in values), ratio)
    console.print(table)


def environment(checkout: Path) -> dict[str, str]:
    """What makes a process run this checkout's code."""
    return {**os.environ, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}


def taken(checkout: Path, *arguments: str) -> dict[str, float]:
    """Seconds and peak memory of a `specscope` command, which may find something wrong. Raises UserError."""
    command = [sys.executable, "-P", child.__file__, sys.executable, "-m", "specscope", *arguments]
    done = subprocess.run(command, env=environment(checkout), cwd=tempfile.gettempdir(), capture_output=True, text=True)
    code, figures = json.loads(done.stdout or "[null, {}]")
    if code not in (0, 1):
        raise UserError(f"{' '.join(arguments)} in {checkout}: {done.stderr.strip()[-300:]}")
    return dict(figures)


def _reading(plan: Plan, console: Console) -> Part:
    """The verbs over long captures, made of two samples."""
    found: Part = {of: {} for of in plan.checkouts}
    with tempfile.TemporaryDirectory() as folder:
        eagle, ngram = (str(_long(name, Path(folder), plan.steps)) for name in ("eagle", "ngram"))
        verbs = {"report": (eagle,), "verify": (eagle,), "compare": (eagle, ngram), "export": (eagle, "-o")}
        for (verb, words), (of, checkout) in product(verbs.items(), plan.checkouts.items()):
            out = (f"{folder}/{of}-tables",) if verb == "export" else ()
            found[of][verb] = taken(checkout, verb, *words, *out)
            console.print(f"{of}, {verb}: {found[of][verb]}", style="dim")
    return found


def _long(sample: str, folder: Path, steps: int) -> Path:
    """A sample's capture of so many steps of requests."""
    short, long = folder / f"short-{sample}.jsonl", folder / f"{sample}.jsonl"
    command = ["git", "-C", str(ROOT), "show", f"{COMMIT}:traces/{sample}.jsonl"]
    there = subprocess.run(command, capture_output=True).stdout
    short.write_bytes(there or (ROOT / "traces" / f"{sample}.jsonl").read_bytes())
    records = read_capture(short).history.steps
    lengthen(str(short), long, steps * len(records) // sum(len(record.requests) for record in records))
    return long


def _start(plan: Plan, console: Console) -> Part:
    """Small commands, and engines: the medians of several starts, the checkouts in turn."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {of: {} for of in plan.checkouts}
    for _, (of, checkout) in product(range(plan.rounds), plan.checkouts.items()):
        for command in ("--version", "help"):
            found[of].setdefault(command, []).append(taken(checkout, command))
        for name in DRAFTING:
            with engine(checkout, plan.engine(name)) as (started, _):
                found[of].setdefault(f"engine, {name}", []).append(started)
    return {
        of: {row: {name: median(one[name] for one in several) for name in several[0]} for row, several in rows.items()}
        for of, rows in found.items()
    }


@contextmanager
def engine(checkout: Path, settings: dict[str, Any]) -> Iterator[tuple[dict[str, float], Callable[..., Any]]]:
    """A checkout's engine in a process of its own: what its start took, and what asks it to work."""
    command = [sys.executable, "-P", child.__file__]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment(checkout), text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def ask(work: dict[str, Any]) -> dict[str, float]:
            questions.write(json.dumps(work) + "\n")
            questions.flush()
            if not (answer := answers.readline()):
                raise UserError(f"an engine of {checkout} stopped: run {child.__file__} by hand")
            return dict(json.loads(answer))

        yield ask(settings), ask


def _speed(plan: Plan, console: Console) -> Part:
    """Plain and drafting, of each checkout, and generate(), in turn; processor time is of whole processes."""
    peer = Peer(EngineConfig(**plan.engine("plain")))
    prompts = [_encoded(peer.tokenizer, text) for text in unseen_prompts(plan.prompts)]
    long = list(islice(cycle(chain(*prompts)), LONG))
    work = {
        "batch 1": {"batches": [[prompt] for prompt in prompts], "tokens": TOKENS},
        "batch 8": {"batches": [list(islice(cycle(prompts), 8))], "tokens": TOKENS},
        f"first of {LONG}": {"batches": [[long]], "tokens": 1},
    }
    found: Part = {name: {} for name in (*plan.checkouts, GENERATE)}
    with ExitStack() as stack:
        with _others(2 * plan.busy):
            engines = {
                f"{of}, {how}": stack.enter_context(engine(checkout, plan.engine(how)))[1]
                for of, checkout in plan.checkouts.items()
                for how in DRAFTING
            }
        for name, task in work.items():
            used: dict[str, Counter[str]] = {side: Counter() for side in (*engines, GENERATE)}
            sides: dict[str, Side] = {side: partial(_asked, ask, task, used[side]) for side, ask in engines.items()}
            sides[GENERATE] = partial(_generated, peer, task, used[GENERATE])
            rates = measure_paired(sides, plan.rounds, console, name)
            for side in sides:
                of, _, how = side.partition(", ")
                rate, processor_ms = median(rates[side]), used[side]["ms"] / used[side]["tokens"]
                figures = {"tokens_s": rate, "seconds": 1 / rate, "processor_ms": processor_ms}
                others = [GENERATE, f"{of}, plain", *(f"{later}, {how}" for later in list(plan.checkouts)[1:])]
                for other in others if how else ():
                    if other != side:
                        pair = PairedSides(name, side, other, 1.0, rates)
                        over = {"": pair.ratio, ", from": pair.interval[0], ", to": pair.interval[1]}
                        figures |= {f"over {other}{end}": ratio for end, ratio in over.items()}
                found[of][f"{name}, {how or 'plain'}"] = figures
    return found


def _encoded(tokenizer: Any, text: str) -> list[int]:  # noqa: ANN401
    if not tokenizer.chat_template:
        return list(tokenizer(text)["input_ids"])
    turn = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False))


@contextmanager
def _others(count: int) -> Iterator[None]:
    """So many processes that do nothing else than keep a processor busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()


def _asked(ask: Callable[..., dict[str, float]], task: dict[str, Any], used: Counter[str]) -> int:
    answer = ask(task)
    used.update({"tokens": int(answer["tokens"]), "ms": round(1000 * answer["processor_s"])})
    return int(answer["tokens"])


def _generated(peer: Peer, task: dict[str, Any], used: Counter[str]) -> int:
    before = time.process_time()
    made = sum(peer.generate(batch, task["tokens"], eos=False) for batch in task["batches"])
    used.update({"tokens": made, "ms": round(1000 * (time.process_time() - before))})
    return made


def _recording(plan: Plan, console: Console) -> Part:
    """Processor time with recording over without it: of the checkout's own engine, of transformers, and of vLLM."""
    found: Part = {of: {} for of in plan.checkouts}
    for of, checkout in plan.checkouts.items():
        pairs: dict[str, list[float]] = {}
        for bench in (("observe", "--no-screen"), ("inside",)):
            command = [sys.executable, "-m", "benchmarks", *bench, "--rounds", str(plan.rounds), "--json"]
            for row in _measured(command, checkout)["comparisons"]:
                pairs[row["name"]] = [sum(row["processor_ms"][row[side]].values()) for side in "ab"]
        if plan.vllm is not None:
            head = checkout / "specscope" / "heads" / "SmolLM2-135M-Instruct"
            script = [plan.vllm, "-P", str(ROOT / "tests" / "vllm" / "overhead.py")]
            pairs |= _measured([*script, str(bundled_model(print)), str(head), str(plan.rounds)], checkout)
        for name, (on, off) in pairs.items():
            found[of][name] = {"recorded_ms": on, "off_ms": off, "recorded over off": on / off}
    return found


def _measured(command: Sequence[str], checkout: Path) -> dict[str, Any]:
    """What a benchmark of the checkout writes to the file that is its last argument. Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        variables = environment(checkout) | {"SPECSCOPE_CAPTURE": str(Path(folder) / "run.jsonl")}
        done = subprocess.run([*command, str(out)], env=variables, cwd=checkout, capture_output=True, text=True)
        if not out.exists():
            raise UserError(f"{' '.join(command)} in {checkout}: {done.stderr.strip()[-300:]}")
        return dict(json.loads(out.read_text()))


PARTS = {"reading": _reading, "start": _start, "speed": _speed, "recording": _recording}
