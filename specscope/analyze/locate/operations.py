"""The names of operations in words."""

from __future__ import annotations

import re

from specscope.analyze.locate.located import Operation, Stage

IN = ":in"
# In the order of computing; by the name of a module or, inside attention, of what it does. A name that is not here
# stands for itself.
WORDS = {
    "tokens": "the tokens that are fed",
    "last token": "the token that was sampled, fed last",
    "positions": "the positions of the rows",
    "later positions": "the positions of the drafter's later passes",
    "block table": "the block table passed to attention",
    "slots": "the slots where keys and values are written",
    "keys seen": "how many keys each row sees",
    "later keys seen": "how many keys the drafter's later passes see",
    "features": "the target's features, as the head is fed them",
    "input_norm": "the norm of the features",
    "fc": "the projection of the features",
    "fed back": "the state fed back from the parent",
    "state": "the state fed back to the next pass",
    "embedding": "the embedding",
    "enorm": "the norm of the token's embedding",
    "hnorm": "the norm of the state",
    "eh_proj:in": "embedding and state, normed, side by side",
    "eh_proj": "the projection of embedding and state",
    "post_norm": "the norm after the layer",
    "input_layernorm": "the norm before attention",
    "hidden_norm": "the norm of the features or of the state",
    "self_attn.q_proj": "the queries' projection",
    "self_attn.k_proj": "the keys' projection",
    "self_attn.v_proj": "the values' projection",
    "self_attn.q_norm": "the queries' norm",
    "self_attn.k_norm": "the keys' norm",
    "self_attn.query": "the queries after rotary",
    "self_attn.key": "the keys after rotary",
    "self_attn.value": "the values",
    "self_attn.keys read": "the keys as read from the KV cache",
    "self_attn.values read": "the values as read from the KV cache",
    "self_attn.context key": "the keys of committed positions",
    "self_attn.context value": "the values of committed positions",
    "self_attn.scores": "the attention scores with mask",
    "self_attn.attention": "the attention output",
    "self_attn.o_proj:in": "the attention output of all heads, side by side",
    "self_attn.o_proj": "the projection of the attention output",
    "self_attn": "the attention output, projected",
    "post_attention_layernorm:in": "the residual after attention",
    "post_attention_layernorm": "the norm before the MLP",
    "mlp.gate_proj": "the MLP's gate",
    "mlp.up_proj": "the MLP's up projection",
    "mlp.act_fn": "the MLP's activation",
    "mlp.down_proj:in": "gate times up",
    "mlp.down_proj": "the MLP's down projection",
    "mlp.gate": "the router of the experts",
    "mlp.experts": "the experts",
    "mlp": "the MLP",
    "norm": "the final norm",
    "lm_head": "the logits",
    "d2t": "the logits by the target's tokens (d2t)",
    "vocabulary": "the logits by the target's tokens",
    "chosen tokens": "the tokens chosen by their logits",
    "parameters": "temperature, top-k and top-p of drafted rows",
    "draft": "the token drafted by the drafter's logits",
    "choice": "the tokens chosen by the target's logits",
}


def operation(stage: Stage, name: str) -> Operation:
    """An operation with its words. `name`: "norm", or within a layer "layers.3.self_attn.q_proj"."""
    layer = re.match(r"(?:layers\.(\d+)|midlayer)(?:\.(.*))?$", name)
    if layer is None:
        return Operation(stage, name, _words(name))
    where = f"{'the drafter, ' if stage is Stage.DRAFTER else ''}layer {layer[1] or 0}"
    return Operation(stage, name, f"{where}: {_words(layer[2])}" if layer[2] else f"{where}: its output")


def _words(name: str) -> str:
    if name in WORDS:
        return WORDS[name]
    if name.startswith("features layer"):
        return f"the target's hidden states at the input of its {name.removeprefix('features ')}, as fed"
    if name.startswith("fc_norm."):
        return f"the norm of the features of part {name.removeprefix('fc_norm.')}"
    plain = name.removesuffix(IN)
    return f"the input of {WORDS.get(plain, plain)}" if name.endswith(IN) else plain
