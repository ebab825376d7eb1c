"""Whoever asks for what is gone is told so, in one line that says what to use instead."""

import pytest

from specscope.gone import GONE, instead, refuse_gone
from tests.support.commands import specscope

# Command lines as people have them in scripts and notes; each is refused by the name that is gone.
CAPTURE = ["capture", "a prompt", "-o", "run.jsonl"]
ASKED: list[tuple[str, list[str]]] = [
    *((verb, [verb, "x"]) for verb in ("replay", "tui", "extract", "audit", "locate", "help", "train", "bench")),
    *((flag, ["watch", "log.txt", "--headless", flag, "x"]) for flag in ("--alert", "--exec")),
    *((flag, ["serve", flag]) for flag in ("--prefix-cache", "--no-prefix-cache")),
    *((name, [*CAPTURE, *name.split()]) for name in ("--adaptive", "--no-adaptive", "--costs", "--speculation auto")),
    *((name, [*CAPTURE, "--drafter", name]) for name in GONE if "+" in name),
    ("synthetic", [*CAPTURE, "--drafter", "synthetic:0.8,0.5"]),
    ("--suffix-shared", ["serve", "--drafter", "suffix", "--suffix-shared", "1000"]),
    ("--evidence counts", ["vllm", "--capture", "x.jsonl", "--evidence", "counts", "--", "serve", "m"]),
    *((flag, ["open", flag, "x"]) for flag in ("--web", "--web-port")),
    ("--keep", ["capture", "prompts.txt", "-o", "run.jsonl", "--otlp-endpoint", "http://x", "--keep", "error"]),
    ("--keep", ["vllm", "--capture", "run.jsonl", "--keep", "error", "--", "serve", "m"]),
    ("--keep-buffer", ["serve", "--keep-buffer", "32"]),
    ("--sample-capture", ["transformers", "--sample-capture", "script.py"]),
    *((flag, ["debug", flag, "x"]) for flag in ("--over", "--attach")),
    ("--enable-per-request-metrics", ["serve", "--enable-per-request-metrics"]),
    ("--stop-on-error", ["debug", "a prompt", "--commands", "f", "--stop-on-error"]),
    ("--step", ["doctor", "--step"]),
    ("--log-stats", [*CAPTURE, "--log-stats"]),
    ("--tui", ["compare", "a.jsonl", "b.jsonl", "--tui"]),
    *(("--html", [*words, "--html", "page.html"]) for words in (["report", "run.jsonl"], ["compare", "a", "b"])),
    ("--plot", ["tune", "run.jsonl", "--plot", "curve.svg"]),
    *((flag, ["diagnose", "run.jsonl", flag, "x"]) for flag in ("--again", "--against")),
]


def test_a_sentence_says_what_to_use():
    assert instead("--adaptive").startswith("--adaptive was removed: `specscope tune` finds the tree to use")
    assert instead("--tree") is None
    refuse_gone("--tree")
    assert [text for text in GONE.values() if "\n" in text or text.endswith(".")] == []


@pytest.mark.parametrize(("name", "words"), ASKED, ids=[name for name, _ in ASKED])
def test_who_asks_is_told(name, words):
    refused = specscope(*words)
    assert refused.returncode == 2
    assert f"specscope: error: {instead(name)}" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_a_variable_that_is_gone_is_named_and_the_command_runs():
    told = specscope("tree", "3", SPECSCOPE_AGGREGATES="1")
    assert told.returncode == 0
    assert told.stderr == f"specscope: {instead('SPECSCOPE_AGGREGATES')}\n"
