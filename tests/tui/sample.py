"""Runs made up from fixed texts and a fixed seed: what an engine could have left behind, without an engine.

The drafter guesses the next tokens of a text, right or wrong by the seed; right guesses are accepted, wrong ones
rejected, so the text comes out whole and every number is of a believable size.
"""

import re
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
from textual.widgets import Input

from specscope.debug.answers import Answer
from specscope.debug.forked import Forked
from specscope.debug.viewer import Control, Viewer
from specscope.debug.views import DistributionView, NodeView, Removed, TopToken
from specscope.trace.history.history import History
from specscope.trace.record.records import (
    FinalKind,
    FinishReason,
    Outcome,
    RequestEnd,
    RequestInfo,
    RequestStep,
    RunInfo,
    StepRecord,
    Verdict,
)
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.reading import read_capture
from specscope.tree_shape import TreeShape, parse_tree
from specscope.tui.app import ScopeApp
from specscope.tui.standing import Standing
from tests.support import records as made
from tests.support.records import MS
from tests.support.samples import TRACES
from tests.waiting import comes

START_NS = 1_700_000_000_000_000_000
WIDE_TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 0, 0, 0)]"

TEXTS: dict[str, tuple[str, str, str]] = {  # id -> kind, prompt, what comes out
    "r0": (
        "code",
        "def fibonacci(n):\n",
        '    """Return the n-th Fibonacci number."""\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b'
        "\n    return a\n\n\nprint([fibonacci(i) for i in range(10)])\n",
    ),
    "r1": (
        "chat",
        "Why is the sky blue?",
        " Sunlight is scattered by the molecules of the air. Blue light is scattered more than red light, because its"
        " waves are shorter, and so it comes to the eye from every part of the sky. Near the horizon the light has to"
        " cross more air, and what is left of it is red. 🌅 That is why [b]sunsets[/b] are red.",
    ),
    "r2": (
        "translate",
        "Translate to German and Japanese: Good morning, how are you?",
        " Guten Morgen, wie geht es dir? おはようございます、お元気ですか?",
    ),
    "r3": (
        "summary",
        "Summarise: Speculative decoding lets a small model guess several tokens, which a large model checks at once.",
        " A small model guesses ahead, and a large one checks all of the guesses in one pass. Nothing is lost: what is"
        " kept has exactly the distribution of the large model, and only the time it takes is smaller.",
    ),
}


class Words:
    """A vocabulary that grows with the texts it is given; characters beyond ASCII come as single bytes."""

    def __init__(self) -> None:
        self.vocabulary = Vocabulary(special={0})
        self.vocabulary.pieces[0] = b"<|eos|>"
        self._ids: dict[bytes, int] = {b"<|eos|>": 0}

    def id(self, piece: bytes) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._ids)
            self.vocabulary.pieces[self._ids[piece]] = piece
        return self._ids[piece]

    def ids(self, text: str) -> list[int]:
        out: list[int] = []
        for part in re.findall(r" ?[A-Za-z]+|\s+|.", text):
            raw = part.encode()
            out += [self.id(raw)] if part.isascii() else [self.id(raw[i : i + 2]) for i in range(0, len(raw), 2)]
        return out


@dataclass
class Going:
    """A request on its way."""

    info: RequestInfo
    target: list[int]
    shape: TreeShape
    drawn: Drawn
    done: int = 0
    steps: int = 0
    drafter: str = "draft-model"
    output: list[int] = field(default_factory=list)


