"""The reference of EAGLE and DFlash heads, pass by pass: what each operation ought to give at the rows of a draft.

The arithmetic is that of `audit`'s heads, whose operations are tapped. A pass of an EAGLE head is over committed pairs,
or over one level of a tree; of a DFlash head over the rows of a block, behind what is written of committed positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specscope.analyze.audit.model.block import BlockHead
from specscope.analyze.audit.model.head import KV, Head
from specscope.analyze.locate.located import FedRow
from specscope.analyze.locate.model.reference import CUT, TRIED, GrownTree, ReferencePass, rounding
from specscope.trace.record.tree import ROOT

ROWS, COPIES = 8, 3  # of a block on which rounding is tried, and how often it is in a pass


@dataclass
class HeadPasses:
    """A head along one request's text. `features` [T, F]: the target's, at the layers that feed the head."""

    head: Head
    text: Sequence[int]
    features: Tensor
    _kv: list[KV] = field(default_factory=list)  # of the first pairs
    # Of the draft that grows now: its nodes, their keys, and the hidden state of each that was run
    _tree: GrownTree = field(default_factory=GrownTree)
    _grown: list[KV] = field(default_factory=list)
    _hidden: dict[int, Tensor] = field(default_factory=dict)

    def feed(
        self,
        start: int,
        end: int,
        nodes: Sequence[int] = (),
        tokens: Sequence[int] = (),
        parents: Sequence[int] = (),
        wanted: Sequence[int] = (),
    ) -> ReferencePass:
        """As ModelPasses.feed, over pairs; all rows have logits."""
        return self._level(nodes, tokens, parents, end - 1) if nodes else self._context(start, end)

    @torch.inference_mode()
    def _context(self, start: int, end: int) -> ReferencePass:
        """The pass over the pairs of positions `start` to `end`."""
        head, slots = self.head, torch.arange(start, end)
        tokens = torch.tensor(self.text[start + 1 : end + 1])
        if not self._kv:
            self._kv = head.nothing()
        if (known := len(self._kv[0][0])) < start:
            self._context(known, start)
        with tapped(self.head) as taps:
            hidden = head.combine(self.features[start:end])
            seen = torch.arange(end)[None] <= slots[:, None]
            out, kv = head.run(head.prepare(tokens, hidden), slots, seen, first_pairs(self._kv, start))
            head.logits(out)
        self._kv = self._grown = kv
        self._hidden, self._tree = {ROOT: out[-1]}, GrownTree()
        rows = [FedRow(slot, token) for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True)]
        return self._pass(rows, start, rows, taps)

    @torch.inference_mode()
    def _level(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int], root: int) -> ReferencePass:
        """The pass over some nodes of a tree, after those above them. `root`: the position of the root's pair."""
        head, fed = self.head, self._tree.grow(nodes, tokens, parents, root)
        seen, positions = self._tree.seen(nodes, root + 1), torch.tensor([row.position for row in fed])
        with tapped(self.head) as taps:
            hidden = head.fed_back(torch.stack([self._hidden[parent] for parent in parents]))
            out, self._grown = head.run(head.prepare(torch.tensor(list(tokens)), hidden), positions, seen, self._grown)
            head.logits(out)
        self._hidden |= zip(nodes, out, strict=True)
        return self._pass(fed, root + 1, self._tree.rows.values(), taps)

    @torch.inference_mode()
    def allowed(self) -> dict[str, float]:
        """The relative error of each operation that rounding explains."""
        end = min(len(self.features), len(self.text) - 1, TRIED)
        made = list[ReferencePass]()
        for size in (end, CUT):
            passes = HeadPasses(self.head, self.text, self.features)
            made += [passes.feed(start, min(start + size, end)) for start in range(0, end, size)]
        return rounding(made[0].taps, (one.taps for one in made[1:]))

    def _pass(self, rows: Sequence[FedRow], end: int, keys: Iterable[FedRow], taps: dict[str, Tensor]) -> ReferencePass:
        """What a pass gave; `keys`: behind those of the first pairs."""
        committed = (FedRow(slot, self.text[slot + 1]) for slot in range(end))
        return ReferencePass(tuple(rows), (*committed, *keys), taps)


@dataclass
class BlockPasses:
    """A head along one request's text. `features` [T, F]: the target's, at the layers that feed the head."""

    head: BlockHead
    text: Sequence[int]
    features: Tensor
    written: dict[str, Tensor] = field(default_factory=dict)  # what was made of the positions that were written last
    _kv: list[KV] = field(default_factory=list)  # of the first positions

    @torch.inference_mode()
    def feed(self, start: int, end: int, rows: int) -> ReferencePass:
        """The pass over a block of so many rows behind `end` positions, of which those from `start` on are written."""
        if (known := len(self._kv[0][2]) if self._kv else 0) < start:
            self._write(known, start)
        self.written = self._write(start, end)
        taps, keys = self._block(end, rows, 1), [FedRow(place, self.text[place + 1]) for place in range(end)]
        tokens = [self.text[end], *[self.head.mask_token or 0] * (rows - 1)]
        block = tuple(FedRow(end + row, token) for row, token in enumerate(tokens))
        return ReferencePass(block, (*keys, *block), taps)

    def _write(self, start: int, end: int) -> dict[str, Tensor]:
        with tapped(self.head) as taps:
            fresh = self.head.context(self.head.combine(self.features[start:end]), torch.arange(start, end))
        before = self._kv or [(key[:0], value[:0], places[:0]) for key, value, places in fresh]
        both = zip(first_pairs(before, start), fresh, strict=True)
        self._kv = [(torch.cat((a, x)), torch.cat((b, y)), torch.cat((c, z))) for (a, b, c), (x, y, z) in both]
        return taps

    def _block(self, end: int, rows: int, copies: int) -> dict[str, Tensor]:
        """What a block gives, so often beside itself."""
        head, of = self.head, torch.arange(copies).repeat_interleave(rows)
        tokens = torch.tensor([self.text[end], *[head.mask_token or 0] * (rows - 1)]).repeat(copies)
        seen = torch.cat([torch.ones(len(of), end, dtype=torch.bool), of[:, None] == of], dim=1)
        with tapped(head) as taps:
            positions = (end + torch.arange(rows)).repeat(copies)
            head.logits(head.block(tokens, positions, seen, first_pairs(self._kv, end))[0])
        return taps

    @torch.inference_mode()
    def allowed(self) -> dict[str, float]:
        """The relative error of each operation that rounding explains."""
        end = min(len(self.features), len(self.text) - 1, TRIED)
        whole, passes = BlockPasses(self.head, self.text, self.features), list[dict[str, Tensor]]()
        at_once = {**whole._write(0, end), **whole._block(end, ROWS, 1)}
        pieces = BlockPasses(self.head, self.text, self.features)
        passes += [pieces._write(start, min(start + CUT, end)) for start in range(0, end, CUT)]
        passes.append({name: x[:ROWS] for name, x in pieces._block(end, ROWS, COPIES).items()})
        return rounding(at_once, passes)


@contextmanager
def tapped(head: Head) -> Iterator[dict[str, Tensor]]:
    """What the head's operations give meanwhile, by name."""
    taps: dict[str, Tensor] = {}
    before, head.tap = head.tap, taps.__setitem__
    try:
        yield taps
    finally:
        head.tap = before


def first_pairs(kv: Sequence[KV], count: int) -> list[KV]:
    """The keys and values of the first pairs."""
    return [tuple(x[:count] for x in layer) for layer in kv]  # type: ignore[misc]
