"""What each forward of vLLM should have been fed: tokens and positions of a request's rows.

By the texts that vLLM committed, and the counts of its scheduler. The runner makes the inputs from these, and is what
is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specscope.analyze.findings import Reference
from specscope.analyze.locate.located import FedRow
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
    parts: Sequence[RequestStep]
    steps: Sequence[int]  # the engine's step number of each

    @staticmethod
    def of(request: RequestHistory, numbers: Sequence[int]) -> FedText | None:
        """By its verdicts; None where the prompt is not known. `numbers`: the engine's step number of each step."""
        if request.info is None or not len(request.info.prompt_tokens):
            return None
        tokens: list[int] = request.info.prompt_tokens.tolist()
        text = FedText(request.id, len(tokens), tokens, [], [], list(request.steps), numbers)
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
    text: FedText
    index: int  # of the request's step
    rows: Tensor  # among the forward's rows
    positions: Tensor
    tokens: Tensor
    last: int  # which of the rows a drafter draws from; the last of the text, of a target
    known: int  # of how many first rows the context is the request's text, so that a reference over the text has it
    ended: bool  # whether the prompt had ended: what is drafted is used

    @property
    def where(self) -> Reference:
        """The request's step."""
        return Reference(self.text.request, self.text.parts[self.index].index, self.text.steps[self.index])

    @property
    def batch(self) -> int:
        """The request's place in the batch."""
        return self.forward.row_of(self.text.request)

    def labels(self, rows: Tensor) -> tuple[FedRow, ...]:
        """Some of the rows, as a walk has them."""
        both = zip(self.positions[rows].tolist(), self.tokens[rows].tolist(), strict=True)
        return tuple(FedRow(position, token) for position, token in both)


def fed_rows(tapped: Tapped, text: FedText, *, shift: int) -> list[Fed]:
    """The rows of a request in every forward. `shift`: by how much an EAGLE head's tokens are ahead, 1 or 0."""
    targets = list(tapped.of(text.request, TARGET))[: len(text.parts)]
    by_step = {made.step: index for index, made in enumerate(targets)}
    drafted = [made for made in tapped.of(text.request, DRAFTER) if made.step in by_step]
    drafts = (_drafter(tapped, text, made, by_step[made.step], targets, shift) for made in drafted)
    return [*(_target(text, made, index) for index, made in enumerate(targets)), *filter(None, drafts)]


def _context(text: FedText, made: TappedForward, index: int) -> int:
    """Tokens whose KV is there before a step: the host of V2 counts every draft as accepted at first."""
    return min(made.computed[made.row_of(text.request)], text.before[index] - 1)


def _target(text: FedText, made: TappedForward, index: int) -> Fed:
    batch, start = made.row_of(text.request), _context(text, made, index)
    count, drafts = made.scheduled[batch], list(made.drafts[batch])
    if any(token < 0 for token in drafts):
        drafts = text.parts[index].tree.token.tolist()[: len(drafts)]
    plain = min(count - len(drafts), text.before[index] - start)
    tokens = (text.tokens[start : start + plain] + drafts)[:count]
    same = [token == right for token, right in zip(tokens, text.tokens[start:], strict=False)]
    known = next((row for row, is_same in enumerate(same) if not is_same), len(same))
    own = torch.arange(len(tokens))
    ended = start + plain >= text.prompt
    first = made.starts[batch]
    return Fed(made, text, index, first + own, start + own, torch.tensor(tokens), max(known - 1, 0), known, ended)


def _drafter(
    tapped: Tapped, text: FedText, made: TappedForward, index: int, targets: Sequence[TappedForward], shift: int
) -> Fed | None:
    """Rows whose token is behind the committed text are padding, and left out."""
    target = targets[index]
    batch, start, count = made.row_of(text.request), _context(text, target, index), 1
    end, first = start + target.scheduled[batch], made.starts[batch]
    ended = end >= text.prompt
    committed = text.after[index] if ended else min(end + 1, text.prompt)
    if not made.number:
        count = committed - shift - start if ended or shift else target.scheduled[batch]
        tokens = torch.tensor(text.tokens[start + shift : start + shift + max(count, 0)])
    else:
        drafted = tapped.drafted.get(made.step)  # its token was drafted in the pass before it
        if not ended or drafted is None or drafted.dim() != 2 or made.number > drafted.shape[1]:
            return None
        tokens, start = drafted[batch, made.number - 1].view(1).long(), committed - 1 - shift + made.number
    if count < 1 or len(tokens) < count:
        return None
    own = torch.arange(count)
    return Fed(made, text, index, first + own, start + own, tokens, count - 1, 0 if made.number else count, ended)
