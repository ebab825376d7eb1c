"""`specscope audit --trainer FOLDER`: the training code's forward as the reference for the served head."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from specscope.analyze.audit.model.causal import Causal
from specscope.analyze.audit.options import Progress
from specscope.analyze.findings import Exit
from specscope.analyze.locate.located import Floats, Located, Location, Operation, Stage, Walk
from specscope.analyze.questions.groups import Share
from specscope.errors import UserError
from specscope.measure.judges import audit_options, target_named
from specscope.measure.trainer.folders import (
    FolderDifference,
    read_trained,
    served_dtype,
    setting_differences,
    weight_differences,
)
from specscope.measure.trainer.places import TextPlaces, places_of, recorded
from specscope.measure.trainer.recorded import RecordedInputs, norms_of
from specscope.measure.trainer.served import forced, served_features, served_passes, served_runner
from specscope.measure.trainer.taps import Pass
from specscope.measure.trainer.training import ForcedText, OwnTraining
from specscope.measure.trainer.walk import Walker, first_named
from specscope.model.heads.head_loader import LoadedHead, load_head
from specscope.model.heads.head_runner import HeadRunner
from specscope.model.kv_cache import BLOCK_SIZE
from specscope.model.loader import LoadedModel, load_model
from specscope.model.places import head_place
from specscope.model.runner import ModelRunner
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural
from specscope.trace.record.notes import model_part

SURE = 0.5  # nats between a head's two likeliest tokens from which 16 bits do not swap them
FEW = 0.02  # of the places: so many recorded drafts may be others before the engine is at fault


class Forward(Protocol):
    """A training code's forward."""

    name: str

    def passes(self, text: ForcedText, depths: int, dtype: torch.dtype) -> list[Pass]:
        """The operations of each depth, teacher-forced."""


@dataclass(frozen=True)
class DepthRates:
    """Acceptance at one depth: of the places, at how many the head's choice is the target's greedy token."""

    depth: int
    training: Share
    served: Share
    recorded: Share  # of the steps that came so far: accepted there too

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for --json."""
        names = ("training", "served", "recorded")
        return {"depth": self.depth, **{name: _share(getattr(self, name)) for name in names}}


@dataclass(frozen=True)
class TrainerAudit:
    """What was found. Filled by `audit_trainer`."""

    source: str
    trainer: str
    served: str
    reference: str  # whose forward, with which weights
    places: int
    available: int
    requests: int
    rates: tuple[DepthRates, ...]
    location: Location
    notes: tuple[str, ...] = field(default=())

    @property
    def exit(self) -> Exit:
        """What the command exits with."""
        return self.location.exit

    @property
    def verdict(self) -> str:
        """In a sentence."""
        where = f"{plural(self.places, 'place')} of {plural(self.requests, 'request')}"
        if self.location.located:
            first = self.location.located[0]
            name = first.operation.name
            if name.startswith("recorded"):
                agrees = f"The served head agrees with training over {where}, but serving fed it otherwise"
                return f"{agrees}: {first.sentence}."
            return f"The served head is not the trained one over {where}: {name}: {first.sentence}."
        if self.location.unexplained:
            return f"The served head agrees with training over {where}, but {'; '.join(self.location.unexplained)}."
        if self.location.left_out:
            return f"Not judged: {'; '.join(self.location.left_out)}."
        return f"The served head agrees with training over {where}: {'; '.join(self.location.ruled_out)}."

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for --json."""
        names = ("source", "trainer", "served", "reference", "places", "available", "requests", "verdict")
        return {
            **{name: getattr(self, name) for name in names},
            "exit": int(self.exit),
            "warnings": list(self.notes),
            "rates": [rates.to_dict() for rates in self.rates],
            "location": self.location.to_dict(),
        }


