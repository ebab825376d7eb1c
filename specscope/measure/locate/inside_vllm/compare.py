"""A request's rows in vLLM's forwards beside what they should be: inputs, operations, the cache as it was read."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specscope.analyze.locate.model.reference import ReferencePass
from specscope.measure.locate.inside_vllm.fed import DRAFTER, Fed, Tapped
from specscope.measure.locate.pairs import HeldPair, heads_of
from specscope.trace.record.params import SamplingParams

TIE = 1e-4  # by which logits may differ where two tokens are as good


def exact(name: str, fed: Fed, ours: Tensor, right: Tensor, rows: Tensor) -> HeldPair:
    """Whole numbers, which agree or do not."""
    return HeldPair(name, ours.double().view(-1, 1), right.double().view(-1, 1), fed.labels(rows), exact=True)


def inputs(tapped: Tapped, fed: Fed) -> Iterator[HeldPair]:
    """What the forward was fed, and what attention was told."""
    given, made, batch = fed.forward.tensors, fed.forward, fed.batch
    later = "later " if made.number else ""
    own = torch.arange(len(fed.rows))[fed.rows < len(given.get("tokens", ()))]
    if not len(own):
        return
    rows, positions = fed.rows[own], fed.positions[own]
    is_last = (own == fed.last) & (made.who == DRAFTER and not made.number)
    for name, some in (("last token", own[is_last]), ("tokens", own[~is_last])):
        yield exact(name, fed, given["tokens"][fed.rows[some]], fed.tokens[some], some)
    if (told := given.get("positions")) is not None and told.dim() == 1:
        yield exact(f"{later}positions", fed, told[rows], positions, own)
    due, size, blocks = _slots(tapped, fed), tapped.block_size, torch.tensor(made.blocks[batch])
    known = own[due[own] >= 0]
    if len(known) and "block_table" in given:
        number = fed.positions[known] // size
        last = min(int(number.max()) + 1, given["block_table"].shape[1])
        same = given["block_table"][batch][:last] == blocks[:last]
        upto = torch.cumprod(same.long(), 0)[number.clamp(max=last - 1)]
        yield exact("block table", fed, 1 - upto, torch.zeros(len(known)), known)
    slots = [x for name, x in given.items() if name.endswith(".slots")] if len(known) else []
    slots = [x[fed.rows[known]] for x in slots if int(fed.rows[known].max()) < len(x)]
    if slots:
        other = next((x for x in slots if bool((x != due[known]).any())), slots[0])
        yield exact("slots", fed, other, due[known], known)
    if "seq_lens" in given:
        start, end = made.starts[batch], made.starts[batch + 1]
        seen = int(given["seq_lens"][batch]) - (end - start) + (rows - start) + 1
        yield exact(f"{later}keys seen", fed, seen, positions + 1, own)


def _slots(tapped: Tapped, fed: Fed) -> Tensor:
    """Where the KV of the rows lies; -1 where the scheduler gave no block."""
    size, blocks = tapped.block_size, torch.tensor((*fed.forward.blocks[fed.batch], -1))
    block = blocks[(fed.positions // size).clamp(max=len(blocks) - 1)]
    return torch.where(block < 0, -1, block * size + fed.positions % size)


def computed(fed: Fed, right: ReferencePass, rows: Tensor, sizes: dict[str, int]) -> Iterator[HeldPair]:
    """What a model's operations gave, and the cache as attention read it. `rows`: which of the fed ones are known."""
    own, heads = fed.rows[rows], (sizes.get("num_heads", 1), sizes.get("num_kv_heads", 1))
    for name, ours in fed.forward.tensors.items():
        plain, _, batch = name.rpartition(".")
        if name in right.taps and name != "lm_head" and int(own.max()) < len(ours):
            ours, due, labels = ours[own], right.taps[name], right.rows
        elif plain.endswith(" read") and batch == str(fed.batch) and plain in right.taps:
            count, name = min(len(ours), len(right.keys)), plain
            ours, due, labels = ours[:count], right.taps[plain][:count], right.keys[:count]
        else:
            continue
        ours = ours.float().flatten(1) if ours.dim() > 1 else ours.float()[:, None]
        if ours.shape == due.shape:
            yield HeldPair(name, ours, due, labels, heads_of(name, *heads))


def _likeliest(fed: Fed, rows: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """The likeliest tokens at rows of the forward's logits, and these logits, [rows, k] each; None where none is told.

    ids [draft vocabulary]: the target's tokens of a head's own.
    """
    logits, tokens = (fed.forward.tensors.get(name) for name in ("lm_head", "lm_head.tokens"))
    if logits is None or tokens is None or not len(rows) or int(rows.max()) >= len(logits):
        return None
    named = tokens[rows].long()
    return named if ids is None else ids[named], logits[rows].float()


def logits(fed: Fed, at: Tensor, right: Tensor, rows: Tensor, ids: Tensor | None = None) -> Iterator[HeldPair]:
    """The likeliest tokens' logits. at: the rows of the logits; right [rows, V]."""
    if (told := _likeliest(fed, at, ids)) is not None:
        tokens, ours = told
        yield HeldPair("lm_head", ours, right.gather(1, tokens), fed.labels(rows), tokens=tokens)


def target_logit_rows(fed: Fed) -> tuple[Tensor, Tensor]:
    """(rows of the logits, which of the fed rows they are): of each request the row before its drafts, and theirs."""
    made, batch = fed.forward, fed.batch
    counts = [len(drafts) + 1 for drafts in made.drafts]
    first = made.scheduled[batch] - counts[batch]
    rows = torch.arange(made.scheduled[batch])[max(first, 0) : fed.known]
    return sum(counts[:batch]) + rows - first, rows


def choices(fed: Fed, at: Tensor, rows: Tensor, params: SamplingParams, right: Tensor) -> Iterator[HeldPair]:
    """The tokens that were committed behind rows, where nothing but the logits decides. right [rows, V].

    Of a greedy request beside the likeliest by vLLM's own logits; of a sampled one one that top-k and top-p leave.
    """
    text, behind = fed.text, fed.positions[rows] + 1
    kept = (behind >= text.before[fed.index]) & (behind < text.after[fed.index])
    moved = params.penalised or params.logit_bias or params.min_tokens or params.structured_outputs is not None
    if not bool(kept.any()) or moved:
        return
    taken = torch.tensor([text.tokens[place] for place in behind[kept].tolist()])
    if params.temperature > 0:
        yield exact("choice", fed, taken, _left(right[kept], taken, params), rows[kept])
    elif (told := _likeliest(fed, at[kept])) is not None:
        yield _chosen("choice", fed, taken, *told, rows[kept])


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


def drafts(fed: Fed, drafted: Tensor | None, ids: Tensor | None) -> Iterator[HeldPair]:
    """The token that a pass drafted greedily, and the likeliest by its logits. drafted [requests, passes]."""
    number, batch, told = fed.forward.number, fed.batch, _likeliest(fed, torch.tensor([fed.batch]), ids)
    if told is not None and fed.ended and drafted is not None and drafted.dim() == 2 and number < drafted.shape[1]:
        yield _chosen("draft", fed, drafted[batch, number].view(1).long(), *told, torch.tensor([fed.last]))


def _chosen(name: str, fed: Fed, taken: Tensor, best: Tensor, scores: Tensor, rows: Tensor) -> HeldPair:
    """Whether a token is the likeliest, or as good as it."""
    good = (best == taken[:, None]) & (scores >= scores[:, :1] - TIE)
    return exact(name, fed, taken, torch.where(good.any(1), taken, best[:, 0]), rows)
