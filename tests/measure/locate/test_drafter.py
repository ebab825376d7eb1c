"""The drafter's walk: nothing where nothing is wrong, and a planted fault at its own operation."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from specscope import Engine
from specscope.analyze.diagnose.diagnosis import JudgedCase
from specscope.analyze.findings import Exit
from specscope.analyze.locate.located import Stage
from specscope.analyze.verify.trial import Case, judge
from specscope.measure.judges import audit_options
from specscope.measure.locate.locate import locate
from specscope.model.fast import decoder
from specscope.model.fast.decoder import FusedLayer
from specscope.model.heads.eagle_head import EagleHead
from specscope.speculate.drafters.base import Level
from specscope.speculate.drafters.eagle import Eagle
from tests.faults import settings
from tests.faults.fault import in_every_engine
from tests.faults.models import TARGET
from tests.faults.planted.drafter_kv import (
    first_tokens_only,
    leaf_taken_for_run,
    nodes_one_further,
    not_moved,
    other_base,
    spoiled_after_rejections,
)
from tests.faults.planted.drafts import other_map
from tests.faults.planted.features import nothing, one_late, other_layers, rows_by_index
from tests.faults.settings import DRAFTERS, Setting, history, record
from tests.heads import head_tensors, write_head, write_parallel_head

WARM = {"temperature": 0.8}
NOTHING = SimpleNamespace(findings=(), finding=lambda name: None)  # an audit that found nothing


def walked(capture, drafter, install=None):
    """The walk over a capture, by an engine into which a fault is put."""
    return walk_of(capture, str(TARGET), DRAFTERS[drafter]["draft_model"], install)


def walk_of(capture, target, draft, install):
    """The same, of any models."""
    options = audit_options(history(capture), target, draft, None)
    with nullcontext() if install is None else in_every_engine(install):
        case = Case(history(capture), judge(history(capture), source="run"))
        return locate(JudgedCase(case, NOTHING, options), stages=(Stage.DRAFTER,))


def random_heads(folder):
    """Heads of other kinds over the tiny target, with random weights: how to draft with each."""
    norms = {f"fc_norm.{i}.weight": 1 + 0.1 * i + torch.zeros(48) for i in range(3)}
    window = {"sliding_window": 12, "layer_types": ["full_attention", "sliding_attention"]}
    heads = {
        "p-eagle": (write_parallel_head(folder / "p", head_tensors(parallel=True, layers=2)), "4"),
        "eagle 1": (write_head(folder / "1", head_tensors(version=1)), "[(0,), (1,), (0, 0), (1, 0)]"),
        "eagle 3.1": (write_head(folder / "31", head_tensors() | norms, fc_norm=True, norm_output=True), "3"),
        "window": (write_head(folder / "w", head_tensors(layers=2), **window), "3"),
    }
    return {name: {"drafter": "eagle", "draft_model": str(head), "tree": tree} for name, (head, tree) in heads.items()}


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

    with pytest.MonkeyPatch.context() as patch:
        for name, how in random_heads(folder).items():
            patch.setitem(DRAFTERS, name, how)
        yield capture


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


def stale_after_full(patch, engine):
    """After a full acceptance the last pair that was guessed stays in the head's cache."""
    pending, full = Eagle.pending, set()
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
    patch.setattr(Eagle, "pending", skipping)


def missing_token(patch, engine):
    """One token is missing in the draft vocabulary's mask."""
    make = Level.__init__

    def without(self, logits, *more, **named):
        logits = logits.clone()
        logits[:, 5] = -torch.inf
        make(self, logits, *more, **named)

    patch.setattr(Level, "__init__", without)


def narrow_window(patch, engine):
    """The sliding window of the head's last layer is one too narrow (of one that sees all: it sees 15)."""
    *_, layer = engine.drafter.runner.layer, *engine.drafter.runner.further
    patch.setattr(layer, "variant", dataclasses.replace(layer.variant, window=(layer.variant.window or 16) - 1))
    patch.setattr(layer, "compiled", None)


def shifted_embedding(patch, engine):
    """The head looks up the row of the token before."""
    runner = engine.drafter.runner
    weight = runner.loaded.embedding.weight
    shifted = nn.Embedding.from_pretrained(weight.roll(1, 0))
    patch.setattr(runner, "loaded", dataclasses.replace(runner.loaded, embedding=shifted))


def no_head(patch, engine):
    """One attention head's output is zero behind attention."""
    attend, mine = FusedLayer._attend, engine.drafter.runner.layer.linears

    def zeroed(self, x, rotation, batch, cache):
        out = attend(self, x, rotation, batch, cache)
        if self.linears is mine:
            out[:, self.size : 2 * self.size] = 0
        return out

    patch.setattr(FusedLayer, "_attend", zeroed)


@dataclass(frozen=True)
class Planted:
    name: str
    drafter: str
    install: Callable
    place: str  # of the operation
    looks: str = ""  # a part of what the difference looks like


def not_normed(patch, engine):
    """A head of EAGLE-3.1 feeds back the state before its norm."""
    patch.setattr(EagleHead, "leave", lambda self, x: (self.norm(x), x))


def features_first(patch, engine):
    """An EAGLE-1 head joins feature and embedding in the wrong order."""
    fc = engine.drafter.runner.head.fc
    forward = fc.forward
    patch.setattr(fc, "forward", lambda x: forward(torch.cat(x.chunk(2, -1)[::-1], -1)))


