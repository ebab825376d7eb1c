"""Host and device, two implementations of one function of the batch, against the oracle of single distributions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.model.places import Backend
from specscope.speculate import sampling
from specscope.speculate.changes import Changes
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.sampling import Memory, TargetRows
from specscope.speculate.verify import device, host
from specscope.speculate.verify.inputs import VerifyBatch, VerifyInput, step_batch
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinalKind, Outcome
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from tests.kernels import DEVICE
from tests.speculate.reads import Reads
from tests.speculate.verify import book, oracle
from tests.speculate.verify.book import Dense, OneHot

VOCAB = 11
BACKENDS = pytest.mark.parametrize("backend", [host, device], ids=["host", "device"])


def random_input(rng, drawn, greedy, forced):
    """(input, its rows of the target as distributions)."""
    n = int(rng.integers(0, 7))
    parent = [int(rng.integers(-1, i)) if i else ROOT for i in range(n)]
    token, q = np.zeros(n, dtype=np.int64), {}
    for above in set(parent):
        row = rng.dirichlet(np.full(VOCAB, 0.7)) + 1e-6
        children = [i for i in range(n) if parent[i] == above]
        token[children] = rng.choice(VOCAB, len(children), p=row / row.sum(), replace=drawn == Drawn.WITH_REPLACEMENT)
        if drawn != Drawn.DETERMINISTIC:
            q[above] = torch.tensor(row / row.sum(), dtype=torch.float32)
    tree = DraftTree.build(token, parent, drawn=drawn)
    if greedy:
        p = [OneHot(int(rng.choice([*token, *range(VOCAB)]))) for _ in range(n + 1)]
    else:
        p = [Dense(torch.tensor(row, dtype=torch.float32)) for row in rng.dirichlet(np.full(VOCAB, 0.5), n + 1)]
    given_nodes = {i: bool(rng.integers(2)) for i in range(n) if rng.random() < forced}
    final = int(rng.integers(VOCAB)) if rng.random() < forced else None
    return VerifyInput(tree, q, rng.random(n + 1), greedy, given_nodes, final), p


def batch_of(asked, where):
    choices = [row.token for _, p in asked for row in p if isinstance(row, OneHot)]
    rows = [row.probs for _, p in asked for row in p if isinstance(row, Dense)]
    p = torch.stack(rows) if rows else torch.zeros(0, VOCAB)
    batch = VerifyBatch.build(
        [one for one, _ in asked], TargetRows(torch.tensor(choices, dtype=torch.int64).to(where), p.to(where))
    )
    return VerifyBatch(batch.inputs, batch.trees, batch.target, [row.to(where) for row in batch.q])


def agree(got, wanted):
    for name in ("outcome", "path", "forced"):
        assert getattr(got, name).tolist() == getattr(wanted, name).tolist(), name
        assert getattr(got, name).dtype == getattr(wanted, name).dtype, name
    assert (got.token, got.kind, got.final_coin) == (wanted.token, wanted.kind, wanted.final_coin)
    for name in ("p", "p_trial", "q_trial", "accept_prob", "residual_mass", "coin"):
        np.testing.assert_allclose(getattr(got, name), getattr(wanted, name), atol=2e-5, rtol=1e-4, err_msg=name)
        assert getattr(got, name).dtype == getattr(wanted, name).dtype, name
    assert got.final_p == pytest.approx(wanted.final_p, abs=2e-5)
    assert got.final_margin == pytest.approx(wanted.final_margin, abs=2e-5)


@pytest.mark.every(2)
@BACKENDS
@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    drawn=st.sampled_from(list(Drawn)),
    greedy=st.lists(st.booleans(), min_size=1, max_size=4),
    forced=st.sampled_from([0.0, 0.5]),
)
def test_a_batch_is_judged_as_each_tree_alone(backend, seed, drawn, greedy, forced):
    rng = np.random.default_rng(seed)
    asked = [random_input(rng, drawn, yes, forced) for yes in greedy]
    verdicts = backend.verify(batch_of(asked, DEVICE if backend is device else "cpu"))
    for (one, p), got in zip(asked, verdicts, strict=True):
        agree(got, oracle.verify(one.tree, p, book.dense(one.q), one.coin, one.forced, one.final))


@BACKENDS
def test_a_forced_rejection_leaves_of_its_token_what_the_rule_leaves(backend):
    """p exceeds q at the token: nobody but a fork rejects there, and the rest of its mass may still be drawn."""
    tree = DraftTree.build([0, 1], [ROOT, ROOT], [0.2, 0.3], Drawn.WITHOUT_REPLACEMENT)
    q = {ROOT: torch.tensor([0.2, 0.3, 0.5] + [0.0] * (VOCAB - 3))}
    p = [Dense(torch.tensor([0.6, 0.1, 0.3] + [0.0] * (VOCAB - 3)))] * 3
    one = VerifyInput(tree, q, np.array([0.5, 0.01, 0.9]), False, {0: False}, None)
    (got,) = backend.verify(batch_of([(one, p)], DEVICE if backend is device else "cpu"))
    assert got.outcome.tolist() == [Outcome.REJECTED, Outcome.REJECTED]
    assert got.residual_mass[0] == pytest.approx(0.4)
    assert (got.token, got.kind, got.forced.tolist()) == (0, FinalKind.RECOVERED, [0])


@BACKENDS
def test_a_choice_that_is_forced_rejected_has_nothing_left_and_is_recovered(backend):
    tree = DraftTree.build([4], [ROOT])
    one = VerifyInput(tree, {}, np.full(2, 0.5), True, {0: False}, None)
    (got,) = backend.verify(batch_of([(one, [OneHot(4), OneHot(5)])], DEVICE if backend is device else "cpu"))
    assert (got.token, got.kind, got.residual_mass.tolist()) == (4, FinalKind.RECOVERED, [0.0])


def parts(logits, temperatures, **params):
    """Chains of one node for requests whose logits are neighbours."""
    tree = DraftTree.build([1], [ROOT])
    return [
        (Context("r", [5, 6, 7], 2, SamplingParams(temperature=t, **params)), Draft(tree), rows)
        for t, rows in zip(temperatures, logits.split(2), strict=True)
    ]


@pytest.mark.parametrize("backend", list(Backend))
def test_a_batch_has_choices_for_greedy_rows_and_probabilities_for_the_others(backend):
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    batch = step_batch(parts(logits, [0, 0.5, 2.0, 0]), None, Memory())
    assert batch.trees.greedy.tolist() == [True, False, False, True]
    assert batch.target.choices.tolist() == logits[[0, 1, 6, 7]].argmax(-1).tolist()
    heat = torch.tensor([[0.5], [0.5], [2.0], [2.0]], device=DEVICE)
    torch.testing.assert_close(batch.target.p, (logits[2:6] / heat).softmax(-1))
    assert batch.trees.p_row.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


def test_a_fork_changes_coins_outcomes_and_the_final_token_at_its_position_alone():
    changes = Changes(outcomes={(2, 0): True, (3, 0): False}, coins={(2, 0): 0.25, (2, 9): 0.5}, tokens={2: 8})
    batch = step_batch(parts(torch.randn(2, VOCAB), [0.7]), changes, Memory())
    assert batch.inputs[0].forced == {0: True}
    assert batch.trees.forced.tolist() == [0, Outcome.ACCEPTED]
    assert (batch.trees.coin[1], batch.trees.final.tolist()) == (0.25, [8])


@pytest.mark.parametrize("temperatures", [[0, 0, 0], [0.5, 1.0, 0.7], [0, 0.5, 0]])
def test_a_batch_is_made_for_the_device_without_a_read(monkeypatch, temperatures):
    """Bias and penalties too. Its one read is Verdicts.to_host."""
    logits = torch.randn(6, VOCAB)
    asked = parts(logits, temperatures, logit_bias={3: 2.0}, repetition_penalty=1.2, frequency_penalty=0.5)
    monkeypatch.setattr(sampling, "argmax", lambda rows: rows.argmax(-1))  # as it is where there is a GPU
    reads = Reads(monkeypatch)
    batch = step_batch(asked, None, Memory())
    assert reads.count == 0
    batch.trees.on(torch.device("cpu"))
    assert reads.count == 1  # of a buffer on the host, which one copy takes to the device
