"""Mistakes of transformers, of its past or made up, planted again: each is convicted, and named.

A mistake is a line of transformers' own source that is written otherwise; so it is at work in every version known.
"""

import inspect
import textwrap
from collections import Counter

import pytest
from transformers import DynamicCache, GenerationMixin
from transformers.generation import utils
from transformers.generation.candidate_generator import AssistedCandidateGenerator

import specscope
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.run import examine
from specscope.trace.wire.reading import read_capture
from tests.transformers.generators import CASES, GEMMA4_DRAWN, Case, buildable, generate, steps

RAW = {"do_sample": True, "temperature": 0.7, "top_k": 5}
SURE = Case({"do_sample": True, "top_k": 0, "temperature": 0.2, "assistant_early_exit": 1}, False)


def rewrite(monkeypatch, owner, name, *pairs):
    """Write lines of a function of transformers otherwise: pairs of old and new text."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in pairs:
        assert source.count(old) == 1, f"{name} has no one line {old!r}"
        source = source.replace(old, new)
    made = {}
    exec(compile(source, inspect.getsourcefile(function), "exec"), function.__globals__, made)
    monkeypatch.setattr(owner, name, made[name])


def greedy_drafter(monkeypatch):
    """#32867: the token is q's likeliest, and the ratio test is told that it was drawn from q."""
    original = AssistedCandidateGenerator._generate_candidates

    def likeliest(self, arguments):
        config = arguments["generation_config"]
        config.do_sample = False
        try:
            return original(self, arguments)
        finally:
            config.do_sample = True

    monkeypatch.setattr(AssistedCandidateGenerator, "_generate_candidates", likeliest)


def raw_q(monkeypatch):
    """#47932: drafts are drawn behind all processors, and the logits of before are handed on."""
    rewrite(
        monkeypatch,
        AssistedCandidateGenerator,
        "_generate_candidates",
        ("torch.stack(assistant_output.scores, dim=1)", "torch.stack(assistant_output.logits, dim=1)"),
        ("assistant_output = ", "self.generation_config.output_logits = True; assistant_output = "),
    )


def softmaxed_residual(monkeypatch):
    """#28508: max(p - q, 0) goes through a softmax, where it is to be divided by its sum."""
    divided = ("p_prime.div_(p_prime_sum)", "p_prime = p_prime.softmax(-1)")
    rewrite(monkeypatch, utils, "_speculative_sampling", divided)


def past_the_end(monkeypatch):
    """#47912: only the last token of a round is looked at."""
    rewrite(monkeypatch, GenerationMixin, "_assisted_decoding", ("if eos_positions.numel() > 0:", "if False:"))


def cache_not_cropped(monkeypatch):
    """One rejected draft stays in the cache."""
    crop = DynamicCache.crop

    def keep(self, length):
        crop(self, min(length + 1, 0) if length < 0 else length)

    monkeypatch.setattr(DynamicCache, "crop", keep)


def its_own(monkeypatch):
    """Of transformers 5.10 to 5.24: Gemma 4's assistant drafts by argmax, and states its raw logits as q."""


# The mistake, what is generated with it, checks that must fail, and the cause that must be named
PLANTED = [
    (greedy_drafter, CASES["assistant, plain"], {"drafted surprisal", "emitted surprisal"}, Cause.Q_NOT_DRAWN),
    (raw_q, Case(RAW), {"drafted surprisal"}, Cause.Q_TEMPERATURE),
    (softmaxed_residual, SURE, {"final tokens"}, Cause.FINAL_NOT_RESIDUAL),
    (past_the_end, CASES["assistant, greedy"], {"ends"}, Cause.PAST_THE_END),
    (cache_not_cropped, CASES["lookup, greedy"], {"tokens in the cache"}, Cause.TARGET_KV),
    (its_own, GEMMA4_DRAWN, {"drafted surprisal", "emitted surprisal"}, Cause.Q_NOT_DRAWN),
]


def recorded(path, case, **more):
    """The history of six requests."""
    with specscope.record(path) as recording:
        for seed in range(6):
            generate(case, seed, **more)
    assert recording.losses == []
    return read_capture(path).history


def accepted_inside(history):
    """The token that most often is one of a round's, and not its last."""
    return Counter(token for part in steps(history) for token in part.output()[:-1]).most_common(1)[0][0]


@pytest.mark.parametrize(("plant", "case", "checks", "cause"), PLANTED, ids=[row[0].__name__ for row in PLANTED])
def test_it_is_convicted_and_named(tmp_path, plant, case, checks, cause):
    more = {}
    buildable(case)
    if plant is past_the_end:
        more["eos_token_id"] = accepted_inside(recorded(tmp_path / "healthy.jsonl", case))
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        history = recorded(tmp_path / "run.jsonl", case, **more)
    found = examine(history, "a test")
    trial = found.stages["verify"]
    assert trial.tokens <= 220
    assert checks <= {check.name for check in trial.failed}
    assert found.suspects[0].cause is cause