def no_head_in(index):
    """In one layer of the draft model an attention head's output is zero."""

    def install(patch, engine):
        attention = decoder.paged_attention

        def zeroed(query, layer, cache, batch, variant):
            out = attention(query, layer, cache, batch, variant)
            if cache is engine.drafter.cache and layer == index:
                out = out.clone()
                out[:, 1] = 0
            return out

        patch.setattr(decoder, "paged_attention", zeroed)

    return install


SCORES, READ, FED = "midlayer.self_attn.scores", "layers.0.self_attn.keys read", "features layer 2"
NORMS = {
    "midlayer.hidden_norm": "eagle tree",
    "midlayer.input_layernorm": "eagle chain",
    "midlayer.post_attention_layernorm": "eagle chain",
    "norm": "eagle dynamic",
    "fc_norm.1": "eagle 3.1",
}
PLANTED = [
    *(Planted(f"no {name}", drafter, norm_left_out(name), name) for name, drafter in NORMS.items()),
    Planted("scale", "eagle chain", scaled_attention, SCORES, "0.577"),
    Planted("rotary base", "eagle chain", other_base(500.0), "midlayer.self_attn.query"),
    Planted("layers reversed", "eagle chain", other_layers(lambda x: tuple(reversed(x))), FED),
    Planted("layers lower", "eagle dynamic", other_layers(lambda x: tuple(i - 1 for i in x)), FED),
    Planted("features one late", "eagle chain", one_late, FED, "the position 1 before"),
    Planted("features by index", "eagle tree", rows_by_index, FED),
    Planted("no features", "eagle chain", nothing, FED, "zero"),
    Planted("stale KV", "eagle chain", stale_after_full, "midlayer.self_attn.keys read"),
    Planted("missing token", "eagle tree", missing_token, "d2t", "cannot"),
    Planted("first tokens", "eagle chain", first_tokens_only(20), "d2t", "first"),
    Planted("d2t off by a row", "eagle chain", other_map(lambda d2t: d2t.roll(1)), "d2t", "row of d2t"),
    Planted("window", "eagle chain", narrow_window, SCORES),
    Planted("embedding shifted", "eagle tree", shifted_embedding, "embedding"),
    Planted("no attention head", "eagle chain", no_head, "midlayer.self_attn.o_proj:in", "head 1"),
    Planted("positions of nodes", "eagle tree", nodes_one_further, "positions", "+1"),
    # Other kinds of heads
    Planted("fed back before the norm", "eagle 3.1", not_normed, "fed back"),
    Planted("feature first", "eagle 1", features_first, "fc"),
    Planted("second layer's window", "window", narrow_window, "layers.1.self_attn.scores", "11"),
    # Draft models
    Planted("no attention head in layer 1", "model chain", no_head_in(1), "layers.1.self_attn.attention", "head 1"),
    Planted("positions below the root", "model tree", nodes_one_further, "positions", "+1"),
    Planted("leaf taken for run", "model chain", leaf_taken_for_run, READ),
    Planted("KV not moved", "model tree", not_moved, READ),
    Planted("spoiled after rejections", "model chain", spoiled_after_rejections, READ, "zero"),
    Planted("first model tokens", "model chain", first_tokens_only(75), "vocabulary", "first 75"),
]
# The others take their turn in the slow tests
QUICK = {"scale", "features one late", "d2t off by a row", "positions below the root"}
FAULTS = [
    pytest.param(fault, id=fault.name, marks=() if fault.name in QUICK else pytest.mark.slow) for fault in PLANTED
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_located_at_its_operation(fault, captures):
    result = walked(captures(fault.drafter), fault.drafter, fault.install)
    located = result.located[0]
    assert located.operation.name == fault.place
    assert fault.looks in located.looks
    assert located.certain


HEALTHY = ["eagle chain", "eagle tree", "eagle dynamic", "model chain", "model tree", "model dynamic", "early tree"]
HEALTHY += ["eagle 1", "eagle 3.1", "window"]


@pytest.mark.parametrize("params", [{}, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize(
    "drafter",
    [pytest.param(name, marks=() if name in ("eagle tree", "model chain") else pytest.mark.slow) for name in HEALTHY],
)
def test_nothing_is_located_in_a_healthy_drafter(drafter, params, captures):
    result = walked(captures(drafter, params.items()), drafter)
    assert result.located == ()
    assert "agree, from their inputs" in result.ruled_out[-1]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle chain", "eagle dynamic", "model tree"])
@pytest.mark.parametrize(
    "crowded", [{"blocks": 12}, {"step_tokens": 32, "prompt": 150}], ids=["preempted", "in chunks"]
)
def test_nothing_is_located_where_requests_wait(drafter, crowded, captures, tmp_path):
    captures(drafter)  # makes the random heads
    setting = Setting(drafter, WARM, requests=3, tokens=40, **crowded)
    assert walked(record(setting, tmp_path / "capture.jsonl"), drafter).located == ()


def test_a_head_that_drafts_in_one_pass_is_left_to_audit(captures):
    result = walked(captures("p-eagle"), "p-eagle")
    assert (result.located, result.exit) == ((), Exit.NOT_JUDGED)
    assert "audit judges it" in result.left_out[0]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle chain", "model tree"])
def test_nothing_is_located_in_a_run_of_bfloat16(drafter, tmp_path):
    """The walk is in float32: other trees come out of it than were recorded."""
    setting = Setting(drafter, WARM, requests=2, tokens=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "Engine", lambda **how: Engine(**how | {"dtype": "bfloat16"}))
        capture = record(setting, tmp_path / "capture.jsonl")
    assert history(capture).run.dtype == "bfloat16"
    assert walked(capture, drafter).located == ()
