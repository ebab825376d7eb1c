"""What each forward of vLLM should have been fed: tokens, positions, slots and reach of a request's rows.

By the texts that vLLM committed, and the blocks and counts of its scheduler. The runner makes the inputs from these,
and is what is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specscope.analyze.findings import Reference
from specscope.measure.locate.inside_vllm.tapped import DRAFTER, TARGET, Tapped, TappedForward
from specscope.trace.history.history import RequestHistory
from specscope.trace.record.records import RequestStep


@dataclass(frozen=True)
class FedText:
    """A request's tokens, and how many were committed before and after each of the engine's steps it took part in."""

    request: str
    prompt: int
    tokens: list[int]
    before: list[int]
    after: list[int]
    parts: list[RequestStep]
    steps: list[int]  # the engine's step number of each

    @staticmethod
    def of(request: RequestHistory, numbers: Sequence[int]) -> FedText | None:
        """By its verdicts; None where the prompt is not known. `numbers`: the engine's step number of each step."""
        if request.info is None or not len(request.info.prompt_tokens):
            return None
        tokens: list[int] = request.info.prompt_tokens.tolist()
        text = FedText(request.id, len(tokens), tokens, [], [], list(request.steps), list(numbers))
        for part in request.steps:
            text.before.append(len(tokens))
            if part.verdict is not None:
                tokens += [int(part.tree.token[node]) for node in part.verdict.path] + [int(part.verdict.token)]
            text.after.append(len(tokens))
        return text


@dataclass(frozen=True, eq=False)
class Fed:
    """Rows of one request in one forward, with what they should be. All tensors are [rows]."""

    forward: TappedForward
    where: Reference
    rows: Tensor  # among the forward's rows
    positions: Tensor
    tokens: Tensor
    slots: Tensor
    last: int  # which of the rows a drafter draws from; the last of the text, of a target
    same: Tensor  # bool: whether the row's context is the request's text, so that a reference over the text has it
    ended: bool  # whether the prompt had ended: what is drafted is used

    @property
    def batch(self) -> int:
        """The request's place in the batch."""
        return self.forward.row_of(self.where.request)


def fed_rows(tapped: Tapped, text: FedText, *, shift: int) -> list[Fed]:
    """The rows of a request in every forward. `shift`: by how much an EAGLE head's tokens are ahead, 1 or 0."""
    targets = list(tapped.of(text.request, TARGET))[: len(text.parts)]
    fed = [_target(tapped, text, made, index) for index, made in enumerate(targets)]
    by_step = {made.step: index for index, made in enumerate(targets)}
    for made in tapped.of(text.request, DRAFTER):
        if made.step in by_step:
            index = by_step[made.step]
            first = _drafter(tapped, text, made, index, targets[index], shift)
            fed += [] if first is None else [first]
    return fed


def _where(text: FedText, index: int) -> Reference:
    return Reference(text.request, text.parts[index].index, text.steps[index])


def context(text: FedText, made: TappedForward, index: int) -> int:
    """Tokens whose KV is there before a step: the host of V2 counts every draft as accepted at first."""
    return min(made.computed[made.row_of(text.request)], text.before[index] - 1)


def _slots(tapped: Tapped, made: TappedForward, batch: int, positions: Tensor) -> Tensor:
    """Where the KV of positions lies; -1 where the scheduler gave no block."""
    size, blocks = tapped.block_size, torch.tensor((*made.blocks[batch], -1))
    number = (positions // size).clamp(max=len(blocks) - 1)
    return torch.where(blocks[number] < 0, -1, blocks[number] * size + positions % size)


def _target(tapped: Tapped, text: FedText, made: TappedForward, index: int) -> Fed:
    batch, start = made.row_of(text.request), context(text, made, index)
    count = made.scheduled[batch]
    drafts = list(made.drafts[batch])
    if any(token < 0 for token in drafts):
        drafts = [int(token) for token in text.parts[index].tree.token]
        drafts = drafts[: len(made.drafts[batch])]
    plain = min(count - len(drafts), text.before[index] - start)
    tokens = (text.tokens[start : start + plain] + drafts)[:count]
    positions = torch.arange(start, start + len(tokens))
    known = text.tokens[start : start + len(tokens)]
    same = torch.zeros(len(tokens), dtype=torch.bool)
    for row, (token, right) in enumerate(zip(tokens, known, strict=False)):
        if token != right:
            break
        same[row] = True
    rows = made.starts[batch] + torch.arange(len(tokens))
    accepted = max(int(same.sum()) - 1, 0)
    ended = start + plain >= text.prompt
    where = _where(text, index)
    slots = _slots(tapped, made, batch, positions)
    return Fed(made, where, rows, positions, torch.tensor(tokens), slots, accepted, same, ended)


def _drafter(
    tapped: Tapped, text: FedText, made: TappedForward, index: int, target: TappedForward, shift: int
) -> Fed | None:
    """Rows whose token is behind the committed text are padding, and left out."""
    batch, start = made.row_of(text.request), context(text, target, index)
    ended = start + target.scheduled[batch] >= text.prompt
    committed = text.after[index] if ended else min(start + target.scheduled[batch] + 1, text.prompt)
    if made.number == 0:
        most = committed - shift - start if ended or shift else target.scheduled[batch]
        positions = torch.arange(start, start + most)
        tokens = torch.tensor(text.tokens[start + shift : start + shift + most])
        rows = made.starts[batch] + torch.arange(most)
        same = torch.ones(most, dtype=torch.bool)
    else:
        drafted = tapped.drafted.get(made.step)  # its token was drafted in the pass before it
        if not ended or drafted is None or drafted.dim() != 2 or made.number > drafted.shape[1]:
            return None
        positions = torch.tensor([committed - 1 - shift + made.number])
        tokens = drafted[batch, made.number - 1].view(1).long()
        rows, most = torch.tensor([made.starts[batch]]), 1
        same = torch.zeros(1, dtype=torch.bool)
    if most < 1 or len(tokens) < most:
        return None
    slots = _slots(tapped, made, batch, positions)
    return Fed(made, _where(text, index), rows, positions, tokens, slots, most - 1, same, ended)
