"""Calls of a sampler from a file of arrays: .npz, of which nothing is unpickled, or .pt, of weights alone.

Arrays go by the names under which people dump them in vLLM and SGLang (NAMES); docs/python.md tells their shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.errors import UserError, first_line
from specscope.testing.calls import VerifyCall
from specscope.trace.kinds import TENSORS, kind_of, start_of
from specscope.trace.record.tree import Doubles

Arrays = Mapping[str, NDArray[Any]]
LARGEST = 8 * 2**30  # bytes of all arrays
SUMS = 0.02  # by which a row of 16-bit probabilities may miss 1
NAMES: Mapping[str, tuple[str, ...]] = {
    "p": ("target_probs", "target_p", "target_prob"),
    "logits": ("target_logits",),
    "q": ("draft_probs", "draft_p", "draft_prob"),
    "draft_logits": (),
    "drafted": ("draft_token_ids", "draft_tokens", "draft_ids", "drafts"),
    "output": ("output_token_ids", "output_tokens", "output_ids", "sampled_token_ids"),
    "coin": ("coins", "uniform_samples", "uniform_probs", "uniform_rand", "u"),
    "final_coin": ("final_coins", "uniform_samples_for_final_sampling", "coins_for_final_sampling"),
    "counts": ("num_draft_tokens", "cu_num_draft_tokens"),
    "temperature": ("temperatures",),
}
ROWS, IDS, COINS = ("p", "q"), ("drafted", "output", "counts"), ("coin", "final_coin")
OF_TREES = re.compile("tree|retrie?ve?_|sibling|parent")  # in the names of what only trees have
BY_CALL = ("output", "final_coin", "temperature", "counts")  # also where calls are packed


def read_calls(path: str) -> tuple[list[VerifyCall], tuple[str, ...]]:
    """The calls, and remarks on what was not used. Raises UserError."""
    given, found = dict(_tensors(path) if kind_of(start_of(path)) is TENSORS else _npz(path)), dict[str, NDArray[Any]]()
    unused = set(given)
    for name, others in NAMES.items():
        spelled = [one for one in (name, *others) if one in given]
        if len(spelled) > 1:
            raise UserError(f"{path} has both {spelled[0]} and {spelled[1]}, which mean the same: leave one out")
        for one in spelled:
            array = _checked(given[one], f"{one} in {path}", name)
            found[name] = np.diff(array, prepend=0) if one.startswith("cu_") else array
            unused.remove(one)
    for name, other in (("p", "logits"), ("drafted", ""), ("output", "")):
        if name not in found and other not in found:
            names = ", ".join(filter(None, (name, *NAMES[name], other)))
            raise UserError(f"{path} has no {names}; it has {', '.join(sorted(given)) or 'nothing'}")
    if hint := next(filter(OF_TREES.search, sorted(unused)), ""):
        raise UserError(f"{path} has {hint}: its drafts are a tree, and calls are judged of chains alone")
    every = [_call(one, f"call {number} in {path}") for number, one in enumerate(_one_by_one(found, path))]
    calls, notes = [call for call in every if len(call.drafted)], []
    if unused:
        notes.append(f"not used: {', '.join(sorted(unused))}")
    if len(calls) < len(every):
        notes.append(f"{len(every) - len(calls)} of {len(every)} calls have no drafts and are left out")
    return calls, tuple(notes)


def _npz(path: str) -> Iterator[tuple[str, NDArray[Any]]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            if sum(entry.file_size for entry in archive.zip.infolist()) > LARGEST:
                raise UserError(f"{path} holds more than {LARGEST >> 30} GiB: give some of its calls")
            yield from archive.items()
    except UserError:
        raise
    except Exception as error:  # of zipfile, zlib, and whatever reads a header
        pickled = "holds pickled Python objects, which specscope never loads: save numbers"
        broken = f"is damaged or cut off: {first_line(error)}"
        raise UserError(f"{path} {pickled if 'allow_pickle' in str(error) else broken}") from error


def _tensors(path: str) -> Iterator[tuple[str, NDArray[Any]]]:
    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"{path} is damaged or holds more than tensors: {first_line(error)}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path} holds a {type(loaded).__name__}: save a dictionary of tensors by name")
    for name, value in loaded.items():
        if isinstance(value, torch.Tensor | int | float | list | tuple):
            tensor = torch.as_tensor(value).detach()
            yield str(name), (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _checked(array: NDArray[Any], where: str, name: str) -> NDArray[Any]:
    """An array of such numbers as its name promises. Raises UserError."""
    array = np.atleast_1d(array)
    if array.dtype.kind not in "fiu" or not array.size:
        raise UserError(f"{where} is {list(array.shape)} of {array.dtype}: it must hold numbers")
    if np.isnan(array).any():
        raise UserError(f"{where} has NaN")
    if name in IDS and (array != np.floor(array)).any():
        raise UserError(f"{where} has values that are not whole numbers")
    if name in COINS and not ((array >= 0) & (array <= 1)).all():
        raise UserError(f"{where} has values outside 0 to 1")
    if name in ROWS:
        sums = np.atleast_1d(array.sum(-1, dtype=np.float64))
        worst = float(sums.flat[np.abs(sums - 1).argmax()])
        if not (array >= 0).all() or abs(worst - 1) > SUMS:
            raise UserError(f"{where} has a row that sums to {worst:.6g} or is negative in places: not probabilities")
    return array.astype(np.int64) if name in IDS else array.astype(np.float32) if array.itemsize < 4 else array


def _one_by_one(found: Arrays, path: str) -> Iterator[Arrays]:
    """The arrays of each call. Raises UserError where they are not of as many calls."""
    counts, parts = found.get("counts"), dict[str, list[NDArray[Any]]]()
    for name, array in found.items():
        parts[name] = [array] if counts is None and found["drafted"].ndim == 1 else list(array)
        if counts is not None and name not in BY_CALL:
            with_bonus = name != "drafted" and len(array) == counts.sum() + len(counts)
            parts[name] = np.split(array, np.cumsum(counts + with_bonus)[:-1])
        if name == "temperature" and array.size == 1:
            parts[name] = [array] * len(found["output"])
    calls = len(parts["drafted"])
    for name, split in parts.items():
        if len(split) < calls or (len(split) > calls and name != "temperature"):
            raise UserError(f"{path} has {calls} calls by its drafts, but {len(split)} by {name}")
    return ({name: split[number] for name, split in parts.items()} for number in range(calls))


def _call(one: Arrays, where: str) -> VerifyCall:
    """One call. Raises UserError for shapes that do not fit together, and tokens outside the vocabulary."""
    drafted, output = (one[name][: int((one[name] >= 0).sum())] for name in ("drafted", "output"))
    p, q, n = _rows(one, "p", "logits"), _rows(one, "q", "draft_logits"), len(drafted)
    assert p is not None
    shapes = {"drafted": one["drafted"], "p": p, "q": q, "coin": one.get("coin")}
    known = [(array, 1 + (name in ROWS)) for name, array in shapes.items() if array is not None]
    drafts = len(one["drafted"])
    fits = all(array.ndim == dims and drafts <= len(array) <= drafts + 1 for array, dims in known)
    if not fits or (q is not None and q.shape[-1] != p.shape[-1]) or output.ndim != 1 or not len(output):
        told = ", ".join(f"{name} {list(array.shape)}" for name, array in shapes.items() if array is not None)
        raise UserError(f"{where} has {n} drafts and {len(output)} output tokens, which contradicts {told}")
    for name, tokens in (("drafted", drafted), ("output", output)):
        if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= p.shape[-1]:
            raise UserError(f"{where}: {name} is {tokens.tolist()}, but the vocabulary has {p.shape[-1]} tokens")
    q, coin = (None if x is None else x[:n] for x in (q, one.get("coin")))
    final = float(one["final_coin"].flat[0]) if "final_coin" in one else None
    return VerifyCall(p[: n + (len(p) > drafts)], drafted, output, q, coin, final)


def _rows(one: Arrays, name: str, logits: str) -> Doubles | None:
    """A call's probabilities, from logits where it has these; None where it has neither."""
    if logits not in one:
        return one.get(name)
    rows, heat = one[logits].astype(np.float64), float(one["temperature"].flat[0]) if "temperature" in one else 1.0
    rows -= rows.max(-1, keepdims=True)
    made = np.exp(rows / heat) if heat > 0 else rows == 0
    return np.asarray(made / made.sum(-1, keepdims=True), np.float32)
