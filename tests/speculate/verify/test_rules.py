"""Rules of verification: exact, by enumeration; what is noted at parents, and what rounding could flip."""

import dataclasses
import inspect
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.model.places import Backend
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.sampling import LogitRows, TargetRows
from specscope.speculate.verify import batch as inputs
from specscope.speculate.verify import host, match, traversal
from specscope.speculate.verify.distribution import Residual
from specscope.speculate.verify.verifier import Verifier, on_device
from specscope.testing import enumeration
from specscope.testing.enumeration import by_coins, conditional, total_variation
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinalKind, Outcome
from specscope.trace.record.rules import BLOCK, MATCH, ROUNDING, STANDARD, TRAVERSAL
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.tree_shape import parse_tree
from tests.analyze.locate.planted import q_doubled_where_late
from tests.engines import DRAFTERS, PROMPTS, each_drafter, tiny_engine
from tests.faults.fault import replaced
from tests.faults.planted import trials
from tests.kernels import DEVICE
from tests.speculate.verify.enumeration import SHAPES, batch_of, dense, random_input

DRAWN = pytest.mark.parametrize("drawn", list(Drawn), ids=lambda d: d.name.lower())
DEEP = [*SHAPES, ("3", 3), ("[(0,), (1,), (0, 0), (0, 1), (1, 0)]", 3), ("[(0,), (0, 0), (0, 0, 0), (0, 1)]", 3)]


def post_order(tree):
    """Nodes in the order in which traversal tests their coins."""

    def below(node):
        for child in tree.children(node):
            yield from below(child)
            yield child

    return list(below(ROOT))


# Looked up when they are called: tests plant others
standard = by_coins(lambda batch: host.verify(batch))
ahead = by_coins(lambda batch: traversal.verify(batch), post_order)


def matched(tree, p, q):
    """Every draw at every node under token matching, as the coin that makes it."""

    def explore(coins, weight):
        coin = np.full(len(tree) + 1, 0.5)
        for parent, value in coins.items():
            coin[1 + tree.children(parent)[0]] = value
        (verdict,), (left,) = match.verify(batch_of(tree, p, q, coin))
        reached = [ROOT, *verdict.path.tolist()]
        fresh = next((node for node in reached if tree.children(node) and node not in coins), None)
        if fresh is not None:
            row = p[fresh + 1].numpy()
            ends = np.cumsum(row) / row.sum()
            for end, share in zip(ends, row, strict=True):
                yield from explore(coins | {fresh: end - share / 2}, weight * share)
            return
        last = left.row.numpy()
        if verdict.kind is FinalKind.RECOVERED:
            last = np.eye(len(last))[verdict.token]
        yield weight, verdict.path, last

    yield from explore({}, 1.0)


def worst(text, vocab, drawn, outcomes, seeds=2, **how):
    models = ((conditional(vocab, seed), conditional(vocab, seed + 1000)) for seed in range(seeds))
    return max(total_variation(parse_tree(text), *each, drawn, outcomes, **how) for each in models)


@pytest.mark.every(2)
@DRAWN
@pytest.mark.parametrize(("text", "vocab"), SHAPES)
def test_the_standard_rule_emits_the_targets_distribution(text, vocab, drawn):
    """Total variation from the target, over every draw and coin outcome, for many random p and q."""
    assert worst(text, vocab, drawn, standard) < 1e-12


@pytest.mark.every(5)
@DRAWN
@pytest.mark.parametrize(("text", "vocab"), DEEP)
def test_traversal_emits_the_targets_distribution(text, vocab, drawn):
    assert worst(text, vocab, drawn, ahead) < 1e-12


@pytest.mark.every(5)
@DRAWN
@pytest.mark.parametrize(("text", "vocab"), SHAPES)
def test_matching_emits_the_targets_distribution(text, vocab, drawn):
    assert worst(text, vocab, drawn, matched) < 1e-12


# Mistakes


