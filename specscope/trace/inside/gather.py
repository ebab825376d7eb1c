"""What evidence needs of a sampler's tensors, gathered on their device: some tens of numbers a row, in two copies.

Nothing here waits for the device. The numbers are copied behind the work that is queued there, into pinned memory, and
read when they have come, a step or two later.

R rows of logits over V tokens, of B requests; a request's rows follow one another. Rows are asked for by ranges and
worked on in parts, so that no copy of all of them need exist at once: the engine has left little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specscope.trace.inside.gathered import Gathered, Sent
from specscope.trace.record.notes import TINY, TOP

PART = 2**24  # numbers in a part: rows times tokens
Columns = dict[str, Tensor]
Range = Callable[[int, int], Tensor]  # rows from..to of a tensor [., V]


@dataclass
class Scores:
    """What the drafter itself gave for some of the rows."""

    rows: Tensor  # [s] which
    logits: Range  # of these s


@dataclass
class Rows:
    """Functions of a range give float32 [., V]. Nothing here waits for the device."""

    tokens: Tensor  # [R] the draft that each row judges; below 0 where there is none
    request: Tensor  # [R] its request
    first: Tensor  # [B] a request's first row
    drafted: Tensor  # [B] how many of its rows judge a draft
    accepted: Tensor  # [B]
    final: Tensor  # [B] the token behind the accepted ones
    greedy: Tensor  # [B] whether its temperature is 0
    raw: Callable[[Tensor], Tensor]  # the target's logits at some of the rows, before any rule
    target: Range  # and after every rule
    vocabulary: int  # V
    probs: Range | None = None  # p [R]; None where all requests are greedy
    q: Range | None = None  # [R] what drafts were sampled from; None where they are deterministic
    whole: Range | None = None  # p [B] at the row of the final token; None where all requests are greedy
    whole_q: Range | None = None  # q [B] there
    coins: Tensor | None = None  # [R]
    scores: Sequence[Scores] = ()
    scored: list[int] = field(default_factory=list)  # [B] rows that have scores, from the first on; empty: none have
    seeds: Tensor | None = None  # int64 [B] where coins follow from a seed
    positions: Tensor | None = None  # int64 [R] and a position
    longest: int = 0  # drafts of a chain at most, where chains are verified as blocks
    by_step: bool = False  # the chain is verified as one block
    step_seeds: bool = False  # and each draft's coin has a seed of its own
    confidence: Tensor | None = None  # [R] what the drafter thinks of its draft

    @property
    def ended(self) -> Tensor:
        """[B] the row that the final token was drawn at, or one behind all drafts."""
        return self.first + self.accepted


def gather(rows: Rows, *, full: bool) -> Gathered:
    """Queue the work and the copy."""
    count, requests = len(rows.tokens), len(rows.first)
    step = max(PART // rows.vocabulary, 1)
    of_rows = [_row_columns(rows, low, min(low + step, count), full) for low in range(0, count, step)]
    scale = _add_blocks(rows, of_rows, step) if rows.by_step and rows.probs is not None and of_rows else None
    of_ends = [_end_columns(rows, low, min(low + step, requests), scale, full) for low in range(0, requests, step)]
    tables = {"rows": _joined(of_rows), "ends": _joined(of_ends)}
    if full and rows.scores and of_rows:
        tables["scores"] = _score_columns(rows, tables["rows"]["top"][:, 0], step)
    columns = {(table, name): column for table, named in tables.items() for name, column in named.items()}
    scored = rows.scored if "scores" in tables else ()
    return Gathered(Sent(columns), requests, scored, full, rows.step_seeds)


def _joined(parts: Sequence[Columns]) -> Columns:
    """The columns [.] or [., w] of all parts, which have the same ones."""
    joined = {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
    return {name: column.squeeze(1) if column.shape[1:] == (1,) else column for name, column in joined.items()}


def _row_columns(rows: Rows, low: int, high: int, full: bool) -> Columns:
    """What target and drafter gave at rows from..to."""
    token = rows.tokens[low:high].clamp_min(0)[:, None]
    greedy = rows.greedy[rows.request[low:high]]
    largest, best = rows.target(low, high).max(1)
    hit = torch.where(largest.isfinite(), best == token[:, 0], torch.nan)[:, None]  # NaN is the largest of all to max
    made = {"token": rows.tokens[low:high], "choice": best, "p": hit}
    if full:
        made |= {"rank": hit == 1, "choice_p": torch.ones_like(best)}
    if rows.positions is not None:
        made["position"] = rows.positions[low:high]
    if rows.coins is not None:
        made["coin"] = rows.coins[low:high]
    if rows.confidence is not None:
        made["confidence"] = rows.confidence[low:high]
    if rows.probs is not None:
        p = rows.probs(low, high)
        likeliest, choice = p.max(1)
        here = p.gather(1, token)
        drawn = {"choice": choice, "p": here}
        if full:
            drawn |= {"choice_p": likeliest, "rank": _ranks(p, here)}
        made |= {name: torch.where(greedy, made[name].flatten(), value.flatten()) for name, value in drawn.items()}
        if full:
            made |= _spreads(p, ~greedy, "")
    if rows.q is not None:
        q = rows.q(low, high)
        here = q.gather(1, token)
        made["q"] = here
        if full:
            rank = _ranks(q, here)
            rank = torch.where(
                (rank == 1) & (q.argmax(1, keepdim=True) != token), 2, rank
            )  # of equal ones, one is first
            made |= {"q_rank": rank, **_spreads(q, ~greedy, "q_")}
    if full:
        weights = _weights(rows.raw(torch.arange(low, high, device=token.device)))
        mass = weights.sum(1, keepdim=True)
        top, tokens = weights.topk(min(TOP, rows.vocabulary), dim=1)
        made |= {"raw_p": weights.gather(1, token) / mass, "top": tokens, "top_p": top / mass}
    return made


def _add_blocks(rows: Rows, parts: list[Columns], step: int) -> Tensor:
    """Add to the parts what block verification decides by; returns the ratio [R] before each row."""
    p = torch.cat([part["p"].flatten() for part in parts])
    q = torch.cat([part["q"].flatten() for part in parts]) if rows.q is not None else None
    ratio = _ratios(rows, p, q, rows.longest)
    before = _before(rows, ratio)
    ahead = _masses(rows, before, step)
    for part, *columns in zip(parts, torch.split(ratio, step), torch.split(ahead, step), strict=True):
        part["ratio"], part["ahead"] = columns
    return before


def _ratios(rows: Rows, p: Tensor, q: Tensor | None, longest: int) -> Tensor:
    """[R] the ratio of the prefix that ends with each row's draft.

    `p`, `q` [R]: of the drafts; `longest`: the most drafts of a chain.
    """
    of_one = p if q is None else p / q
    place = torch.arange(len(p), device=p.device) - rows.first[rows.request]
    ratio = of_one.clamp_max(1)
    for position in range(1, longest):
        ratio = torch.where(place == position, (ratio.roll(1) * of_one).clamp_max(1), ratio)
    return ratio


def _before(rows: Rows, ratio: Tensor) -> Tensor:
    """[R] the ratio of the prefix before each row: 1 at a request's first."""
    is_first = torch.arange(len(ratio), device=ratio.device) == rows.first[rows.request]
    return torch.where(is_first, 1, ratio.roll(1))


