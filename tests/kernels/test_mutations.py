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

MUTATIONS = {
    "tree_attention: mask off by one": (
        "tree_attention",
        "word >> (w % 64)",
        "word >> ((w + 1) % 64)",
        check_attention,
        {},
    ),
    "tree_attention: the wrong word": (
        "tree_attention",
        "(w // 64)[None, :]",
        "(w // 65)[None, :]",
        check_attention,
        {"most_nodes": 100, "most_context": 10},
    ),
    "tree_attention: a block edge of the context": (
        "tree_attention",
        "before // KEYS * KEYS",
        "(before // KEYS + 1) * KEYS",
        check_attention,
        {},
    ),
    "tree_attention: a block edge of the cache": (
        "tree_attention",
        "BLOCK + j % BLOCK)",
        "BLOCK + (j + 1) % BLOCK)",
        check_attention,
        {},
    ),
    "tree_attention: parts that overlap": (
        "tree_attention",
        "tl.minimum(low + share, end)",
        "tl.minimum(low + share + KEYS, end)",
        check_attention,
        {"splits": 4, "keys": 16},
    ),
    "tree_attention: the window off by one, in the tree": (
        "tree_attention",
        "theirs[None, :] < WINDOW",
        "theirs[None, :] <= WINDOW",
        check_attention,
        {"window": 4},
    ),
    "tree_attention: the window off by one, in the context": (
        "tree_attention",
        "j[None, :] < WINDOW",
        "j[None, :] <= WINDOW",
        check_attention,
        {"window": 20},
    ),
    "tree_attention: what was summed is not rescaled": (
        "tree_attention",
        "acc * faded[:, None] + tl.dot",
        "acc + tl.dot",
        check_attention,
        {"keys": 16},
    ),
    "tree_attention: a missing renormalisation of the parts": (
        "tree_attention",
        "whole = tl.sum(total * share, 0)",
        "whole = tl.sum(total, 0)",
        check_attention,
        {"splits": 4, "keys": 16},
    ),
    "tree_attention: sinks forgotten when parts are joined": (
        "tree_attention",
        "whole += tl.exp(sink - top)",
        "whole += 0.0",
        check_attention,
        {"splits": 2, "keys": 16, "sinks": True},
    ),
    "tree_verify: a missing renormalisation of p": (
        "tree_verify",
        "p_x = before / mass",
        "p_x = before",
        check_verify,
        {"drawn": DETERMINISTIC},
    ),
    "tree_verify: a missing renormalisation of q": (
        "tree_verify",
        "q_token / q_mass, 1.0)",
        "q_token, 1.0)",
        check_verify,
        {"drawn": WITHOUT_REPLACEMENT},
    ),
    "tree_verify: a token drawn with replacement is tried once": (
        "tree_verify",
        "& (tl.load(drawn + child) != 2)",
        "",
        check_verify,
        {"drawn": WITH_REPLACEMENT, "forced": 0.7},
    ),
    "tree_verify: the second residual not weighed": (
        "tree_verify",
        "mass / q_mass, 0.0)",
        "1.0, 0.0)",
        check_verify,
        {"drawn": WITHOUT_REPLACEMENT},
    ),
    "tree_verify: a residual below zero": (
        "tree_verify",
        "r = tl.maximum(r.to(tl.float64) - taken * theirs.to(tl.float64), 0.0).to(tl.float32)",
        "r = (r.to(tl.float64) - taken * theirs.to(tl.float64)).to(tl.float32)",
        check_verify,
        {"drawn": WITHOUT_REPLACEMENT},
    ),
    "tree_verify: a rejected token stays": (
        "tree_verify",
        "gone = (x == tl.load(token + child))",
        "gone = (x == tl.load(token + child) + 1)",
        check_verify,
        {"drawn": DETERMINISTIC},
    ),
    "tree_verify: a block edge of the vocabulary": (
        "tree_verify",
        "inside = x < vocabulary",
        "inside = x < vocabulary - 1",
        check_verify,
        {"drawn": DETERMINISTIC, "vocabulary": 5},
    ),
    "tree_verify: what a forced rejection leaves of its token is forgotten": (
        "tree_verify",
        "tl.load(remains + child).to(tl.float32), r)",
        "0.0, r)",
        check_verify,
        {"drawn": WITHOUT_REPLACEMENT, "forced": 0.7},
    ),
    "tree_verify: a forced outcome is judged": (
        "tree_verify",
        "| (given == 1)",
        "",
        check_verify,
        {"drawn": DETERMINISTIC, "forced": 0.5},
    ),
    "tree_verify: a forced final token is drawn": (
        "tree_verify",
        "tl.where(given >= 0, given, vocabulary)",
        "vocabulary",
        check_verify,
        {"drawn": DETERMINISTIC, "forced": 0.5},
    ),
    "tree_verify: a greedy row is read": (
        "tree_verify",
        "r = tl.where(inside & (x == choice), 1.0, r)",
        "r = r",
        check_verify,
        {"drawn": DETERMINISTIC, "greedy": 0.5},
    ),
    "tree_verify: a choice of another row": (
        "tree_verify",
        "                choice = tl.load(choices + behind, mask=one_hot != 0, other=-1)\n",
        "",
        check_verify,
        {"drawn": DETERMINISTIC, "greedy": 0.5},
    ),
    "tree_verify: the cumulative sum begins anew in each block": (
        "tree_verify",
        "sums = up_to + tl.cumsum",
        "sums = tl.cumsum",
        check_verify,
        {"drawn": DETERMINISTIC},
    ),
    "tree_verify: a share begins where the one before does": (
        "tree_verify",
        "*(mine * share, ",
        "*(0, ",
        check_verify,
        {"drawn": WITHOUT_REPLACEMENT, "shares": 3},
    ),
    "tree_verify: the last share is not added": (
        "tree_verify",
        "mask=(part < shares)",
        "mask=(part < shares - 1)",
        check_verify,
        {"drawn": DETERMINISTIC, "shares": 3},
    ),
    "tree_verify: the coin falls into the wrong share": (
        "tree_verify",
        "up_to = tl.sum(tl.where(part < found_in",
        "up_to = tl.sum(tl.where(part <= found_in",
        check_verify,
        {"drawn": DETERMINISTIC, "shares": 3},
    ),
    "tree_verify: the residual is forgotten between launches": (
        "tree_verify",
        "tl.store(next_one + 4, taken)",
        "tl.store(next_one + 4, 0.0 * taken)",
        check_verify,
        {"drawn": WITHOUT_REPLACEMENT, "shares": 3},
    ),
    "tree_attention: a part that nobody wrote is read": (
        "tree_attention",
        "inside = used[:, None] & ",
        "inside = (s < splits)[:, None] & ",
        check_attention,
        {"splits": 4, "keys": 16},
    ),
}


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
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_caught(name, tmp_path, monkeypatch):
    module, old, new, check, how = MUTATIONS[name]
    copy = changed(tmp_path, monkeypatch, module, old, new)
    for seed in range(SEEDS):
        try:
            check(copy, np.random.default_rng(seed), **how)
        except AssertionError:
            return
    pytest.fail(f"{SEEDS} random cases did not catch it")


ALIKE = {(module, check, str(how)): (module, check, how) for module, _, _, check, how in MUTATIONS.values()}


@pytest.mark.every(3)
@pytest.mark.parametrize(("module", "check", "how"), ALIKE.values())
def test_without_the_mistake_the_same_cases_pass(module, check, how, tmp_path, monkeypatch):
    copy = changed(tmp_path, monkeypatch, module, "import torch\n", "import torch\n")
    for seed in range(3):
        check(copy, np.random.default_rng(seed), **how)
