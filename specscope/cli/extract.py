"""`specscope extract`: a part of a capture, to attach to an issue."""

from __future__ import annotations

from typing import Any

import click

from specscope.cli.captures import PLACE, fetches_captures, need_steps, reading_bar
from specscope.cli.options import asked_privacy, no_clobber_option, privacy_options
from specscope.cli.streams import say, warn
from specscope.errors import UserError
from specscope.trace.files import CAPTURE, Existing, check_output
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import printable


@click.command()
@click.argument("places", nargs=-1, required=True, type=PLACE, metavar="CAPTURE#REQUEST[@STEP[:LAST]]...")
@click.option("-o", "--output", required=True, metavar="FILE", help="The capture to write (OTLP JSON Lines).")
@no_clobber_option
@privacy_options
@fetches_captures
def extract(places: tuple[str, ...], output: str, *, no_clobber: bool, **flags: Any) -> None:  # noqa: ANN401
    """Write a part of a capture as a capture, to attach to an issue.

    \b
      specscope extract run.jsonl#r3 -o part.jsonl             a request
      specscope extract run.jsonl#r3@17 -o part.jsonl          a step of it
      specscope extract run.jsonl#r3@10:40 -o part.jsonl       its steps 10 to 40, both included; 10: goes to its end
      specscope extract run.jsonl#r3@10:40 run.jsonl#r5 -o part.jsonl --no-text

    Every verb that reads a capture reads the part. Nothing of the other requests is in it but how many took part in a
    step. What the request asked and how it ended go along, with the whole prompt and output even where few steps are
    taken: --no-text leaves out the texts, and --no-tokens the token ids too. Of an edited run, the steps are those on
    the path on which the request ended.
    """
    from specscope.trace.extract import part_of, write_part
    from specscope.trace.wire.reading import read_capture, split_file

    named = [split_file(place) for place in places]
    file = named[0][0]
    for other, _ in named:
        if other != file:
            raise UserError(f"{other} is another capture than {file}: extract takes places of one")
    existing = Existing.REFUSE if no_clobber else Existing.REPLACE
    check_output(output, "-o", (file,), CAPTURE, existing)
    privacy = asked_privacy(flags)
    with reading_bar("reading") as progress:
        reader = read_capture(file, progress)
    history = reader.history
    need_steps(history, file, "extracted from")
    first = next(iter(history.requests), "r3")
    if len(history.requests) != 1 and not all(text for _, text in named):
        count = plural(len(history.requests), "request")
        raise UserError(f"{file} has {count}: write one after #, such as {file}#{printable(first)}")
    part = part_of(history, [text or first for _, text in named], privacy)
    for warning in reader.warnings:
        warn(warning)
    size = write_part(part, history.vocabulary, output, existing)
    counts = f"{plural(part.steps, 'step')} of {plural(len(part.requests), 'request')}, {plural(size, 'byte')}"
    say(f"wrote {output}: {counts}; left out: {', '.join(part.left_out)}")
