"""The forwards of a vLLM's models as specscope/vllm/taps.py wrote them, and what each should have been fed.

Tokens and positions of a request's rows are due by the texts that vLLM committed, and the counts of its scheduler. The
runner makes the inputs from these, and is what is judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specscope.analyze.findings import Reference
from specscope.analyze.locate.located import FedRow
from specscope.errors import UserError
from specscope.trace.checked import decoded
from specscope.trace.history.history import RequestHistory
from specscope.trace.record.records import RequestStep

TARGET, DRAFTER = "target", "drafter"


@dataclass(frozen=True, eq=False)
class TappedForward:
    """One forward of a model, over the rows of a batch."""

    index: int  # among all forwards
    who: str  # TARGET or DRAFTER
    step: int  # of the engine, from 0
    number: int  # of the drafter's passes in its step, from 0
    requests: Sequence[str]  # in the batch's order
    scheduled: Sequence[int]  # rows of each, the target's
    computed: Sequence[int]  # tokens of each whose KV is there, by the scheduler's count
    drafts: Sequence[Sequence[int]]  # that the scheduler handed to the target; -1 where it does not know them
    blocks: Sequence[Sequence[int]]  # that the scheduler gave each
    tensors: dict[str, Tensor] = field(repr=False)
    unread: str = ""  # why the cache was not read

    def row_of(self, request: str) -> int:
        """Its place in the batch."""
        return self.requests.index(request)

    @cached_property
    def starts(self) -> list[int]:
        """The first row of each request, and the number of rows: as attention was told, else as it was scheduled."""
        told = self.tensors.get("query_start_loc")
        if told is not None and (self.who == DRAFTER or len(told) > len(self.requests)):
            return [int(x) for x in told.tolist()[: len(self.requests) + 1]]
        starts = [0]
        for count in self.scheduled:
            starts.append(starts[-1] + count)
        return starts


@dataclass(frozen=True, eq=False)
class Tapped:
    """A run."""

    forwards: tuple[TappedForward, ...]
    is_v2: bool
    block_size: int
    code: dict[str, dict[str, list[str]]]  # of TARGET and DRAFTER: an operation's functions
    sizes: dict[str, dict[str, int]]  # heads and their size
    is_full: bool  # what came later is not here

    @cached_property
    def drafted(self) -> dict[int, Tensor]:
        """By step, what was drafted in it: [requests, passes]."""
        return {made.step: made.tensors["drafted"] for made in self.forwards if "drafted" in made.tensors}

    def of(self, request: str, who: str) -> Iterator[TappedForward]:
        """The forwards that a request took part in."""
        return (made for made in self.forwards if made.who == who and request in made.requests)


def read_taps(folder: Path) -> Tapped:
    """All of a folder. Raises UserError where there is nothing."""
    from safetensors.torch import load_file

    try:
        about: dict[str, Any] = decoded((folder / "about.json").read_bytes(), dict[str, Any])
        end: dict[str, Any] = decoded((folder / "end.json").read_bytes(), dict[str, Any])
    except (OSError, ValueError) as error:
        raise UserError(f"vLLM wrote no taps to {folder}: is specscope installed in its environment?") from error
    forwards: list[TappedForward] = []
    for path in sorted(folder.glob("taps-*.safetensors")):
        tensors, lines = load_file(path), decoded(path.with_suffix(".json").read_bytes(), list[dict[str, Any]])
        by_pass: list[dict[str, Tensor]] = [{} for _ in lines]
        for key, rows in tensors.items():
            number, _, name = key.partition("/")
            by_pass[int(number)][name] = rows
        for line, own in zip(lines, by_pass, strict=True):
            forwards.append(TappedForward(len(forwards), tensors=own, **line))
    return Tapped(tuple(forwards), about["v2"], about["block_size"], about["code"], about["sizes"], end["full"])


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
