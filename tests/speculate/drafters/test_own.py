"""A drafter of one's own: what it gives is verified, and its mistakes are named."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import specscope
from specscope import Draft, EngineConfig, SamplingParams, draft_tree
from specscope.errors import UserError
from specscope.plans.plan import parse_plan
from specscope.trace.record.tree import DraftTree, Drawn
from tests.engines import run_all, tiny_engine
from tests.own import Bigrams


class LastWords(specscope.Drafter):
    max_nodes = max_depth = 4

    def __init__(self, setup):
        self.vocabulary = setup.target.vocab_size

    def propose(self, contexts):
        return [Draft.chain(list(context.tokens[-3:])) for context in contexts]


class Duck:
    """It derives from nothing, and has what it needs."""

    name, max_nodes, max_depth = "a duck", 2, 2

    def __init__(self, setup):
        pass

    def propose(self, contexts):
        return [Draft.chain([int(context.tokens[-1])] * 2) for context in contexts]


def generated(tiny, drafter, **how):
    engine = tiny_engine(tiny, drafter=drafter, **how)
    try:
        return engine, engine.generate(["abcabcabc", "hello hello"], SamplingParams(max_tokens=12, ignore_eos=True))
    finally:
        engine.close()


def test_another_file_is_another_drafter_to_compare(tiny, tmp_path, monkeypatch):
    """Its class has one name in both: `compare` said nothing of it."""
    monkeypatch.syspath_prepend(tmp_path)
    text, digests = "from tests.speculate.drafters.test_own import Duck as Theirs\n\n\nclass Duck(Theirs):\n", []
    for nodes in (2, 3, 2):
        (tmp_path / "theirs.py").write_text(f"{text}    max_nodes = {nodes}\n")
        sys.modules.pop("theirs", None)
        digests.append(generated(tiny, "theirs:Duck")[0].run_info.draft_digest)
    assert digests[0] == digests[2] != digests[1]
    assert all(digests)


def test_a_name_alone_imports_nothing():
    """A capture's, or one that comes over a debug socket: `fork` changes an engine's configuration."""
    config = EngineConfig(drafter=Bigrams)
    for drafter in ("tests.own:Other", "tests.own:Bigrams.plan"):
        with pytest.raises(UserError, match="is imported only if --drafter names it"):
            replace(config, drafter=drafter)
    assert not replace(config, drafter="ngram").is_own


def mine(members):
    return type("Mine", (LastWords,), members)


def proposing(draft):
    return mine({"propose": lambda self, contexts: [draft for _ in contexts]})


SAMPLED = DraftTree.build([3], [-1], [0.5], Drawn.WITH_REPLACEMENT)
HALF = Draft(replace(DraftTree.build([1], [-1]), token=np.array([1.7])))
MIXED = replace(DraftTree.build([3, 4], [-1, -1]), drawn=np.array([1, 0], np.uint8))


def saying(row):
    """A drafter whose model says this behind every path."""
    plan, logits = parse_plan("2x2"), lambda paths: torch.tensor([row] * len(paths))
    return mine({"propose": lambda self, contexts: [draft_tree(context, plan, logits) for context in contexts]})


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        (proposing(Draft.chain([1] * 9)), "has 9 nodes, 9 deep; max_nodes is 4 and max_depth 4"),
        (proposing(Draft.chain([5000])), "has tokens outside the target's vocabulary of 300"),
        (proposing(Draft(DraftTree.build([1, 2], [1, -1]))), "has a node before its parent"),
        (proposing(Draft(SAMPLED)), r"has the sampled node 0 without q \[300\] at its parent"),
        (proposing(Draft(SAMPLED, {-1: torch.full((300,), torch.nan)})), "has a q that is no distribution at node 0"),
        (proposing(Draft(SAMPLED, {-1: torch.ones(300)})), "has a q that is no distribution at node 0"),
        (proposing(Draft(MIXED, {-1: torch.full((300,), 1 / 300)})), "has siblings that were drawn in different ways"),
        (proposing(Draft(DraftTree.build([5, 6], [-1]))), "has 2 tokens and 1 parent"),
        (proposing(Draft(DraftTree.build([5, 5], [-1, -1]))), "has one token twice behind one parent"),
        (
            proposing(Draft(replace(DraftTree.build([1], [-1]), token=np.array([1.7])))),
            "propose failed: TypeError: 'numpy.float64' object",
        ),
        (mine({"propose": lambda self, _: [Draft.chain([1.7])]}), r"propose failed: TypeError: 'float'.*test_own.py"),
        (proposing(Draft([5, 6])), "propose failed: AttributeError: 'list' object has no attribute"),
        (mine({"propose": lambda self, contexts: None}), "propose returned None, not a draft for each request"),
        (saying([0.0] * 10), "has logits over 10 tokens, but the target's vocabulary is 300"),
        (saying(0.0), r"ValueError: logits gave \[1\] for 1 paths"),
        (saying([torch.nan] * 300), "ValueError: the logits have NaN"),
        (mine({"max_nodes": None}), "max_nodes or max_depth failed: TypeError"),
        (mine({"aux_layers": 5}), "aux_layers failed: TypeError"),
        (mine({"aux_layers": (99,)}), 'aux_layers has 99: give "final" or layers from 0 to 2'),
        (proposing([1, 2]), r"is a list: propose must return a specscope.Draft, such as Draft.chain\(tokens\)"),
        (mine({"propose": lambda self, contexts: []}), "propose returned 0 drafts for 2 requests"),
        (mine({"propose": lambda self, contexts: 1 / 0}), "propose failed: ZeroDivisionError"),
        (mine({"propose": lambda self, contexts: sys.exit("bye")}), "propose failed: SystemExit: bye"),
        (mine({"commit": lambda self, *_: {}["a"]}), "commit failed: KeyError.*test_own.py, line"),
        (mine({"max_nodes": 0}), "max_nodes is 0 and max_depth 4"),
        (mine({"name": "eagle"}), "specscope has a drafter named eagle"),
        (lambda: None, "calling it with a DrafterSetup failed: TypeError"),
        (lambda setup: 3, "has no max_nodes: derive it from specscope.Drafter"),
    ],
)
def test_a_mistake_is_named(tiny, drafter, says):
    with pytest.raises(UserError, match=says):
        generated(tiny, drafter)


class Scribbler(LastWords):
    """Takes all that it is given, and all that it gave, for scratch space."""

    aux_layers = ("final",)

    def propose(self, contexts):
        drafts = [draft_tree(context, parse_plan("2x2"), self.logits) for context in contexts]
        self.gave = [array for draft in drafts for array in (*vars(draft.tree).values(), *draft.q.values())]
        for context in contexts:
            context.tokens[:] = [7] * len(context.tokens)
            context.params.logit_bias[7] = 99.0
        return drafts

    def logits(self, paths):
        self.row = torch.arange(300.0).remainder(7)
        return self.row.expand(len(paths), -1)

    def commit(self, context, tree, verdict):
        for array in (self.row, *self.gave, tree.token, tree.parent, verdict.path, verdict.outcome):
            array[:] = 0
        context.tokens.clear()

    def observe(self, request, start, features, tokens):
        features.zero_()
        tokens.clear()


class Honest(Scribbler):
    """The same without writing."""

    def propose(self, contexts):
        return [draft_tree(context, parse_plan("2x2"), self.logits) for context in contexts]

    commit, observe = specscope.Drafter.commit, specscope.Drafter.observe


class Embedded(Honest):
    """Its model is the target's first and last module."""

    def __init__(self, setup):
        self.target, self.config = setup.target, setup.target.model.config

    def logits(self, paths):
        last = torch.tensor([path[-1] if path else 5 for path in paths], device=self.target.device)
        assert self.target.embedding(last).shape[1] == self.config.hidden_size
        return self.target.output(self.target.embedding(last))


