"""Assisted generation in transformers, recorded: as without, also of scripts that know nothing of it, and on trial.

Mistakes of transformers, of its past or made up, are planted again: lines of its own source that are written otherwise,
so each is at work in every version known; it is convicted, and named.
"""

import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    DynamicCache,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation import utils
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator
from transformers.generation.streamers import BaseStreamer

import specscope
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import CheckResult
from specscope.analyze.verify.trial import judge
from specscope.errors import UserError
from specscope.remote.receiver import Receiver
from specscope.trace.history.history import History
from specscope.trace.record.records import FinishReason
from specscope.trace.wire.reading import read_capture
from specscope.transformers import hooks, unasked
from tests.support.commands import run_here
from tests.support.records import received
from tests.support.sources import skeleton
from tests.transformers.generators import ALL, CASES, GEMMA4_DRAWN, SAMPLED, Case, buildable, generate, models, steps
from tests.transformers.models import prompt
from tests.transformers.scripts import SCRIPT, environment, installed, run, without_ours

WRAPPED = (
    (GenerationMixin, "_assisted_decoding"),
    (GenerationMixin, "_get_candidate_generator"),
    (utils, "_speculative_sampling"),
)
# By case, checks that fail by a bug of transformers' own
NOT_DRAWN = {"Gemma 4, sampled": {"drafted surprisal", "emitted surprisal"}}


def wrapped():
    return [getattr(owner, name) for owner, name in WRAPPED]


def recorded(path, *calls) -> History:
    """The history of what these calls did."""
    with specscope.record(path) as recording:
        for call in calls:
            call()
    assert recording.losses == []
    return read_history(path)


def read_history(path) -> History:
    return read_capture(path).history


def failed(history):
    return [check.name for check in judge(history, source="a test").checks if check.result is CheckResult.FAILED]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ALL)
def test_output_and_random_state_are_as_without_and_verify_passes(tmp_path, name):
    case, before, recordings = buildable(ALL[name]), wrapped(), []
    without = generate(case)
    history = recorded(tmp_path / "run.jsonl", lambda: recordings.append(generate(case)))
    assert recordings == [without]
    assert wrapped() == before
    assert set(failed(history)) <= NOT_DRAWN.get(name, set())
    made = [token for part in steps(history) for token in part.output()]
    assert made == without[0][12:]
    assert any(len(part.tree) for part in steps(history))
    assert any(part.verdict.accepted < len(part.tree) for part in steps(history)) or not case.arguments["do_sample"]
    assert history.run is not None
    assert not history.run.is_ours


def test_a_lookup_under_sampling_is_judged_by_matching(tmp_path):
    history = recorded(tmp_path / "run.jsonl", *(lambda s=s: generate(CASES["lookup, sampled"], s) for s in range(5)))
    drafts = [part for part in steps(history) if len(part.tree)]
    assert {part.rule for part in drafts} == {"match"}
    assert any(part.verdict.accepted for part in drafts)
    assert not any(part.verdict.coin.any() for part in drafts)


def test_an_accepted_token_that_the_end_cuts_behind_is_told(tmp_path):
    """The verifier accepted more than came out."""
    greedy, lookup = CASES["assistant, greedy"], CASES["lookup, greedy"]
    stop = generate(greedy)[0][16]
    whole, calls = generate(greedy, eos_token_id=stop)[0], [lambda: generate(greedy, eos_token_id=stop)]
    calls += [partial(generate, lookup, tokens=n) for n in range(1, 9)]
    histories = [recorded(tmp_path / f"{n}.jsonl", call) for n, call in enumerate(calls)]
    assert all(failed(history) == [] for history in histories)
    ends = [record.finished[0] for history in histories for record in history.steps if record.finished]
    assert ends[0].reason is FinishReason.EOS
    assert ends[0].output.tolist() == whole[12:]
    assert {end.reason for end in ends[1:]} <= {FinishReason.LENGTH, FinishReason.EOS}
    last = [steps(history)[-1] for history in histories]
    assert any(part.emitted <= part.verdict.accepted for part in last), "no accepted draft was the last token"


def test_rules_that_an_assistant_applies_twice_cost_acceptance_alone(tmp_path):
    """As transformers does: its drafts are drawn from the q that is recorded, and judged by it."""
    loaded = []
    for name, model in zip(("target", "drafter"), models(), strict=True):
        model.save_pretrained(tmp_path / name)
        loaded.append(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name))
    target, drafter = loaded
    drafter.generation_config.update(assistant_confidence_threshold=0, num_assistant_tokens=4)
    how = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}
    with specscope.record(tmp_path / "run.jsonl"):
        for seed in range(4):
            torch.manual_seed(seed)
            target.generate(prompt(seed=seed), assistant_model=drafter, max_new_tokens=48, pad_token_id=0, **how)
    _, out, _ = run_here(["diagnose", str(tmp_path / "run.jsonl")])
    assert re.search(r"1\. .* \(rules_wrong; proven: ", out)
    assert "applied twice" in out
    assert "so the output is the target's; fewer drafts are accepted" in out