def mutant(module, old, new):
    """The module's `verify` with a piece of its text replaced."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, old
    changed = types.ModuleType(module.__name__ + "_mutant")
    sys.modules[changed.__name__] = changed  # dataclasses look their module up
    exec(compile(source.replace(old, new), changed.__name__, "exec"), changed.__dict__)
    return changed.verify


def sorted_siblings(tree, q):
    order = np.argsort([-float(q[ROOT][int(t)]) for t in tree.token], kind="stable")
    return DraftTree.build(tree.token[order], tree.parent, drawn=Drawn.WITHOUT_REPLACEMENT)


def pruned(tree, q):
    kept = int(np.argmax([float(q[ROOT][int(t)]) for t in tree.token]))
    return DraftTree.build([tree.token[kept]], [ROOT], drawn=Drawn.WITHOUT_REPLACEMENT)


@replaced(enumeration, "chance_drawn")
def as_top_k(right, q, tokens, drawn):
    """Sampled drafts are taken for the likeliest ones."""
    return right(q, tokens, Drawn.DETERMINISTIC)


MISTAKES = {  # in drafting or in the rule
    "a ratio test of deterministic drafts": as_top_k,
    "the residual is not renormalised": trials.tried(reject=trials.as_it_is),
    "q is not renormalised": trials.not_divided,
    "q keeps a rejected sibling": q_doubled_where_late,
    "the residual is forgotten": trials.tried(reject=trials.unchanged),
}
REARRANGED = {"siblings are sorted by q": sorted_siblings, "a sampled sibling is pruned": pruned}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", [*MISTAKES, *REARRANGED])
def test_mistakes_in_drafting_and_of_the_standard_rule_are_caught(monkeypatch, name):
    if name in MISTAKES:
        MISTAKES[name](monkeypatch, None)
    how = {"rearrange": REARRANGED[name]} if name in REARRANGED else {}
    assert max(worst(shape, 5, Drawn.WITHOUT_REPLACEMENT, standard, **how) for shape in ("2x1", "3x1")) > 0.05


TRAVERSAL_MISTAKES = {
    "the ratio is not capped at 1": ("min(1.0, ratio * p_token / q_token)", "ratio * p_token / q_token"),
    "the ratio starts anew at each node": ("min(1.0, ratio * p_token", "min(1.0, p_token"),
    "the residual is not scaled by the ratio": ("gone=gone, scale=ratio", "gone=gone"),
    "the parent keeps its ratio when a child is rejected": ("ratio = mass / (mass + (1 - ratio))", "ratio = ratio"),
    "the parent's ratio is the residual's mass": ("mass / (mass + (1 - ratio))", "mass"),
    "q keeps a rejected sibling": ("gone=gone, scale=ratio", "gone=False, scale=ratio"),
    "the final token is drawn from all of p": ("return (row, left) if", "return (row, self.at_row[row]) if"),
    "so it is at the root": ("return row, left\n", "return row, self.at_row[row]\n"),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", TRAVERSAL_MISTAKES)
def test_mistakes_of_traversal_are_caught(monkeypatch, name):
    monkeypatch.setattr(traversal, "verify", mutant(traversal, *TRAVERSAL_MISTAKES[name]))
    shapes = [("2", 4), ("3x1", 5), ("[(0,), (1,), (0, 0), (1, 0)]", 3)]
    assert max(worst(text, vocab, Drawn.WITHOUT_REPLACEMENT, ahead) for text, vocab in shapes) > 0.005


MATCH_MISTAKES = {
    "each child has a coin of its own": ("accepted = token == child_token", "accepted = coin < left.prob(child_token)"),
    "a recovered token is drawn from all of p": ("return None, left, token", "return None, p, child_token"),
    "the draw forgets what a child took": ("= p.draw(coin)", "= left_over(p, trees, children).draw(coin)"),
}


def left_over(p, trees, children):
    """p without the first child: a draw that can never accept it."""
    return p.reject(int(trees.token[children[0]]), None)[0]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", MATCH_MISTAKES)
def test_mistakes_of_matching_are_caught(monkeypatch, name):
    planted = mutant(match, *MATCH_MISTAKES[name])
    planted.__globals__["left_over"] = left_over
    monkeypatch.setattr(match, "verify", planted)
    assert max(worst(text, vocab, Drawn.WITHOUT_REPLACEMENT, matched) for text, vocab in SHAPES[:3]) > 0.05


# The verdict and its evidence


@pytest.mark.parametrize(
    ("verify", "where"), [(lambda batch: host.verify(batch)[0], "cpu"), (on_device, DEVICE)], ids=["host", "device"]
)
def test_a_forced_rejection_leaves_of_its_token_what_the_rule_leaves(verify, where):
    """p exceeds q at the token: nobody but a fork rejects there, and the rest of its mass may still be drawn."""
    tree = DraftTree.build([0, 1], [ROOT, ROOT], [0.2, 0.3], Drawn.WITHOUT_REPLACEMENT)
    p, q = (torch.tensor([*some, 0.0]) for some in ([0.6, 0.1, 0.3], [0.2, 0.3, 0.5]))
    (got,) = verify(batch_of(tree, [p] * 3, {ROOT: q}, [0.5, 0.01, 0.9], {0: False}, where=where))
    assert got.outcome.tolist() == [Outcome.REJECTED, Outcome.REJECTED]
    assert got.residual_mass[0] == pytest.approx(0.4)
    assert (got.token, got.kind, got.forced.tolist()) == (0, FinalKind.RECOVERED, [0])


# All rules alike


@pytest.mark.parametrize(("rule", "name"), [(host, STANDARD), (traversal, TRAVERSAL), (match, MATCH)])
@given(seed=st.integers(0, 2**32 - 1), drawn=st.sampled_from(list(Drawn)), greedy=st.booleans())
@settings(max_examples=60, deadline=None)
def test_forced_outcomes_are_kept(rule, name, seed, drawn, greedy):
    """A node that is forced rejected is on no path; one that is forced accepted is, where its turn came."""
    *asked, forced, final = random_input(np.random.default_rng(seed), drawn, greedy, 0.5)
    (found,), _ = rule.verify(batch_of(*asked, forced, final))
    for node, accepted in forced.items():
        if found.outcome[node] != Outcome.UNTRIED:
            assert (node in found.path) is accepted
            assert node in found.forced
    assert final is None or found.token == final
    assert found.rule == name


def judged(backend, context, draft, logits, rule=STANDARD):
    """The verdict on a draft, and what is noted beside it."""
    step = Verifier(backend, rule=rule).judge([(context, draft, logits)])
    return step.verdicts[0], step.notes()[0]


@pytest.mark.parametrize("rule", [BLOCK, TRAVERSAL, MATCH])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_verifier_on_the_device_judges_these_rules_on_the_host(rule, temperature):
    """The target's rows come from the backend's kernels; verdicts and notes are those of the host's own backend."""
    logits = 2 * torch.randn(4, 11, generator=torch.Generator().manual_seed(5))
    tree = DraftTree.build([int(logits[0].argmax()), 4, 3], [ROOT, 0, 1])
    context = Context("r", [5, 6, 7], 2, SamplingParams(temperature=temperature, seed=3))
    found = []
    for backend in Backend:
        where = DEVICE if backend is Backend.TRITON else "cpu"
        verdict, notes = judged(backend, context, Draft(tree), logits.to(where), rule)
        assert verdict.rule == rule
        found.append((verdict.path.tolist(), verdict.token, notes.final_entropy))
    assert (found[0][:2], found[0][2]) == (found[1][:2], pytest.approx(found[1][2], abs=1e-4))


