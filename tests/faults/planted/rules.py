"""Faults in the sampling rules along a tree's paths."""

import dataclasses

import numpy as np
import torch

from specscope.analyze.diagnose.causes import Cause
from specscope.speculate import sampling
from specscope.speculate.sampling import LogitRows, target_rows
from specscope.speculate.verify import batch as inputs
from specscope.speculate.verify import verifier
from tests.faults.fault import Fault, in_phase, replaced


@replaced(inputs, "logit_rows")
def penalties_of_the_root(rows, context, draft, logits):
    """Penalties count prompt and output, but not the drafted tokens on the way to a node."""
    if not context.params.penalised:
        return LogitRows(logits, context.params)
    paths = [[]] * (len(draft.tree) + 1)
    return LogitRows(logits, context.params, context.tokens, context.prompt_len, paths)


def cut_at_the_root(**without):
    """Top-k, top-p and min-p are applied at the root alone."""

    def relaxed(step_batch, parts, changes):
        batch = step_batch(parts, changes)
        free = [
            (dataclasses.replace(context, params=dataclasses.replace(context.params, **without)), draft, logits)
            for context, draft, logits in parts
        ]
        other = target_rows([inputs.logit_rows(*part) for part in free])
        below = np.concatenate([np.arange(len(draft.tree) + 1) > 0 for _, draft, _ in parts])
        p = torch.where(torch.from_numpy(below)[:, None], other.p, batch.target.p)
        return dataclasses.replace(batch, target=dataclasses.replace(batch.target, p=p))

    return replaced(verifier, "step_batch")(relaxed)


def params_of(change):
    """The target's p by other sampling parameters, `change` of the right ones; the drafter's stay."""

    def changed(rows, context, draft, logits):
        params = dataclasses.replace(context.params, **change(context.params))
        return dataclasses.replace(rows(context, draft, logits), params=params)

    return replaced(inputs, "logit_rows")(changed)


@replaced(sampling, "all_probabilities")
def cut_first(probabilities, parts, memory=None):
    """Top-p is taken before the temperature."""
    rows = []
    for part in parts:
        shaped = part.shaped().float()
        cut = sampling._beyond_top_p(shaped, part.params)
        rows.append((shaped / part.params.temperature).masked_fill(cut, -torch.inf).softmax(-1))
    return torch.cat(rows)


@replaced(inputs, "logit_rows")
def presence_of_the_prompt(rows, context, draft, logits):
    """Tokens that stand in the prompt alone are charged the presence penalty too."""
    alone = sorted({*context.tokens[: context.prompt_len]} - {*context.tokens[context.prompt_len :]})
    charged = logits.float().clone()
    charged[:, alone] -= context.params.presence_penalty
    return dataclasses.replace(rows(context, draft, logits), logits=charged)


def last_of_each_step(patch, engine):
    """Penalties take in only the last token of each step."""
    last: dict[str, list[int]] = {}

    def noted(engine, now):
        for turn in now.turns:
            if turn.request.output:
                last.setdefault(turn.request.id, []).append(turn.request.output[-1])

    def of_last(rows, context, draft, logits):
        made = rows(context, draft, logits)
        if not context.params.penalised:
            return made
        tokens = [*context.tokens[: context.prompt_len], *last.get(context.request, [])]
        return dataclasses.replace(made, tokens=tokens)

    in_phase("commit", noted)(patch, engine)
    replaced(inputs, "logit_rows")(of_last)(patch, engine)


NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
unpenalised = params_of(lambda params: NO_PENALTIES)
squared = params_of(lambda params: {"temperature": params.temperature**2})
FAULTS = [
    Fault("temperature twice", Cause.RULES_WRONG, squared, "early tree warm"),
    Fault("top-p first", Cause.RULES_WRONG, cut_first, "model tree top-p"),
    Fault("presence of the prompt", Cause.RULES_WRONG, presence_of_the_prompt, "model chain presence"),
    Fault("penalties of last tokens", Cause.RULES_WRONG, last_of_each_step, "model chain repeats", rare=0),
    Fault("penalties of the drafter alone", Cause.RULES_WRONG, unpenalised, "model tree rules"),
    Fault("penalties of the root", Cause.RULES_WRONG, penalties_of_the_root, "model tree rules", rare=30),
    Fault("top-p at the root", Cause.RULES_WRONG, cut_at_the_root(top_p=1.0), "model tree top-p"),
    Fault("top-k at the root", Cause.RULES_WRONG, cut_at_the_root(top_k=0), "eagle tree top-k"),
]
