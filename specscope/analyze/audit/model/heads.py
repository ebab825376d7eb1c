"""The references of heads, a row for each kind that our engine runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specscope.analyze.audit.model.block import BlockHead
from specscope.analyze.audit.model.head import Head
from specscope.analyze.audit.model.mtp import Modules
from specscope.analyze.audit.options import ModelSource

HEADS: Mapping[str, Callable[[ModelSource, Any], Head]] = {"eagle": Head, "dflash": BlockHead, "mtp": Modules}


def head_of(source: ModelSource, target: Any) -> Head:  # noqa: ANN401
    """The reference of a head over the transformers model that it continues. Raises UserError."""
    return HEADS[source.kind](source, target)
