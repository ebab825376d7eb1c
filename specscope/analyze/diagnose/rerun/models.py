"""The models that reruns ask: each is loaded once, however many judges ask it."""

from __future__ import annotations

from functools import cached_property

import torch

from specscope.analyze.audit.model.causal import Causal
from specscope.analyze.audit.model.head import Head
from specscope.analyze.audit.options import Options


class Models:
    """The models of one audit, in float32."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @cached_property
    def target(self) -> Causal:
        """The target."""
        return Causal(self.options.target, "float32", self.options.device)

    @cached_property
    def draft(self) -> Causal:
        """The drafter, where it is a causal language model."""
        assert self.options.draft is not None
        return Causal(self.options.draft, "float32", self.options.device)

    @cached_property
    def head(self) -> Head:
        """The drafter, where it is an EAGLE head."""
        assert self.options.draft is not None
        return Head(self.options.draft, self.target.model).to(torch.float32)