def test_it_may_use_the_targets_embedding_and_output(tiny):
    """As docs/python.md says; the model as a whole cannot be called."""
    _, (first, _) = generated(tiny, Embedded)
    assert first.steps[1].tree.max_depth == 2
    assert first.token_ids == generated(tiny, "none")[1][0].token_ids


@pytest.mark.parametrize("temperature", [0, 1])
def test_what_a_drafter_writes_changes_nothing(tiny, temperature):
    """Neither what a request comes to, which was another text, nor what its steps tell of it."""
    params, outcomes = SamplingParams(max_tokens=12, temperature=temperature, ignore_eos=True), []
    for drafter in (Honest, Scribbler):
        engine = tiny_engine(tiny, drafter=drafter)
        results = engine.generate(["abcabcabc", "hello hello"], params)
        outcomes.append([(step.tree, step.verdict, step.notes, step.parents) for r in results for step in r.steps])
        outcomes.append([result.token_ids for result in results])
        engine.close()
    assert outcomes[:2] == outcomes[2:]
    assert sum(len(tree) for tree, *_ in outcomes[0]) > 20


@pytest.mark.parametrize(
    ("text", "source", "says"),
    [
        ("nowhere_to_be:A", None, "there is no module nowhere_to_be, neither installed nor in"),
        ("mine_a:B", "A = 1", "mine_a has no B"),
        ("mine_a.py:A", None, "leave out .py, as in --drafter mine_a:A"),
        ("mine_e:A", "raise SystemExit(3)", r"cannot be imported: SystemExit: 3 \(.*mine_e.py, line 1\)"),
        ("mine_c:A", "1 / 0", r"cannot be imported: ZeroDivisionError: division by zero \(.*mine_c.py, line 1\)"),
        ("mine_d:A", "import mine_e", "cannot be imported: ModuleNotFoundError: No module named 'mine_e'"),
        ("synthetic:3", None, "was removed"),
    ],
)
def test_a_name_that_leads_nowhere(tiny, tmp_path, monkeypatch, text, source, says):
    """Of the folder that module alone is run: what it imports is installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "mine_e.py").write_text("A = 1")
    if source is not None:
        (tmp_path / f"{text.partition(':')[0]}.py").write_text(source)
    with pytest.raises(UserError, match=says):
        generated(tiny, text)
    assert not [name for name in sys.modules if name in ("mine_c", "mine_d")]


class Keeper(LastWords):
    """Its drafts are right; each feature that it is shown must be that of its token."""

    aux_layers = (0,)  # the states that enter the first layer: embeddings
    can_rewind, right = True, {}

    def __init__(self, setup):
        super().__init__(setup)
        self.texts, self.embedding = {}, setup.target.embedding

    def propose(self, contexts):
        assert all(self.texts[context.request] == context.tokens[:-1] for context in contexts)
        return [
            Draft.chain(self.right[context.request][len(context.tokens) - context.prompt_len :][:3])
            for context in contexts
        ]

    def observe(self, request, start, features, tokens):
        text = self.texts.setdefault(request, [])
        assert start <= len(text)
        text[start:] = tokens[start : start + len(features)]
        torch.testing.assert_close(features, self.embedding(torch.tensor(text[start:])))

    def rewind(self, request, tokens):
        del self.texts[request][tokens - 1 :]
        return None if self.can_rewind else False

    def release(self, request):
        del self.texts[request]


@pytest.mark.parametrize("drafter", [Keeper, type("Forgetful", (Keeper,), {"can_rewind": False})])
def test_going_back_keeps_what_it_observed_or_shows_it_again(tiny, drafter, monkeypatch):
    _, results = generated(tiny, "none")
    monkeypatch.setattr(Keeper, "right", {f"r{place}": result.token_ids for place, result in enumerate(results)})
    engine = tiny_engine(tiny, drafter=drafter)
    engine.keep_timeline()
    for prompt in ("abcabcabc", "hello hello"):
        engine.add(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    records = run_all(engine)
    assert len(records) < 6  # three drafts and a bonus token a step
    engine.rewind(2)
    assert run_all(engine) == records[2:]
    engine.close()
