"""Runs of a made-up model over twelve tokens, sampled by the real rule with the real coins: in milliseconds.

A context's distribution follows from its last two tokens; the drafter's is a blurred copy. Faults can be planted at one
place of one request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from specscope.analyze.compare.fields import Field
from specscope.analyze.compare.result import Comparison
from specscope.analyze.compare.side import Side, from_history
from specscope.trace.history.history import History
from specscope.trace.record.coins import Stream, coins
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import (
    DraftNotes,
    FinalKind,
    FinishReason,
    Outcome,
    ParentNotes,
    Phase,
    RequestEnd,
    RequestInfo,
    RequestStep,
    RunInfo,
    StepRecord,
    Verdict,
)
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.capture import CaptureWriter
from tests.analyze.histories import RUN

WORDS = 12
MS = 1_000_000
KINDS = ("code", "prose")


@dataclass
class Made:
    """How a run goes."""

    seed: int = 0
    requests: int = 24
    tokens: int = 40
    chain: int = 3
    temperature: float = 1.0
    dtype: str = "float32"
    blur: float = 0.3  # how much of q is another distribution than p
    noise: float = 0.0  # how far p moves, as by rounding
    sampled: bool = True  # False: the drafter's likeliest token, without q
    batch: int = 4
    model: int = 1
    evidence: bool = False  # whether what target and drafter gave is recorded
    run: RunInfo = RUN
    plant: Mapping[tuple[str, int], str] = field(default_factory=dict)  # (request, output tokens before): what is wrong
    _cache: dict = field(default_factory=dict)

    def distribution(self, which: int, last: tuple[int, int]) -> np.ndarray:
        """p (0) or what q is blurred with (1), after these two tokens."""
        key = (which, last)
        if key not in self._cache:
            rng = np.random.default_rng([self.model, which, *last])
            self._cache[key] = rng.dirichlet(np.full(WORDS, 0.4))
        return self._cache[key]

    def raw(self, last: tuple[int, int]) -> np.ndarray:
        p = self.distribution(0, last)
        if self.noise:
            moved = np.random.default_rng([9, *last]).uniform(-self.noise, self.noise, WORDS)
            p = np.maximum(p + moved, 0)
            p = p / p.sum()
        return p

    def p(self, last: tuple[int, int]) -> np.ndarray:
        p = self.raw(last)
        return np.eye(WORDS)[np.argmax(p)] if self.temperature == 0 else p

    def q(self, last: tuple[int, int]) -> np.ndarray:
        q = (1 - self.blur) * self.distribution(0, last) + self.blur * self.distribution(1, last)
        return q / q.sum()


def draw(weights: np.ndarray, coin: float) -> int:
    return int(min(np.searchsorted(np.cumsum(weights) / weights.sum(), coin, "right"), WORDS - 1))


def draft(made: Made, text: list[int], seed: int, position: int, fault: str) -> tuple[list[int], list[float]]:
    tokens, qs, drawn = [], [], coins(seed, Stream.DRAFT, position, made.chain)
    for at in range(0 if fault == "no draft" else made.chain):
        q = made.q(tuple((text + tokens)[-2:]))
        token = draw(q, drawn[at]) if made.sampled else int(np.argmax(q))
        if fault in ("draw", "near draw") and at == 0:
            token = (token + 1) % WORDS
        tokens.append(token)
        qs.append(float(q[token]) if made.sampled else 1.0)
    return tokens, qs


def judge(made: Made, text: list[int], seed: int, position: int, fault: str) -> tuple[DraftTree, Verdict]:
    """The standard rule on a chain."""
    tokens, qs = draft(made, text, seed, position, fault)
    n = len(tokens)
    coin = coins(seed, Stream.VERIFY, position, n + 1)
    if fault == "coin":
        coin = (coin + 0.5) % 1.0
    given = np.array([made.p(tuple((text + tokens[:at])[-2:])) for at in range(n + 1)])
    if fault == "p":
        given = 0.5 * given + 0.5 * np.roll(given, 1, axis=1)
    if fault == "deep p":  # as of a mask that is wrong below the first level
        given[1:] = 0.7 * given[1:] + 0.3 * np.roll(given[1:], 1, axis=1)
    p = np.array([given[at, tokens[at]] for at in range(n)])
    accept = np.minimum(1, p / np.array(qs))
    outcome, path = np.zeros(n, np.uint8), []
    p_trial, q_trial, residual = np.zeros(n), np.zeros(n), np.zeros(n)
    left = given[n]
    for at in range(n):
        p_trial[at], q_trial[at] = p[at], qs[at]
        fine = coin[at] < accept[at]
        if fault == "verdict" and at == 0:
            fine = not fine
        outcome[at] = Outcome.ACCEPTED if fine else Outcome.REJECTED
        if not fine:
            q = made.q(tuple((text + tokens[:at])[-2:])) if made.sampled else np.eye(WORDS)[tokens[at]]
            left = np.maximum(given[at] - q, 0) if made.sampled else given[at] * (1 - q)
            residual[at] = left.sum()
            left = left if left.sum() > 0 else given[at]
            break
        path.append(at)
    token = draw(left, coin[n])
    whole = left / left.sum()
    below = whole[:token].sum()
    margin = min(1.0, abs(coin[n] - below), abs(below + whole[token] - coin[n])) if whole[token] < 1 else 1.0
    kind = FinalKind.RECOVERED if len(path) < n else FinalKind.BONUS if n else FinalKind.TARGET
    drawn = Drawn.WITH_REPLACEMENT if made.sampled else Drawn.DETERMINISTIC
    tree = DraftTree.build(tokens, list(range(-1, n - 1)), qs, drawn)
    single = np.float32
    verdict = Verdict(
        outcome,
        p.astype(single),
        p_trial.astype(single),
        q_trial.astype(single),
        np.where(outcome > 0, accept, 0.0),
        coin[:n],
        residual,
        np.array(path, np.int32),
        token,
        kind,
        float(whole[token]),
        float(coin[n]),
        float(margin),
    )
    return tree, verdict


def notes(made: Made, text: list[int], verdict: Verdict, tree: DraftTree) -> ParentNotes:
    """What target and drafter gave at the root and at each accepted node with a child."""
    nodes = [ROOT, *[int(node) for node in verdict.path if node < len(tree) - 1]]
    last = [tuple([*text, *tree.token[: node + 1].tolist()][-2:]) for node in nodes]
    raw, p, q = ([give(one) for one in last] for give in (made.raw, made.p, made.q))
    k = len(nodes)

    def entropy(rows: list[np.ndarray]) -> np.ndarray:
        return np.array([-(one[one > 0] * np.log(one[one > 0])).sum() for one in rows], np.float32)

    order = np.argsort(-np.array(raw), axis=1, kind="stable")[:, :4].astype(np.int32)
    zero, whole = np.zeros(k, np.float32), np.zeros(k, np.int32)
    raw_p = np.zeros(len(tree), np.float32)
    for at, node in enumerate(nodes):
        raw_p[node + 1] = raw[at][tree.token[node + 1]]
    return ParentNotes(
        node=np.array(nodes, np.int32),
        top=order,
        top_p=np.take_along_axis(np.array(raw), order, 1).astype(np.float32),
        choice=np.argmax(p, axis=1).astype(np.int32),
        choice_p=np.max(p, axis=1).astype(np.float32),
        entropy=entropy(p),
        varentropy=zero,
        q_entropy=entropy(q) if made.sampled else zero,
        q_varentropy=zero,
        draft_top=np.zeros((k, 0), np.int32),
        draft_top_p=np.zeros((k, 0), np.float32),
        choice_rank=whole,
        choice_q=zero,
        outside=zero,
        raw_p=raw_p,
        rank=np.zeros(len(tree), np.int32),
        q_rank=np.zeros(len(tree), np.int32),
        final_entropy=0.0,
        final_varentropy=0.0,
        final_target_p=float(made.p(tuple([*text, *tree.token[verdict.path].tolist()][-2:]))[verdict.token]),
    )


def at_a_border(tree: DraftTree) -> DraftNotes:
    """Of a chain whose first token was nearly another one."""
    none, far = np.zeros(0, np.int32), np.ones(len(tree))
    far[:1] = 1e-7
    return DraftNotes(tree.q, np.log(tree.q).cumsum(), none, none, np.zeros(0, np.float32), draw_margin=far)


def infos(made: Made) -> list[RequestInfo]:
    found = []
    for at in range(made.requests):
        prompt = np.array([at % WORDS, at // WORDS % WORDS, 3], np.int32)
        params = SamplingParams(temperature=made.temperature, seed=made.seed * 1000 + at, max_tokens=made.tokens)
        found.append(RequestInfo(f"r{at}", 0, MS, f"prompt {at}", prompt, params, {"kind": KINDS[at % 2]}))
    return found


def make(made: Made) -> History:
    """The run."""
    history = History(run=dataclasses.replace(made.run, dtype=made.dtype))
    history.vocabulary = Vocabulary({token: b"t%d " % token for token in range(WORDS)})
    waiting, going, output, index = infos(made), [], {}, {}
    step = 0
    while waiting or going:
        admitted = []
        while waiting and len(going) < made.batch:
            admitted.append(waiting.pop(0))
            going.append(admitted[-1])
            output[admitted[-1].id], index[admitted[-1].id] = [], 0
        parts, ended = [], []
        for info in list(going):
            out = output[info.id]
            text = [*info.prompt_tokens.tolist(), *out]
            fault = made.plant.get((info.id, len(out)), "")
            tree, verdict = judge(made, text, info.params.seed, len(text) - 1, fault)
            emitted = min(len(verdict.path) + 1, made.tokens - len(out))
            first = index[info.id] == 0
            context, fed = (0, len(text) - 1) if first else (len(text) - 1, 0)
            given = notes(made, text, verdict, tree) if made.evidence and made.chain else None
            part = RequestStep(info.id, index[info.id], context, fed, "made", tree, verdict, emitted, parents=given)
            if fault == "near draw":
                part = dataclasses.replace(part, notes=at_a_border(tree))
            parts.append(part)
            out += part.output()
            index[info.id] += 1
            if len(out) >= made.tokens:
                going.remove(info)
                ended.append(RequestEnd(info, step * MS, FinishReason.LENGTH, "", np.array(out, np.int32)))
        phase = Phase("forward", step * MS, (step + 1) * MS)
        counts = (len(parts), len(waiting), 10, 90)
        history.append(StepRecord(step, (phase,), *counts, True, "", tuple(admitted), tuple(parts), (), tuple(ended)))
        step += 1
    return history


def side(made: Made | None = None, **how: object) -> Side:
    """The run as a side of a comparison."""
    return from_history(make(made or Made(**how)), "made.jsonl")


def with_params(made: Side, requests: int | None = None, **params: object) -> Side:
    """The side, its requests (or the first so many) asked with these."""
    for request in made.requests[:requests]:
        changed = dataclasses.replace(request.info.params, **params)
        request.info = dataclasses.replace(request.info, params=changed)
    return made


def with_rule(made: Side, rule: str) -> Side:
    """The side, verified by another rule."""
    vars(made.columns)["rule"] = np.full(len(made), rule)
    return made


def field_of(found: Comparison, name: str) -> Field:
    """What was compared under a name."""
    return next(field for field in found.fields if field.name == name)


def write(history, path):
    """The capture of a history."""
    writer = CaptureWriter(path, history.run, history.vocabulary)
    for record in sorted(history._known.values(), key=lambda record: record.step):
        writer(record)
    writer.close()
