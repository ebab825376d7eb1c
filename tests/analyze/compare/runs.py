"""Runs of a made-up model over twelve tokens, sampled by the real rule with the real coins: in milliseconds.

A context's distribution follows from its last two tokens; the drafter's is a blurred copy. Faults can be planted at one
place of one request.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from specscope.analyze.compare.side import from_history
from specscope.trace.history.history import History
from specscope.trace.record.coins import Stream, coins
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import DraftNotes, Phase, RunInfo
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.trace.record.vocabulary import Vocabulary
from tests.analyze.histories import RUN, noted
from tests.support import records

WORDS = 12
MS = records.MS
KINDS = ("code", "prose")


@cache
def distribution(model, which, last):
    """p (0) or what q is blurred with (1), after these two tokens."""
    return np.random.default_rng([model, which, *last]).dirichlet(np.full(WORDS, 0.4))


@cache
def rounding(last):
    """How far each probability moves, of 1."""
    return np.random.default_rng([9, *last]).uniform(-1, 1, WORDS)


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

    def raw(self, last):
        p = distribution(self.model, 0, last)
        if self.noise:
            p = np.maximum(p + self.noise * rounding(last), 0)
            p = p / p.sum()
        return p

    def p(self, last):
        p = self.raw(last)
        return np.eye(WORDS)[np.argmax(p)] if self.temperature == 0 else p

    def q(self, last):
        q = (1 - self.blur) * distribution(self.model, 0, last) + self.blur * distribution(self.model, 1, last)
        return q / q.sum()


def draw(weights, coin):
    return int(min(np.searchsorted(np.cumsum(weights) / weights.sum(), coin, "right"), WORDS - 1))


def draft(made, text, seed, position, fault):
    tokens, qs, drawn = [], [], coins(seed, Stream.DRAFT, position, made.chain)
    for at in range(0 if fault == "no draft" else made.chain):
        q = made.q(tuple((text + tokens)[-2:]))
        token = draw(q, drawn[at]) if made.sampled else int(np.argmax(q))
        if fault in ("draw", "near draw") and at == 0:
            token = (token + 1) % WORDS
        tokens.append(token)
        qs.append(float(q[token]) if made.sampled else 1.0)
    return tokens, qs


def judge(made, text, seed, position, fault):
    """The standard rule on a chain."""
    tokens, qs = draft(made, text, seed, position, fault)
    n = len(tokens)
    coin = coins(seed, Stream.VERIFY, position, n + 1)
    coin = (coin + 0.5) % 1.0 if fault == "coin" else coin
    last = [tuple((text + tokens[:at])[-2:]) for at in range(n + 1)]
    given = np.array(list(map(made.p, last)))
    if fault == "p":
        given = 0.5 * given + 0.5 * np.roll(given, 1, axis=1)
    if fault == "deep p":  # as of a mask that is wrong below the first level
        given[1:] = 0.7 * given[1:] + 0.3 * np.roll(given[1:], 1, axis=1)
    p = given[np.arange(n), tokens] if n else np.zeros(0)
    accept = np.minimum(1, p / np.array(qs))
    fine = coin[:n] < accept
    fine[:1] ^= fault == "verdict"
    good = int(np.argmin([*fine, False]))  # how many are accepted
    left, residual = given[good], np.zeros(n)
    if good < n:
        left = np.maximum(left - made.q(last[good]), 0) if made.sampled else left * (np.arange(WORDS) != tokens[good])
        residual[good] = left.sum()
        left = left if left.sum() > 0 else given[good]
    token, whole, tried = draw(left, coin[n]), left / left.sum(), np.arange(n) <= good
    below = whole[:token].sum()
    margin = min(1.0, abs(coin[n] - below), abs(below + whole[token] - coin[n])) if whole[token] < 1 else 1.0
    parents = list(range(-1, n - 1))
    drawn = Drawn.WITH_REPLACEMENT if made.sampled else Drawn.DETERMINISTIC
    verdict = records.verdict(
        records.outcomes(n, range(good), range(good, min(good + 1, n))),
        range(good),
        token,
        records.kind_of(parents, range(good)),
        p=p,
        p_trial=p * tried,
        q_trial=qs * tried,
        accept_prob=accept * tried,
        coin=coin[:n],
        final_p=float(whole[token]),
        final_coin=float(coin[n]),
        final_margin=float(margin),
        residual_mass=residual,
    )
    return DraftTree.build(tokens, parents, qs, drawn), verdict


def entropy(rows):
    return records.floats([-(one[one > 0] * np.log(one[one > 0])).sum() for one in rows])


def notes(made, text, verdict, tree):
    """What target and drafter gave at the root and at each accepted node with a child."""
    nodes = [ROOT, *[int(node) for node in verdict.path if node < len(tree) - 1]]
    last = [tuple([*text, *tree.token[: node + 1].tolist()][-2:]) for node in nodes]
    raw, p, q = (np.array([give(one) for one in last]) for give in (made.raw, made.p, made.q))
    top, raw_p = np.argsort(-raw, axis=1, kind="stable")[:, :4], np.zeros(len(tree))
    below = np.array(nodes) + 1
    raw_p[below] = raw[np.arange(len(nodes)), tree.token[below]]
    final = float(made.p(tuple([*text, *tree.token[verdict.path].tolist()][-2:]))[verdict.token])
    more = {"choice_p": np.max(p, axis=1), "q_entropy": entropy(q) * made.sampled, "final_target_p": final}
    return noted(nodes, len(tree), top, np.take_along_axis(raw, top, 1), raw_p, entropy=entropy(p), **more)


def at_a_border(tree):
    """Of a chain whose first token was nearly another one."""
    none, far = np.zeros(0, np.int32), np.ones(len(tree))
    far[:1] = 1e-7
    return DraftNotes(tree.q, np.log(tree.q).cumsum(), none, none, np.zeros(0, np.float32), draw_margin=far)


def infos(made):
    for at in range(made.requests):
        params = SamplingParams(temperature=made.temperature, seed=made.seed * 1000 + at, max_tokens=made.tokens)
        tokens, labels = [at % WORDS, at // WORDS % WORDS, 3], {"kind": KINDS[at % 2]}
        yield records.info(f"r{at}", f"prompt {at}", tokens, labels, admitted=MS, params=params)


def make(made):
    """The run."""
    history = History(run=dataclasses.replace(made.run, dtype=made.dtype))
    history.vocabulary = Vocabulary({token: b"t%d " % token for token in range(WORDS)})
    waiting, going, output, index = [*infos(made)], [], {}, Counter()
    while waiting or going:
        admitted = [waiting.pop(0) for _ in range(min(len(waiting), made.batch - len(going)))]
        going += admitted
        output |= {info.id: [] for info in admitted}
        parts, ended, step = [], [], len(history.steps)
        for info in list(going):
            out = output[info.id]
            text = [*info.prompt_tokens.tolist(), *out]
            fault = made.plant.get((info.id, len(out)), "")
            tree, verdict = judge(made, text, info.params.seed, len(text) - 1, fault)
            context, fed = (len(text) - 1, 0) if index[info.id] else (0, len(text) - 1)
            part = records.part(
                info.id,
                tree,
                verdict,
                index=index[info.id],
                context=context,
                prefill=fed,
                emitted=min(len(verdict.path) + 1, made.tokens - len(out)),
                drafter="made",
                notes=at_a_border(tree) if fault == "near draw" else None,
                parents=notes(made, text, verdict, tree) if made.evidence and made.chain else None,
            )
            parts.append(part)
            out += part.output()
            index[info.id] += 1
            if len(out) >= made.tokens:
                going.remove(info)
                ended.append(records.end(info, out, finished=step * MS))
        around = {"admitted": tuple(admitted), "finished": tuple(ended), "waiting": len(waiting)}
        history.append(records.record(step, parts, [Phase("forward", step * MS, (step + 1) * MS)], **around))
    return history


MADE = {}  # the histories of sides, by how they were made


def side(run=RUN, dtype="float32", **how):
    """A run as a side of a comparison, of its own; what stands in the header changes no step."""
    key = repr(sorted(how.items()))
    if key not in MADE:
        MADE[key] = make(Made(**how))
    MADE[key].run = dataclasses.replace(run, dtype=dtype)
    return from_history(MADE[key], "made.jsonl")


def with_params(made, **params):
    """The side, its requests asked with these."""
    for request in made.requests:
        request.info = dataclasses.replace(request.info, params=dataclasses.replace(request.info.params, **params))
    return made


def field_of(found, name):
    """What was compared under a name."""
    return next(field for field in found.fields if field.name == name)
