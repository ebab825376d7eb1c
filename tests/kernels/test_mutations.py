"""Mistakes put into the kernels on purpose: the checks that the kernels pass must fail on each of them."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from specscope import kernels
from specscope.kernels.flat_trees import DETERMINISTIC, WITH_REPLACEMENT, WITHOUT_REPLACEMENT
from tests.kernels.cases import check_attention, check_verify

SEEDS = 12
# By what is wrong: the text, the mistake, and the cases that must show it
ATTENTION = {
    "mask off by one": ("word >> (w % 64)", "word >> ((w + 1) % 64)", {}),
    "the wrong word": ("(w // 64)[None, :]", "(w // 65)[None, :]", {"most_nodes": 100, "most_context": 10}),
    "a block edge of the context": ("before // KEYS * KEYS", "(before // KEYS + 1) * KEYS", {}),
    "a block edge of the cache": ("BLOCK + j % BLOCK)", "BLOCK + (j + 1) % BLOCK)", {}),
    "parts that overlap": (
        "tl.minimum(low + share, end)",
        "tl.minimum(low + share + KEYS, end)",
        {"splits": 4, "keys": 16},
    ),
    "the window off by one, in the tree": ("theirs[None, :] < WINDOW", "theirs[None, :] <= WINDOW", {"window": 4}),
    "the window off by one, in the context": ("j[None, :] < WINDOW", "j[None, :] <= WINDOW", {"window": 20}),
    "what was summed is not rescaled": ("acc * faded[:, None] + tl.dot", "acc + tl.dot", {"keys": 16}),
    "a missing renormalisation of the parts": (
        "whole = tl.sum(total * share, 0)",
        "whole = tl.sum(total, 0)",
        {"splits": 4, "keys": 16},
    ),
    "sinks forgotten when parts are joined": (
        "whole += tl.exp(sink - top)",
        "whole += 0.0",
        {"splits": 2, "keys": 16, "sinks": True},
    ),
    "a part that nobody wrote is read": (
        "inside = used[:, None] & ",
        "inside = (s < splits)[:, None] & ",
        {"splits": 4, "keys": 16},
    ),
}
VERIFY = {
    "a missing renormalisation of p": ("p_x = before / mass", "p_x = before", {"drawn": DETERMINISTIC}),
    "a missing renormalisation of q": ("q_token / q_mass, 1.0)", "q_token, 1.0)", {"drawn": WITHOUT_REPLACEMENT}),
    "a token drawn with replacement is tried once": (
        "& (tl.load(drawn + child) != 2)",
        "",
        {"drawn": WITH_REPLACEMENT, "forced": 0.7},
    ),
    "the second residual not weighed": ("mass / q_mass, 0.0)", "1.0, 0.0)", {"drawn": WITHOUT_REPLACEMENT}),
    "a residual below zero": (
        "r = tl.maximum(r.to(tl.float64) - taken * theirs.to(tl.float64), 0.0).to(tl.float32)",
        "r = (r.to(tl.float64) - taken * theirs.to(tl.float64)).to(tl.float32)",
        {"drawn": WITHOUT_REPLACEMENT},
    ),
    "a rejected token stays": (
        "gone = (x == tl.load(token + child))",
        "gone = (x == tl.load(token + child) + 1)",
        {"drawn": DETERMINISTIC},
    ),
    "a block edge of the vocabulary": (
        "inside = x < vocabulary",
        "inside = x < vocabulary - 1",
        {"drawn": DETERMINISTIC, "vocabulary": 5},
    ),
    "what a forced rejection leaves of its token is forgotten": (
        "tl.load(remains + child).to(tl.float32), r)",
        "0.0, r)",
        {"drawn": WITHOUT_REPLACEMENT, "forced": 0.7},
    ),
    "a forced outcome is judged": ("| (given == 1)", "", {"drawn": DETERMINISTIC, "forced": 0.5}),
    "a forced final token is drawn": (
        "tl.where(given >= 0, given, vocabulary)",
        "vocabulary",
        {"drawn": DETERMINISTIC, "forced": 0.5},
    ),
    "a greedy row is read": (
        "r = tl.where(inside & (x == choice), 1.0, r)",
        "r = r",
        {"drawn": DETERMINISTIC, "greedy": 0.5},
    ),
    "a choice of another row": (
        "            p_row, choice, q_row, first = _at(",
        "            p_row, _, q_row, first = _at(",
        {"drawn": DETERMINISTIC, "greedy": 0.5},
    ),
    "the cumulative sum begins anew in each block": (
        "sums = up_to + tl.cumsum",
        "sums = tl.cumsum",
        {"drawn": DETERMINISTIC},
    ),
}
CHECKS = {"tree_attention": (check_attention, ATTENTION), "tree_verify": (check_verify, VERIFY)}


def changed(tmp_path, monkeypatch, module, old, new):
    """A copy of a kernel's module with one change."""
    source = (Path(kernels.__path__[0]) / f"{module}.py").read_text()
    assert old in source, "the mutation no longer fits the kernel"
    path = tmp_path / f"{module}_changed.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    copy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, copy)
    spec.loader.exec_module(copy)
    return copy


@pytest.mark.every(2)
@pytest.mark.parametrize(("module", "name"), [(module, name) for module, (_, rows) in CHECKS.items() for name in rows])
def test_a_mistake_is_caught(module, name, tmp_path, monkeypatch):
    check, rows = CHECKS[module]
    old, new, how = rows[name]
    copy = changed(tmp_path, monkeypatch, module, old, new)
    for seed in range(SEEDS):
        try:
            check(copy, np.random.default_rng(seed), **how)
        except AssertionError:
            return
    pytest.fail(f"{SEEDS} random cases did not catch it")


ALIKE = {f"{module} {how}": (module, how) for module, (_, rows) in CHECKS.items() for *_, how in rows.values()}


@pytest.mark.every(3)
@pytest.mark.parametrize(("module", "how"), ALIKE.values())
def test_without_the_mistake_the_same_cases_pass(module, how, tmp_path, monkeypatch):
    copy = changed(tmp_path, monkeypatch, module, "import torch\n", "import torch\n")
    for seed in range(3):
        CHECKS[module][0](copy, np.random.default_rng(seed), **how)
