"""Sentences of `why`: each agrees with the evidence, over every node of the sample captures, worked out again here."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from specscope.trace.history.decided import deciding, ended_by
from specscope.trace.history.undrafted import ABOUT, Undrafted, why_undrafted
from specscope.trace.history.why import Asker, brief, headline, why, why_step
from specscope.trace.record.draft_vocabulary import draft_tokens
from specscope.trace.record.records import FinalKind, Outcome
from specscope.trace.wire.reading import read_capture

ROOT = Path(__file__).parents[3]
CAPTURES = [*sorted((ROOT / "traces").glob("*.jsonl")), *sorted((ROOT / "tests/data/vllm").glob("why*.jsonl"))]


@cache
def history(path):
    return read_capture(path).history


def steps(path):
    run = history(path)
    for request in run.requests.values():
        asker = Asker.of(run, request.id)
        yield from ((step, asker) for step in request.steps if step.verdict is not None)


def records(path):
    """(the engine's step, the request's, what its sentences need)."""
    run = history(path)
    for request in run.requests.values():
        for step, position in zip(request.steps, request.engine_steps, strict=True):
            yield run.steps[position], step, Asker.of(run, request.id)


def close(text, value):
    """Whether a figure in a sentence is this number, as far as it has digits."""
    if text == ">.999":
        return 0.9995 <= value < 1
    shown = float(text)
    return shown == value if value in (0, 1) else abs(shown - value) <= 0.5 * value if "e" in text else (
        abs(shown - value) <= 0.0006
    )  # fmt: skip


def near(text, value):
    """Likewise of a figure with four digits or more."""
    return np.isclose(float(text), value, rtol=6e-4, atol=1e-12)


class Facts:
    """What the record holds of one node's place, read straight from its arrays."""

    def __init__(self, step, node, asker):
        self.step, self.verdict, self.asker = step, step.verdict, asker
        self.node, self.tree, self.parents = node, step.tree, step.parents
        path = step.verdict.path.tolist()
        end = path[-1] if path else -1
        self.parent = end if node == len(step.tree) else int(step.tree.parent[node])
        rows = [] if self.parents is None else np.flatnonzero(self.parents.node == self.parent).tolist()
        self.row = rows[0] if rows else None
        self.children = np.flatnonzero(step.tree.parent == self.parent).tolist()
        self.tokens = {int(step.tree.token[child]): child for child in reversed(self.children)}

    def show(self, token):
        return f"‘{self.asker.vocabulary.show(token)}’"

    def top(self, name, token):
        """(rank, p) of a token among the likeliest."""
        if self.row is None or not getattr(self.parents, name).size:
            return None, None
        row = getattr(self.parents, name)[self.row].tolist()
        shares = getattr(self.parents, name + "_p")[self.row].tolist()
        return (row.index(token) + 1, shares[row.index(token)]) if token in row else (None, None)

    def check_outside(self, token):
        known = draft_tokens(self.asker.run)
        if known is not None:
            assert token not in known
        else:  # what the drafter's vocabulary is was not recorded: its rank of the target's first choice tells
            assert self.top("top", token)[0] == 1
            assert self.parents.choice_rank[self.row] == 0
            assert self.parents.draft_top_p[self.row].any()

    def check_described(self, text, token):
        """`␣for (p 0.1; raw p 0.921, 1st; draft p 0.006, 15th)`."""
        name = self.show(token)
        assert text.startswith(name)
        rest = text[len(name) :]
        if not rest:
            return
        assert rest.startswith(" (")
        assert rest.endswith(")")
        child = self.tokens.get(token)
        for fact in rest[2:-1].split("; "):
            if match := re.fullmatch(r"p (\S+)", fact):
                p = float(self.verdict.p[child]) if child is not None else None
                if p is None:
                    assert self.parents.choice[self.row] == token
                    p = float(self.parents.choice_p[self.row])
                assert close(match[1], p)
            elif match := re.fullmatch(r"q (\S+)", fact):
                assert self.tree.drawn[child] != 0
                assert close(match[1], float(self.tree.q[child]))
            elif match := re.fullmatch(r"raw p ([^,\s]+)(?:, (\d+)(?:st|nd|rd|th))?", fact):
                rank, p = self.top("top", token)
                p = float(self.parents.raw_p[child]) if child is not None and self.row is not None else p
                assert close(match[1], p)
                assert match[2] is None if rank is None else int(match[2]) == rank
            elif fact == "outside the draft vocabulary":
                self.check_outside(token)
            elif match := re.fullmatch(r"(?:draft p ([^,\s]+))?(?:, )?(?:([\d,]+)(?:st|nd|rd|th))?", fact):
                rank, p = self.top("draft_top", token)
                if rank is None and self.top("top", token)[0] == 1 and self.parents.choice_rank[self.row]:
                    rank, p = int(self.parents.choice_rank[self.row]), float(self.parents.choice_q[self.row])
                if child is not None and self.tree.drawn[child] == 0:
                    p = float(self.step.notes.prob[child])
                if match[1] is not None:
                    assert close(match[1], p)
                assert match[2] is None if rank is None else int(match[2].replace(",", "")) == rank
            else:
                raise AssertionError(f"what is {fact}?")