def audit_trainer(
    history: History,
    source: str,
    folder: str,
    target: str | None,
    draft_model: str | None,
    sample: int | None,
    progress: Progress = lambda *_: None,
) -> TrainerAudit:
    """Compare a head in training with the head that served a capture. Raises UserError."""
    began = time.perf_counter()
    run = history.run
    if run is not None and model_part(run.drafter) != "eagle":
        raise UserError(f"the capture's drafter is {run.drafter}: --trainer compares EAGLE heads")
    head_place(folder)
    options = audit_options(history, target, draft_model, sample)
    assert run is not None  # otherwise audit_options has refused it
    if options.draft is None:
        raise UserError(options.why_no_draft)
    texts, depths, available = places_of(history, sample)
    progress("loading the target", 0, 0)
    loaded = load_model(target_named(run, target), torch.device("cpu"), torch.float32)
    sides = _Sides(folder, options.draft.path, loaded)
    walker, tally, inputs = Walker(), _Tally(depths), RecordedInputs.of(run, sides.served.head.config.aux_layers)
    causal = Causal(options.target, "float32", "cpu")
    left_out = sides.unlike
    if not left_out:
        longest, most = max(len(text.tokens) for text in texts), max(len(text.places) for text in texts)
        runner = served_runner(sides.served, longest, most, depths)
        for text, training, ours in _along(texts, causal, sides, walker, inputs, progress):
            _compare(sides, runner, text, training, ours, walker, tally)
    where = texts[0].places[0].step.where
    fed = Walk(Stage.DRAFTER, where, tuple(inputs.rows), inputs.held(), "as recorded", "plain transformers, float32")
    engine, reference = "specscope, torch's operators, float32", f"{sides.forward.name}, float64"
    walk = Walk(Stage.DRAFTER, where, walker.rows, walker.walked(), engine, reference)
    recorded_inputs = inputs.located(lambda text: _all_norms(causal, text))
    location = Location(
        source,
        located=(*_located(sides, walker, texts), *([] if recorded_inputs is None else [recorded_inputs])),
        walks=(fed, walk) if fed.operations else (walk,),
        ruled_out=_ruled_out(sides, fed, walk),
        unexplained=tally.unexplained(),
        left_out=left_out,
        seconds=time.perf_counter() - began,
    )
    return TrainerAudit(
        source=source,
        trainer=folder,
        served=options.draft.path,
        reference=f"{sides.forward.name}, weights of {sides.trained.weights}",
        places=sum(len(text.places) for text in texts),
        available=available,
        requests=len(texts),
        rates=tuple(tally.rates(texts)) if not left_out else (),
        location=location,
        notes=(*options.notes, *tally.notes()),
    )


class _Sides:
    """Both heads over one target, and what their folders differ in."""

    def __init__(self, folder: str, served: str, target: LoadedModel) -> None:
        self.target = target
        self.served = load_head(served, target)
        dtype = served_dtype(served)
        self.trained = read_trained(folder, target, dtype)
        ours = self.trained.loaded
        self.differences: list[FolderDifference] = [
            *weight_differences(ours, self.served, dtype),
            *setting_differences(ours.head.config, self.served.head.config),
        ]
        tokens = ours.head.target_tokens()
        self.rows: Tensor = target.output.weight.detach().float()
        self.rows = self.rows if tokens is None else self.rows[tokens]
        self.forward = self._forward(folder)

    def _forward(self, folder: str) -> Forward:
        if not self.trained.published:
            return OwnTraining(self.trained.loaded, self.rows)
        from specscope.measure.trainer.published import SpeculatorsTraining

        return SpeculatorsTraining(folder, self.trained.loaded, self.rows)

    @property
    def unlike(self) -> tuple[str, ...]:
        """Why the two cannot run over the same text; nothing where they can."""
        ours, served = self.trained.loaded.head.config, self.served.head.config
        if (len(ours.aux_layers), ours.layers, ours.version) != (len(served.aux_layers), served.layers, served.version):
            return ("the heads are of different shapes, so that no operation of one stands beside one of the other",)
        if (ours.parallel is None) != (served.parallel is None):
            return ("one head drafts all depths in one pass, and the other one after the other",)
        return ()


