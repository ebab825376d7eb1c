"""The rows that fed an EAGLE head, as recorded, held against the text and the target's hidden states.

Of each row the capture has the token, its position and the norm of each layer's hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.analyze.audit.contexts import Contexts
from specscope.analyze.audit.model.causal import Causal
from specscope.analyze.audit.tally import Tally
from specscope.trace.record.privacy import NO_TOKEN

LEAST = 2e-3  # relative error of a norm that is rounding in float32: kernels add up in another order
SAFETY = 4.0  # times the largest error that the target's own dtype made on a few texts

Norms = NDArray[np.float32]  # [T, layers]
Layers = Sequence[int | str]


def norms_of(states: Tensor, layers: int) -> Norms:
    """[T, layers] the norm of each layer's hidden states in [T, layers * width]."""
    norms: Norms = torch.stack([part.norm(dim=-1) for part in states.chunk(layers, -1)], dim=-1).float().cpu().numpy()
    return norms


def allowed_error(rounded: Sequence[tuple[Tensor, Tensor]], layers: int) -> float:
    """The relative error of a norm that rounding explains. `rounded`: states in the capture's dtype, and exact ones."""
    errors = [_errors(norms_of(low, layers), norms_of(exact[: len(low)], layers)) for low, exact in rounded if len(low)]
    return max([LEAST, *(SAFETY * float(error.max()) for error in errors if error.size)])


def judge_fed(
    causal: Causal, layers: Layers, plans: Sequence[Contexts], features: Mapping[str, Tensor], allowed: float, to: Tally
) -> None:
    """Compare the rows that fed the head in each step. features: of each request, [T, layers * width]."""
    looks: str | None = None  # of the first step that differs
    for contexts in plans:
        if not len(states := features[contexts.request]):
            continue
        right, end = norms_of(states, len(layers)), min(len(states), len(contexts.text) - 1)
        for step in contexts.steps:
            notes = step.part.notes
            if notes is None or notes.fed_norms.shape[1:] != (len(layers),):
                continue
            known = notes.fed_position < min(step.part.position, end)
            positions, norms, tokens = notes.fed_position[known], notes.fed_norms[known], notes.fed_token[known]
            if not len(positions):
                continue
            texts = np.array(contexts.text)[positions + 1]
            errors = _errors(norms, right[positions])
            row, layer = map(int, np.unravel_index(int(errors.argmax()), errors.shape))
            if other := np.flatnonzero((tokens != texts) & (tokens != NO_TOKEN)).tolist():
                differs, recorded, judged = True, float(tokens[other[0]]), float(texts[other[0]])
                fed, wanted = to.show(int(recorded)), to.show(int(judged))
                text = f"{fed} was fed at position {positions[other[0]]}, where the text has {wanted}"
            else:
                differs, recorded = bool(errors[row, layer] > allowed), float(norms[row, layer])
                judged = float(right[positions[row], layer])
                text = f"layer {layers[layer]}, position {positions[row]}: a norm of {recorded:.4g}, not {judged:.4g}"
                if differs and looks is None:
                    looks = _likeness(causal, layers, contexts, norms, positions, allowed)
            to.add(step.where, differs=differs, recorded=recorded, judged=judged, text=text)
    to.about += f"; it looks like {looks}" if looks else ""


def _errors(norms: Norms, right: Norms) -> Norms:
    errors: Norms = np.abs(norms - right) / np.maximum(right, 1e-30)
    return errors


def _likeness(
    causal: Causal, layers: Layers, contexts: Contexts, norms: Norms, positions: NDArray[np.int32], allowed: float
) -> str:
    """Whose hidden states they are, by the norms of all layers: another position's, or other layers'; "" elsewhere."""
    every = (*range(int(causal.config.num_hidden_layers)), "final")
    states = causal.alone(contexts.text[: int(positions.max()) + 2], every)[1]
    assert states is not None
    known, last = norms_of(states, len(every)), len(every) - 1
    own = [last if layer == "final" else int(layer) for layer in layers]
    for by, where in ((-1, "before"), (1, "after")):
        near = np.clip(positions + by, 0, len(known) - 1)
        if np.median(_errors(norms, known[near][:, own])) < allowed:
            return f"the hidden states of the position {where}"
    errors = np.median(_errors(norms[:, :, None], known[positions][:, None]), axis=0)  # [layers, every]
    best = errors.argmin(axis=1).tolist()
    if errors.min(axis=1).max() >= allowed or best == own:
        return ""
    return f"layers {', '.join(str(every[layer]) for layer in best)} instead of {', '.join(map(str, layers))}"