def check_headline(facts, text):
    if match := re.fullmatch(r"(?:Drafted|Target drew) (.*)\.", text, re.S):
        final = facts.node == len(facts.tree)
        facts.check_described(match[1], facts.verdict.token if final else int(facts.tree.token[facts.node]))
        return
    if text.startswith("Target took "):
        assert facts.verdict.kind is FinalKind.RECOVERED
        assert facts.row is None
        token = facts.show(int(facts.tree.token[facts.node]))
        first, second = text[len("Target took ") : -1].split(f", drafted {token}", 1)
        facts.check_described(first, facts.verdict.token)
        facts.check_described(token + second, int(facts.tree.token[facts.node]))
        return
    assert text.startswith("Target wanted ")
    if facts.row is not None:
        wanted = int(facts.parents.choice[facts.row])
    else:  # lean evidence: a greedy step took what it wanted
        assert facts.children
        assert facts.verdict.is_greedy
        kept = [int(facts.tree.token[node]) for node in facts.children if node in facts.verdict.path.tolist()]
        wanted = kept[0] if kept else facts.verdict.token
    rest = text[len("Target wanted ") : -1]
    if rest.endswith(", and it was drafted"):
        assert int(facts.tree.token[facts.node]) == wanted
        facts.check_described(rest.removesuffix(", and it was drafted"), wanted)
        return
    if facts.node == len(facts.tree):
        facts.check_described(rest, wanted)
        return
    token = int(facts.tree.token[facts.node])
    first, second = rest.split(f", drafted {facts.show(token)}", 1)
    facts.check_described(first, wanted)
    facts.check_described(facts.show(token) + second, token)


def check_decision(facts, text):
    verdict, node, tree = facts.verdict, facts.node, facts.tree
    outcome = Outcome(int(verdict.outcome[node]))
    word, _, why = text.partition(": ")
    if outcome is Outcome.UNTRIED:
        assert word == "Not tried"
        why, _, there = why.partition("; ")
        if there:
            assert verdict.is_greedy
            assert there == f"the target would {'' if verdict.p[node] == 1 else 'not '}have taken it there."
            why += "."
        if match := re.fullmatch(r"its parent (.*) was (rejected|not tried)\.", why, re.S):
            parent = int(tree.parent[node])
            assert match[1] == facts.show(int(tree.token[parent]))
            assert (verdict.outcome[parent] == Outcome.REJECTED) == (match[2] == "rejected")
            return
        match = re.fullmatch(r"its sibling (.*) was accepted\.", why, re.S)
        kept = [other for other in facts.children if verdict.outcome[other] == Outcome.ACCEPTED]
        assert match[1] == facts.show(int(tree.token[kept[0]]))
        return
    assert word.lower() == outcome.name.lower()
    if why == "it is the target's choice, and no coin decides.":
        assert outcome is Outcome.ACCEPTED
        assert verdict.p_trial[node] == 1
    elif match := re.fullmatch(r"the target's choice is (.*), and no coin decides\.", why, re.S):
        assert outcome is Outcome.REJECTED
        assert verdict.p_trial[node] == 0
        assert match[1] in ("another token", facts.show(verdict.token), *map(facts.show, facts.tokens))
    elif match := re.fullmatch(
        r"coin (\S+) ([<≥]) a = p = (\S+): the token was not drawn, so q is 1"
        r"(?:; p was (\S+) before its earlier siblings were rejected)?\.",
        why,
    ):
        coin, sign, p, before = match.groups()
        assert tree.drawn[node] == 0
        assert verdict.q_trial[node] == 1
        assert near(coin, verdict.coin[node])
        assert near(p, verdict.p_trial[node])
        assert near(p, verdict.accept_prob[node])
        assert (sign == "<") == (outcome is Outcome.ACCEPTED) == (verdict.coin[node] < verdict.accept_prob[node])
        if before:
            assert near(before, verdict.p[node])
    elif match := re.fullmatch(
        r"coin (\S+) ([<≥]) a = min\(1, p / q\) = min\(1, (\S+) / (\S+)\) = (\S+?)"
        r"(?:; p was (\S+) before its earlier siblings were rejected)?\.",
        why,
    ):
        coin, sign, p, q, a, before = match.groups()
        assert near(coin, verdict.coin[node])
        assert near(p, verdict.p_trial[node])
        assert near(q, verdict.q_trial[node])
        assert near(a, verdict.accept_prob[node])
        assert np.isclose(float(a), min(1, float(p) / float(q)), rtol=3e-3)
        assert (sign == "<") == (outcome is Outcome.ACCEPTED) == (verdict.coin[node] < verdict.accept_prob[node])
        if before:
            assert near(before, verdict.p[node])
    else:
        raise AssertionError(f"what is {why}?")


