"""What specscope had and has no more: whoever still asks for it is told what to use instead."""

from __future__ import annotations

from specscope.errors import UserError

_TUNE = "`specscope tune` finds the tree to use, and --tree takes it"
_ALONE = "use one drafter, such as --drafter eagle"
_COLLECTOR = "docs/telemetry.md shows how an OpenTelemetry Collector keeps chosen requests"
_PART = "`specscope export FILE#REQUEST -o part.jsonl` writes a part of a capture"
_ANSWERS = "`specscope report` of a capture (serve -o run.jsonl) has each request's figures"
_COUNTS = "`specscope watch` reads counts from the server's metrics page"

# Each name as people write it (a flag, a verb, a drafter, a variable, a setting), and the end of the sentence.
GONE = {
    **dict.fromkeys(("--adaptive", "--costs", "--speculation auto"), _TUNE),
    "--save-costs": "--costs FILE measures what a step costs where there is no such file, and writes it",
    "--no-adaptive": "trees are not sized by costs; leave it out",
    "--suffix-shared": "--drafter suffix searches each request's own text",
    **dict.fromkeys(("--prefix-cache", "--no-prefix-cache"), "there is no prefix cache; leave it out"),
    **dict.fromkeys(("suffix+eagle", "ngram+eagle", "suffix+draft_model", "ngram+draft_model"), _ALONE),
    "synthetic": "the debugger's `fork accept=NODE` forces verdicts",
    **dict.fromkeys(("--keep", "--keep-buffer", "SPECSCOPE_KEEP", "SPECSCOPE_KEEP_BUFFER"), _COLLECTOR),
    **dict.fromkeys(("extract", "--sample-capture", "SPECSCOPE_SAMPLE_CAPTURE"), _PART),
    **dict.fromkeys(("--evidence counts", "SPECSCOPE_EVIDENCE=counts", "SPECSCOPE_AGGREGATES"), _COUNTS),
    "train": "docs/training.md shows the trainers of speculators and SpecForge, and how to judge what they make",
    "the command force": "`fork accept=NODE` shows what would follow, on our own engine: specscope debug PROMPT",
    "bench": "docs/serve.md shows `vllm bench serve` and `guidellm` against `specscope serve`",
    "--again": "`specscope diagnose` runs the engine again and finds where it breaks",
    "--against": "`specscope compare` shows what differs between two runs",
    **dict.fromkeys(("--web", "--web-host", "--web-port"), "`ssh -t HOST specscope ...` shows a remote screen"),
    "replay": "`specscope open FILE` shows a capture",
    "tui": "`specscope watch --listen HOST:PORT` shows engines that send to it",
    "audit": "`specscope diagnose --only audit` judges every step by the models",
    "locate": "`specscope diagnose --only locate` names the first operation that is wrong",
    "help": "`specscope VERB --help` explains a verb",
    **dict.fromkeys(("--per-request-spec-decode-metrics", "--enable-per-request-metrics"), _ANSWERS),
    "--stop-on-error": "a script runs to its end, and the last line names the first command that failed",
    "--step": "a step is written FILE#REQUEST@STEP, and `specscope report FILE` shows where a step's time goes",
    "--log-stats": "--metrics-port 9464 serves the counts, and `specscope watch` prints them by interval",
    "--tui": "--screen shows it on a screen",
    "--over": "`specscope debug FILE` debugs a capture",
    "--attach": "`specscope debug SOCKET` attaches to an engine that runs",
    "the command run": "`goto start`, then `continue`",
    "the command reverse-step": "`reverse-next`, then `step` goes through its phases",
    "the command commands": "type the lines after the stop, or run a script: specscope debug X --commands FILE",
    "the command tbreak": "`break`, then `delete` after its stop",
    "the command ignore": "give `break` a condition, such as `break reject if p < 0.1`",
    **dict.fromkeys(("the command enable", "the command disable"), "`delete` the breakpoint; `break` sets it again"),
    **dict.fromkeys(("the command up", "the command down"), "`node N` goes to a node, and `tree` numbers them"),
    "info spans": "Jaeger shows the spans of other services",
    **dict.fromkeys(("--html", "--plot"), "`specscope export FILE -o run.html` writes a page of it all"),
    "--gpu": "`specscope doctor` names the GPU; kernels/README.md says how its kernels are tested",
    "--http-port": "HTTP has the port after that of --listen",
    **dict.fromkeys(("--alert", "--exec"), "use an alerting rule of Prometheus over the metrics page"),
}


def instead(name: str) -> str | None:
    """The sentence about a name that there was; None for any other."""
    return f"{name} was removed: {GONE[name]}" if name in GONE else None


def refuse_gone(name: str) -> None:
    """Raises UserError with that sentence."""
    if line := instead(name):
        raise UserError(line)
