"""The drafter's walk: nothing where nothing is wrong, and a planted fault at its own operation."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from specscope import Engine
from specscope.analyze.audit.options import ModelSource
from specscope.measure.locate.drafter import DrafterModels, walk_drafter
from specscope.measure.locate.locate import _chosen, _contexts
from specscope.model.heads.eagle_head import EagleHead
from specscope.speculate.drafters.eagle import Eagle
from specscope.speculate.drafters.level import Level
from specscope.speculate.drafters.tree_builder import TreeBuilder
from tests.faults.models import TARGET
from tests.faults.planted.drafter_kv import first_tokens_only, nodes_one_further, other_base
from tests.faults.planted.drafts import other_map
from tests.faults.planted.features import nothing, one_late, other_layers, rows_by_index
from tests.faults.settings import DRAFTERS, Setting, history, record

WARM = {"temperature": 0.8}


def walked(capture, drafter, install=None):
    """The walk over a capture, by an engine into which a fault is put."""
    how, run = DRAFTERS[drafter], history(capture)
    names, until = _chosen(run, None, {})
    plans = {name: contexts for name in names if (contexts := _contexts(run, name, until)) is not None}
    with pytest.MonkeyPatch.context() as patch:

        def make(config):
            engine = Engine(config)
            if install is not None:
                install(patch, engine)
            return engine

        models = DrafterModels(
            ModelSource(str(TARGET), "target"),
            ModelSource(how["draft_model"], "draft"),
            make,
            str(TARGET),
            how["draft_model"],
        )
        return walk_drafter(run, plans, until, models)


@pytest.fixture(scope="session")
def captures(tmp_path_factory):
    """A healthy capture of each drafter, made when it is first asked for."""
    folder, made = tmp_path_factory.mktemp("captures"), {}

    def capture(drafter, params=()):
        key = drafter, tuple(params)
        if key not in made:
            setting = Setting(drafter, dict(params), requests=2, batch=2, tokens=50)
            made[key] = record(setting, folder / f"{len(made)}.jsonl")
        return made[key]

    return capture


def scaled_attention(patch, engine):
    """The head's attention scale is 1/sqrt(3) of what it ought to be."""
    for layer in (engine.drafter.runner.layer, *engine.drafter.runner.further):
        patch.setattr(layer, "variant", dataclasses.replace(layer.variant, scale=layer.variant.scale / 3**0.5))
        patch.setattr(layer, "compiled", None)


def norm_left_out(name):
    """A norm of the head does nothing."""

    def install(patch, engine):
        parent, _, child = name.rpartition(".")
        owner = engine.drafter.runner.head.get_submodule(parent)
        patch.setitem(owner._modules, child, nn.Identity())
        layer = engine.drafter.runner.layer
        if child == "post_attention_layernorm":
            patch.setattr(layer, "second_norm", nn.Identity())
        patch.setattr(layer, "compiled", None)

    return install


