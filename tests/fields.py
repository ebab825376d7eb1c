"""docs/fields.md, of what the records declare: `python -m tests.fields` writes it anew."""

import ast
import dataclasses
import inspect
import io
import tokenize
from enum import Enum, IntEnum
from pathlib import Path
from typing import get_args, get_origin

from msgspec import Meta

from specscope.trace.record.aggregate import Aggregate, LeftOut, RequestFigures, Sampled
from specscope.trace.record.declared import DIMENSIONS, WireForm
from specscope.trace.record.notes import DraftNotes, FormNotes, Logprobs, MethodNotes, ParentNotes
from specscope.trace.record.privacy import blank
from specscope.trace.record.records import RequestEnd, RequestInfo, RequestStep, RunInfo, StepRecord, Verdict
from specscope.trace.record.tree import DraftTree
from specscope.trace.wire.codec import wired

PAGE = Path(__file__).parent.parent / "docs" / "fields.md"
KINDS = {
    RunInfo: "the resource of every span",
    StepRecord: "a span `engine_step`",
    LeftOut: "beside that, where trace sampling took something out",
    Aggregate: "beside that, where the step is an interval",
    RequestInfo: "a span `queue`",
    RequestStep: "a span `decode_step`, or `prefill`",
    DraftTree: "in `decode_step`",
    Verdict: "in `decode_step`",
    DraftNotes: "in `decode_step`, where the drafter is a model",
    ParentNotes: "JSON in `specscope.parents`",
    MethodNotes: "JSON in `specscope.method`",
    FormNotes: "JSON in `specscope.form`",
    Logprobs: "JSON in `specscope.logprobs`",
    RequestEnd: "a request's own span, `text_completion MODEL` or `chat MODEL`",
    RequestFigures: "beside that: a request in sums",
    Sampled: "beside that, where not all requests' spans are kept",
}
HEAD = """# Fields of the evidence

Made by `python -m tests.fields` of what the records in `specscope/trace/record/` declare; the words and figures are
explained in [evidence](evidence.md). A field of a record is an attribute of a span; notes are JSON in one attribute. A
field is absent where an array is empty, or where it has the value that records have by default, but for those that are
always written. Numbers that JSON has no form for are the texts `NaN`, `Infinity` and `-Infinity`.

Shapes are over:

"""


def page():
    """The whole page."""
    shapes = "".join(f"- {letter}: {over.words}, at most {over.most:,}\n" for letter, over in DIMENSIONS.items())
    return HEAD + shapes + "".join(map(table, KINDS))


def table(kind):
    """The fields of a record."""
    meanings = comments(kind)
    rows = [
        (f"`{field.name}`", told(field), typed(field), shape(field), meaning(field, meanings[field.name]))
        for field in wired(kind)
    ]
    lines = [("field", "attribute", "type", "shape", "meaning"), ("---",) * 5, *rows]
    about = " ".join(inspect.getdoc(kind).split("\n\n")[0].splitlines())
    text = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
    return f"\n## {kind.__name__}\n\n{about} On the wire: {KINDS[kind]}.\n\n{text}"


def told(field):
    """The attribute."""
    if not field.attribute:
        return ""
    return f"`{field.attribute}*`" if field.attribute.endswith(".") else f"`{field.attribute}`"


def typed(field):
    """Type and unit."""
    declared = field.base if field.wire.kind is None else field.wire.kind
    kinds = [one for one in (declared, *get_args(declared)) if isinstance(one, type) and issubclass(one, Enum)]
    if kinds:
        unit = ", ".join(f"{v.value} {v.name.lower()}" if isinstance(v, IntEnum) else str(v.value) for v in kinds[0])
    else:
        unit = next((meta.title for meta in metas(declared) if meta.title), "")
    if field.dtype is not None:
        name = field.dtype.__name__
    elif field.wire.form is WireForm.BY_HAND:
        name = field.wire.form.value
    elif field.wire.form is WireForm.JSON or field.notes is not None:
        name = "JSON"
    else:
        name = "list" if get_origin(field.base) is tuple else plain_name(field.base)
    return ": ".join(part for part in (name, unit) if part and part != "text")


def plain_name(base):
    """Of a type that may be None."""
    one = next((kind for kind in (base, *get_args(base)) if isinstance(kind, type)), base)
    return "str" if issubclass(one, str) else one.__name__


def metas(kind):
    """What is declared of a type and of its parts, the outermost first."""
    own = [meta for meta in getattr(kind, "__metadata__", ()) if isinstance(meta, Meta)]
    inner = (kind.__origin__,) if own else get_args(kind)
    return own + [meta for part in inner if part is not Ellipsis for meta in metas(part)]


def shape(field):
    """What it is over."""
    if field.dtype is None:
        return ""
    return f"[{', '.join(field.dimensions)}]" + (" or [0]" if field.wire.per.endswith("?") else "")


def meaning(field, comment):
    """The field's comment, and what leaves it out."""
    if field.mark is None:
        return comment
    return f"{comment} ({'not' if field.mark.instead is blank else 'less of it'} with `{field.mark.level.flag}`)"


def comments(kind):
    """The comment above each field, or behind it."""
    source = inspect.getsource(kind)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    said = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body[0].body:
        if not isinstance(node, ast.AnnAssign):
            continue
        above = node.lineno - 1
        while above in said and lines[above - 1].strip().startswith("#"):
            above -= 1
        numbers = [*range(above + 1, node.lineno), node.end_lineno]
        found[node.target.id] = " ".join(said[at].string.removeprefix("# ") for at in numbers if at in said)
    missing = [field.name for field in dataclasses.fields(kind) if field.name in found and not found[field.name]]
    assert not missing, f"{kind.__name__}: say what {missing} is in a comment"
    return found


if __name__ == "__main__":
    PAGE.write_text(page())
