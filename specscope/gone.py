"""What specscope had and has no more: whoever still asks for it is told what to use instead."""

from __future__ import annotations

from specscope.errors import UserError

_TUNE = "`specscope tune` finds the tree to use, and --tree takes it"
_ALONE = "use one drafter, such as --drafter eagle"
_COLLECTOR = "docs/telemetry.md shows how an OpenTelemetry Collector keeps chosen requests"
_PART = "`specscope export FILE#REQUEST -o part.jsonl` writes a part of a capture"
_COUNTS = "`specscope watch` reads counts from the server's metrics page"

# Each name as people write it (a flag, a verb, a drafter, a variable, a setting), and the end of the sentence.
GONE = {
    "--adaptive": _TUNE,
    "--no-adaptive": "trees are never sized by costs, so leave it out",
    "--costs": _TUNE,
    "--speculation auto": _TUNE,
    "--suffix-shared": "--drafter suffix looks into each request's own text",
    "--prefix-cache": "each prompt is computed anew, so leave it out",
    "--no-prefix-cache": "there is no prefix cache, so leave it out",
    "suffix+eagle": _ALONE,
    "ngram+eagle": _ALONE,
    "suffix+draft_model": _ALONE,
    "ngram+draft_model": _ALONE,
    "synthetic": "`fork accept=NODE` of the debugger forces verdicts",
    "--keep": _COLLECTOR,
    "--keep-buffer": _COLLECTOR,
    "SPECSCOPE_KEEP": _COLLECTOR,
    "SPECSCOPE_KEEP_BUFFER": _COLLECTOR,
    **dict.fromkeys(("--evidence counts", "SPECSCOPE_EVIDENCE=counts", "SPECSCOPE_AGGREGATES"), _COUNTS),
    "train": "docs/training.md shows the trainers of speculators and SpecForge, and how to judge what they make",
    "force": "`fork accept=NODE` shows what would follow, over a live engine of ours: specscope debug PROMPT",
    "bench": "docs/serve.md shows `vllm bench serve` and `guidellm` against `specscope serve`",
    "--again": "`specscope locate` runs the engine again and finds where it breaks",
    "--against": "`specscope compare` shows what differs between two runs",
    "--web": "`ssh -t HOST specscope ...` shows the screen from another machine",
    "--web-host": "`ssh -t HOST specscope ...` shows the screen from another machine",
    "--web-port": "`ssh -t HOST specscope ...` shows the screen from another machine",
    **dict.fromkeys(("extract", "--sample-capture", "SPECSCOPE_SAMPLE_CAPTURE"), _PART),
    "info spans": "Jaeger shows the spans of other services",
    "[keys]": "keys cannot be changed, so leave it out",
    **dict.fromkeys(("--alert", "--exec"), "an alerting rule of Prometheus does it, over the metrics page"),
}


def instead(name: str) -> str | None:
    """The sentence about a name that there was; None for any other."""
    return f"{name} is gone: {GONE[name]}" if name in GONE else None


def refuse_gone(name: str) -> None:
    """Raises UserError with that sentence."""
    if line := instead(name):
        raise UserError(line)
