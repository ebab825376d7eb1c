"""tree_verify against the rule on the host, tree_attention against float64, an engine on both, captured, and compiled.

The variants that are compiled are those that the launchers ask for, on a device of which only the limits are known:
nothing runs but Triton's compiler. A pass is "captured" by keeping it as it is, its tensors where they were.
"""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope import SamplingParams
from specscope.engine.build import capture_graphs
from specscope.errors import UserError
from specscope.kernels import launch, tree_attention, tree_verify
from specscope.kernels.tree_batch import (
    DETERMINISTIC,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
    FlatTrees,
    LayerShape,
    Part,
    Tree,
    TreeBatch,
)
from specscope.model.graphs import CudaCapture
from specscope.model.places import Backend, pick_backend
from specscope.speculate.changes import Changes
from specscope.trace.record.tree import ROOT
from tests.analyze.audit.runs import Bench
from tests.kernels import DEVICE
from tests.kernels.cases import check_attention, check_verify, near, on_host, part, random_batch, work_of
from tests.kernels.variants import A100, B200, H100, watched

SEEDS = st.integers(0, 2**32 - 1).map(np.random.default_rng)
RULES = [DETERMINISTIC, WITHOUT_REPLACEMENT, WITH_REPLACEMENT]


NO_CHOICES = torch.zeros(0, dtype=torch.int64, device=DEVICE)


def read(*work):
    """What becomes of trees, four tokens of the vocabulary at a time."""
    return tree_verify.tree_verify(*work, block=4).to_host()


@pytest.mark.every(3)
@pytest.mark.parametrize("drawn", RULES)
@settings(max_examples=20, deadline=None)
@given(
    rng=SEEDS,
    vocabulary=st.integers(13, 70),  # no node has more children than there are tokens to draw
    nodes=st.integers(0, 12),
    block=st.sampled_from([4, 16, 64]),
    greedy=st.sampled_from([0, 0.5, 1]),
    forced=st.sampled_from([0, 0.5]),
)
def test_any_trees(drawn, rng, vocabulary, nodes, **how):
    check_verify(tree_verify, rng, drawn, vocabulary=vocabulary, most_nodes=nodes, **how)


def test_all_mass_at_a_rejected_token_gives_it_nevertheless_and_never_nan():
    """A residual of all zeros falls back to p."""
    p = torch.zeros(2, 8, device=DEVICE)
    p[:, 3] = 1
    tree = Tree(
        np.array([3], np.int32),
        np.array([ROOT], np.int32),
        np.array([WITHOUT_REPLACEMENT], np.uint8),
        np.array([0.5, 1.0]),  # a coin that nothing passes
        np.array([0, -1]),
    )
    got = read(FlatTrees.build([tree]).on(DEVICE), p, NO_CHOICES, p[:1].clone())
    assert float(got["residual_mass"][1]) == 0
    assert (int(got["token"][0]), float(got["final_p"][0])) == (3, 1.0)


def test_where_hardly_any_q_is_left_nothing_is_lost():
    """After the first sibling q's mass is beyond float32: a factor of 1e40, which must not meet a 0 in float32."""
    q = torch.zeros(1, 8, device=DEVICE)
    q[0, 1], q[0, 2] = 1.0, 1e-40
    p = torch.full((3, 8), 0.125, device=DEVICE)
    tree = Tree(
        np.array([1, 2], np.int32),
        np.array([ROOT, ROOT], np.int32),
        np.full(2, WITHOUT_REPLACEMENT, np.uint8),
        np.array([0.4, 0.9, 0.9]),
        np.array([0, -1, -1]),
    )
    work = FlatTrees.build([tree]).on(DEVICE), p, NO_CHOICES, q
    got = read(*work)
    assert got["outcome"].tolist() == [0, 2, 2]
    assert got["p_trial"].tolist() == pytest.approx([0, 0.125, 1 / 7], rel=1e-4)
    assert got["q_trial"].tolist() == pytest.approx([0, 1, 1], rel=1e-4)
    assert got["residual_mass"].tolist() == pytest.approx([0, 0.875, 6 / 7], rel=1e-4)


PROMPTS = ["abcabcab", "the cat sat on the mat", "x"]
DRAFTERS = {  # by the name of a row: that of its engine, and its tree
    "ngram": ("ngram", "3x3"),
    "tree": ("draft tree", "[(0,), (1,), (0, 0), (1, 0)]"),
    "forced": ("draft tree", "2x2"),
    "dynamic": ("draft tree", "dynamic:6,depth=3,top=3"),
    "module": ("mtp", "[(0,), (1,), (0, 0)]"),
    "modules": ("mtp-3", "3"),
}
# Of "forced": at some positions the first child is accepted and the second rejected, at others all are rejected.
FORCED = Changes(
    outcomes={(position, node): node == 0 and position % 3 > 0 for position in range(64) for node in (0, 1)}
)


@pytest.fixture(scope="module")
def bench(tiny, tmp_path_factory):
    return Bench(tiny, tmp_path_factory.mktemp("heads"), device=DEVICE.type, max_step_tokens=32)


