"""Sentences of `why`, as they stand in the sample captures; what makes them; and expressions of conditions."""

import dataclasses
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.speculate.verify import traversal
from specscope.trace.history.conditions import LONGEST, Expression, ExpressionError
from specscope.trace.history.history import History
from specscope.trace.history.place import headline, ratios, why, why_step
from specscope.trace.history.wording import acceptance, accepted_text, ending
from specscope.trace.record.records import FinalKind, FinishReason, Outcome
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.trace.wire.reading import read_capture
from specscope.trace.words import NODE, draw_tree
from tests.speculate.verify.enumeration import batch_of, random_input
from tests.trace.samples import decode, encoded, part, record, verdict

FOLDER = Path(__file__).parents[3]
CAPTURES = [*sorted((FOLDER / "traces").glob("*.jsonl")), *sorted((FOLDER / "tests/data/vllm").glob("why*.jsonl"))]
# A step in full, or one of its nodes: what `specscope why` prints there.
PLACES = """
eagle r0@0: Nothing was drafted: first token after the prompt. The final token ‘def’ is the target's own: greedy
  decoding takes the top token.
eagle r0@1/1: Target wanted ‘␣f’ (raw p 0.961, 1st; draft p 0.072, 2nd), and it was drafted. Accepted: greedy decoding
  takes the target's top token, and this is it.
eagle r0@2: Accepted 5 of 5 levels: ‘␣b’ ‘):’ ‘⏎␣␣␣’ ‘␣c’ ‘␣=’. Target took ‘␣a’. The accepted path ended at a leaf,
  so ‘␣a’ is a bonus token: greedy decoding takes the top token.
eagle r0@3/3: Target wanted ‘␣*’ (raw p 0.961, 1st; draft p 0.481, 1st), drafted ‘⏎␣␣␣’ (raw p 0.002, 4th; draft p
  0.047, 4th). Not tried: its sibling ‘␣*’ was accepted; the target would not have chosen this token either.
eagle r1@8/13: Target wanted ‘5’ (raw p 0.973, 1st; draft p 0.078, 4th), drafted ‘3’ (raw p 1e-04; draft p 0.162,
  2nd). Rejected: greedy decoding takes the target's top token, ‘5’. The drafter had drafted ‘5’ here, and re-ranking
  dropped it: a tree of more nodes might keep it.
eagle r1@11: Accepted 1 of 3 levels: ‘1’. Target wanted ‘2’ (raw p 0.655, 1st; draft p 0.043, 6th), drafted ‘9’ (raw p
  2e-04; draft p 0.329, 1st). Rejected: greedy decoding takes the target's top token, ‘2’. The drafter ranks ‘2’ 6th
  here: a tree 6 wide at this place would hold it; this one is 3 wide. At temperature 1 it would be accepted with
  probability 2e-04. Then also rejected: ‘1’ (raw p 0.254, 2nd; draft p 0.216, 2nd), node 9. Then also rejected: ‘8’
  (raw p 2e-04; draft p 0.111, 3rd), node 10. All drafts there were rejected, so ‘2’ is a recovered token:
  greedy decoding takes the top token.
ngram r0@4/2: Drafted ‘⏎’. Not tried: its parent ‘<|im_end|>’ was rejected; the target would have taken it there.
evidence r0@0: Nothing was drafted: first token after the prompt. The final token ‘print’ is the target's own: drawn
  from p (its probability there: 0.262; coin 0.752).
evidence r0@1/0: Target wanted ‘(’ (p 0.861; raw p 0.746, 1st; q 0.976; draft p 0.913, 1st), and it was drafted.
  Accepted: coin 0.3552 < a = min(1, p / q) = min(1, 0.861 / 0.9758) = 0.8824.
evidence r0@1/4: Drafted ‘⏎’ (p 0.520; q 0.475). Not tried: its parent ‘()’ was not tried.
evidence r0@5: Accepted 0 of 4 levels. Target wanted ‘␣=’ (p 0.594; raw p 0.434, 1st; draft p 0.052, 3rd), drafted ‘`’
  (p 5e-07; raw p 6e-06; q 0.063; draft p 0.048, 4th). Rejected: coin 0.3325 ≥ a = min(1, p / q) = min(1, 4.582e-07 /
  0.06258) = 7.322e-06. The drafter ranks ‘␣=’ 3rd here: a tree of its 3 likeliest tokens would hold it, but sampled
  siblings may miss it. Then also rejected: ‘␣function’ (p 6e-05; raw p 3e-04; q 0.010), node 1. Then also
  rejected: ‘␣{’ (p 0.009; raw p 0.016; q 0.206; draft p 0.123, 1st), node 2. All drafts there were rejected, so ‘␣=’
  is a recovered token: drawn from the residual (its probability there: 0.615; coin 0.3962).
evidence r0@9: Accepted 4 of 4 levels: ‘␣creates’ ‘␣a’ ‘␣new’ ‘␣function’. Target drew ‘␣that’. The accepted path
  ended at a leaf, so ‘␣that’ is a bonus token: drawn from p (its probability there: 0.373; coin 0.4711).
evidence r2@15/1: Target wanted ‘␣tilt’ (p 0.402; raw p 0.323, 1st; outside the draft vocabulary), drafted ‘␣fresh’ (p
  3e-09; raw p 1e-07; q 8e-05). Rejected: coin 0.1611 ≥ a = min(1, p / q) = min(1, 0 / 8.308e-05) = 0; p was 3.476e-09
  before its earlier siblings were rejected. ‘␣tilt’ is outside the draft vocabulary: no tree of this drafter can hold
  it.
sampled r1@9/1: Target wanted ‘ED’ (p 0.951; raw p 0.811, 1st; draft p 3e-05, 348th), drafted ‘␣number’ (p 9e-05; raw
  p 5e-04; q 0.069). Rejected: coin 0.9058 ≥ a = min(1, p / q) = min(1, 0 / 0.08466) = 0; p was 8.662e-05 before its
  earlier siblings were rejected. The drafter ranks ‘ED’ 348th here: no tree is that wide.
why_sampled 1-ac17a2f8@1: Accepted 2 of 3 levels: ‘⏎’ ‘<|im_start|>’. Target wanted ‘ass’ (p 0.682; raw p 0.647, 1st;
  draft p 0.923, 1st), and it was drafted. Rejected: coin 0.9133 ≥ a = p = 0.6825: the token was not drawn, so q is 1.
  At temperature 0 it would be accepted: it is the target's likeliest token. All drafts there were rejected, so ‘user’
  is a recovered token: drawn from the residual (its probability there: 0.998).
"""


