"""Faults in bookkeeping: tokens, counts, verdicts and rows that get lost, go astray or are changed on their way."""

import dataclasses

import numpy as np

from specscope.analyze.diagnose.causes import Cause
from specscope.engine.request import Request
from specscope.engine.scheduler import Scheduler
from specscope.speculate.drafters.model_drafter import ModelDrafter
from tests.faults.fault import Fault, altered, in_phase, replaced


@replaced(Scheduler, "preempt")
def lost_at_preemption(preempt, self, victim, plan):
    """A request that loses its place loses its newest token too."""
    preempt(self, victim, plan)
    if len(victim.tokens) > len(victim.prompt_tokens) + 1:
        del victim.tokens[len(victim.tokens) - 1 :]


def lost_at_a_border(engine, now):
    """The first token of every prefill chunk but the first is not fed."""
    for turn in now.turns:
        if not turn.decodes and turn.request.pending > 2:
            turn.request.computed += 1


def swapped_counts(engine, now):
    """In a batch of two or more each request is given its neighbour's count of accepted tokens."""
    judged = [turn for turn in now.decoding if len(turn.draft.tree)]
    counts = [len(turn.verdict.path) for turn in judged]
    for turn, count in zip(judged, counts[1:] + counts[:1], strict=True):
        path = np.arange(min(count, len(turn.draft.tree)), dtype=np.int32)
        turn.verdict = dataclasses.replace(turn.verdict, path=path)


def late_verdicts(patch, engine):
    """Each step is given the verdict of the request's previous step."""
    last = {}

    def late(engine, now):
        for turn in now.decoding:
            right, old = turn.verdict, last.get(turn.request.id)
            last[turn.request.id] = right
            if old is not None and len(old.outcome) == len(right.outcome):
                turn.verdict = old

    in_phase("verify", late)(patch, engine)


@replaced(Request, "accept")
def past_a_stop(accept, self, tokens, eos, max_context, vocabulary):
    """Stop tokens are looked for in the last token of each step alone."""
    params = self.params
    self.params = dataclasses.replace(params, stop_token_ids=())
    made = accept(self, tokens[:-1], eos, max_context, vocabulary)
    self.params = params
    return made if self.finish is not None else made + accept(self, tokens[-1:], eos, max_context, vocabulary)


def not_a_number(engine, now):
    """A request's p is NaN, as a row that is masked whole gives it."""
    for turn in now.decoding:
        if len(turn.verdict.p):
            turn.verdict = dataclasses.replace(turn.verdict, p=turn.verdict.p * np.float32("nan"))
            return


def one_more(engine, now):
    """One draft more is accepted than was judged right."""
    for turn in now.decoding:
        tree, path = turn.draft.tree, turn.verdict.path
        children = tree.children(int(path[-1]) if len(path) else -1)
        if children:
            outcome = turn.verdict.outcome.copy()
            outcome[children[0]] = 1
            longer_path = np.append(path, children[0]).astype(np.int32)
            turn.verdict = dataclasses.replace(turn.verdict, path=longer_path, outcome=outcome)


def logits_swapped(engine, now):
    """At every third step the first two requests that draft get each other's logits."""
    pair = _drafting(now)[:2]
    if len(pair) == 2 and engine.steps % 3 == 0 and len({len(turn.logits) for turn in pair}) == 1:
        one, other = pair
        one.logits, other.logits = other.logits, one.logits


def drafts_swapped(engine, now):
    """The first two requests that draft get each other's trees."""
    pair = _drafting(now)[:2]
    if len(pair) == 2 and len({len(turn.draft.tree) for turn in pair}) == 1:
        one, other = pair
        one.draft, other.draft = other.draft, one.draft


def _drafting(now):
    return [turn for turn in now.turns if len(turn.draft.tree)]


def target_scaled(engine, now):
    """The target's logits times a factor."""
    for turn in now.turns:
        turn.logits = turn.logits * 0.9


@replaced(ModelDrafter, "run_pass")
def drafter_scaled(run_pass, self, *given):
    """The drafter's logits times a factor."""
    level = run_pass(self, *given)
    level.logits = level.logits * 1.6
    return level


# The header names a rule that no step is judged by
other_rule = altered("run_info", lambda info: dataclasses.replace(info, rule="block"))
border = in_phase("commit", lost_at_a_border)
swapped, scaled = (in_phase("verify", change, before=True) for change in (logits_swapped, target_scaled))
FAULTS = [
    Fault("logits swapped", Cause.ROWS_SWAPPED, swapped, "model chain", rare=10),
    Fault("logits swapped, sampled", Cause.ROWS_SWAPPED, swapped, "early tree warm", rare=20),
    Fault("drafts swapped", Cause.ROWS_SWAPPED, in_phase("draft", drafts_swapped), "model chain", rare=10),
    Fault("target's logits scaled", Cause.LOGITS_SCALED, scaled, "model chain warm"),
    Fault("drafter's logits scaled", Cause.LOGITS_SCALED, drafter_scaled, "eagle chain warm"),
    Fault("past a stop", Cause.PAST_THE_END, past_a_stop, "model chain stops", rare=0),
    Fault("another rule", Cause.OTHER_RULE, other_rule, "model chain", rare=0),
    Fault("not a number", Cause.NOT_A_NUMBER, in_phase("verify", not_a_number), "model chain warm", rare=1),
    Fault("one more", Cause.ACCEPTED_COUNT, in_phase("verify", one_more), "model chain", rare=30),
    Fault("token lost at preemption", Cause.TOKEN_LOST, lost_at_preemption, "model chain crowded", rare=60),
    Fault("token lost at a chunk's border", Cause.TOKEN_LOST, border, "model chain chunks"),
    Fault("counts swapped", Cause.ROWS_SWAPPED, in_phase("verify", swapped_counts), "model chain", rare=10),
    Fault("verdicts late", Cause.VERDICT_LATE, late_verdicts, "model chain", rare=0),
]