def _along(
    texts: Sequence[TextPlaces],
    causal: Causal,
    sides: _Sides,
    walker: Walker,
    inputs: RecordedInputs,
    progress: Progress,
) -> Iterator[tuple[TextPlaces, tuple[ForcedText, Tensor], Tensor]]:
    """Each text, as training is given it with the target's greedy choices, and the features that serving feeds."""
    config, served = sides.trained.loaded.head.config, sides.served.head.config
    longest = max(len(text.tokens) for text in texts)
    runner = ModelRunner(sides.target, -(-longest // BLOCK_SIZE) + 1, served.aux_layers)
    width = sides.target.width
    for number, text in enumerate(texts):
        progress("training beside serving", number, len(texts))
        logits, states = causal.alone(text.tokens, (*config.aux_layers, *served.aux_layers, "final"))
        assert states is not None
        split = [len(config.aux_layers) * width, len(served.aux_layers) * width, width]
        features, of_served, final = states.split(split, dim=-1)
        inputs.add(text, of_served)
        ours = served_features(runner, text.tokens).float()
        same = walker.features(text, features, ours, config.aux_layers, served.aux_layers)
        given = ForcedText(text.tokens, features, final, text.pairs)
        yield text, (given, logits.argmax(-1)), features if same else ours
    runner.close()


def _compare(
    sides: _Sides,
    runner: HeadRunner,
    text: TextPlaces,
    training: tuple[ForcedText, Tensor],
    features: Tensor,
    walker: Walker,
    tally: _Tally,
) -> None:
    """One text: training's forward and the served head's, their choices and their operations."""
    (given, choices), depths = training, tally.depths
    again = sides.forward.passes(given, depths, torch.float32)
    right = sides.forward.passes(given, depths, torch.float64)
    logits = forced(runner, text.tokens, features, text.pairs, depths)
    tally.add(text, choices, sides, [x["lm_head"] for x in again], logits)
    walker.passes(text, right, again, served_passes(runner, text.tokens, features, text.pairs, depths))


class _Tally:
    """Counts by depth, and recorded drafts that are not what the head drafts here."""

    def __init__(self, depths: int) -> None:
        self.depths = depths
        self.places, self.outside, self.sure, self.others = 0, [0] * depths, 0, 0
        self.right: dict[str, list[int]] = {"training": [0] * depths, "served": [0] * depths}

    def add(
        self, text: TextPlaces, choices: Tensor, sides: _Sides, training: Sequence[Tensor], served: Sequence[Tensor]
    ) -> None:
        """A text's logits by depth, [places, draft vocabulary] each; choices int64 [T]: the target's."""
        at = torch.tensor(text.pairs)
        self.places += len(at)
        heads = {"training": sides.trained.loaded, "served": sides.served}
        known = _tokens(sides.trained.loaded)
        for depth in range(self.depths):
            wanted = choices[at + 1 + depth]
            for name, logits in (("training", training[depth]), ("served", served[depth])):
                self.right[name][depth] += int((_tokens(heads[name])[logits.argmax(-1)] == wanted).sum())
            self.outside[depth] += int((~torch.isin(wanted, known)).sum())
        if text.plain:
            self._recorded(text, _tokens(sides.served), served[0])

    def _recorded(self, text: TextPlaces, tokens: Tensor, logits: Tensor) -> None:
        """Whether the recorded drafts hold the served head's choice, where it is sure and drafts are not drawn."""
        best = logits.float().topk(2, dim=-1)
        for place, choice, values in zip(text.places, tokens[best.indices[:, 0]].tolist(), best.values, strict=True):
            tree = place.step.part.tree
            if not tree.is_sampled and float(values[0] - values[1]) > SURE:
                self.sure += 1
                self.others += choice not in tree.token[tree.parent < 0].tolist()

    def rates(self, texts: Sequence[TextPlaces]) -> Iterator[DepthRates]:
        """By depth, from 1."""
        for depth in range(self.depths):
            training, served = (Share(self.right[name][depth], self.places) for name in ("training", "served"))
            yield DepthRates(depth + 1, training, served, recorded(texts, depth + 1))

    def unexplained(self) -> tuple[str, ...]:
        """What the engine that made the capture did otherwise than this head does here."""
        if self.others <= FEW * self.sure:
            return ()
        return (
            f"the recorded drafts lack the head's choice at {self.others:,} of {plural(self.sure, 'place')} where it "
            "is sure: the engine that made the capture fed or computed something else (specscope locate)",
        )

    def notes(self) -> tuple[str, ...]:
        """What readers of the rates must know."""
        if not self.outside or not self.outside[0]:
            return ()
        share = Share(self.outside[0], self.places)
        return (
            f"the target's choice is not in the draft vocabulary at {share.value:.1%} of "
            f"{plural(share.total, 'place')}: training's own held-out figures leave that out",
        )


def _located(sides: _Sides, walker: Walker, texts: Sequence[TextPlaces]) -> tuple[Located, ...]:
    """Weights and settings that differ, first of all; else the first operation that differs."""
    shown = walker.located(texts)
    if not sides.differences:
        return () if shown is None else (shown,)
    found = []
    for difference in sides.differences:
        named = Operation(Stage.DRAFTER, difference.key, difference.sentence, sides.served.name)
        if shown is None:
            found.append(Located(named, difference.sentence, unit="tensor"))
        else:
            found.append(first_named(shown, named, difference.sentence))
    return tuple(found)


def _all_norms(causal: Causal, text: TextPlaces) -> Floats:
    """[T, layers + 1] the norm of what enters each of the target's layers, and its head."""
    layers = (*range(int(causal.config.num_hidden_layers)), "final")
    states = causal.alone(text.tokens, layers)[1]
    assert states is not None
    return norms_of(states, len(layers))


def _ruled_out(sides: _Sides, fed: Walk, walk: Walk) -> tuple[str, ...]:
    agree = [held for held in walk.operations if not held.differs]
    kinds = {difference.key.split(":")[0] for difference in sides.differences}
    tensors = len(sides.served.head.state_dict()) + 1
    parts = [] if "weights" in kinds else [f"{plural(tensors, 'tensor')} are the checkpoint's"]
    parts += [] if "config" in kinds else ["every setting is the trained one"]
    if fed.operations and not any(held.differs for held in fed.operations):
        parts.append(f"what was fed in serving is the text's at {plural(fed.operations[0].rows, 'recorded row')}")
    if agree:
        error, rows = max(held.error for held in agree), max(held.rows for held in agree)
        parts.append(f"{plural(len(agree), 'operation')} agree to {error:.1g} over up to {plural(rows, 'row')}")
    return tuple(parts)


def _tokens(loaded: LoadedHead) -> Tensor:
    """The target's token behind each draft token."""
    tokens = loaded.head.target_tokens()
    return torch.arange(loaded.head.config.draft_vocab) if tokens is None else tokens


def _share(share: Share) -> dict[str, Any]:
    return {"count": share.count, "n": share.total, "rate": share.value, "interval": share.interval}
