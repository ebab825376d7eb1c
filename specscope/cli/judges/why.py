"""`specscope why`: why a token was rejected, in words."""

from __future__ import annotations

import click
from rich.console import Console
from rich.text import Text

from specscope.analyze.plain import plain
from specscope.analyze.why import NodeAnswer, RunAnswer, why_part, why_run
from specscope.cli.arguments import PLACE, X_RULE
from specscope.cli.captures import need_steps, print_json, read_branch, source_options
from specscope.cli.help import verb
from specscope.cli.options import branch_option, json_option
from specscope.cli.streams import warn
from specscope.envelope import envelope
from specscope.terminal import text_console
from specscope.trace.record.vocabulary import shell_word
from specscope.trace.wire.reading import split_file


@verb(epilog=X_RULE)
@click.argument("place", type=PLACE, metavar="CAPTURE[#REQUEST[@STEP[/NODE]]]")
@json_option
@branch_option
@source_options
def why(place: str, *, as_json: bool, branch: int | None) -> None:
    """Explain why a token was rejected.

    \b
      specscope why run.jsonl            the kinds of rejection that cost this run most
      specscope why run.jsonl#r3         the same for one request
      specscope why run.jsonl#r3@17      a step: its path and the node that ended it
      specscope why run.jsonl#r3@17/4    a node: what the target wanted, what decided, what would have accepted it
    """
    file, text = split_file(place)
    reader = read_branch(file, branch)
    history = reader.history
    need_steps(history, file, "explained")
    answer: NodeAnswer | RunAnswer
    if not text:
        answer = why_run(history)
    else:
        request, named = history.find(text)
        step = named.index
        answer = why_run(history, request.id) if step is None else why_part(history, request, step, named.node)
    if as_json:
        print_json(envelope("why", plain(answer), source=[file], warnings=reader.warnings))
    else:
        for warning in reader.warnings:
            warn(warning)
        render(answer, file, text_console())


def render(answer: NodeAnswer | RunAnswer, file: str, console: Console) -> None:
    """Print a sentence per line; for a run, a paragraph per kind."""
    if isinstance(answer, NodeAnswer):
        console.print(Text(str(answer.reference), style="bold cyan"))
        for number, sentence in enumerate((*answer.sentences, *answer.typical)):
            console.print(Text(sentence, style="bold" if number == 0 else ""))
        return
    for line in answer.lines():
        console.print(Text(line))
    if answer.kinds:
        example = answer.kinds[0].examples[0]
        console.print(Text(f"\nExample: specscope why {shell_word(f'{file}#{example}')}", style="dim"))
        console.print(Text(f"A fault, or a weak drafter: specscope diagnose {shell_word(file)}", style="dim"))
