"""A sampler in numpy that leaves whole evidence behind: healthy, or with one mistake put in.

Every place has a target distribution p and a drafter's q of its own, over a small vocabulary; a step drafts a tree,
judges it by the standard rule and draws the final token. Nothing of the engine is used.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from specscope.trace.history.history import History
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import DraftNotes, FinalKind, FinishReason, Outcome
from specscope.trace.record.tree import DraftTree, Drawn
from specscope.tree_shape import parse_tree
from tests.analyze.histories import RUN, record
from tests.support import records

PROMPT = [1, 2, 3]
FAULTS = {
    "noise reused": "the noise that drew a draft draws the recovered token too (vLLM 47386)",
    "accepts more": "a coin is divided by 1.25 before it is compared, and recorded as it was",
    "ratio by p": "q is left out of the ratio test",
    "not renormalised": "later siblings are tried against a residual that was not renormalised",
    "final from p": "after a rejection the final token is drawn from p",
    "sorted": "siblings are sorted by q after they were drawn",
    "pruned": "of one sibling more than the tree has, the least likely is dropped",
    "coins shared": "all siblings have one coin",
    "coin twice": "the coin that drew the draft draws the final token",
    "coins low": "coins are squared",
    "coins in series": "each coin is half the one before",
    "draft coins again": "the drafts of every step are drawn by the same coins",
    "draft coins judge": "a draft is judged by the coin that drew it",
    "draft coins low": "coins that draw drafts are squared",
    "draws beside": "a draft is the token before the one that its coin draws",
}


@dataclass
class Synthetic:
    """A sampler. `run` makes a history of so many requests and steps."""

    seed: int = 0
    tree: str = "2x2"
    drawn: Drawn = Drawn.WITHOUT_REPLACEMENT
    fault: str = ""
    vocab: int = 8
    p: tuple[float, ...] = ()  # everywhere, where it is given
    q: tuple[float, ...] = ()
    notes: bool = True  # whether the evidence tells of parents
    tells_draws: bool = False  # whether drafts are drawn by coins, which the evidence tells
    params: Mapping[str, object] = field(default_factory=lambda: {"temperature": 1.0})

    def __post_init__(self):
        assert self.fault in ("", *FAULTS)
        self.rng = np.random.default_rng(self.seed)
        self.shape = parse_tree(self.tree)
        self.same_coins = np.random.default_rng((self.seed, 1)).random(len(self.shape))  # of a sequence of its own

    def run(self, requests, steps):
        """Requests one after another: a prefill of the prompt's last token, then decode steps."""
        # Not our engine's: its coins come from numpy's generator
        history = History(run=dataclasses.replace(RUN, versions={}, eos_tokens=(), dtype="float32"))
        for r in range(requests):
            params = SamplingParams(max_tokens=10**6, seed=r, **self.params)
            info = records.info(f"r{r}", "", PROMPT, admitted=1, params=params)
            output, context, fed = [], 0, len(PROMPT) - 1
            for index in range(steps):
                tree, verdict, notes, parents = self.step()
                more = {"drafter": "synthetic", "notes": notes, "parents": parents}
                part = records.part(info.id, tree, verdict, index=index, context=context, prefill=fed, **more)
                context, fed = part.position + verdict.accepted + 1, 0
                output += part.tokens()
                ends = [records.end(info, output, FinishReason.CANCELLED, finished=2)] * (index == steps - 1)
                around = {"admitted": () if index else (info,), "finished": tuple(ends)}
                history.append(record(len(history.steps), [part], **around))
        return history

    def _p(self):
        p = np.array(self.p) if self.p else self.rng.dirichlet(np.full(self.vocab, 0.5))
        return np.maximum(p, 1e-6).astype(np.float32).astype(np.float64) / np.maximum(p, 1e-6).sum()

    def _q(self, p):
        if self.q:
            return np.array(self.q)
        q = 0.6 * p + 0.4 * self.rng.dirichlet(np.full(self.vocab, 0.7))
        return np.maximum(q, 1e-6) / np.maximum(q, 1e-6).sum()

    def step(self):
        """One decode step: its tree, its verdict, and what was noted of the drafts and of parents."""
        n, rng = len(self.shape), self.rng
        coin = self._coins(n + 1)
        p = [self._p() for _ in range(n + 1)]  # by row: the root's, then each node's
        q = [self._q(one) for one in p]
        noise = rng.gumbel(size=(n + 1, len(p[0])))
        draft_coin = rng.random(n + 1)
        token = np.zeros(n, np.int32)
        for row in range(-1, n):
            children = self.shape.children(row)
            if children:
                token[children] = self._siblings(q[row + 1], len(children), noise[row + 1], draft_coin[row + 1])
        notes = self._draw(q, token, coin) if self.tells_draws else None
        above = np.array(self.shape.parent, np.int32)
        drawn_q = [q[row + 1][t] for row, t in zip(above, token, strict=True)] if self._sampled else np.ones(n)
        tree = DraftTree(token, above, np.array(drawn_q, np.float32), np.full(n, self.drawn, np.uint8))
        return tree, *self._judge(tree, p, q, coin, noise, draft_coin, notes)

    @property
    def _sampled(self):
        return self.drawn != Drawn.DETERMINISTIC

    def _draw(self, q, token, coin):
        """Draw every node by a coin of its own; `token` and, where the fault says so, `coin` are filled in place."""
        n = len(token)
        mine = self.same_coins if self.fault == "draft coins again" else self.rng.random(n)
        mine = mine**2 if self.fault == "draft coins low" else mine
        low = np.zeros(n)
        for row in range(-1, n):
            left = q[row + 1].astype(np.float64).copy()
            for node in self.shape.children(row):
                ends = left.cumsum() / left.sum()
                token[node] = min(int(ends.searchsorted(mine[node], "right")), len(left) - 1)
                if self.fault == "draws beside" and token[node] and left[token[node] - 1] > 0:
                    token[node] -= 1
                low[node] = ends[token[node]] - left[token[node]] / left.sum()
                if self.drawn == Drawn.WITHOUT_REPLACEMENT:
                    left[token[node]] = 0
        if self.fault == "draft coins judge":
            coin[1:] = mine
        none, ones = np.zeros(0, np.int32), np.ones(n, np.float32)
        return DraftNotes(ones, 0 * ones, none, none, ones[:0], coin=mine.copy(), low=low)

    def _coins(self, count):
        coin = self.rng.random(count)
        if self.fault == "coins low":
            return coin**2
        if self.fault == "coins shared":
            return np.full(count, coin[0])
        if self.fault == "coins in series":
            for i in range(1, count):
                coin[i] = (coin[i - 1] + coin[i]) % 1 if i % 2 else coin[i - 1] * 0.5 + coin[i] * 0.5
        return coin

    def _siblings(self, q, count, noise, coin):
        if not self._sampled:
            return np.argsort(-q)[:count].tolist()
        if self.drawn == Drawn.WITH_REPLACEMENT:
            return self.rng.choice(len(q), count, p=q).tolist()
        if self.fault == "coin twice" and count == 1:
            return [_inverse(q, coin)]
        drawn = np.argsort(-(np.log(q) + noise))  # Gumbel's trick: without replacement
        if self.fault == "pruned":
            return [t for t in drawn[: count + 1] if t != min(drawn[: count + 1], key=lambda t: q[t])]
        drawn = drawn[:count]
        return sorted(drawn, key=lambda t: -q[t]) if self.fault == "sorted" else drawn.tolist()

    def _judge(self, tree, p, q, coin, noise, draft_coin, notes):
        n, row, path, tried, recovered = len(tree), -1, [], [], False
        p_trial, q_trial, accept, mass = np.zeros((4, n))
        outcome = np.zeros(n, np.uint8)
        of_p = [p[above + 1][token] for above, token in zip(tree.parent, tree.token, strict=True)]
        while (children := tree.children(row)) and not recovered:
            tried.append(row)
            left, of_q = p[row + 1], q[row + 1].copy()
            recovered = True
            for node in children:
                token = tree.token[node]
                q_trial[node] = of_q[token] if self._sampled else 1.0
                p_trial[node] = left[token]
                accept[node] = min(1.0, left[token] / q_trial[node])
                limit = min(1.0, left[token]) if self.fault == "ratio by p" else accept[node]
                value = coin[node + 1] / 1.25 if self.fault == "accepts more" else coin[node + 1]
                if value < limit:
                    outcome[node], recovered, row = Outcome.ACCEPTED, False, node
                    path.append(node)
                    break
                outcome[node] = Outcome.REJECTED
                left, mass[node] = self._residual(left, of_q, token)
                if self.drawn == Drawn.WITHOUT_REPLACEMENT and node != children[-1]:
                    of_q[token] = 0
                    of_q /= of_q.sum()
        final = left if recovered and self.fault != "final from p" else p[row + 1]
        final_coin = float(draft_coin[row + 1] if self.fault == "coin twice" else coin[0])
        token = self._final(final, final_coin, noise[row + 1], recovered)
        kind = FinalKind.RECOVERED if recovered else FinalKind.BONUS if path else FinalKind.TARGET
        numbers = {"p": of_p, "p_trial": p_trial, "q_trial": q_trial, "accept_prob": accept, "coin": coin[1:].copy()}
        last = {"residual_mass": mass, "final_p": float(final[token]), "final_coin": final_coin}
        verdict = records.verdict(outcome, path, token, kind, **numbers, **last)
        return verdict, notes, self._parents(tree, p, q, tried, final, p[row + 1], token) if self.notes else None

    def _residual(self, left, q, token):
        rest = np.maximum(left - q, 0) if self._sampled else np.where(np.arange(len(left)) == token, 0, left)
        mass = float(rest.sum())
        if mass <= 0:
            return left, mass
        return (rest if self.fault == "not renormalised" else rest / mass), mass

    def _final(self, final, coin, noise, recovered):
        if self.fault == "noise reused" and recovered:
            with np.errstate(divide="ignore"):
                return int(np.argmax(np.log(final) + noise))
        return _inverse(final / final.sum(), coin)

    def _parents(self, tree, p, q, tried, final, here, token):
        n, k = len(tree), len(tried)
        of_p, of_q = [p[row + 1] for row in tried], [q[row + 1] for row in tried]
        entropy = np.array([_entropy(one) for one in of_p]).reshape(k, 2)
        q_entropy = np.array([_entropy(one) if self._sampled else (0, 0) for one in of_q]).reshape(k, 2)
        top = np.array([np.argsort(-one)[:4] for one in of_p], np.int32).reshape(k, -1)
        rank, q_rank, raw = np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(n, np.float32)
        for row in tried:
            for node in tree.children(row):
                raw[node] = p[row + 1][tree.token[node]]
                rank[node] = 1 + (p[row + 1] > p[row + 1][tree.token[node]]).sum()
                q_rank[node] = 1 + (q[row + 1] > q[row + 1][tree.token[node]]).sum() if self._sampled else 0
        of_final = _entropy(final / final.sum())
        return records.parents(
            tried,
            n,
            top=top,
            top_p=np.array([one[t] for one, t in zip(of_p, top, strict=True)]).reshape(k, -1),
            choice=top[:, 0] if k else (),
            choice_p=[one.max() for one in of_p],
            entropy=entropy[:, 0],
            varentropy=entropy[:, 1],
            q_entropy=q_entropy[:, 0],
            q_varentropy=q_entropy[:, 1],
            raw_p=raw,
            rank=rank,
            q_rank=q_rank,
            final_entropy=of_final[0],
            final_varentropy=of_final[1],
            final_target_p=float(here[token]),
        )


def _inverse(probs, coin):
    return int(min(np.searchsorted(np.cumsum(probs), coin, "right"), np.flatnonzero(probs)[-1]))


def _entropy(probs):
    some = probs[probs > 0]
    entropy = float(-(some * np.log(some)).sum())
    return entropy, float((some * np.log(some) ** 2).sum()) - entropy**2