def check_kept(facts, text):
    wanted = int(facts.parents.choice[facts.row])
    name = facts.show(wanted)
    sampled = bool((facts.tree.drawn != 0).any())
    if match := re.fullmatch(r"The drafter ranks (.*?) ([\d,]+)(?:st|nd|rd|th) here: (.*)\.", text, re.S):
        rank = int(match[2].replace(",", ""))
        assert match[1] == name
        assert rank == (facts.top("draft_top", wanted)[0] or int(facts.parents.choice_rank[facts.row]))
        assert wanted not in facts.tokens
        if rank > 256:
            assert match[3] == "no tree is that wide"
        elif sampled or rank <= len(facts.children):
            tokens = "likeliest token" if rank == 1 else f"{rank} likeliest tokens"
            assert match[3] == f"a tree of its {tokens} would hold it, where tokens that are drawn may miss it"
        else:
            wide = len(facts.children)
            assert match[3] == f"a tree {rank} wide at this place would hold it; this one is {wide} wide"
    elif text == f"The drafter had drafted {name} here, and re-ranking dropped it: a tree of more nodes might keep it.":
        notes = facts.step.notes
        assert wanted in notes.dropped_token[notes.dropped_parent == facts.parent]
    elif text == f"{name} is outside the draft vocabulary: no tree of this drafter can hold it.":
        facts.check_outside(wanted)
    elif text.startswith(f"{name} is not among the drafter's {facts.parents.draft_top.shape[1]} likeliest tokens"):
        assert facts.top("draft_top", wanted)[0] is None
        assert facts.top("top", wanted)[0] != 1
    elif text == "At temperature 0 it would be accepted: it is the target's likeliest token.":
        assert not facts.asker.params.greedy
        assert int(facts.tree.token[facts.node]) == wanted
    elif match := re.fullmatch(r"At temperature 1 it would be accepted with probability (\S+)\.", text):
        assert facts.asker.params.temperature == 0
        assert facts.children[0] == facts.node
        assert facts.tree.q[facts.node] == 1
        assert close(match[1], float(facts.parents.raw_p[facts.node]))
    else:
        raise AssertionError(f"what is {text}?")


def check_final(facts, text):
    verdict = facts.verdict
    name = facts.show(verdict.token)
    where = {
        FinalKind.BONUS: f"The accepted path ended at a leaf, so {name} is a bonus token",
        FinalKind.RECOVERED: f"All that was drafted there was rejected, so {name} is a recovered token",
        FinalKind.TARGET: f"The final token {name} is the target's own",
    }[verdict.kind]
    assert text.startswith(where)
    rest = text[len(where) :]
    if rest == ": the target's choice, and no coin decides.":
        assert verdict.final_p == 1
        return
    match = re.fullmatch(r": drawn from (.*?)(?: by coin (\S+))?, where it had (\S+)\.", rest)
    assert (match[1] == "p") == (verdict.kind is not FinalKind.RECOVERED)
    if match[2]:
        assert near(match[2], verdict.final_coin)
    assert close(match[3], verdict.final_p)


