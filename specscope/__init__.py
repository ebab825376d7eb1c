"""specscope: the debugger for speculative decoding.

`Engine` and the drafters need torch and are imported when first asked for, so that `import specscope.trace`,
`specscope open` and the screens start without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specscope.engine.config import EngineConfig as EngineConfig
    from specscope.engine.engine import Engine as Engine
    from specscope.engine.engine import Result as Result
    from specscope.page.load import load as load
    from specscope.speculate.drafters.base import Context as Context
    from specscope.speculate.drafters.base import Draft as Draft
    from specscope.speculate.drafters.base import Drafter as Drafter
    from specscope.speculate.drafters.own import DrafterSetup as DrafterSetup
    from specscope.speculate.drafters.own import draft_tree as draft_tree
    from specscope.trace.record.own_rule import NodeTrial as NodeTrial
    from specscope.trace.record.params import SamplingParams as SamplingParams
    from specscope.trace.record.tree import DraftTree as DraftTree
    from specscope.transformers.recording import record as record

__version__ = "0.1.0"
_HOMES = {
    "Context": "specscope.speculate.drafters.base",
    "Draft": "specscope.speculate.drafters.base",
    "draft_tree": "specscope.speculate.drafters.own",
    "Drafter": "specscope.speculate.drafters.base",
    "DrafterSetup": "specscope.speculate.drafters.own",
    "DraftTree": "specscope.trace.record.tree",
    "Engine": "specscope.engine.engine",
    "EngineConfig": "specscope.engine.config",
    "load": "specscope.page.load",
    "NodeTrial": "specscope.trace.record.own_rule",
    "record": "specscope.transformers.recording",
    "Result": "specscope.engine.engine",
    "SamplingParams": "specscope.trace.record.params",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import the public names on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'specscope' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
