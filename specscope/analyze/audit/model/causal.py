"""Plain transformers over a request's contexts: its text as one causal pass, then the branches beside it.

A mask lets a branch row see the text up to where it leaves it, its ancestors and itself. A model with a running state
(convolutions, Mamba, linear attention) has no mask for that: a branch is fed with a copy of the cache.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from specscope.analyze.audit.contexts import Contexts
from specscope.analyze.audit.options import ModelSource
from specscope.errors import not_loaded

PIECE = 256  # rows of a pass
ATTENTION = frozenset(("full_attention", "sliding_attention", "chunked_attention"))  # layers with keys of each token

Rows = tuple[list[int], Tensor]  # row numbers, and the logits there, float32 [rows, V]
Layers = Sequence[int | str]
Made = tuple[Tensor, Tensor | None]  # logits [rows, V], and features [rows, F]


def cached(model: Any, cache: Any) -> dict[str, Any]:  # noqa: ANN401
    """The arguments that give a transformers model a cache: since 5.24 by another name."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: cache, "use_cache": True}


class Causal:
    def __init__(self, source: ModelSource, dtype: str) -> None:
        """Loads it. Raises UserError."""
        logging.disable_progress_bar()
        how = {"dtype": getattr(torch, dtype), **source.arguments}
        read = partial(AutoModelForCausalLM.from_pretrained, source.path, trust_remote_code=False, **how)
        try:
            try:
                model: Any = read(attn_implementation="sdpa")
            except ValueError:  # families with a soft cap or with sinks, such as Gemma 2 and GPT-OSS, have none
                model = read(attn_implementation="eager")
        except Exception as error:
            raise not_loaded(source.name, error) from error
        self.model = model.eval().requires_grad_(False)
        self.name = source.name
        self.config = self.model.config.get_text_config()

    @property
    def vocab(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def runs_on(self) -> bool:
        """Whether some layer keeps a running state, from which no token can be taken back."""
        kinds = frozenset(getattr(self.config, "layer_types", None) or ())
        return bool(kinds - ATTENTION) or getattr(self.model, "_is_stateful", False)

    def exact(self) -> None:
        """Continue in float32: the weights keep their loaded values, and sums are no longer rounded."""
        self.model = self.model.float()

    def alone(self, tokens: Sequence[int], layers: Sequence[int | str] = ()) -> tuple[Tensor, Tensor | None]:
        """One sequence by itself, without a cache or a mask: logits [L, V] and the features of `layers` [L, F]."""
        return self.forward(tokens, [*range(len(tokens))], layers, use_cache=False)

    @torch.inference_mode()
    def rows(self, contexts: Contexts, layers: Sequence[int | str] = ()) -> Iterator[tuple[Rows, Tensor | None]]:
        """The logits of all rows that are needed, in pieces, those of the text with their features."""
        length, asked, start = len(contexts.text), list(contexts.asks()), 0
        end = max((row for row in asked if row < length), default=-1) + 1
        cache = DynamicCache(config=self.model.config) if self.runs_on else DynamicCache()
        leaving = _paths(contexts) if self.runs_on else {}
        for stop in sorted({*(row + 1 for row in leaving), *range(PIECE, end, PIECE), end}) if asked else ():
            here = [row for row in asked if start <= row < stop]
            keep, kept = [row - start for row in here], cached(self.model, cache)
            logits, features = self.forward(contexts.text[start:stop], keep, layers, **kept)
            yield (here, logits), features
            for path, new in leaving.get(stop - 1, ()):
                tokens, keep = [contexts.token[row - length] for row in path], [path.index(row) for row in new]
                yield (new, self.forward(tokens, keep, (), **cached(self.model, deepcopy(cache)))[0]), None
            start = stop
        for rows in () if self.runs_on else contexts.branches(PIECE):
            here = [row for row in asked if row in rows]
            tokens, keep = [contexts.token[row - length] for row in rows], [row - rows.start for row in here]
            mask = self._branch_mask(contexts, rows, end)
            yield (here, self.forward(tokens, keep, (), **cached(self.model, cache), **mask)[0]), None
            cache.crop(-len(rows))

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], keep: list[int], layers: Layers, **how: Any) -> Made:  # noqa: ANN401
        """A pass: the logits of the rows `keep`, and the features of `layers`."""
        ids, wanted = torch.tensor([list(tokens)]), torch.tensor(keep, dtype=torch.long)
        out = self.model(input_ids=ids, logits_to_keep=wanted, output_hidden_states=bool(layers), **how)
        logits = out.logits[0] if out.logits.shape[1] == len(keep) else out.logits[0][wanted]
        return logits.float(), self._features(out, layers) if layers else None

    def _features(self, out: Any, layers: Sequence[int | str]) -> Tensor:  # noqa: ANN401
        """Hidden states: for layer j, its input; for `final`, the input of the LM head, after the last norm."""
        states = out.hidden_states
        return torch.cat([states[-1 if layer == "final" else int(layer)][0] for layer in layers], dim=-1).float()

    def _branch_mask(self, contexts: Contexts, rows: range, end: int) -> dict[str, Any]:
        """Mask and positions of branch rows behind the text up to `end`, as transformers takes them."""
        length, seen = len(contexts.text), torch.zeros(len(rows), end + len(rows), dtype=torch.bool)
        for index, row in enumerate(rows):
            above = contexts.parent[row - length]
            if above >= length:
                seen[index] = seen[above - rows.start]
            else:
                seen[index, : above + 1] = True
            seen[index, end + index] = True
        own = seen.sum(-1) - 1
        distance = own[:, None] - torch.cat([torch.arange(end), own])[None]
        return {"attention_mask": self.masks(seen, distance), "position_ids": own[None]}

    def masks(self, seen: Tensor, distance: Tensor) -> Any:  # noqa: ANN401
        """[1, 1, rows, keys], added to the scores; one for each kind of layer where the model has several."""
        window = getattr(self.config, "sliding_window", None)
        kinds = set(getattr(self.config, "layer_types", None) or ())
        full = self._added(seen)
        if window is None or getattr(self.config, "use_sliding_window", True) is False or int(distance.max()) < window:
            return full
        near = self._added(seen & (distance < window))
        return {"full_attention": full, "sliding_attention": near} if len(kinds) > 1 else near

    def _added(self, seen: Tensor) -> Tensor:
        dtype = self.model.dtype
        return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


def _paths(contexts: Contexts) -> dict[int, list[tuple[list[int], list[int]]]]:
    """By the text's row that they leave, the branches as their rows, and which of these no earlier branch has."""
    length, done = len(contexts.text), set[int]()
    paths: dict[int, list[tuple[list[int], list[int]]]] = defaultdict(list)
    for leaf in sorted({*range(length, length + len(contexts.token))} - {*contexts.parent}):
        path = [leaf]
        while (above := contexts.parent[path[0] - length]) >= length:
            path.insert(0, above)
        paths[above].append((path, [row for row in path if row not in done]))
        done.update(path)
    return paths