def check_node(step, node, asker):
    facts, sentences = Facts(step, node, asker), why(step, node, asker)
    check_headline(facts, sentences[0])
    assert sentences[0] == headline(step, node, asker) + "."
    if node == len(step.tree):
        assert len(sentences) == 2
        check_final(facts, sentences[1])
        return
    check_decision(facts, sentences[1])
    for sentence in sentences[2:]:
        assert step.verdict.outcome[node] == Outcome.REJECTED
        check_kept(facts, sentence)


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_each_sentence_agrees_with_the_evidence(path):
    looked = 0
    for step, asker in steps(path):
        for node in range(len(step.tree) + 1):
            check_node(step, node, asker)
            looked += 1
    assert looked > 20


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_a_step_is_told_from_its_path_to_its_final_token(path):
    for record, step, asker in records(path):
        sentences = why_step(record, step, asker)
        if step.verdict is None:
            assert sentences == [f"A prefill of {step.prefill_tokens} tokens: nothing was judged."]
            continue
        if not len(step.tree):
            reason = why_undrafted(asker.run, record, step)
            told = "" if reason is Undrafted.UNKNOWN else f": {ABOUT[reason]}"
            assert sentences[0].startswith(f"Nothing was drafted{told}")
            check_final(Facts(step, 0, asker), sentences[-1])
            continue
        accepted = step.verdict.accepted
        assert sentences[0].startswith(f"Accepted {accepted} of {step.tree.max_depth} level")
        node = ended_by(step)
        assert sentences[1] == why(step, node, asker)[0]
        if step.verdict.kind is FinalKind.RECOVERED:
            assert step.verdict.outcome[node] == Outcome.REJECTED
            assert len(step.verdict.path) == step.tree.depth[node] - 1
            assert sum(text.startswith("Then also rejected: ") for text in sentences) == len(deciding(step)) - 1
        check_final(Facts(step, len(step.tree), asker), sentences[-1])


def test_the_question_that_people_ask():
    """Of a greedy replay: the target wanted ` for`, which the drafter had at rank 15."""
    run = history(ROOT / "traces" / "eagle.jsonl")
    request = run.requests["r2"]
    step = request.steps[request.place_of(24)]
    asker = Asker.of(run, "r2")
    assert why(step, 0, asker) == [
        "Target wanted ‘␣for’ (raw p 0.921, 1st; draft p 0.006, 15th), "
        "drafted ‘,’ (raw p 0.029, 3rd; draft p 0.263, 1st).",
        "Rejected: the target's choice is ‘␣for’, and no coin decides.",
        "The drafter ranks ‘␣for’ 15th here: a tree 15 wide at this place would hold it; this one is 4 wide.",
        "At temperature 1 it would be accepted with probability 0.029.",
    ]
    assert brief(step, 0, asker) == "Target wanted ‘␣for’ (0.921, the drafter's 15th), drafted ‘,’ (0.029, its 1st)"


def a_greedy_step():
    run = history(ROOT / "traces" / "eagle.jsonl")
    request = run.requests["r2"]
    return request.steps[request.place_of(24)], Asker.of(run, "r2")


def test_an_outcome_that_p_contradicts_is_said_to_be_one():
    step, asker = a_greedy_step()
    outcome = step.verdict.outcome.copy()
    outcome[0] = Outcome.ACCEPTED
    wrong = dataclasses.replace(step, verdict=dataclasses.replace(step.verdict, outcome=outcome))
    assert why(wrong, 0, asker)[1] == "Accepted: although the target's p of it is 0."


def test_a_forced_outcome_is_no_answer_about_p():
    step, asker = a_greedy_step()
    forced = dataclasses.replace(step.verdict, forced=np.array([0], np.int32))
    sentences = why(dataclasses.replace(step, verdict=forced), 0, asker)
    assert sentences[1:] == ["Rejected: by force, so this step is not lossless."]


def test_what_is_not_recorded_is_not_said():
    step, asker = a_greedy_step()
    lean = dataclasses.replace(step, parents=None)
    assert why(lean, 0, asker) == [
        "Target wanted ‘␣for’, drafted ‘,’ (draft p 0.263).",
        "Rejected: the target's choice is ‘␣for’, and no coin decides.",
    ]
    forced = dataclasses.replace(step.verdict, forced=np.array([len(step.tree)], np.int32))
    sentences = why(dataclasses.replace(lean, verdict=forced), 0, asker)
    assert sentences[1] == "Rejected: the target's choice is another token, and no coin decides."
    untold = dataclasses.replace(step.verdict, final_p=0.0, p=step.verdict.p * 0, p_trial=step.verdict.p_trial * 0)
    sentences = why(dataclasses.replace(lean, verdict=untold), 0, asker)
    assert sentences == [
        "Target took ‘␣for’, drafted ‘,’ (draft p 0.263).",
        "Rejected: p and the coins are not recorded.",
    ]
