"""Samplers of people: the standard rule in a few lines, with mistakes to plant, and what they are called with."""

import numpy as np

from specscope.testing import VerifyCall


def calls(count, seed, mistake="", *, vocab=16, drafts=3, deterministic=False):
    """Calls of a sampler that makes a mistake. p [count, drafts + 1, V], q [count, drafts, V], drafted, outputs."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        p = rng.dirichlet(np.full(vocab, 0.4), drafts + 1).astype(np.float32)
        q = ((p[:-1] + rng.dirichlet(np.full(vocab, 0.4), drafts)) / 2).astype(np.float32)
        drafted = np.array([draw(rng, row) for row in q])
        seen = np.eye(vocab)[drafted] if deterministic else q
        output = np.array(sampled(rng, p.astype(float), seen.astype(float), drafted.tolist(), mistake))
        made.append(VerifyCall(p, drafted, output, None if deterministic else q))
    return made


def draw(rng, row):
    return int(rng.choice(len(row), p=row.astype(float) / row.sum(dtype=float)))


def sampled(rng, p, q, drafted, mistake):
    """The tokens that come out."""
    out = []
    for place, token in enumerate(drafted):
        row, drafter = p[place + (mistake == "p off by one")], q[place]
        accept = row[token] / drafter[token]
        if mistake == "min(1, q/p)":
            accept = drafter[token] / row[token] if row[token] else 1.0
        if mistake == "accept by p > q":
            accept = float(row[token] > drafter[token])
        if mistake in ("ratio x 1.3", "the last is taken"):
            accept = accept * 1.3 if mistake == "ratio x 1.3" else float(place == len(drafted) - 1) or accept
        if rng.random() < accept:
            out.append(token)
            continue
        left = np.maximum((p[place + 1] if mistake == "residual off by one" else row) - drafter, 0)
        if mistake == "softmax":
            left = np.exp(left)
        if mistake == "a token never comes":
            left[0] = 0
            left = left if left.any() else row
        if mistake == "residual from raw p":
            left = row
        if mistake == "argmax of recovered":
            return [*out, int(left.argmax())]
        if mistake == "renormalisation left out":
            return [*out, min(int(np.searchsorted(np.cumsum(left), rng.random(), "right")), len(left) - 1)]
        return [*out, draw(rng, left)]
    return [*out, draw(rng, q[-1] if mistake == "bonus from q" else p[-1])]


def arrays(of):
    """Calls as people dump them from vLLM: a batch, outputs padded with -1."""
    output = np.full((len(of), len(of[0].drafted) + 1), -1)
    for row, call in zip(output, of, strict=True):
        row[: len(call.output)] = call.output
    made = {"target_probs": np.stack([call.p for call in of]), "output_token_ids": output}
    if of[0].q is not None:
        made["draft_probs"] = np.stack([call.q for call in of])
    return made | {"draft_token_ids": np.stack([call.drafted for call in of])}