class OnDevice(torch.Tensor):
    """A tensor that says that it lies on a GPU, and cannot be read but by a copy."""

    device = property(lambda tensor: torch.device("cuda"))

    def cpu(self):
        return torch.Tensor.cpu(self).as_subclass(torch.Tensor)

    def numpy(self):
        raise TypeError("can't convert cuda tensor to numpy: use Tensor.cpu() first")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_torch_backend_judges_rows_of_a_device(monkeypatch, temperature):
    """`--backend torch` on a GPU: what `doctor` recommends where Triton does not run."""
    logits = 2 * torch.randn(3, 11, generator=torch.Generator().manual_seed(5))
    q = logits[0].softmax(-1)
    tree = DraftTree.build(
        [int(logits[0].argmax()), 4], [ROOT, ROOT], [float(q.max()), float(q[4])], Drawn.WITH_REPLACEMENT
    )
    context = Context("r", [5, 6, 7], 2, SamplingParams(temperature=temperature, seed=3))
    wanted, of_host = judged(Backend.TORCH, context, Draft(tree, {ROOT: q}), logits)
    rows = inputs.target_rows([context.rows(logits, list)])
    on_device = TargetRows(rows.choices.as_subclass(OnDevice), rows.p.as_subclass(OnDevice))
    monkeypatch.setattr(inputs, "target_rows", lambda parts: on_device)
    draft = Draft(tree, {ROOT: q.as_subclass(OnDevice)})
    verdict, notes = judged(Backend.TORCH, context, draft, logits)
    assert verdict == wanted
    assert notes == of_host


SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=12, seed=5, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PENALISED = SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.2, max_tokens=8, seed=2)


@pytest.mark.every(3)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("name", each_drafter(DRAFTERS))
def test_the_notes_are_those_of_the_distributions(engines, name, params):
    engine = engines[name]
    engine.keep_timeline()  # keeps the tensors of the step that ran last
    for prompt in PROMPTS[:3]:
        engine.add(prompt, params)
    seen = 0
    while engine.busy:
        record = engine.step()
        state = engine.last
        for part, turn in zip(record.requests, state.turns, strict=True):
            if part.verdict is not None:
                tokens = turn.request.tokens[: part.position + 1]
                check(part, turn.draft, turn.logits, params, tokens, len(turn.request.prompt_tokens))
                seen += len(part.parents.node)
    assert seen > 1 or name == "none"


def check(part, draft, logits, params, tokens, prompt_len):
    """One part against numbers that are computed one by one, in float64."""
    tree, verdict, notes = part.tree, part.verdict, part.parents
    tried = [node for node in (ROOT, *verdict.path.tolist()) if tree.children(node)]
    assert notes.node.tolist() == tried
    for k, node in enumerate(tried):
        raw = softmax(logits[node + 1])
        assert notes.top[k, 0] == raw.argmax()
        assert np.allclose(notes.top_p[k], np.sort(raw)[::-1][:4], atol=1e-6)
        p = shaped(part, logits, params, tokens, prompt_len, node)
        assert notes.choice[k] == p.argmax()
        assert np.isclose(notes.choice_p[k], p.max(), atol=1e-6)
        assert np.allclose([notes.entropy[k], notes.varentropy[k]], spread(p), atol=2e-5)
        for child in tree.children(node):
            token = int(tree.token[child])
            assert np.isclose(notes.raw_p[child], raw[token], atol=1e-6)
            assert notes.rank[child] == (0 if p[token] == 0 else 1 + int((p > p[token]).sum()))
        check_drafter(k, node, part, draft, raw)
    untried = verdict.outcome == Outcome.UNTRIED
    below = np.isin(tree.parent, tried)
    assert not notes.raw_p[untried & ~below].any()
    check_final(part, draft, shaped(part, logits, params, tokens, prompt_len, above(verdict)))


def check_drafter(k, node, part, draft, raw):
    tree, notes = part.tree, part.parents
    children = tree.children(node)
    if tree.drawn[children[0]] != Drawn.DETERMINISTIC:
        q = draft.q[node].double().numpy()
        assert np.allclose([notes.q_entropy[k], notes.q_varentropy[k]], spread(q), atol=2e-5)
        assert all(notes.q_rank[c] == 1 + (q > q[tree.token[c]]).sum() for c in children)
    row = draft.row([] if node == ROOT else tree.token[tree.path_to(node)].tolist())
    if row is None:
        assert not notes.draft_top_p[k].any()  # nothing, or zeros where the drafter looked at other parents
        return
    own, known = softmax(row.full()[0]), np.isfinite(row.full()[0].numpy())
    assert notes.draft_top[k, 0] == own.argmax()
    assert np.allclose(notes.draft_top_p[k], np.sort(own)[::-1][: notes.draft_top.shape[1]], atol=1e-6)
    choice = int(raw.argmax())
    assert notes.choice_rank[k] == (1 + int((own > own[choice]).sum()) if known[choice] else 0)
    assert np.isclose(notes.choice_q[k], own[choice], atol=1e-6)
    assert np.isclose(notes.outside[k], raw[~known].sum(), atol=1e-5)