def test_a_generator_of_the_users_own_may_call_its_parameters_otherwise(tmp_path, monkeypatch):
    own = PromptLookupCandidateGenerator.get_candidates
    monkeypatch.setattr(PromptLookupCandidateGenerator, "get_candidates", lambda self, ids, **more: own(self, ids))
    history = recorded(tmp_path / "run.jsonl", partial(generate, CASES["lookup, greedy"]))
    assert any(len(part.tree) for part in steps(history))


class AtThirdPut(BaseStreamer):
    """Does something when a text comes for the third time."""

    def __init__(self, act):
        self.act, self.puts = act, 0

    def put(self, value):
        self.puts += 1
        if self.puts == 3:
            self.act()

    def end(self): ...


def enough():
    raise RuntimeError("enough")


@pytest.mark.parametrize("name", ALL)
def test_a_script_that_raises_leaves_transformers_as_it_was(tmp_path, name):
    case, before = buildable(ALL[name]), wrapped()
    target, _ = models(case.models)
    with pytest.raises(RuntimeError, match="enough"), specscope.record(tmp_path / "run.jsonl"):
        generate(case, streamer=AtThirdPut(enough))
    assert wrapped() == before
    assert not target._forward_hooks
    assert torch.overrides._get_current_function_mode_stack() == []
    (end,) = [end for record in read_history(tmp_path / "run.jsonl").steps for end in record.finished]
    assert (end.reason, end.error) == (FinishReason.ERROR, "RuntimeError: enough")


def interrupted():
    raise KeyboardInterrupt


def test_a_request_that_ctrl_c_ends_is_cancelled(tmp_path):
    case = CASES["assistant, greedy"]
    with pytest.raises(KeyboardInterrupt), specscope.record(tmp_path / "run.jsonl"):
        generate(case, streamer=AtThirdPut(interrupted))
    end = [end for record in read_history(tmp_path / "run.jsonl").steps for end in record.finished][-1]
    assert (end.reason, end.error) == (FinishReason.CANCELLED, "")


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ALL)
def test_a_second_generate_inside_a_streamer_is_a_request_of_its_own(tmp_path, name):
    def nested():
        inner = []
        return generate(case, streamer=AtThirdPut(lambda: inner.append(generate(case, seed=5, tokens=8)))), inner

    case = buildable(ALL[name])
    without, with_it = nested(), []
    history = recorded(tmp_path / "run.jsonl", lambda: with_it.append(nested()))
    assert with_it == [without]
    outputs = {end.info.id: end.output.tolist() for record in history.steps for end in record.finished}
    assert outputs == {"generate-0": without[0][0][12:], "generate-1": without[1][0][0][12:]}
    assert set(failed(history)) <= NOT_DRAWN.get(name, set())


def test_another_drafter_gets_a_file_of_its_own(tmp_path):
    with specscope.record(tmp_path / "run.jsonl") as recording:
        generate(CASES["assistant, greedy"])
        generate(CASES["lookup, greedy"])
        generate(CASES["assistant, sampled"])
    assert recording.captures == [str(tmp_path / "run.jsonl"), str(tmp_path / "run.2.jsonl")]
    assert {part.request for part in steps(read_history(tmp_path / "run.jsonl"))} == {"generate-0", "generate-2"}


def test_calls_with_other_ends_of_sequence_are_runs_of_their_own(tmp_path):
    """It is an argument of each call; a run has one set of them."""
    case, files = CASES["assistant, sampled"], [tmp_path / "run.jsonl", tmp_path / "run.2.jsonl"]
    often = Counter(generate(case, eos_token_id=None)[0][12:]).most_common(1)[0][0]
    for first, second in ((often, None), (None, often)):
        with specscope.record(files[0]) as recording:
            generate(case, eos_token_id=first)
            generate(case, eos_token_id=second)
        assert recording.captures == [*map(str, files)]
        assert [failed(read_history(file)) for file in files] == [[], []]
        reasons = [ended.reason for file in files for ended in ends(file)]
        assert sorted(reasons) == [FinishReason.EOS, FinishReason.LENGTH]
        for file in files:
            file.unlink()


