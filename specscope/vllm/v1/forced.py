"""Forced: another outcome of one request's step than vLLM's sampler gave. The rest is judged as it would have been."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specscope.errors import UserError
from specscope.trace.checked import short, whole
from specscope.trace.history.wording import plural
from specscope.vllm.call import Forced, SamplerCall


def parse(words: Sequence[str], before: Forced) -> Forced:
    """`accept=0 reject=1 token=5`, on top of what was forced before. Raises UserError."""
    nodes, token = dict(before.nodes), before.token
    for word in words:
        name, _, value = word.partition("=")
        number = whole(value)
        if name not in ("accept", "reject", "token") or number is None:
            raise UserError(f"{short(word)}: write accept=NODE, reject=NODE or token=ID")
        if name == "token":
            token = number
        else:
            nodes[number] = name == "accept"
    return Forced(nodes, token)


def force(call: SamplerCall, request: int, forced: Forced) -> None:
    """Write what follows into vLLM's own output, before vLLM reads it. Raises UserError, and changes nothing then."""
    assert call.output is not None
    if forced.token is not None and not forced.token < call.logits.shape[1]:
        raise UserError(f"there is no token {forced.token}: the vocabulary has {call.logits.shape[1]:,}")
    nodes = _nodes(call, request)
    if forced.nodes and max(forced.nodes) >= len(nodes):
        raise UserError(f"there is no node {max(forced.nodes)}: {plural(len(nodes), 'node')} drafted, numbered from 0")
    tokens = _tokens(call, request, forced, nodes)
    applied = Forced(forced.nodes, forced.token, tokens[-1])
    if forced.token is not None:
        tokens[-1] = forced.token
    call.own.setdefault(request, call.output[request].clone())
    call.forced[request] = applied
    call.output[request] = -1
    call.output[request, : len(tokens)] = torch.tensor(tokens, dtype=call.output.dtype)


def _nodes(call: SamplerCall, request: int) -> list[int]:
    """A request's drafts, as they are numbered; one that vLLM found invalid ends them."""
    first = sum(call.drafted[:request])
    drafts = call.draft_tokens[first : first + call.drafted[request]].tolist()
    return drafts[: next((index for index, token in enumerate(drafts) if token < 0), len(drafts))]


def _tokens(call: SamplerCall, request: int, forced: Forced, nodes: list[int]) -> list[int]:
    """The accepted drafts, and the final token that vLLM would have given after them."""
    first, sampled = sum(call.drafted[:request]), _own(call, request)
    rejected = len(sampled) - 1  # the node that vLLM rejected; as many as it drafted where it rejected none
    for node, token in enumerate(nodes):
        yes = node < rejected if node <= rejected else _accepts(call, request, first + node, token)
        if forced.nodes.get(node, yes):
            continue
        behind = [other for other in forced.nodes if other > node]
        if behind:
            raise UserError(f"node {min(behind)} is not tried, as node {node} is rejected: accept={node} comes first")
        return [*nodes[:node], sampled[-1] if node == rejected else _instead(call, request, first + node)]
    if rejected == len(nodes):
        return sampled
    if len(nodes) < call.drafted[request]:  # the next draft is invalid
        return [*nodes, _instead(call, request, first + len(nodes))]
    assert call.bonus_tokens is not None
    return [*nodes, int(call.bonus_tokens.reshape(-1)[request])]


def _own(call: SamplerCall, request: int) -> list[int]:
    """What vLLM's sampler gave: accepted drafts and the final token."""
    assert call.output is not None
    row = call.own.get(request, call.output[request]).tolist()
    return row[: next((index for index, token in enumerate(row) if token < 0), len(row))]


def _accepts(call: SamplerCall, request: int, row: int, token: int) -> bool:
    """The rule of vLLM's kernels, for a draft that they did not reach."""
    if call.greedy(request):
        return _choice(call, row) == token
    assert call.target_probs is not None
    assert call.coins is not None
    p, q = call.target_probs[row, token], 1.0 if call.draft_probs is None else call.draft_probs[row, token]
    coin = call.coins[row]
    if coin.device.type == "cpu":  # there the kernel's coins are float32
        coin = coin.float()
    return bool(q > 0) and bool(p / q >= coin)


def _instead(call: SamplerCall, request: int, row: int) -> int:
    """The final token where this draft is rejected."""
    if call.greedy(request):
        return _choice(call, row)
    assert call.recovered is not None
    return int(call.recovered[row])


def _choice(call: SamplerCall, row: int) -> int:
    assert call.target_logits is not None
    return int(call.target_logits[row].argmax())