@cache
def history(path):
    return read_capture(path).history


def place(text):
    """(the engine's step, the request's, the node or None, its run) at such a place."""
    name, request, step, node = re.fullmatch(r"(\w+) ([\w-]+)@(\d+)(?:/(\d+))?", text).groups()
    run = history(next(path for path in CAPTURES if path.stem == name))
    at = run.requests[request].place_of(int(step))
    record = run.steps[run.requests[request].engine_steps[at]]
    return record, run.requests[request].steps[at], node and int(node), run


@pytest.mark.parametrize("text", re.split(r"\n(?! )", PLACES.strip()), ids=lambda text: text.partition(":")[0])
def test_each_sentence_where_its_evidence_is(text):
    where, _, told = " ".join(text.split()).partition(": ")
    record, step, node, run = place(where)
    sentences = why_step(run, record, step) if node is None else why(run, step, node)
    assert " ".join(sentences) == told


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_every_node_has_its_headline_and_its_outcome(path):
    run, words = history(path), {Outcome.ACCEPTED: "Accepted: ", Outcome.REJECTED: "Rejected: "}
    for request in run.requests.values():
        for step in (step for step in request.steps if step.verdict is not None):
            for node, outcome in enumerate(step.verdict.outcome):
                first, second, *others = why(run, step, node)
                assert first == headline(step, node, run.vocabulary) + "."
                assert second.startswith(words.get(Outcome(outcome), "Not tried: "))
                assert not others or outcome == Outcome.REJECTED
            assert len(why(run, step, len(step.tree))) == 2


