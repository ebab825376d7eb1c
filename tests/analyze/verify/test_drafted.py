"""Drafted tokens outside the head's vocabulary."""

import dataclasses

import numpy as np

from specscope.analyze.findings import CheckResult
from specscope.analyze.verify.trial import judge
from specscope.trace.history.history import History
from tests.analyze.verify.edits import edited, put, replaced
from tests.heads import DRAFT_VOCAB

NAME = "draft vocabulary"


def check(history):
    return next(one for one in judge(history, source="run").checks if one.name == NAME)


def test_a_token_outside_the_draft_vocabulary_is_found(runs):
    good = check(runs["deterministic"])  # of an EAGLE head with a reduced vocabulary
    assert good.result is CheckResult.PASSED
    assert good.tested > 100
    assert good.note == f"{DRAFT_VOCAB} tokens of the target"

    def outside(part):
        unknown = next(t for t in range(300) if t not in known)
        return replaced(part, tree__token=put(part.tree.token, 0, unknown)) if len(part.tree) else None

    from specscope.trace.record.draft_vocabulary import draft_tokens

    known = set(draft_tokens(runs["deterministic"].run).tolist())
    bad = check(edited(runs["deterministic"], outside))
    assert bad.result is CheckResult.FAILED
    assert "is not among them" in bad.detail


def test_it_is_skipped_with_its_reason(runs):
    assert check(runs["sampled"]).note == "the drafter's vocabulary is not reduced"
    history = runs["deterministic"]
    before, history.run = history.run, dataclasses.replace(history.run, draft_tokens="", evidence="")
    try:
        assert check(history).result is CheckResult.SKIPPED
        assert check(history).note == "the capture does not tell what the drafter knows"
    finally:
        history.run = before


def test_an_engine_that_verifies_a_part_of_a_chain_is_not_accused(runs):
    """vLLM's scheduler cuts chains: by a form, by the step's budget, where a request is about to end."""

    def cut(part):
        n = len(part.tree) - 1
        if n < 1 or part.verdict.outcome[n] or not part.tree.is_sampled:
            return None
        arrays = ("outcome", "p", "p_trial", "q_trial", "accept_prob", "coin", "residual_mass")
        verdict = {f"verdict__{name}": getattr(part.verdict, name)[:n] for name in arrays}
        tree = {f"tree__{name}": getattr(part.tree, name)[:n] for name in ("token", "parent", "q", "drawn")}
        return replaced(part, **verdict, **tree, notes=None, parents=None)

    def planned(run):
        history = edited(runs["sampled"], cut)
        history.run = run
        return next(one for one in judge(history, source="run").checks if one.name == "drafts as planned")

    ours = runs["sampled"].run
    assert planned(ours).result is CheckResult.FAILED
    assert planned(dataclasses.replace(ours, versions={"vllm": "0.32.0"})).result is CheckResult.PASSED


def test_what_an_n_gram_is_filled_with_is_no_draft_in_another_place(runs):
    """vLLM's V2 runner fills the chain with the root's token where the text holds nothing more."""
    before = runs["sampled"]
    assert before.run is not None
    history = History(run=before.run, vocabulary=before.vocabulary)
    roots: dict[str, int] = {}
    for record in before.steps:
        roots |= {info.id: int(info.prompt_tokens[-1]) for info in record.admitted}
        parts = []
        for part in record.requests:
            filled = np.full(len(part.tree), roots[part.request], np.int32)
            rejected = {} if part.verdict is None else {"verdict__path": np.zeros(0, np.int32), "emitted": 1}
            parts.append(replaced(part, tree__token=filled, **rejected))
            roots[part.request] = roots[part.request] if part.verdict is None else part.verdict.token
        history.append(dataclasses.replace(record, requests=tuple(parts)))

    def in_place(**changed):
        history.run = dataclasses.replace(before.run, versions={"vllm": "0.32.0"}, **changed)
        return next(one for one in judge(history, source="run").checks if one.name == "drafts in place").result

    assert in_place(drafter="eagle") is CheckResult.FAILED
    assert in_place(drafter="ngram") is CheckResult.SKIPPED  # nothing else was drafted
