"""What a run's header must look like: the resource of every span of it. As schema.py, which reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct, field

import specscope
from specscope.trace.record.draft_vocabulary import unpack
from specscope.trace.record.records import EVIDENCE
from specscope.trace.record.vocabulary import printable
from specscope.trace.wire.engine_spans import is_ours
from specscope.trace.wire.schema import MAX_TEXT, Count, Int64, Name, Short, Text, Token


class Resource(Struct, frozen=True, kw_only=True):
    """The resource: what a capture says of its run. RunInfo's fields."""

    run_id: Name = field(name="specscope.run.id")
    target: Short = field(name="specscope.run.target")
    revision: Short = field(name="specscope.run.revision")
    drafter: Short = field(name="specscope.run.drafter")
    draft_model: Short = field(name="specscope.run.draft_model")
    tree: Short = field(name="specscope.run.tree")
    device: Short = field(name="specscope.run.device")
    dtype: Short = field(name="specscope.run.dtype")
    backend: Short = field(name="specscope.run.backend")
    seed: Int64 = field(name="specscope.run.seed")
    eos_tokens: Annotated[list[Token], Meta(max_length=4096)] = field(
        name="specscope.run.eos_tokens", default_factory=list
    )
    max_context: Count = field(name="specscope.run.max_context")
    blocks: Count = field(name="specscope.run.blocks")
    block_size: Annotated[int, Meta(ge=1, lt=2**31)] = field(name="specscope.run.block_size")
    params: Text = field(name="specscope.run.params")  # JSON: dict[str, ParamValue]
    versions: Short = field(name="specscope.run.versions")  # JSON: dict[str, str]
    aux_layers: Annotated[list[Name], Meta(max_length=1024)] = field(
        name="specscope.run.aux_layers", default_factory=list
    )
    draft_vocab: Count = field(name="specscope.run.draft_vocab", default=0)
    draft_tokens: Annotated[str, Meta(max_length=MAX_TEXT)] = field(name="specscope.run.draft_tokens", default="")
    evidence: Short = field(name="specscope.run.evidence", default="")
    speculation: Short = field(name="specscope.run.speculation", default="{}")  # JSON: dict[str, Any]
    rule: Name = field(name="specscope.run.rule", default="standard")
    costs: Short = field(name="specscope.run.costs", default="")
    text: bool = field(name="specscope.run.text")
    tokens: bool = field(name="specscope.run.tokens", default=True)
    sampling: Short = field(name="specscope.run.sampling", default="")
    target_path: Short = field(name="specscope.run.target_path", default="")
    target_digest: Short = field(name="specscope.run.target_digest", default="")
    draft_path: Short = field(name="specscope.run.draft_path", default="")
    draft_digest: Short = field(name="specscope.run.draft_digest", default="")

    def __post_init__(self) -> None:
        if self.draft_tokens:
            try:
                unpack(self.draft_tokens, self.draft_vocab)
            except ValueError as error:
                raise ValueError(f"`specscope.run.draft_tokens` {error}") from None


def newer(resource: Mapping[str, Any]) -> str:
    """In words, where a newer specscope wrote it, or it is of a kind that this one does not know; else ""."""
    version, evidence = (str(resource.get(name, "")) for name in ("service.version", "specscope.run.evidence"))
    if is_ours(resource) and _numbers(version) > _numbers(specscope.__version__):
        wrote = f"specscope {printable(version)[:40]} wrote it, and this is {specscope.__version__}"
        return f"{wrote}, which does not know all that is in it (update specscope)"
    if evidence and evidence not in EVIDENCE:
        return f"a capture of a kind that this specscope does not know (evidence: {printable(evidence)[:40]})"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    """Of a version, as far as it is numbers: 0.10.0rc1 is (0, 10, 0)."""
    return tuple(int(part) for part in re.findall(r"\d{1,9}", re.match(r"[0-9.]*", version)[0]))  # type: ignore[index]