def a_greedy_step():
    _, step, _, run = place("eagle r2@24")
    return step, run


def test_a_token_that_ties_with_the_drafters_likeliest_is_ranked_behind_those_that_are_listed():
    step, run = a_greedy_step()
    ranks = np.ones_like(step.parents.choice_rank)  # how many are above it, and one more: none is
    tied = dataclasses.replace(step, parents=dataclasses.replace(step.parents, choice_rank=ranks))
    assert "‘␣for’ (raw p 0.921, 1st; draft p 0.006, 5th)" in why(run, tied, 0)[0]


def test_an_outcome_that_p_contradicts_is_said_to_be_one():
    step, run = a_greedy_step()
    outcome = step.verdict.outcome.copy()
    outcome[0] = Outcome.ACCEPTED
    wrong = dataclasses.replace(step, verdict=dataclasses.replace(step.verdict, outcome=outcome))
    assert why(run, wrong, 0)[1] == "Accepted: although the target's p for it is 0."


def test_a_forced_outcome_is_no_answer_about_p():
    step, run = a_greedy_step()
    forced = dataclasses.replace(step.verdict, forced=np.array([0], np.int32))
    sentences = why(run, dataclasses.replace(step, verdict=forced), 0)
    assert sentences[1:] == ["Rejected: forced, so this step is not lossless."]


def test_what_is_not_recorded_is_not_said():
    step, run = a_greedy_step()
    lean = dataclasses.replace(step, parents=None)
    assert why(run, lean, 0) == [
        "Target wanted ‘␣for’, drafted ‘,’ (draft p 0.263).",
        "Rejected: greedy decoding takes the target's top token, ‘␣for’.",
    ]
    forced = dataclasses.replace(step.verdict, forced=np.array([len(step.tree)], np.int32))
    sentences = why(run, dataclasses.replace(lean, verdict=forced), 0)
    assert sentences[1] == "Rejected: greedy decoding takes the target's top token, another one."
    untold = dataclasses.replace(step.verdict, final_p=0.0, p=step.verdict.p * 0, p_trial=step.verdict.p_trial * 0)
    sentences = why(run, dataclasses.replace(lean, verdict=untold), 0)
    assert sentences == [
        "Target took ‘␣for’, drafted ‘,’ (draft p 0.263).",
        "Rejected: p and the coins are not recorded.",
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(list(Drawn)))
def test_ratios_follow_from_the_evidence(seed, drawn):
    """What each coin was held against comes out again from p and q as tried and the residuals' masses."""
    tree, *asked = random_input(np.random.default_rng(seed), drawn, False, 0.0)
    (found,), _ = traversal.verify(batch_of(tree, *asked))
    again = ratios(tree, found)
    for node in np.flatnonzero(found.judged):
        assert again.left[node] == pytest.approx(found.accept_prob[node], abs=1e-5, rel=1e-4)
    for node in found.path[:-1]:
        assert again.own[node] == pytest.approx(found.accept_prob[node], abs=1e-5, rel=1e-4)
    untried = found.outcome == Outcome.UNTRIED
    assert not again.own[untried].any()


def test_the_likeliest_tokens_come_with_their_texts():
    """Of a run that does not keep text, test_privacy.py."""
    step, run = a_greedy_step()
    decoder, back = decode(encoded(run.steps, run.run, run.vocabulary))
    assert len(back) == len(run.steps)
    named = step.parents.named([*step.tree.token.tolist(), step.verdict.token])
    assert named
    assert 327 not in named  # the final token has its text in the tree
    assert {token: decoder.vocabulary.pieces.get(token) for token in named} == {
        token: run.vocabulary.pieces[token] for token in named
    }


