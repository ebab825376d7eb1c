"""A request's rows in vLLM's forwards beside what they should be: inputs, operations, the cache as it was read."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specscope.analyze.locate.model.reference import ReferencePass
from specscope.measure.locate.inside_vllm.fed import Fed, FedText
from specscope.measure.locate.inside_vllm.sheet import exact, fed_rows_of, heads_of
from specscope.measure.locate.inside_vllm.tapped import DRAFTER, Tapped
from specscope.measure.locate.pairs import HeldPair
from specscope.trace.record.params import SamplingParams

TIE = 1e-4  # by which logits may differ where two tokens are as good


def inputs(tapped: Tapped, fed: Fed) -> Iterator[HeldPair]:
    """What the forward was fed, and what attention was told."""
    given, rows, made = fed.forward.tensors, fed.rows, fed.forward
    later = "later " if made.number else ""
    if int(rows.max()) >= len(given.get("tokens", ())):
        rows = rows[rows < len(given.get("tokens", ()))]
    own = torch.arange(len(rows))
    if "tokens" in given and len(rows):
        ours, right = given["tokens"][rows], fed.tokens[own]
        is_last = torch.zeros(len(rows), dtype=torch.bool)
        if made.who == DRAFTER and made.number == 0 and fed.last < len(rows):
            is_last[fed.last] = True
            yield exact("last token", fed, ours[is_last], right[is_last], own[is_last])
        if bool((~is_last).any()):
            yield exact("tokens", fed, ours[~is_last], right[~is_last], own[~is_last])
    if (positions := given.get("positions")) is not None and positions.dim() == 1 and len(rows):
        yield exact(f"{later}positions", fed, positions[rows], fed.positions[own], own)
    yield from _told(tapped, fed, own, later)


def _told(tapped: Tapped, fed: Fed, own: Tensor, later: str) -> Iterator[HeldPair]:
    given, made, batch = fed.forward.tensors, fed.forward, fed.batch
    rows, positions = fed.rows[own], fed.positions[own]
    known = own[fed.slots[own] >= 0]
    if "block_table" in given and len(known):
        blocks = torch.tensor(made.blocks[batch])
        last = min(int(positions[known].max()) // tapped.block_size + 1, given["block_table"].shape[1])
        same = given["block_table"][batch][:last] == blocks[:last]
        upto = torch.cumprod(same.long(), 0)[(positions[known] // tapped.block_size).clamp(max=last - 1)]
        yield exact("block table", fed, 1 - upto, torch.zeros(len(known)), known)
    slots = [(name, x) for name, x in given.items() if name.endswith(".slots")]
    if slots and len(known):
        right = fed.slots[known]
        told = [x[fed.rows[known]] for _, x in slots if int(fed.rows[known].max()) < len(x)]
        other = next((x for x in told if bool((x != right).any())), told[0] if told else None)
        if other is not None:
            yield exact("slots", fed, other, right, known)
    if "seq_lens" in given and len(own):
        start, end = made.starts[batch], made.starts[batch + 1]
        seen = int(given["seq_lens"][batch]) - (end - start) + (rows - start) + 1
        yield exact(f"{later}keys seen", fed, seen, positions + 1, own)


def computed(fed: Fed, right: ReferencePass, rows: Tensor, sizes: dict[str, int]) -> Iterator[HeldPair]:
    """What a model's operations gave, and the cache as attention read it. `rows`: which of the fed ones are known."""
    own = fed.rows[rows]
    for name, ours in fed.forward.tensors.items():
        plain, _, batch = name.rpartition(".")
        if name in right.taps and name != "lm_head" and int(own.max()) < len(ours):
            a, b, labels = as_rows(ours[own]), right.taps[name], right.rows
        elif plain.endswith(" read") and batch == str(fed.batch) and plain in right.taps:
            count, name = min(len(ours), len(right.keys)), plain
            a, b, labels = as_rows(ours[:count]), right.taps[plain][:count], right.keys[:count]
        else:
            continue
        if a.shape == b.shape:
            yield HeldPair(name, a, b, labels, heads_of(name, sizes))


def logits(fed: Fed, ours_rows: Tensor, right: Tensor, rows: Tensor, ids: Tensor | None) -> Iterator[HeldPair]:
    """The likeliest tokens' logits. right [rows, V]; ids [draft vocabulary]: the target's tokens of a head's own."""
    given, tokens = fed.forward.tensors.get("lm_head"), fed.forward.tensors.get("lm_head.tokens")
    if given is None or tokens is None or not len(ours_rows) or int(ours_rows.max()) >= len(given):
        return
    named = tokens[ours_rows].long()
    named = named if ids is None else ids[named]
    labels = fed_rows_of(fed.positions[rows], fed.tokens[rows])
    yield HeldPair("lm_head", given[ours_rows].float(), right.gather(1, named), labels, tokens=named)