# By case, arguments whose effect on p is not in the capture
UNTOLD = {
    "own": {"logits_processor": LogitsProcessorList([lambda _, logits: 3 * logits])},
    "of a known kind": {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.3)])},
    "decay": {"exponential_decay_length_penalty": (4, 1.5)},
    "masked, then top-p": {"suppress_tokens": [*range(3, 50)], "top_p": 0.9},
    "guided": {"guidance_scale": 1.5},  # it runs the target again in each round
    "guided, lookup": {"guidance_scale": 1.5, "prompt_lookup_num_tokens": 4},
}


@pytest.mark.parametrize("how", UNTOLD)
def test_rules_that_the_capture_only_names_convict_nobody(tmp_path, how):
    case = Case({"do_sample": True, "top_k": 0} | UNTOLD[how], "lookup" not in how)
    without = [generate(case, seed)[0][12:] for seed in range(3)]
    history = recorded(tmp_path / "run.jsonl", *(partial(generate, case, seed) for seed in range(3)))
    assert [end.output.tolist() for record in history.steps for end in record.finished] == without
    found = examine(history, "a test")
    assert found.stages["verify"].failed == []
    assert not found.suspects
    (check,) = [check for check in found.stages["verify"].checks if check.name == "temperature and penalties"]
    assert (check.result, check.note) == (
        CheckResult.SKIPPED,
        "rules that the capture only names shape p, as logits processors",
    )


CRITERIA = {
    "own": {"stopping_criteria": StoppingCriteriaList([lambda ids, _, **more: torch.tensor([ids.shape[1] > 16])])},
    "time": {"max_time": 0.0},
}


@pytest.mark.parametrize("how", CRITERIA)
def test_a_criterion_of_the_callers_is_a_stop(tmp_path, how):
    history = recorded(tmp_path / "run.jsonl", partial(generate, CASES["assistant, sampled"], **CRITERIA[how]))
    (end,) = ends(tmp_path / "run.jsonl")
    assert (end.reason, end.stop) == (FinishReason.STOP, "")
    assert 0 < len(end.output) < 32
    assert failed(history) == []


def test_what_is_recorded_already_is_refused(tmp_path):
    with specscope.record(tmp_path / "run.jsonl"), pytest.raises(UserError, match="already"):
        specscope.record(tmp_path / "other.jsonl").__enter__()


def test_a_request_whose_rule_is_not_lossless_is_left_out_and_said(tmp_path, caplog):
    with specscope.record(tmp_path / "run.jsonl"):
        generate(Case(SAMPLED | {"assistant_ensemble_weight": 0.5}))
    assert "a request with assistant_ensemble_weight is not recorded" in caplog.text
    assert not (tmp_path / "run.jsonl").exists()


# Folders of unpacked wheels, transformers-5.20.2 and so on, where they are at hand
SOURCES = sorted(Path(os.environ.get("SPECSCOPE_TRANSFORMERS_SOURCES", "/nonexistent")).glob("transformers-*"))


def test_the_installed_version_is_as_it_is_known():
    hooks.check_version(transformers.__version__)
    hooks.check_signatures(utils, transformers.__version__)


@pytest.mark.parametrize("version", ["4.57.1", "5.19.0", "5.25.0", "6.0.0"])
def test_another_version_is_refused_by_a_sentence(version):
    with pytest.raises(UserError, match=rf"transformers {version} .* 5.20 to 5.24 can be recorded"):
        hooks.check_version(version)


def test_a_changed_signature_is_refused_and_nothing_is_wrapped(tmp_path, monkeypatch):
    def _speculative_sampling(candidate_input_ids, candidate_logits, candidate_length, new_logits, is_done): ...

    _speculative_sampling.__module__ = utils.__name__
    monkeypatch.setattr(utils, "_speculative_sampling", _speculative_sampling)
    decoding = utils.GenerationMixin._assisted_decoding
    with pytest.raises(UserError, match=r"_sampling takes .*is_done"), specscope.record(tmp_path / "a.jsonl"):
        pass
    assert utils.GenerationMixin._assisted_decoding is decoding
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_each_known_version_is_as_its_source_has_it(source):
    hooks.check_signatures(skeleton(source / "transformers", utils.__name__), source.name)


@pytest.fixture(scope="module")
def installation(tmp_path_factory):
    return installed(tmp_path_factory.mktemp("installed"))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def ends(capture):
    return [end for record in read_capture(capture).history.steps for end in record.finished]