def run(bench, backend, name, params):
    drafter, tree = DRAFTERS[name]
    engine = bench.fresh(drafter, tree=tree, backend=backend, changes=FORCED if name == "forced" else None)
    assert engine.run_info.backend.startswith(backend)
    results = engine.generate(PROMPTS, params)
    assert engine.runner.cache.pool.used == 0
    return results


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        pytest.param(name, t, marks=() if (name, t) == ("tree", 0.9) else pytest.mark.slow)
        for name in DRAFTERS
        for t in (0.0, 0.9)
    ],
)
def test_both_backends_make_the_same_of_a_batch(bench, name, temperature):
    params = SamplingParams(max_tokens=4, temperature=temperature, seed=3, ignore_eos=True)
    ours, reference = (run(bench, backend, name, params) for backend in ("triton", "torch"))
    assert [r.token_ids for r in ours] == [r.token_ids for r in reference]
    for a, b in zip(ours, reference, strict=True):
        for left, right in zip(a.steps, b.steps, strict=True):
            assert (left.verdict is None) == (right.verdict is None)
            if left.verdict is None:
                continue
            assert (left.verdict.kind, left.verdict.path.tolist()) == (right.verdict.kind, right.verdict.path.tolist())
            for name in ("outcome", "p", "p_trial", "q_trial", "accept_prob", "residual_mass", "coin"):
                got, wanted = getattr(left.verdict, name), getattr(right.verdict, name)
                assert got.dtype == wanted.dtype
                np.testing.assert_allclose(got, wanted, atol=2e-5, err_msg=name)


def test_a_backend_is_chosen_by_device():
    assert pick_backend("auto", torch.device("cpu")) is Backend.TORCH
    assert pick_backend("auto", torch.device("cuda")) is Backend.TRITON
    assert pick_backend("torch", torch.device("cuda")) is Backend.TORCH


def test_triton_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="needs a CUDA GPU"):
        pick_backend("triton", torch.device("cpu"))


@settings(max_examples=8, deadline=None)
@given(
    rng=SEEDS,
    requests=st.integers(1, 4),
    window=st.sampled_from([None, None, 1, 7, 40]),
    softcap=st.sampled_from([None, None, 5.0]),
    sinks=st.booleans(),
    splits=st.sampled_from([1, 1, 2, 4]),
    keys=st.sampled_from([16, 32, 64]),
    wrong=st.sampled_from([None, float("nan"), float("inf")]),
)
def test_any_batch(rng, requests, **how):
    check_attention(tree_attention, rng, requests=requests, **how)


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", [{}, {"splits": 2}, {"window": 9}, {"softcap": 20.0}, {"sinks": True}])
def test_half_types_sum_in_float32(dtype, how):
    for seed in range(3):
        check_attention(tree_attention, np.random.default_rng(seed), dtype, **how)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 4, 16])
def test_long_contexts(splits):
    check_attention(
        tree_attention, np.random.default_rng(splits), most_context=3000, requests=2, splits=splits, keys=64
    )