def scaled_positions(patch, engine):
    """Past position 96 the head's rotary tables are those of half the distance."""
    runner = engine.drafter.runner
    turns = runner._turns.clone()
    turns[96:] = turns[96 + torch.arange(len(turns) - 96) // 2]
    patch.setattr(runner, "_turns", turns)


def stale_after_full(patch, engine):
    """After a full acceptance the last pair that was guessed stays in the head's cache."""
    pending, full = Eagle._pending, set()
    commit = Eagle.commit

    def note(self, context, tree, verdict):
        commit(self, context, tree, verdict)
        if len(tree) and len(verdict.path) == tree.max_depth:
            full.add(context.request)

    def skipping(self, drafting, limit, *, logits):
        for g in drafting:
            if g.context.request in full and g.base - g.state.computed > 2:
                full.discard(g.context.request)
                self._features[g.context.request].take(1)
                g.state.computed += 1
        return pending(self, drafting, limit, logits=logits)

    patch.setattr(Eagle, "commit", note)
    patch.setattr(Eagle, "_pending", skipping)


def missing_token(patch, engine):
    """One token is missing in the draft vocabulary's mask."""
    make = Level.__init__

    def without(self, logits, *more, **named):
        logits = logits.clone()
        logits[:, 5] = -torch.inf
        make(self, logits, *more, **named)

    patch.setattr(Level, "__init__", without)


def normed_twice(patch, engine):
    """The state that is fed back is normed, and the head's config does not say so."""
    leave = EagleHead.leave
    patch.setattr(EagleHead, "leave", lambda self, x: (leave(self, x)[0], self.norm(leave(self, x)[1])))


def narrow_window(patch, engine):
    """The head's sliding window is one too narrow (of one that sees all: it sees 15)."""
    for layer in (engine.drafter.runner.layer, *engine.drafter.runner.further):
        window = (layer.variant.window or 16) - 1
        patch.setattr(layer, "variant", dataclasses.replace(layer.variant, window=window))
        patch.setattr(layer, "compiled", None)


def shifted_embedding(patch, engine):
    """The head looks up the row of the token before."""
    runner = engine.drafter.runner
    weight = runner.loaded.embedding.weight
    shifted = nn.Embedding.from_pretrained(weight.roll(1, 0))
    patch.setattr(runner, "loaded", dataclasses.replace(runner.loaded, embedding=shifted))


def no_head(patch, engine):
    """One attention head's output is zero."""
    layer = engine.drafter.runner.layer
    out = layer.out

    def zeroed(x):
        x = x.clone()
        x[:, layer.size : 2 * layer.size] = 0
        return out(x)

    patch.setattr(layer, "out", zeroed)
    patch.setattr(layer, "compiled", None)


def deeper(patch, engine):
    """Below the root positions are one high."""
    segment = TreeBuilder.segment

    def further(self, table, base):
        made = segment(self, table, base)
        made.positions = made.positions + 1
        return made

    patch.setattr(TreeBuilder, "segment", further)


@dataclass(frozen=True)
class Planted:
    name: str
    drafter: str
    install: Callable
    place: str  # of the operation
    looks: str = ""  # a part of what the difference looks like


HEADS = [
    Planted("scale", "eagle chain", scaled_attention, "midlayer.self_attn.scores", "0.577"),
    Planted("norm of the hidden state", "eagle tree", norm_left_out("midlayer.hidden_norm"), "midlayer.hidden_norm"),
    Planted(
        "norm of the embedding", "eagle chain", norm_left_out("midlayer.input_layernorm"), "midlayer.input_layernorm"
    ),
    Planted(
        "norm before the MLP",
        "eagle chain",
        norm_left_out("midlayer.post_attention_layernorm"),
        "midlayer.post_attention_layernorm",
    ),
    Planted("final norm", "eagle dynamic", norm_left_out("norm"), "norm"),
    Planted("rotary scaled", "eagle chain", scaled_positions, "midlayer.self_attn.query"),
    Planted("rotary base", "eagle chain", other_base(500.0), "midlayer.self_attn.query"),
    Planted(
        "layers reversed", "eagle chain", other_layers(lambda x: tuple(reversed(x))), "features layer 2", "in layer 4"
    ),
    Planted(
        "layers one lower",
        "eagle dynamic",
        other_layers(lambda x: tuple(i - 1 for i in x)),
        "features layer 2",
        "in layer 1",
    ),
    Planted("features one late", "eagle chain", one_late, "features layer 2", "1 position before"),
    Planted("features by index", "eagle tree", rows_by_index, "features layer 2", "tree"),
    Planted("no features", "eagle chain", nothing, "features layer 2", "zero"),
    Planted("stale KV", "eagle chain", stale_after_full, "midlayer.self_attn.keys read"),
    Planted("missing token", "eagle tree", missing_token, "d2t", "cannot"),
    Planted("first tokens", "eagle chain", first_tokens_only(20), "d2t", "first"),
    Planted("d2t off by a row", "eagle chain", other_map(lambda d2t: d2t.roll(1)), "d2t", "row of d2t"),
    Planted("normed twice", "eagle chain", normed_twice, "fed back"),
    Planted("window", "eagle chain", narrow_window, "midlayer.self_attn.scores"),
    Planted("embedding shifted", "eagle tree", shifted_embedding, "embedding"),
    Planted("no attention head", "eagle chain", no_head, "midlayer.self_attn.o_proj"),
    Planted("positions of nodes", "eagle tree", nodes_one_further, "positions", "+1"),
]


@pytest.mark.parametrize("fault", HEADS, ids=lambda fault: fault.name)
def test_a_fault_of_a_head_is_located(fault, captures):
    result = walked(captures(fault.drafter), fault.drafter, fault.install)
    assert result.located is not None
    print(result.located)
    assert result.located.operation.name == fault.place
    assert fault.looks in result.located.looks


@pytest.mark.parametrize("params", [{}, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("drafter", ["eagle chain", "eagle tree", "eagle dynamic"])
def test_nothing_is_located_in_a_healthy_head(drafter, params, captures):
    result = walked(captures(drafter, params.items()), drafter)
    assert result.located is None
    assert result.passes > 20
