"""`specscope bench serve`: loads one after another, on servers in turn, each after uncounted warm-up requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from specscope.bench.datasets import Dataset, Load, LoadRequest, built_in, read_dataset
from specscope.bench.drive import LoadRun, drive, unless_stopped
from specscope.bench.endpoint import Endpoint, RequestOptions
from specscope.bench.figures import figures
from specscope.bench.points import Figures, to_json
from specscope.bench.show import show_comparison, show_run, show_summary
from specscope.errors import UserError
from specscope.interrupt import Interrupt, interruptible
from specscope.measure.paired import write_figures
from specscope.terminal import text_console
from specscope.trace.history.wording import plural


@dataclass(frozen=True)
class LoadPlan:
    """What to measure."""

    urls: Sequence[str]
    loads: Sequence[Load]
    request: RequestOptions
    requests: int = 100
    warm_up: int = 4  # requests before the first run of each load on each server
    rounds: int = 1
    burstiness: float = 1.0
    model: str | None = None
    dataset: str | None = None
    key: str | None = None
    percentiles: Sequence[float] = field(default=(99.0,))
    detailed: bool = False


def run_serve(plan: LoadPlan, json_file: str | None, plot: str | None) -> int:
    """Measure, print and write; the exit code. Raises UserError."""
    if plot is not None:
        from specscope.bench.plot import write_plot
    console = text_console()
    dataset = built_in() if plan.dataset is None else read_dataset(plan.dataset)
    asks = dataset.take(plan.requests + plan.warm_up, plan.request.seed)
    console.print(_about(dataset, len(asks)), style="dim", highlight=False)
    if not plan.request.chat:
        for ask in asks:
            ask.text()  # refuses what is no plain prompt before anything is sent
    with interruptible() as interrupt:
        runs = asyncio.run(_Sweep(plan, asks, console, interrupt).run())
    code = interrupt.code if interrupt.asked else 0
    show_summary(runs, plan.percentiles, console)
    show_comparison(runs, console)
    if runs:
        try:
            if plot is not None:
                write_plot(runs, plan.percentiles, plot)
        except UserError:
            code = 2
            raise
        finally:
            write_figures(json_file, "serve", to_json(runs), source=plan.urls, code=code)
    return code


def _about(dataset: Dataset, taken: int) -> str:
    """The prompts of a run in words."""
    prompts = len(dataset.asks)
    words = [f"{plural(prompts, 'prompt')}, {dataset.layout}"]
    if taken > prompts:
        words.append(f"each is asked up to {-(-taken // prompts)} times in a run")
    if dataset.left_out:
        words.append(f"{plural(dataset.left_out, 'conversation')} left out: too short or too long")
    return "; ".join(words)


class _Sweep:
    def __init__(self, plan: LoadPlan, asks: Sequence[LoadRequest], console: Console, interrupt: Interrupt) -> None:
        self.plan, self.console, self.interrupt = plan, console, interrupt
        # the warm-up's requests are the last ones, so that no prefix cache holds the others
        self.asks, self.first = asks[: plan.requests], asks[plan.requests :]

    async def run(self) -> list[Figures]:
        """All runs; after Ctrl-C those that are complete. Raises UserError."""
        plan = self.plan
        runs: list[Figures] = []
        async with AsyncExitStack() as stack:
            servers = []
            for name, url in _names(plan.urls):
                server = await stack.enter_async_context(Endpoint(url, plan.request, name=name, key=plan.key))
                await unless_stopped(server.open(plan.model, (self.first or self.asks)[0]), self._stopped, [])
                servers.append(server)
            for load in plan.loads:
                for number in range(plan.rounds):
                    for server in servers if number % 2 == 0 else servers[::-1]:
                        if number == 0:
                            await self._warm_up(server, load)
                        if self._stopped():
                            return runs
                        run = await self._measure(LoadRun(server, load, number, len(self.asks), plan.burstiness))
                        runs.append(figures(run, plan.percentiles, detailed=plan.detailed))
                        show_run(runs[-1], plan.percentiles, self.console)
        return runs

    def _stopped(self) -> bool:
        return self.interrupt.asked

    async def _warm_up(self, server: Endpoint, load: Load) -> None:
        """Send the warm-up requests, at most as many at once as the load has."""
        if self.first and not self._stopped():
            at_once = replace(load, rate=None, concurrency=load.concurrency or len(self.first))
            await drive(LoadRun(server, at_once, 0, 0), self.first, self._stopped, lambda: None)

    async def _measure(self, run: LoadRun) -> LoadRun:
        with _progress(self.console) as bar:
            task = bar.add_task(_title(run, self.plan.rounds), total=run.asked, failed="")
            advance = _advance(bar, task, run)
            return await drive(run, self.asks, self._stopped, advance)


def _title(run: LoadRun, rounds: int) -> str:
    round_ = f", round {run.round + 1}/{rounds}" if rounds > 1 else ""
    return f"{run.server.name}, {run.load.name}{round_}"


def _advance(bar: Progress, task: TaskID, run: LoadRun) -> Callable[[], None]:
    def advance() -> None:
        failed = len(run.answers) - len(run.good) if run.answers[-1].error else 0
        bar.advance(task)
        if failed:
            bar.update(task, failed=f"{failed} failed")

    return advance


def _progress(console: Console) -> Progress:
    """A bar that is rarely drawn, to leave the processor to the measurement."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(
        *columns, TextColumn("{task.fields[failed]}"), console=console, transient=True, refresh_per_second=2
    )


def _names(urls: Sequence[str]) -> list[tuple[str, str]]:
    """(name, URL) of each server; one that is given twice is measured twice."""
    return [
        (f"{url} ({urls[:index].count(url) + 1})" if urls.count(url) > 1 else url, url)
        for index, url in enumerate(urls)
    ]