def test_tiles_reach_no_further_than_their_rows_see():
    """Of a chunk of 40 rows in tiles of 16, the first tile reads no slot that only later rows see: those hold NaN."""
    rng, heads = np.random.default_rng(0), LayerShape(1, 16, 16)
    parts = [part(rng, 10, 40, 0, 40, list(range(4)))]
    batch = TreeBatch.build(parts, DEVICE)
    query, rows = torch.randn(40, 4, 16, device=DEVICE), torch.randn(64, 32, device=DEVICE)
    wanted = on_host(query, rows, heads, parts, 0.2)
    seen = torch.arange(26)
    slots = batch.table[0].cpu().long()[seen // 16] * 16 + seen % 16
    poisoned = torch.full_like(rows, torch.nan)
    poisoned[slots] = rows[slots]
    got = tree_attention.tree_attention(query, poisoned, heads, batch, scale=0.2, keys=16)
    near(got[:16], wanted[:16], 3e-6)
    assert got[16:].isnan().any(-1).all()


DEVICES = {80: A100, 90: H100, 100: B200}
CPU = torch.device("cpu")


@pytest.fixture(params=[pytest.param(number, marks=() if number == 90 else pytest.mark.slow) for number in DEVICES])
def capability(request, monkeypatch):
    """Launches for this device are seen, and none is made."""
    monkeypatch.setattr(launch, "limits", lambda _: DEVICES[request.param])
    return request.param


def attend(heads, fold, dtype, rows, context, **variant):
    """One sequence."""
    count, size, value = heads
    blocks = range(-(-(context + rows) // 16))
    batch = TreeBatch.build([Part(blocks, context, context + np.arange(rows), np.tri(rows, dtype=np.bool_))], CPU)
    layer = torch.zeros(len(blocks) * 16, count * (size + value), dtype=dtype)
    query = torch.zeros(rows, count * fold, size, dtype=dtype)
    if variant.pop("sinks", False):
        variant["sinks"] = torch.zeros(count * fold, dtype=dtype)
    tree_attention.tree_attention(query, layer, LayerShape(*heads), batch, scale=0.1, **variant)


def check(capability, variants):
    """Every one compiles, and its shared memory is within the device's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = sorted(variants, key=repr)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling"],
        input=json.dumps([(capability, dataclasses.asdict(one)) for one in asked]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    taken = json.loads(done.stdout)
    assert len(taken) == len(asked) > 0
    for one, shared in zip(asked, taken, strict=True):
        assert shared <= DEVICES[capability].shared, one


def test_attention_compiles_within_shared_memory(capability):
    with watched(dry=True) as seen:
        for dtype, size in ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 128), (torch.float32, 256)):
            attend((8, size, size), 4, dtype, 64, 5000)  # the largest tile
        attend((8, 128, 128), 4, torch.bfloat16, 1, 5000)
        attend((8, 128, 128), 4, torch.bfloat16, 1, 5)
        attend((2, 64, 64), 8, torch.bfloat16, 25, 5000, window=128, sinks=True)
    assert {"tree_attention._attend", "tree_attention._join"} == {one.kernel for one in seen}
    check(capability, seen)


def test_verification_compiles(capability):
    with watched(dry=True) as seen:
        for drawn in (DETERMINISTIC, WITHOUT_REPLACEMENT):
            tree_verify.tree_verify(*work_of(random_batch(np.random.default_rng(0), 5000, 2, 5, drawn)))
    assert len({one.kernel for one in seen}) == 1
    check(capability, seen)


ASKED = ["abcabcab", "the cat"]
ROWS = {  # by the name of an engine: its tree, and a temperature
    "none": (None, 0.9),
    "ngram": ("2x3", 0.0),
    "dynamic model": ("dynamic:3,depth=2,top=2", 0.9),
    "eagle dynamic": ("dynamic:3,depth=2,top=2", 0.0),
    "eagle": ("[(0,), (1,), (1, 0)]", 0.9),
    "mtp": ("[(0,), (1,), (1, 0)]", 0.9),
    "p-eagle dynamic": ("dynamic:3,depth=2,top=2", 0.0),
    "dflash": ("3", 0.9),
}


@torch.inference_mode()
def keep(run):
    """A capture without a GPU."""
    outputs = run()

    def again():
        for old, new in zip(outputs, run(), strict=True):
            old.copy_(new)

    return outputs, torch.inference_mode()(again)


@pytest.fixture(scope="module")
def graphs_bench(deep, tiny, tmp_path_factory):
    how = {"backend": "triton", "graphs": "off", "device": DEVICE.type, "max_context": 48}
    made = Bench(deep, tmp_path_factory.mktemp("heads"), **how, max_batch=2, max_step_tokens=32)
    made.targets |= dict.fromkeys(("none", "ngram"), tiny)
    return made


def capture(engine):
    make_capture = CudaCapture if DEVICE.type == "cuda" else lambda: keep
    said = []
    text = capture_graphs(engine.config, engine.runner, engine.drafter, engine.max_context, make_capture, said.append)
    return text, said


def watch_replays(graphs):
    """Of each pass, whether some shape fits and is replayed."""
    used, replay = [], graphs.replay
    graphs.replay = lambda *given: (done := replay(*given), used.append(done is not None))[0]
    return used


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "ngram" else pytest.mark.slow) for name in ROWS]
)
def test_a_captured_engine_gives_the_same(graphs_bench, name):
    tree, temperature = ROWS[name]
    params = SamplingParams(max_tokens=5, temperature=temperature, seed=3, ignore_eos=True)
    plain, graphed = (graphs_bench.fresh(name, tree=tree) for _ in range(2))
    text, said = capture(graphed)
    count = len(said)
    assert text == f"{count} CUDA graphs"
    assert said[-1] == f"capturing CUDA graphs: {count} of {count}"
    used = watch_replays(graphed.runner.graphs)
    drafted = watch_replays(graphed.drafter.runner.graphs) if graphed.drafter.runner is not None else [True] * 3
    ours, reference = graphed.generate(ASKED, params), plain.generate(ASKED, params)
    assert used.count(True) > 2  # decode steps; prompts are longer than any shape
    assert used.count(False) > 0
    assert drafted.count(True) > 2
    assert [r.token_ids for r in ours] == [r.token_ids for r in reference]
    for a, b in zip(ours, reference, strict=True):
        for left, right in zip(a.steps, b.steps, strict=True):
            if right.verdict is None:
                assert left.verdict is None
                continue
            assert left.verdict.path.tolist() == right.verdict.path.tolist()
            np.testing.assert_allclose(left.verdict.p, right.verdict.p, atol=2e-5)
            assert left.tree.token.tolist() == right.tree.token.tolist()
    assert graphed.runner.cache.pool.used == 0


def test_a_model_that_cannot_be_captured_runs_without(graphs_bench):
    engine = graphs_bench.fresh("none")

    def refuse(run):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    args = (engine.config, engine.runner, engine.drafter, engine.max_context, lambda: refuse, lambda _: None)
    text = "0 CUDA graphs; the target could not be captured: operation not permitted when stream is capturing"
    assert capture_graphs(*args) == text
    assert not len(engine.runner.graphs)
    assert len(engine.generate(["ab"], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
