"""What the plugin is asked to do, from the environment: vLLM's processes inherit it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

CAPTURE, ENDPOINT, PROTOCOL = "SPECSCOPE_CAPTURE", "SPECSCOPE_OTLP_ENDPOINT", "SPECSCOPE_OTLP_PROTOCOL"
EVIDENCE, NO_TEXT, DEBUG = "SPECSCOPE_EVIDENCE", "SPECSCOPE_NO_TEXT", "SPECSCOPE_DEBUG_SOCKET"
AGGREGATES = "SPECSCOPE_AGGREGATES"
ALL = (CAPTURE, ENDPOINT, PROTOCOL, EVIDENCE, NO_TEXT, DEBUG, AGGREGATES)


@dataclass(frozen=True)
class Settings:
    """Read from SPECSCOPE_* variables. Nothing happens unless one of the first three is set."""

    capture: str | None  # SPECSCOPE_CAPTURE: a file
    endpoint: str | None  # SPECSCOPE_OTLP_ENDPOINT: a URL
    debug: str | None  # SPECSCOPE_DEBUG_SOCKET: the path of a Unix socket
    protocol: str | None = None  # SPECSCOPE_OTLP_PROTOCOL: grpc or http/protobuf
    full: bool = True  # SPECSCOPE_EVIDENCE=lean leaves out the notes on parents
    text: bool = True  # SPECSCOPE_NO_TEXT=1 leaves out prompts and text
    aggregates: bool = False  # SPECSCOPE_AGGREGATES=1: sums over all requests, and no evidence

    @property
    def is_on(self) -> bool:
        """Whether anything is to be done."""
        return any((self.capture, self.endpoint, self.debug))

    @staticmethod
    def read(environment: Mapping[str, str] = os.environ) -> Settings:
        """From the environment; an empty variable is as good as none."""
        return Settings(
            capture=environment.get(CAPTURE) or None,
            endpoint=environment.get(ENDPOINT) or None,
            debug=environment.get(DEBUG) or None,
            protocol=environment.get(PROTOCOL) or None,
            full=environment.get(EVIDENCE, "full") != "lean",
            text=environment.get(NO_TEXT, "") in ("", "0"),
            aggregates=environment.get(AGGREGATES, "") not in ("", "0"),
        )
