"""A drafter of one's own: what it gives is verified, and its mistakes are named."""

import sys
from dataclasses import replace

import pytest

import specscope
from specscope import Draft, EngineConfig, SamplingParams
from specscope.errors import UserError
from specscope.trace.record.tree import DraftTree, Drawn
from tests.engines import tiny_engine
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


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        (proposing(Draft.chain([1] * 9)), "has 9 nodes, 9 deep; max_nodes is 4 and max_depth 4"),
        (proposing(Draft.chain([5000])), "has tokens outside the target's vocabulary of 300"),
        (proposing(Draft(DraftTree.build([1, 2], [1, -1]))), "has a node before its parent"),
        (proposing(Draft(SAMPLED)), r"has the sampled node 0 without q \[300\] at its parent"),
        (proposing([1, 2]), r"is a list: propose must return a specscope.Draft, such as Draft.chain\(tokens\)"),
        (mine({"propose": lambda self, contexts: []}), "propose returned 0 drafts for 2 requests"),
        (mine({"propose": lambda self, contexts: 1 / 0}), "propose failed: ZeroDivisionError"),
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


@pytest.mark.parametrize(
    ("text", "source", "says"),
    [
        ("nowhere_to_be:A", None, "there is no module nowhere_to_be, neither installed nor in"),
        ("mine_a:B", "A = 1", "mine_a has no B"),
        ("mine_a.py:A", None, "leave out .py, as in --drafter mine_a:A"),
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