class Maker:
    """Makes steps one by one; the same ones for the same seed."""

    def __init__(self, seed: int = 7, chunk: int = 0) -> None:
        self.words = Words()
        self.history = History(run=run_info(), vocabulary=self.words.vocabulary)
        self.rng = np.random.default_rng(seed)
        self.going: list[Going] = []
        self.waiting: list[Going] = []
        self.ended: list[RequestEnd] = []
        self.chunk = chunk  # prompts longer than this take a prefill step of their own
        self.now = START_NS

    def add(self, name: str, kind: str, prompt: str, text: str, tree: str = "5", drawn: Drawn | None = None) -> None:
        shape = parse_tree(tree) if tree else TreeShape(())
        rule = drawn if drawn is not None else (Drawn.WITH_REPLACEMENT if shape.is_chain else Drawn.DETERMINISTIC)
        labels = {"kind": kind} if kind else {}
        info = made.info(name, prompt, self.words.ids(prompt), labels, arrived=self.now, admitted=self.now + MS)
        names = {True: "draft-model", False: "eagle3"}
        drafter = names[shape.is_chain] if len(shape) else "none"
        self.waiting.append(Going(info, [*self.words.ids(text), 0], shape, rule, drafter=drafter))

    def step(self, batch: int = 8) -> StepRecord:
        admitted = []
        while self.waiting and len(self.going) < batch:
            self.going.append(self.waiting.pop(0))
            admitted.append(self.going[-1].info)
        parts, finished = [], []
        for request in list(self.going):
            parts.append(self._part(request))
            if request.done >= len(request.target):
                self.going.remove(request)
                finished.append(made.end(request.info, request.output, FinishReason.EOS, finished=self.now))
        used = sum((len(g.info.prompt_tokens) + g.done) // 16 + 1 for g in self.going)
        phases = made.phases(self.now, (1, 9, 24, 2, 1))
        self.now = phases[-1].end_ns
        happened = {"admitted": tuple(admitted), "finished": tuple(finished), "waiting": len(self.waiting)}
        blocks = {"blocks_used": used, "blocks_free": 256 - used}
        return made.record(len(self.history.steps), parts, phases, **happened, **blocks)

    def _part(self, request: Going) -> RequestStep:
        prompt, index = len(request.info.prompt_tokens), request.steps
        request.steps += 1
        if index == 0 and self.chunk and prompt > self.chunk:
            return made.part(request.info.id, DraftTree.empty(), None, context=0, prefill=self.chunk, drafter="none")
        tree, verdict = self._judge(request)
        tokens = [*tree.token[verdict.path].tolist(), verdict.token]
        emitted = min(len(tokens), len(request.target) - request.done)
        context, fed = (prompt + request.done - 1, 0) if index else (0, prompt - 1)
        request.done += emitted
        request.output += tokens[:emitted]
        how = {"index": index, "context": context, "prefill": fed, "emitted": emitted}
        return made.part(request.info.id, tree, verdict, drafter=request.drafter if len(tree) else "none", **how)

    def _judge(self, request: Going) -> tuple[DraftTree, Verdict]:
        shape = request.shape if request.done else TreeShape(())
        n, rng, right = len(shape), self.rng, request.target[request.done :] + [0] * 16
        token, good = np.zeros(n, np.int32), np.zeros(n, bool)
        for node, above in enumerate(shape.parent):
            on_path = above == ROOT or good[above]
            hit = on_path and not any(good[e] for e in shape.children(above) if e < node) and rng.random() < 0.58
            good[node] = hit
            token[node] = right[shape.depth[node] - 1] if hit else rng.integers(1, len(self.words.vocabulary.pieces))
        path: list[int] = []
        refused: list[int] = []
        while children := shape.children(path[-1] if path else ROOT):
            hits = [child for child in children if good[child]]
            refused += [child for child in children if not hits or child < hits[0]]
            if not hits:
                break
            path.append(hits[0])
        outcome = made.outcomes(n, path, refused)
        return self._numbers(request, token, outcome, path, made.kind_of(shape.parent, path), right[len(path)])

    def _numbers(
        self, request: Going, token: np.ndarray, outcome: np.ndarray, path: list[int], kind: FinalKind, final: int
    ) -> tuple[DraftTree, Verdict]:
        n, rng = len(token), self.rng
        accepted, tried = outcome == Outcome.ACCEPTED, outcome != Outcome.UNTRIED
        p = np.where(accepted, rng.uniform(0.35, 0.99, n), rng.beta(0.5, 9, n)).astype(np.float32)
        fixed = request.drawn is Drawn.DETERMINISTIC
        q = np.ones(n, np.float32) if fixed else rng.uniform(0.15, 0.95, n).astype(np.float32)
        p = np.where(accepted, p, np.minimum(p, 0.8 * q)).astype(np.float32)
        a = np.minimum(1, p.astype(float) / q)
        coin = np.where(accepted, a * rng.uniform(0.02, 0.98, n), a + (1 - a) * rng.uniform(0.02, 0.98, n))
        tree = DraftTree.build(token.tolist(), request.shape.parent if n else (), q.tolist(), request.drawn)
        numbers = {"p_trial": p * tried, "q_trial": q * tried, "accept_prob": a * tried, "coin": coin * tried}
        numbers["residual_mass"] = np.where(outcome == Outcome.REJECTED, 1 - 0.6 * p.astype(float), 0.0)
        last = {"final_p": float(rng.uniform(0.2, 0.99)), "final_coin": float(rng.uniform(0.01, 0.99))}
        return tree, made.verdict(outcome, path, final, kind, p=p, **numbers, **last)

    def run(self, limit: int = 1000, batch: int = 8) -> History:
        while (self.going or self.waiting) and limit:
            self.history.append(self.step(batch))
            limit -= 1
        return self.history


def run_info() -> RunInfo:
    model, engine = "SmolLM2-135M-Instruct", ("cpu", "bfloat16", "torch", 0, (0,), 2048, 256, 16)
    return RunInfo("run-1", model, "abc", "draft-model", model, "5", *engine, {}, {})


def maker(seed: int = 7) -> Maker:
    """Four requests: two chains, a wide tree, and one without drafts."""
    made = Maker(seed, chunk=16)
    for (name, (kind, prompt, text)), tree in zip(TEXTS.items(), ("5", WIDE_TREE, "", "3x4"), strict=True):
        made.add(name, kind, prompt, text, tree, Drawn.WITHOUT_REPLACEMENT if tree == "3x4" else None)
    return made


def replay(position: int | None = None, seed: int = 7) -> Viewer:
    """A finished run, looked at from `position`, from its end by default."""
    history = maker(seed).run()
    viewer = Viewer(history)
    viewer.position = len(history.steps) - 1
    if position is not None:
        viewer.goto(position)
    return viewer


def forked(seed: int = 7) -> Forked:
    """Two runs of one request that part after a few steps, the second by force."""
    first, second = (maker(s).run().requests["r1"].steps for s in (seed, seed + 1))
    start = next(i for i, step in enumerate(first) if step.verdict is not None)
    original = tuple(first[start : start + 9])
    return Forked(
        "r1", start, "temperature=0.9, node 0 rejected", original, (*original[:3], *second[6:11]), 40, "float32", True
    )


def distribution(token: int, first: int, sharp: float, **more) -> DistributionView:
    """A made-up distribution over the tokens from `first` on, the likeliest with probability `sharp`."""
    top = tuple(TopToken(first + at, sharp * (1 - sharp) ** at) for at in range(12))
    rank = next((at for at, one in enumerate(top, 1) if one.token == token), 40)
    prob = top[rank - 1].prob if rank <= 12 else 0.0004
    return DistributionView(top, 2.31 - sharp, prob, rank, **more)


def node_view(request: str = "r1", step: int = 14, node: int | None = 0, **more) -> NodeView:
    """A made-up answer about a node."""
    token = 20 if node is None else 12 + node
    values = {
        "raw": distribution(token, 10, 0.31),
        "p": distribution(token, 10, 0.47),
        "draft": distribution(token, 12, 0.62),
        "q": distribution(token, 12, 0.8),
        "removed": (Removed("top-k 20", 49_132, 0.0812), Removed("top-p 0.95", 1, 0.00004)),
        "choice_rank": 3,
        "kl": 0.832,
        "tv": 0.41,
        "computed": False,
    }
    return NodeView(request, step, 0, node, token, **{**values, **more})


class FakeEngine(Control):
    """A Control in memory: makes a step a poll while it runs, or when it is told to."""

    obeys = True
    progress = ""

    def __init__(self, made: Maker, status: str = "paused", ready: int = 0) -> None:
        super().__init__()
        self.made, self.state, self.pending = made, status, ready
        self.looked: list[tuple[int, str, int | None]] = []
        self.answers = True  # whether it answers what it is asked about nodes
        self.lines: list[str] = []
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.closed = False

    def poll(self, history: History) -> None:
        steps = self.pending or (1 if self.state == "running" else 0)
        self.pending = 0
        for _ in range(steps):
            history.append(self.made.step())

    def ask(self, verb: str, value=None) -> None:
        if verb == "debug":
            line, *_ = value
            self.lines.append(line)
            self.news.append(Answer(line, f"step 11  {line}" if line.startswith("request") else f"heard {line}"))
        elif verb == "look":
            self.looked.append(value)
            step, request, node = value
            self.node_view = node_view(request, step, node) if self.answers else self.node_view
        elif verb in ("submit", "cancel"):
            (self.submitted if verb == "submit" else self.cancelled).append(value)
        else:
            self.state = "running" if verb == "resume" else "paused"
            self.pending = 1 if verb == "step" else self.pending

    def close(self) -> None:
        self.closed = True

    @property
    def status(self) -> str:
        return self.state


def live(ready: int = 20, status: str = "paused") -> tuple[Viewer, FakeEngine]:
    """An engine that has made `ready` steps, and the viewer over it."""
    engine = FakeEngine(maker(), status, ready)
    return Viewer(engine.made.history, engine), engine


async def until(pilot, condition) -> None:
    """Wait for what comes a little later, however slow the machine is."""

    async def is_there() -> bool:
        await pilot.pause()
        return condition()

    await comes(is_there)


@asynccontextmanager
async def opened(app: ScopeApp, size: tuple[int, int] = (120, 40)):
    """An app in a terminal of this size, when it is drawn: (app, pilot)."""
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield app, pilot


def running(viewer: Viewer, size: tuple[int, int] = (120, 40), **more):
    """The screen over a viewer."""
    return opened(ScopeApp(viewer, **more), size)


def standing(viewer: Viewer) -> tuple[Standing, list[str]]:
    """Where a viewer stands, without a screen, and what is said of it."""
    said: list[str] = []
    place = Standing(viewer, lambda: place.settle(), said.append, list)
    place.settle()
    return place, said


async def pressed(pilot, *keys: str) -> None:
    """Keys, and what they bring is drawn."""
    await pilot.press(*keys)
    await pilot.pause()


async def answered(pilot, key: str, text: str) -> None:
    """The dialog of a key, with a text in it, and Enter."""
    await pilot.press(key)
    pilot.app.screen.query_one(Input).value = text
    await pilot.press("enter")


def notes(app: ScopeApp) -> list[str]:
    """What it has said in passing."""
    return [note.message for note in app._notifications]


def over(name: str) -> Viewer:
    """A replay of one of the sample captures, at its end."""
    viewer = Viewer(read_capture(TRACES / f"{name}.jsonl").history)
    viewer.goto_end()
    return viewer


def told(lines) -> str:
    """Lines without their inks."""
    return "\n".join("".join(text for text, _ in line) for line in lines)


def text_of(panel) -> str:
    """What a panel shows."""
    return told(panel.sheet.lines)