NAMES = {name: field.type for name, field in NODE.items()}
VALUES = {"depth": 1, "p": 0.05, "q": 0.7, "request": "r3", "text": "def f", "tau": None, "node": 2, "accepted": 0}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("depth==1 and p<0.1 and q>0.5", True),
        ("depth == 2 or p >= 0.05", True),
        ('"def" in text', True),
        ('"class" not in text', True),
        ('request=="r3"', True),
        ("not p < 0.1", False),
        ("0.01 < p < 0.1", True),
        ("tau < 1.5", False),  # not known yet: does not hold
        ("p / accepted > 1", False),  # a division by zero does not hold
        ("abs(p - q) > 0.6 if depth == 1 else False", True),
        ("max(p, q) == q", True),
        ("len(text) == 5", True),
        ("node % 2 == 0", True),
    ],
)
def test_what_conditions_say(text, wanted):
    assert Expression(text, NAMES)(VALUES) is wanted


@pytest.mark.parametrize(
    ("text", "column", "why"),
    [
        ("", 0, "give a condition"),
        ("p <", 3, "invalid condition"),
        ("p = 1", 2, "to compare, write =="),
        ("depth==1 and pp<0.1", 13, "there is no field pp here"),
        ("p.real > 0", 0, "an attribute"),
        ("text[0] == 'd'", 0, "an index"),
        ("p ** 2 > 1", 0, r"\*\*"),
        ("open('x')", 0, "only abs, min"),
        ("'a' * 9 == text", 0, "arithmetic needs numbers"),
        ("'%999999d' % node", 0, "arithmetic needs numbers"),
        ("b'x' == text", 0, "only numbers and text"),
        ("f'{p}' == text", 0, "joinedstr"),
        ("max(*text)", 0, "takes one or more values"),
        ("p" * (LONGEST + 1), 0, "longer than"),
    ],
)
def test_what_is_refused_is_shown_at_its_column(text, column, why):
    with pytest.raises(ExpressionError, match=why) as caught:
        Expression(text, NAMES)
    assert caught.value.column == column
    assert f"column {column + 1}" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["9" * 400 + " > p", "1e308 * 1e308 // 0.0 > 1", "- " * 200 + "1 < 0", "1" * 99 + " % p < 0"]
)
def test_numbers_of_any_size_hold_or_do_not(text):
    assert Expression(text, NAMES)(VALUES) in (True, False)


def test_an_unknown_field_suggests_one_or_lists_them():
    with pytest.raises(
        ExpressionError, match=r"there is no field dept here, at column 1: »dept < 1 \(did you mean depth\?\)"
    ):
        Expression("dept < 1", {"depth": int, "p": float})
    with pytest.raises(ExpressionError, match="no field speed here, at column 11: p < 1 and »speed") as error:
        Expression("p < 1 and speed", {"depth": int, "p": float})
    assert str(error.value).endswith("(the fields are: depth, p)")


@pytest.mark.parametrize(
    ("parents", "path", "words"),
    [
        ([ROOT, ROOT, ROOT, ROOT], [], "0 of 4 nodes, depth 0 of 1"),
        ([ROOT, ROOT, 0, 0], [0, 3], "2 of 4 nodes, depth 2 of 2"),
        ([ROOT], [0], "1 of 1 node, depth 1 of 1"),
        ([], [], "nothing drafted"),
    ],
)
def test_what_was_accepted_is_said_of_nodes_and_of_depth(parents, path, words):
    tree = DraftTree.build(list(range(len(parents))), parents)
    outcome = [1 if node in path else 2 for node in range(len(parents))]
    step = part(3, tree, verdict(tree, outcome, path, 9, FinalKind.RECOVERED), len(path) + 1)
    assert acceptance(step) == words
    assert accepted_text(step) == (f"accepted {words}" if parents else words)
    assert acceptance(step, short=True) == words.replace(" of ", "/")


def test_a_prefill_chunk_and_running_out_of_tokens_have_words_of_their_own():
    chunk = part(0, DraftTree.empty(), None, 0, prefill=1)
    assert {acceptance(chunk), accepted_text(chunk), draw_tree(chunk, History().vocabulary)} == {"prefill of 1 token"}
    assert why_step(History(), record(0, (chunk,)), chunk) == ["A prefill of 1 token: nothing was judged."]
    assert ending(FinishReason.LENGTH) == "length limit"
