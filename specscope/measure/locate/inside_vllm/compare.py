"""A request's rows in vLLM's forwards beside what they should be: inputs, operations, the cache as it was read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from specscope.analyze.locate.model.taps import relative
from specscope.measure.locate.inside_vllm.fed import Fed, FedText
from specscope.measure.locate.inside_vllm.sheet import HeldRows, as_rows, exact, fed_rows_of, heads_of
from specscope.measure.locate.inside_vllm.tapped import DRAFTER, Tapped
from specscope.trace.record.params import SamplingParams

TIE = 1e-4  # by which logits may differ where two tokens are as good
Named = Mapping[str, Tensor]


def inputs(tapped: Tapped, fed: Fed) -> Iterator[HeldRows]:
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


def _told(tapped: Tapped, fed: Fed, own: Tensor, later: str) -> Iterator[HeldRows]:
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


def operations(
    fed: Fed, right: Named, index: Tensor, allowed: float, sizes: dict[str, int], rows: Tensor | None = None
) -> Iterator[HeldRows]:
    """What a model's operations gave. `index`: the reference's rows; `rows`: which of the fed ones they are."""
    chosen = torch.arange(len(fed.rows)) if rows is None else rows
    labels = fed_rows_of(fed.positions[chosen], fed.tokens[chosen])
    for name, ours in fed.forward.tensors.items():
        if name not in right or name == "lm_head" or not len(chosen):
            continue
        reference = right[name]
        if int(fed.rows[chosen].max()) >= len(ours) or int(index.max()) >= len(reference):
            continue
        a, b = as_rows(ours[fed.rows[chosen]]), reference[index]
        if a.shape == b.shape:
            yield HeldRows(name, labels, a, b, relative(a, b, heads_of(name, sizes)), allowed)


def cache(
    fed: Fed, keys: Mapping[int, Tensor], values: Mapping[int, Tensor], tokens: list[int], allowed: float
) -> Iterator[HeldRows]:
    """Keys and values of each layer, as attention read them: by context position. keys, values: [context, width]."""
    for layer, right_keys in keys.items():
        for kind, right in (("keys", right_keys), ("values", values[layer])):
            name = f"layers.{layer}.self_attn.{kind} read"
            ours = fed.forward.tensors.get(f"{name}.{fed.batch}")
            if ours is None:
                continue
            count = min(len(ours), len(right))
            a, b = as_rows(ours[:count]), right[:count]
            if count and a.shape == b.shape:
                places = torch.arange(count)
                known = torch.tensor([*tokens[:count], *[-1] * (count - len(tokens[:count]))])
                yield HeldRows(name, fed_rows_of(places, known), a, b, relative(a, b), allowed)


def logits(
    fed: Fed, ours_rows: Tensor, right: Tensor, rows: Tensor, ids: Tensor | None, allowed: float
) -> Iterator[HeldRows]:
    """The likeliest tokens' logits. right [rows, V]; ids [draft vocabulary]: the target's tokens of a head's own."""
    given, tokens = fed.forward.tensors.get("lm_head"), fed.forward.tensors.get("lm_head.tokens")
    if given is None or tokens is None or not len(ours_rows) or int(ours_rows.max()) >= len(given):
        return
    named = tokens[ours_rows].long()
    named = named if ids is None else ids[named]
    a, b = given[ours_rows].float(), right.gather(1, named)
    labels = fed_rows_of(fed.positions[rows], fed.tokens[rows])
    yield HeldRows("lm_head", labels, a, b, relative(a, b), allowed, named)


def target_logit_rows(fed: Fed) -> tuple[Tensor, Tensor]:
    """(rows of the logits, which of the fed rows they are): of each request the row before its drafts, and theirs."""
    made, batch = fed.forward, fed.batch
    counts = [len(drafts) + 1 for drafts in made.drafts]
    end = made.scheduled[batch]
    rows = torch.arange(end - counts[batch], end)
    kept = rows[(rows < len(fed.rows)) & (rows >= 0)]
    kept = kept[fed.same[kept]]
    return sum(counts[:batch]) + kept - (end - counts[batch]), kept


def choices(fed: Fed, text: FedText, logit_rows: Tensor, rows: Tensor) -> Iterator[HeldRows]:
    """Of a greedy request: the tokens that were committed behind rows, and the likeliest by the logits there."""
    given, tokens = fed.forward.tensors.get("lm_head"), fed.forward.tensors.get("lm_head.tokens")
    index = next(i for i, part in enumerate(text.parts) if part.index == fed.where.index)
    behind = fed.positions[rows] + 1
    kept = (behind >= text.before[index]) & (behind < text.after[index])
    if given is None or tokens is None or not bool(kept.any()) or int(logit_rows.max()) >= len(given):
        return
    best, scores = tokens[logit_rows[kept]].long(), given[logit_rows[kept]]
    committed = torch.tensor([text.tokens[int(place)] for place in behind[kept]])
    yield _chosen("choice", fed, committed, best, scores, rows[kept])


def outside(fed: Fed, text: FedText, logits: Tensor, rows: Tensor, params: SamplingParams) -> Iterator[HeldRows]:
    """Of a sampled request: the tokens committed behind rows, and whether top-k and top-p leave them. logits [rows, V].

    A token that was drawn although its probability is 0 stands beside the likeliest one.
    """
    index = next(i for i, part in enumerate(text.parts) if part.index == fed.where.index)
    behind = fed.positions[rows] + 1
    kept = (behind >= text.before[index]) & (behind < text.after[index])
    if not bool(kept.any()):
        return
    scores = logits[kept] / params.temperature
    taken = torch.tensor([text.tokens[int(place)] for place in behind[kept]])
    own = scores.gather(1, taken[:, None])
    ahead = scores > own + TIE
    is_left = torch.ones(len(taken), dtype=torch.bool)
    if params.top_k:
        is_left &= ahead.sum(1) < params.top_k
        lowest = scores.topk(min(params.top_k, scores.shape[1])).values[:, -1:]
        scores = scores.masked_fill(scores < lowest - TIE, -torch.inf)
    is_left &= (scores.softmax(-1) * ahead).sum(1) < params.top_p + TIE
    right = torch.where(is_left, taken, scores.argmax(1))
    yield exact("choice", fed, taken, right, rows[kept])


def parameters(fed: Fed) -> Iterator[HeldRows]:
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


def _chosen(name: str, fed: Fed, taken: Tensor, best: Tensor, scores: Tensor, rows: Tensor) -> HeldRows:
    """Whether a token is the likeliest, or as good as it."""
    good = (best == taken[:, None]) & (scores >= scores[:, :1] - TIE)
    right = torch.where(good.any(1), taken, best[:, 0])
    return exact(name, fed, taken, right, rows)


def drafts(fed: Fed, drafted: Tensor | None, ids: Tensor | None) -> Iterator[HeldRows]:
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