def _masses(rows: Rows, scale: Tensor, step: int) -> Tensor:
    """[R] the mass that scaled p has beyond q at each row."""
    assert rows.probs is not None
    parts = []
    for low in range(0, len(scale), step):
        high = min(low + step, len(scale))
        left = rows.probs(low, high) * scale[low:high, None]
        if rows.q is not None:
            parts.append((left - rows.q(low, high)).clamp_min(0).sum(1))
        else:  # all of q is at the draft
            token = rows.tokens[low:high].clamp_min(0)[:, None]
            parts.append(left.scatter(1, token, 0).sum(1))
    return torch.cat(parts) if parts else scale


def _score_columns(rows: Rows, choice: Tensor, step: int) -> Columns:
    """What the drafter itself gave at the rows that it scored. `choice` [R]: the target's likeliest token, raw."""
    made: list[tuple[Tensor, Columns]] = []
    for scores in rows.scores:
        for low in range(0, len(scores.rows), step):
            places = scores.rows[low : low + step]
            weights = _weights(scores.logits(low, low + step))
            mass = weights.sum(1, keepdim=True)
            wanted = weights.gather(1, choice[places][:, None])
            rank = (weights > wanted).sum(1, keepdim=True) + 1
            top, tokens = weights.topk(min(TOP, weights.shape[1]), dim=1)
            raw = _weights(rows.raw(places))
            scored = {
                "choice_rank": torch.where(wanted > 0, rank, 0),
                "choice_q": wanted / mass,
                "prob": weights.gather(1, rows.tokens[places].clamp_min(0)[:, None]) / mass,
                "outside": torch.where(weights == 0, raw, 0).sum(1) / raw.sum(1),
                "draft_top": tokens,
                "draft_top_p": top / mass,
            }
            made.append((places, scored))
    columns: Columns = {}
    for name, first in made[0][1].items():
        columns[name] = first.new_zeros(len(rows.tokens), *first.shape[1:])
        for places, scored in made:
            columns[name][places] = scored[name]
    return _joined([columns])


