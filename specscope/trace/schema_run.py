"""What a run's header must look like: the resource of every span of it. As schema.py, which reads it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from specscope.trace.draft_vocabulary import unpack
from specscope.trace.schema import MAX_TEXT, Count, Int64, Name, Short, Text, Token


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
