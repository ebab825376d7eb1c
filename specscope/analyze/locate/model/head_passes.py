"""An EAGLE head's reference, pass by pass: what each operation ought to give at the rows of a draft.

The arithmetic is that of `audit`'s Head, whose operations are tapped. A pass is over committed pairs, over one level of
a tree, or over committed pairs with mask rows behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specscope.analyze.audit.model.head import KV, Head
from specscope.analyze.locate.located import FedRow
from specscope.analyze.locate.model.reference import FLOOR, MARGIN, TRIED, ReferencePass
from specscope.analyze.locate.model.taps import relative
from specscope.trace.record.tree import ROOT

PIECE = 7  # rows of a pass that is summed in another order
OF_KEYS = (".scores", " read")  # operations whose values are not one a row


@dataclass
class HeadPasses:
    """A head along one request's text. `features` [T, F]: the target's, at the layers that feed the head."""

    head: Head
    text: Sequence[int]
    features: Tensor
    _kv: list[KV] = field(default_factory=list)  # of the first pairs
    # Of the draft that grows now: the hidden state and parent of each node that was run, their rows, their keys
    _hidden: dict[int, Tensor] = field(default_factory=dict)
    _parent: dict[int, int] = field(default_factory=dict)
    _rows: dict[int, FedRow] = field(default_factory=dict)
    _grown: list[KV] = field(default_factory=list)

    def feed(
        self,
        start: int,
        end: int,
        nodes: Sequence[int] = (),
        tokens: Sequence[int] = (),
        parents: Sequence[int] = (),
        wanted: Sequence[int] = (),
        masks: int = 0,
    ) -> ReferencePass:
        """As ModelPasses.feed, over pairs; all rows have logits. `masks`: mask rows behind the pairs."""
        return self._level(nodes, tokens, parents, end - 1) if nodes else self._context(start, end, masks)

    @torch.inference_mode()
    def _context(self, start: int, end: int, masks: int = 0) -> ReferencePass:
        """The pass over the pairs of positions `start` to `end`, with so many mask rows behind them."""
        head, slots = self.head, torch.arange(start, end + masks)
        tokens = torch.tensor([*self.text[start + 1 : end + 1], *[head.mask_token or 0] * masks])
        before = self._before(start)
        with self._tapped() as taps:
            hidden = head.combine(self.features[start:end])
            if masks:
                taps["mask_hidden"] = mask = self._mask().expand(masks, -1)
                hidden = torch.cat([hidden, mask])
            seen = torch.arange(end + masks)[None] <= slots[:, None]
            out, kv = head.run(head.prepare(tokens, hidden), slots, seen, before)
            head.logits(out)
        self._kv = self._grown = [tuple(x[:end] for x in layer) for layer in kv]  # type: ignore[misc]
        self._hidden, self._parent, self._rows = {ROOT: out[end - start - 1]}, {}, {}
        rows = tuple(FedRow(slot, token) for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True))
        return ReferencePass(rows, (*self._committed(start), *rows), taps)

    @torch.inference_mode()
    def _level(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int], root: int) -> ReferencePass:
        """The pass over some nodes of a tree, after those above them. `root`: the position of the root's pair."""
        head, fed = self.head, dict[int, FedRow]()
        for node, token, parent in zip(nodes, tokens, parents, strict=True):
            above = root if parent == ROOT else self._rows[parent].position
            fed[node] = FedRow(above + 1, token, node)
        self._parent |= zip(nodes, parents, strict=True)
        self._rows |= fed
        place = {node: root + 1 + index for index, node in enumerate(self._rows)}
        seen = torch.zeros(len(nodes), root + 1 + len(place), dtype=torch.bool)
        seen[:, : root + 1] = True
        for index, node in enumerate(nodes):
            while node != ROOT:
                seen[index, place[node]] = True
                node = self._parent[node]
        positions = torch.tensor([row.position for row in fed.values()])
        with self._tapped() as taps:
            hidden = head.fed_back(torch.stack([self._hidden[parent] for parent in parents]))
            out, self._grown = head.run(head.prepare(torch.tensor(list(tokens)), hidden), positions, seen, self._grown)
            head.logits(out)
        self._hidden |= zip(nodes, out, strict=True)
        return ReferencePass(tuple(fed.values()), (*self._committed(root + 1), *self._rows.values()), taps)

    @torch.inference_mode()
    def allowed(self) -> dict[str, float]:
        """The relative error of each operation that rounding explains: two orders of summation, times a margin."""
        end = min(len(self.features), len(self.text) - 1, TRIED)
        whole = HeadPasses(self.head, self.text, self.features).feed(0, end).taps
        cut, passes = dict[str, list[Tensor]](), HeadPasses(self.head, self.text, self.features)
        for start in range(0, end, PIECE):
            for name, x in passes.feed(start, min(start + PIECE, end)).taps.items():
                cut.setdefault(name, []).append(x)
        measured = {
            name: float(relative(_finite(torch.cat(parts)), _finite(whole[name])).max())
            for name, parts in cut.items()
            if not name.endswith(OF_KEYS)
        }
        usual = max(measured.values(), default=0.0)
        return {name: max(FLOOR, MARGIN * measured.get(name, usual)) for name in whole}

    def _mask(self) -> Tensor:
        """[1, width] the hidden state of a mask row."""
        tap, self.head.tap = self.head.tap, None
        try:
            return self.head.combine(self.head.weights["mask_hidden"].view(1, -1))
        finally:
            self.head.tap = tap

    def _before(self, start: int) -> list[KV]:
        """The keys and values of the first `start` pairs."""
        if not self._kv:
            self._kv = self.head.nothing()
        if (known := len(self._kv[0][0])) < start:
            self._context(known, start)
        return [tuple(x[:start] for x in layer) for layer in self._kv]  # type: ignore[misc]

    def _committed(self, end: int) -> tuple[FedRow, ...]:
        return tuple(FedRow(slot, self.text[slot + 1]) for slot in range(end))

    @contextmanager
    def _tapped(self) -> Iterator[dict[str, Tensor]]:
        """What the head's operations give meanwhile, by name."""
        taps: dict[str, Tensor] = {}
        self.head.tap = taps.__setitem__
        try:
            yield taps
        finally:
            self.head.tap = None


def _finite(x: Tensor) -> Tensor:
    return x.flatten(1).nan_to_num(neginf=0.0)