def _end_columns(rows: Rows, low: int, high: int, scale: Tensor | None, full: bool) -> Columns:
    """The outcome of requests from..to, and what their final tokens were drawn from.

    `scale` [R]: of p at each row, before q is taken from it; 1 where None.
    """
    made = {name: getattr(rows, name)[low:high] for name in ("first", "drafted", "accepted", "final", "greedy")}
    if rows.seeds is not None:
        made["seed"] = rows.seeds[low:high]
    if rows.whole is None:
        return made
    whole, final = rows.whole(low, high), made["final"].clamp_min(0)[:, None]
    rejected = made["accepted"] < made["drafted"]
    if rows.whole_q is not None:
        scaled = whole if scale is None else whole * scale[rows.ended[low:high].clamp_max(len(scale) - 1)][:, None]
        left = (scaled - rows.whole_q(low, high)).clamp_min(0)
    else:
        token = rows.tokens[rows.ended[low:high].clamp_max(len(rows.tokens) - 1)] if len(rows.tokens) else final[:, 0]
        left = whole.scatter(1, token.clamp_min(0)[:, None], 0)
        left = torch.where((token < 0)[:, None], whole, left)
    mass = left.sum(1, keepdim=True)
    drawn = torch.where(rejected[:, None] & (mass > 0), left / mass.clamp_min(TINY), whole)
    made |= {"mass": mass, "final_p": drawn.gather(1, final)}
    if full:
        made |= {"final_target_p": whole.gather(1, final), **_spreads(drawn, ~made["greedy"], "final_")}
    return made


def _weights(logits: Tensor) -> Tensor:
    """[., V] a distribution that is not divided by its mass."""
    return (logits - logits.amax(1, keepdim=True)).exp()


def _ranks(p: Tensor, here: Tensor) -> Tensor:
    """[., 1] the rank of a token of probability `here`, from 1; 0 where that is 0."""
    return torch.where(here > 0, (p > here).sum(1, keepdim=True) + 1, 0)


def _spreads(p: Tensor, where: Tensor, prefix: str) -> Columns:
    """Entropy and varentropy in nats; 0 elsewhere."""
    logs = p.clamp_min(TINY).log()
    entropy = -(p * logs).sum(1)
    varentropy = (p * logs.square()).sum(1) - entropy.square()
    spreads = {prefix + "entropy": entropy, prefix + "varentropy": varentropy}
    return {name: torch.where(where, value.clamp_min(0), 0) for name, value in spreads.items()}
