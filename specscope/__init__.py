"""specscope: the debugger for speculative decoding.

`Engine` and the drafters need torch and are imported when first asked for, so that `import specscope.trace`,
`specscope open` and the screens start without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specscope.engine.config import EngineConfig
    from specscope.engine.engine import Engine
    from specscope.engine.generate import Result
    from specscope.page.load import load
    from specscope.speculate.drafters.base import Context, Draft, Drafter
    from specscope.speculate.drafters.own import DrafterSetup, draft_tree
    from specscope.trace.record.own_rule import NodeTrial
    from specscope.trace.record.params import SamplingParams
    from specscope.trace.record.tree import DraftTree
    from specscope.transformers.recording import record

__version__ = "0.1.0"
__all__ = [
    "Context",
    "Draft",
    "DraftTree",
    "Drafter",
    "DrafterSetup",
    "Engine",
    "EngineConfig",
    "NodeTrial",
    "Result",
    "SamplingParams",
    "__version__",
    "draft_tree",
    "load",
    "record",
]

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
    "Result": "specscope.engine.generate",
    "SamplingParams": "specscope.trace.record.params",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import the public names on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'specscope' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
