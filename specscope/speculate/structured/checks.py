"""What xgrammar would silently leave out of a JSON schema or a regular expression: refused in one line.

Found by trying each keyword on xgrammar 0.2.8; vLLM (v1/structured_output/backend_xgrammar.py) and SGLang
(constrained/json_schema_validation.py) refuse most of the same. Nothing here needs xgrammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from specscope.errors import UserError
from specscope.trace.checked import decoded, short
from specscope.trace.record.params import StructuredOutputs

# Keywords whose value is a schema, a list of schemas, or a mapping to schemas.
_ONE = ("additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
_IGNORED = (
    *("not", "if", "then", "else", "multipleOf", "uniqueItems", "contains", "minContains", "maxContains"),
    *("dependencies", "dependentRequired", "dependentSchemas", "$dynamicRef", "$recursiveRef"),
)
_FORMATS = {
    *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer", "relative-json-pointer"),
    *("time", "uri", "uri-reference", "uri-template", "uuid"),
}
_TYPED = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "format")
_OF_OBJECTS = ("required", "minProperties", "maxProperties", "propertyNames", "patternProperties")
_SAYS_NOTHING = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "nullable"),
}
MOST_NESTED = 10_000  # repetitions within each other: what may come next then takes seconds to work out
_ESCAPES = set("dDwWsSnrtfvxucbBpPk")  # of letters; for another one xgrammar takes the letter itself


def check_form(form: StructuredOutputs) -> None:
    """Raises UserError, in one line, for what a grammar made of it would not hold to."""
    if form.kind == "regex":
        if why := _unheld_regex(form.text):
            raise UserError(f"structured_outputs: regex: {why}")
    elif form.kind == "json":
        for schema, where in _schemas(decoded(form.text), "#"):
            if why := next(_unheld(schema), ""):
                raise UserError(f"structured_outputs: json: {why}, at {where[:80]}")


def _schemas(schema: object, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The schema and all within it. Values that are data (enum, default, ...) are not looked into."""
    if not isinstance(schema, dict):
        return
    yield schema, where
    for name in _ONE:
        yield from _schemas(schema.get(name), f"{where}/{name}")
    for name in _LIST:
        inside = schema.get(name)
        for index, subschema in enumerate(inside if isinstance(inside, list) else ()):
            yield from _schemas(subschema, f"{where}/{name}/{index}")
    for name in _NAMED:
        named = schema.get(name)
        for key, subschema in named.items() if isinstance(named, dict) else ():
            yield from _schemas(subschema, f"{where}/{name}/{key}")


def _unheld(schema: dict[str, Any]) -> Iterator[str]:
    """Why the grammar of a schema would allow what the schema forbids, one reason after another."""
    for name in _IGNORED:
        if schema.get(name, False) is not False:
            yield f"{name} cannot be enforced: leave it out"
    if len(schema.get("allOf") or ()) > 1:
        yield "allOf of several schemas cannot be enforced: write them as one"
    for name in ("$ref", "anyOf", "oneOf", "allOf"):
        if name in schema and (beside := set(schema) - {name} - _SAYS_NOTHING):
            yield f"keys beside {name} cannot be enforced: move {short(min(beside))} into it"
    if not str(schema.get("$ref", "#")).startswith("#"):
        yield f"only references within the schema can be followed, not {short(schema['$ref'])}"
    if "enum" in schema or "const" in schema:
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties") or {}
    yield from _untyped(schema, _TYPED)
    if "format" in schema and schema["format"] not in _FORMATS:
        yield f"format {short(schema['format'])} is not known: leave it out"
    if sum(["format" in schema, "pattern" in schema, "minLength" in schema or "maxLength" in schema]) > 1:
        yield "format, pattern and minLength or maxLength cannot be enforced together: keep one of them"
    if "pattern" in schema and (why := _unheld_regex(str(schema["pattern"]), in_schema=True)):
        yield f"pattern: {why}"
    if not known:
        yield from _untyped(schema, _OF_OBJECTS)
    for name in schema.get("required") or () if isinstance(known, dict) else ():
        if name not in known:
            yield f"required names {short(name)}, which properties does not describe: add it there"
    if patterns and (known or len(patterns) > 1 or "propertyNames" in schema):
        yield "patternProperties cannot be enforced beside properties, propertyNames or another pattern"
    if "propertyNames" in schema and known:
        yield "propertyNames cannot be enforced beside properties"


def _untyped(schema: dict[str, Any], names: Iterable[str]) -> Iterator[str]:
    if "type" not in schema:
        yield from (f"{name} cannot be enforced without a type: add one" for name in names if name in schema)


def _unheld_regex(text: str, *, in_schema: bool = False) -> str:
    """Why a grammar of a regular expression would match something else; "" where it would not."""
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", lambda m: " " * len(m[0]), text, flags=re.DOTALL)
    body = plain.strip("^$") if plain.startswith("^") or plain.endswith("$") else plain
    if "^" in body or "$" in body:
        return "^ and $ work only at the ends: the expression matches the whole text anyway"
    if (most := _repetitions(plain)) > MOST_NESTED:
        return f"nested repetitions multiply to {most:,}; the limit is {MOST_NESTED:,}: make it simpler"
    odd = next((m[1] for m in re.finditer(r"\\([A-Za-z])", text.replace("\\\\", "  ")) if m[1] not in _ESCAPES), "")
    if odd:
        return f"\\{odd} is not known"
    if in_schema and (special := re.search(r"\(\?(?!:|<[A-Za-z])|\\[bBpPk1-9]", text)):
        return f"{short(special[0])} cannot be enforced: leave it out"
    return ""


def _repetitions(plain: str) -> int:
    """How often the innermost part may stand at most where counted groups stand in counted groups; else 1.

    `plain`: the expression, its classes and escapes blanked.
    """
    inside, most = [1], 1  # of each open group, how often a part of it may stand at most
    group, end = 1, -1  # the same of the group that closed last, and where it did
    for match in re.finditer(r"\{(\d*),?(\d*)\}|[()]", plain):
        if match[0] == "(":
            inside.append(1)
        elif match[0] == ")" and len(inside) > 1:
            group, end = inside.pop(), match.end()
            inside[-1] = max(inside[-1], group)
        elif count := match[2] or match[1]:
            within = group if match.start() == end else 1
            inside[-1] = max(inside[-1], within * int(count))
            most = max(most, within * int(count)) if within > 1 else most
    return most
