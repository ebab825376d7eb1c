"""What specscope/vllm/taps.py wrote: the forwards of a vLLM's models, in the order in which they ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from specscope.errors import UserError
from specscope.trace.checked import decoded

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
