"""Trees as other programs write them: vLLM's `--speculative-config`, and SGLang's three numbers. No torch.

The lists of paths of EAGLE, Medusa and TensorRT-LLM are read like our own (tree.py).
"""

from __future__ import annotations

import json
import re
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from specscope.errors import UserError
from specscope.trace.checked import short
from specscope.trace.wire.codec import plain_error

SGLANG = ("num_steps", "eagle_topk", "num_draft_tokens")
# As flags of a command line, as keys of a file of settings, or three numbers alone
_NAMED = [re.compile(rf"speculative[-_]{re.sub('_', '[-_]', name)}\W{{1,4}}([0-9]{{1,6}})\b") for name in SGLANG]
_NUMBERS = re.compile(r"([0-9]{1,6})[, ]\s*([0-9]{1,6})[, ]\s*([0-9]{1,6})")
_CONFIG = re.compile(r"\s*\{|.{0,10000}?(?:--speculative-config|-sc)[ =]", re.DOTALL)
LONGEST = 100_000  # characters

Tokens = Annotated[int, Meta(ge=1, lt=10**6)]


class _VllmConfig(Struct):
    """The fields of vLLM's configuration that say how much is drafted."""

    method: str | None = None
    num_speculative_tokens: Tokens | None = None
    speculative_token_tree: str | None = None


def translated(text: str) -> tuple[str, str]:
    """(tree string, its origin in words); (`text`, "") where it is not another program's. Raises UserError."""
    if len(text) > LONGEST:
        return text, ""
    named = [pattern.search(text) for pattern in _NAMED]
    if any(named):
        missing = [f"speculative_{name}" for name, match in zip(SGLANG, named, strict=True) if match is None]
        if missing:
            raise UserError(f"tree {short(text)}: SGLang's three numbers give a tree, and there is no {missing[0]}")
        return _sglang(*(int(match[1]) for match in named if match))
    if numbers := _NUMBERS.fullmatch(text.strip()):
        return _sglang(*map(int, numbers.groups()))
    if _CONFIG.match(text) and "{" in text:
        return _vllm(text)
    return text, ""


def _sglang(steps: int, top: int, tokens: int) -> tuple[str, str]:
    """SGLang's tree: EAGLE-2's, the best of a search and deterministic. Its number of draft tokens counts the root."""
    about = f"SGLang's {steps} steps, top {top}, {tokens} draft tokens, of which the root is one"
    if top == 1:  # then it takes steps + 1 draft tokens, whatever is given
        return f"top:{steps}", about
    return f"dynamic:{tokens - 1},depth={steps},top={top}", about


def _vllm(text: str) -> tuple[str, str]:
    try:
        config = msgspec.convert(json.JSONDecoder().raw_decode(text, text.index("{"))[0], _VllmConfig)
    except (ValueError, RecursionError) as error:  # ValueError: of both
        raise UserError(f"cannot read the tree of the configuration {short(text)}: {plain_error(error)}") from None
    about = f"vLLM's {config.method or 'speculative configuration'}"
    if config.speculative_token_tree is not None:
        return config.speculative_token_tree, f"{about}, its speculative_token_tree"
    if config.num_speculative_tokens is None:
        raise UserError(f"{short(text)} says neither num_speculative_tokens nor speculative_token_tree: it has no tree")
    return str(config.num_speculative_tokens), f"{about}, a chain of num_speculative_tokens"