def check_final(part, draft, p):
    """The final token's distribution: p, less what each rejected child took."""
    tree, verdict, notes = part.tree, part.verdict, part.parents
    assert np.isclose(notes.final_target_p, p[verdict.token], atol=1e-6)
    if verdict.kind is FinalKind.RECOVERED and p.max() < 1:
        q = draft.q.get(above(verdict))
        q = None if q is None else q.double().numpy()
        for child in tree.children(above(verdict)):
            token = int(tree.token[child])
            left = np.maximum(p - q, 0) if q is not None else np.where(np.arange(len(p)) == token, 0, p)
            p = left / left.sum()
            if q is not None:
                q = np.where(np.arange(len(p)) == token, 0, q)
                q = q / q.sum()
    assert np.isclose(verdict.final_p, p[verdict.token], atol=1e-5)
    assert np.allclose([notes.final_entropy, notes.final_varentropy], spread(p), atol=5e-5)


def above(verdict):
    return int(verdict.path[-1]) if len(verdict.path) else ROOT


def softmax(logits):
    return logits.double().softmax(-1).numpy()


def shaped(part, logits, params, tokens, prompt_len, node):
    """p below a node, as it is sampled from."""
    path = [] if node == ROOT else part.tree.token[part.tree.path_to(node)].tolist()
    found = LogitRows(logits[node + 1 : node + 2], params, tokens, prompt_len, [path]).distributions()[0]
    if hasattr(found, "row"):
        return found.row.double().numpy()
    return torch.nn.functional.one_hot(torch.tensor(found.token), logits.shape[-1]).double().numpy()


def spread(p):
    logs = np.log(np.maximum(p, 2.0**-126))
    entropy = -(p * logs).sum()
    return entropy, (p * logs**2).sum() - entropy**2


def test_lean_evidence_leaves_the_notes_out(tiny):
    engine = tiny_engine(tiny, drafter="ngram", evidence="lean")
    (result,) = engine.generate(PROMPTS[0], GREEDY)
    assert engine.run_info.evidence == "lean"
    assert all(step.parents is None for step in result.steps)
    assert result.steps[-1].preceded is not None


COIN = st.floats(0.001, 0.999)
ROWS = st.integers(0, 10_000).map(lambda seed: np.random.default_rng(seed).dirichlet(np.full(5, 0.7)))


def drawn(row, coin):
    token, _, margin = Residual(dense(row)).draw(coin)
    return token, margin


def test_what_is_certain_has_no_margin():
    assert drawn([0.0, 1.0, 0.0], 1e-9) == (1, 1.0)
    assert drawn([0.5, 0.5], 0.499)[1] == pytest.approx(0.001)
    assert drawn([0.5, 0.5], 1e-9)[1] == pytest.approx(0.5)  # below the first token there is none


def tried(p, coin, q=None, how=Drawn.DETERMINISTIC, forced=None):
    tree = DraftTree.build([0], [-1], None if q is None else [q[0]], how)
    own = {} if q is None else {-1: dense(q)}
    return host.verify(batch_of(tree, [dense(p)] * 2, own, [0.5, coin], forced))[0][0]


@given(ROWS, ROWS, COIN, st.booleans())
def test_another_outcome_needs_the_margin_and_no_less(row, q, coin, sampled):
    q, how = (q, Drawn.WITHOUT_REPLACEMENT) if sampled else (None, Drawn.DETERMINISTIC)
    verdict = tried(row, coin, q, how)
    margin = float(verdict.margin[0])
    for share, same in ((0.999, True), (1.001, False)):
        for way in (-1, 1):
            other = row.copy()
            other[0] += way * share * margin
            other[1:] *= (1 - other[0]) / row[1:].sum()
            if 0 < other[0] < 1:
                outcome = tried(other, coin, q, how).outcome[0]
                if same:
                    assert outcome == verdict.outcome[0]
                elif way == (1 if verdict.outcome[0] == 2 else -1):
                    assert outcome != verdict.outcome[0]


def test_near_ties_follow_the_dtype():
    verdict = tried([0.3, 0.7], 0.3 + 1e-6)
    assert verdict.near_ties("float32") == [0]
    assert tried([0.3, 0.7], 0.301).near_ties("float32") == []
    assert tried([0.3, 0.7], 0.301).near_ties("bfloat16") == [0]
    assert tried([0.3, 0.7], 0.3 + 1e-6, forced={0: True}).near_ties("float32") == []
    assert tried([0.3, 0.7], 0.3 + 1e-6).near_ties("another") == []
    final = dataclasses.replace(tried([0.3, 0.7], 0.9), final_margin=ROUNDING["float32"] / 2)
    assert final.near_ties("float32") == [1]