def target_logit_rows(fed: Fed) -> tuple[Tensor, Tensor]:
    """(rows of the logits, which of the fed rows they are): of each request the row before its drafts, and theirs."""
    made, batch = fed.forward, fed.batch
    counts = [len(drafts) + 1 for drafts in made.drafts]
    end = made.scheduled[batch]
    rows = torch.arange(end - counts[batch], end)
    kept = rows[(rows < len(fed.rows)) & (rows >= 0)]
    kept = kept[fed.same[kept]]
    return sum(counts[:batch]) + kept - (end - counts[batch]), kept


def choices(
    fed: Fed, text: FedText, logit_rows: Tensor, rows: Tensor, params: SamplingParams, right: Tensor
) -> Iterator[HeldPair]:
    """The tokens that were committed behind rows, where nothing but the logits decides. right [rows, V].

    Of a greedy request beside the likeliest by vLLM's own logits; of a sampled one one that top-k and top-p leave.
    """
    given, tokens = fed.forward.tensors.get("lm_head"), fed.forward.tensors.get("lm_head.tokens")
    index = next(i for i, part in enumerate(text.parts) if part.index == fed.where.index)
    behind = fed.positions[rows] + 1
    kept = (behind >= text.before[index]) & (behind < text.after[index])
    if not bool(kept.any()) or not _is_plain(params):
        return
    taken = torch.tensor([text.tokens[int(place)] for place in behind[kept]])
    if params.temperature > 0:
        yield exact("choice", fed, taken, _left(right[kept], taken, params), rows[kept])
    elif given is not None and tokens is not None and int(logit_rows.max()) < len(given):
        yield _chosen("choice", fed, taken, tokens[logit_rows[kept]].long(), given[logit_rows[kept]], rows[kept])


def _is_plain(params: SamplingParams) -> bool:
    """Whether no token's logit is moved."""
    moved = params.penalised or params.logit_bias or params.min_tokens or params.structured_outputs is not None
    return not moved


def _left(logits: Tensor, taken: Tensor, params: SamplingParams) -> Tensor:
    """Tokens that may have been drawn: those that were, and the likeliest for one that top-k or top-p leaves out."""
    scores = logits / params.temperature
    own = scores.gather(1, taken[:, None])
    ahead = scores > own + TIE
    is_left = torch.ones(len(taken), dtype=torch.bool)
    if params.top_k:
        is_left &= ahead.sum(1) < params.top_k
        lowest = scores.topk(min(params.top_k, scores.shape[1])).values[:, -1:]
        scores = scores.masked_fill(scores < lowest - TIE, -torch.inf)
    is_left &= (scores.softmax(-1) * ahead).sum(1) < params.top_p + TIE
    return torch.where(is_left, taken, scores.argmax(1))


def parameters(fed: Fed) -> Iterator[HeldPair]:
    """Of drafted rows: the temperature, top-k or top-p that each was given, and its request's."""
    given, batch, number = fed.forward.tensors, fed.batch, 0
    while f"parameters.{number}.rows" in given:
        ours, of, ends = (given[f"parameters.{number}.{name}"] for name in ("rows", "of", "ends"))
        if batch < len(ends):
            first, end = 0 if not batch else int(ends[batch - 1]), int(ends[batch])
            place = len(fed.rows) - (end - first) - 1  # the row before the first draft judges it
            if end > first and place >= 0:
                rows = torch.arange(place, place + end - first)
                yield exact("parameters", fed, ours[first:end], of[batch].expand(end - first), rows)
        number += 1


def _chosen(name: str, fed: Fed, taken: Tensor, best: Tensor, scores: Tensor, rows: Tensor) -> HeldPair:
    """Whether a token is the likeliest, or as good as it."""
    good = (best == taken[:, None]) & (scores >= scores[:, :1] - TIE)
    right = torch.where(good.any(1), taken, best[:, 0])
    return exact(name, fed, taken, right, rows)


def drafts(fed: Fed, drafted: Tensor | None, ids: Tensor | None) -> Iterator[HeldPair]:
    """The token that a pass drafted greedily, and the likeliest by its logits. drafted [requests, passes]."""
    given, tokens = fed.forward.tensors.get("lm_head"), fed.forward.tensors.get("lm_head.tokens")
    number, batch = fed.forward.number, fed.batch
    if drafted is None or given is None or tokens is None or not fed.ended:
        return
    if drafted.dim() != 2 or number >= drafted.shape[1] or batch >= len(given):
        return
    best = tokens[batch : batch + 1].long()
    best = best if ids is None else ids[best]
    last = torch.tensor([fed.last])
    yield _chosen("draft", fed, drafted[batch, number].view(1).long(), best, given[batch : batch + 1], last)


def as_rows(x: Tensor) -> Tensor:
    """[rows, ...] as float32 [rows, width]."""
    return x.to(torch.float32).flatten(1) if x.dim() > 1 else x.to(torch.float32).view(-1, 1)
