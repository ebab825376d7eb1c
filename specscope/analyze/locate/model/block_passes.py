"""A DFlash head's reference, pass by pass: what is written of committed positions, then the rows of a block.

The arithmetic is that of `audit`'s BlockHead, whose operations are tapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specscope.analyze.audit.model.block import BlockHead
from specscope.analyze.audit.model.head import KV
from specscope.analyze.locate.located import FedRow
from specscope.analyze.locate.model.head_passes import first_pairs, tapped
from specscope.analyze.locate.model.reference import CUT, TRIED, ReferencePass, rounding

ROWS, COPIES = 8, 3  # of a block on which rounding is tried, and how often it is in a pass


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