def test_a_script_is_recorded_and_sent(folder, installation):
    taken, words = [], ["script.py", "exits", "--capture", "x"]
    with Receiver(taken.append) as receiver:
        variables = {"SPECSCOPE_CAPTURE": "run.jsonl", "SPECSCOPE_OTLP_ENDPOINT": f"127.0.0.1:{receiver.grpc_port}"}
        recorded = run(words, folder, installation, **variables)
    assert recorded.returncode == 3
    assert f"specscope: captured to {folder / 'run.jsonl'}" in recorded.stderr
    steps = read_capture(folder / "run.jsonl").history.steps
    assert len(steps) > 5
    sent = {span.attributes.get("specscope.step") for _, span in received(taken)} - {None}
    assert sent == {record.step for record in steps}, "the receiver did not get every record"


@pytest.mark.parametrize("how", ["exits", "raises", "forks"])
@pytest.mark.slow
def test_however_it_ends_the_capture_is_whole(folder, installation, how):
    without = run(["script.py", how], folder, installation)
    recorded = run(["script.py", how], folder, installation, SPECSCOPE_CAPTURE="run.jsonl")
    assert (recorded.returncode, recorded.stdout) == (without.returncode, without.stdout)
    assert without_ours(recorded.stderr) == without_ours(without.stderr)
    assert recorded.stderr.count("captured to") == 1
    assert len(ends(folder / "run.jsonl")) == 1  # of a fork there is none: what writes is the parent's


def test_without_a_variable_nothing_of_specscope_is_imported(tmp_path, installation):
    code = "import sys, torch; print(sorted(name for name in sys.modules if name.startswith('specscope')))"
    done = run(["-c", code], tmp_path, installation)
    assert done.stdout.split() == ["['specscope',", "'specscope.transformers',", "'specscope.transformers.unasked']"]


def test_what_cannot_be_recorded_is_told_in_a_line_and_the_import_goes_on(monkeypatch, caplog):
    monkeypatch.setenv("SPECSCOPE_CAPTURE", "run.jsonl")
    monkeypatch.setenv("SPECSCOPE_SAMPLE", "7")
    monkeypatch.delitem(sys.modules, "specscope.cli.main", raising=False)  # our own command records nothing by itself
    assert utils.__name__ in sys.modules  # so that it begins at once
    unasked.register()
    (line,) = [line for line in caplog.messages if "nothing is recorded" in line]
    assert "SPECSCOPE_SAMPLE must be between 0 and 1" in line


def test_inside_vllm_its_own_plugin_records(monkeypatch):
    monkeypatch.setenv("SPECSCOPE_CAPTURE", "run.jsonl")
    monkeypatch.setitem(sys.modules, "vllm", sys)
    monkeypatch.setattr(unasked, "recording_of", lambda settings: pytest.fail("recorded twice"))
    unasked.register()


@pytest.mark.slow
def test_ctrl_c_leaves_a_valid_capture(folder, installation):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    variables = environment(installation, SPECSCOPE_CAPTURE="run.jsonl")
    with subprocess.Popen([sys.executable, "script.py", "waits"], cwd=folder, env=variables, **pipes) as process:
        assert process.stdout.readline().startswith("['script.py', 'waits']")
        process.stdout.readline()  # it has generated once, and goes on
        process.send_signal(2)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == -2  # as Python ends by a Ctrl-C that nobody caught
    assert "KeyboardInterrupt" in stderr
    reader = read_capture(folder / "run.jsonl")
    assert reader.warnings == []
    reasons = {end.reason for end in ends(folder / "run.jsonl")}
    assert reasons <= {FinishReason.LENGTH, FinishReason.EOS, FinishReason.CANCELLED}


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


def planted_run(path, case, **more):
    """The history of six requests."""
    with specscope.record(path) as recording:
        for seed in range(6):
            generate(case, seed, **more)
    assert recording.losses == []
    return read_capture(path).history


def accepted_inside(history):
    """The token that most often is one of a round's, and not its last."""
    return Counter(token for part in steps(history) for token in part.output()[:-1]).most_common(1)[0][0]


@pytest.mark.every(2)
@pytest.mark.parametrize(("plant", "case", "checks", "cause"), PLANTED, ids=[row[0].__name__ for row in PLANTED])
def test_it_is_convicted_and_named(tmp_path, plant, case, checks, cause):
    more = {}
    buildable(case)
    if plant is past_the_end:
        more["eos_token_id"] = accepted_inside(planted_run(tmp_path / "healthy.jsonl", case))
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        history = planted_run(tmp_path / "run.jsonl", case, **more)
    found = examine(history, "a test")
    trial = found.stages["verify"]
    assert trial.tokens <= 220
    assert checks <= {check.name for check in trial.failed}
    assert found.suspects[0].cause is cause
