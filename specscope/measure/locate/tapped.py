"""The forwards of a vLLM's models as vllm/taps.py wrote them, beside what they should have been fed and given."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specscope.analyze.findings import Reference
from specscope.analyze.locate.located import WORDS, FedRow, Held, Located, Operation, Stage, Walk
from specscope.analyze.locate.model.reference import ReferencePass
from specscope.errors import UserError
from specscope.measure.locate.pairs import Allowances, ComparedPass, HeldPair, heads_of, likeness, sentence
from specscope.trace.checked import decoded
from specscope.trace.history.history import RequestHistory
from specscope.trace.history.wording import plural
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import RequestStep

TARGET, DRAFTER = "target", "drafter"


@dataclass(frozen=True, eq=False)
class TappedForward:
    """One forward of a model, over the rows of a batch."""

    index: int  # among all forwards
    who: str  # TARGET or DRAFTER
    step: int  # of the engine, from 0
    number: int  # of the drafter's passes in its step, from 0
    requests: Sequence[str]  # in the batch's order
    scheduled: Sequence[int]  # rows of each, the target's
    computed: Sequence[int]  # tokens of each whose KV is there, by the scheduler's count
    drafts: Sequence[Sequence[int]]  # that the scheduler handed to the target; -1 where it does not know them
    blocks: Sequence[Sequence[int]]  # that the scheduler gave each
    tensors: dict[str, Tensor] = field(repr=False)
    unread: str = ""  # why the cache was not read

    def row_of(self, request: str) -> int:
        return self.requests.index(request)

    @cached_property
    def starts(self) -> list[int]:
        """The first row of each request, and the number of rows: as attention was told, else as it was scheduled."""
        told = self.tensors.get("query_start_loc")
        if told is not None and (self.who == DRAFTER or len(told) > len(self.requests)):
            return [int(x) for x in told.tolist()[: len(self.requests) + 1]]
        return [*accumulate(self.scheduled, initial=0)]


@dataclass(frozen=True, eq=False)
class Tapped:
    forwards: tuple[TappedForward, ...]
    is_v2: bool
    block_size: int
    code: dict[str, dict[str, list[str]]]  # of TARGET and DRAFTER: an operation's functions
    sizes: dict[str, dict[str, int]]  # heads and their size
    is_full: bool  # what came later is not here

    @cached_property
    def drafted(self) -> dict[int, Tensor]:
        """By step, what was drafted in it: [requests, passes]."""
        return {made.step: made.tensors["drafted"] for made in self.forwards if "drafted" in made.tensors}

    def of(self, request: str, who: str) -> Iterator[TappedForward]:
        return (made for made in self.forwards if made.who == who and request in made.requests)


def read_taps(folder: Path) -> Tapped:
    """All of a folder. Raises UserError where there is nothing."""
    from safetensors.torch import load_file

    try:
        about: dict[str, Any] = decoded((folder / "about.json").read_bytes(), dict[str, Any])
        end: dict[str, Any] = decoded((folder / "end.json").read_bytes(), dict[str, Any])
    except (OSError, ValueError) as error:
        raise UserError(f"vLLM wrote no taps to {folder}: is specscope installed in its environment?") from error
    forwards: list[TappedForward] = []
    for path in sorted(folder.glob("taps-*.safetensors")):
        parts = [(*key.partition("/"), rows) for key, rows in load_file(path).items()]
        for number, line in enumerate(decoded(path.with_suffix(".json").read_bytes(), list[dict[str, Any]])):
            own = {name: rows for of, _, name, rows in parts if int(of) == number}
            forwards.append(TappedForward(len(forwards), tensors=own, **line))
    return Tapped(tuple(forwards), about["v2"], about["block_size"], about["code"], about["sizes"], end["full"])


@dataclass(frozen=True)
class FedText:
    """A request's tokens, and how many were committed before and after each of the engine's steps it took part in."""

    request: str
    prompt: int
    tokens: list[int]
    before: list[int]
    after: list[int]
    parts: Sequence[RequestStep]
    steps: Sequence[int]  # the engine's step number of each

    @staticmethod
    def of(request: RequestHistory, numbers: Sequence[int]) -> FedText | None:
        """By its verdicts; None where the prompt is not known. `numbers`: the engine's step number of each step."""
        if request.info is None or not len(request.info.prompt_tokens):
            return None
        tokens: list[int] = request.info.prompt_tokens.tolist()
        text = FedText(request.id, len(tokens), tokens, [], [], list(request.steps), numbers)
        for part in request.steps:
            text.before.append(len(tokens))
            tokens += part.tokens()
            text.after.append(len(tokens))
        return text


@dataclass(frozen=True, eq=False)
class Fed:
    """Rows of one request in one forward, with what they should be. All tensors are [rows]."""

    forward: TappedForward
    text: FedText
    index: int  # of the request's step
    rows: Tensor  # among the forward's rows
    positions: Tensor
    tokens: Tensor
    last: int  # which of the rows a drafter draws from; the last of the text, of a target
    known: int  # of how many first rows the context is the request's text, so that a reference over the text has it
    ended: bool  # whether the prompt had ended: what is drafted is used

    @property
    def where(self) -> Reference:
        return Reference(self.text.request, self.text.parts[self.index].index, self.text.steps[self.index])

    @property
    def batch(self) -> int:
        return self.forward.row_of(self.text.request)

    def labels(self, rows: Tensor) -> tuple[FedRow, ...]:
        """Some of the rows, as a walk has them."""
        both = zip(self.positions[rows].tolist(), self.tokens[rows].tolist(), strict=True)
        return tuple(FedRow(position, token) for position, token in both)


def fed_rows(tapped: Tapped, text: FedText, *, shift: int) -> list[Fed]:
    """The rows of a request in every forward. `shift`: by how much an EAGLE head's tokens are ahead, 1 or 0."""
    targets = list(tapped.of(text.request, TARGET))[: len(text.parts)]
    by_step = {made.step: index for index, made in enumerate(targets)}
    drafted = [made for made in tapped.of(text.request, DRAFTER) if made.step in by_step]
    drafts = (_drafter(tapped, text, made, by_step[made.step], targets, shift) for made in drafted)
    return [*(_target(text, made, index) for index, made in enumerate(targets)), *filter(None, drafts)]


def _context(text: FedText, made: TappedForward, index: int) -> int:
    """Tokens whose KV is there before a step: the host of V2 counts every draft as accepted at first."""
    return min(made.computed[made.row_of(text.request)], text.before[index] - 1)


def _target(text: FedText, made: TappedForward, index: int) -> Fed:
    batch, start = made.row_of(text.request), _context(text, made, index)
    count, drafts = made.scheduled[batch], list(made.drafts[batch])
    if any(token < 0 for token in drafts):
        drafts = text.parts[index].tree.token.tolist()[: len(drafts)]
    plain = min(count - len(drafts), text.before[index] - start)
    tokens = (text.tokens[start : start + plain] + drafts)[:count]
    same = [token == right for token, right in zip(tokens, text.tokens[start:], strict=False)]
    known = next((row for row, is_same in enumerate(same) if not is_same), len(same))
    own = torch.arange(len(tokens))
    ended = start + plain >= text.prompt
    first = made.starts[batch]
    return Fed(made, text, index, first + own, start + own, torch.tensor(tokens), max(known - 1, 0), known, ended)


def _drafter(
    tapped: Tapped, text: FedText, made: TappedForward, index: int, targets: Sequence[TappedForward], shift: int
) -> Fed | None:
    """Rows whose token is behind the committed text are padding, and left out."""
    target = targets[index]
    batch, start, count = made.row_of(text.request), _context(text, target, index), 1
    end, first = start + target.scheduled[batch], made.starts[batch]
    ended = end >= text.prompt
    committed = text.after[index] if ended else min(end + 1, text.prompt)
    if not made.number:
        count = committed - shift - start if ended or shift else target.scheduled[batch]
        tokens = torch.tensor(text.tokens[start + shift : start + shift + max(count, 0)])
    else:
        drafted = tapped.drafted.get(made.step)  # its token was drafted in the pass before it
        if not ended or drafted is None or drafted.dim() != 2 or made.number > drafted.shape[1]:
            return None
        tokens, start = drafted[batch, made.number - 1].view(1).long(), committed - 1 - shift + made.number
    if count < 1 or len(tokens) < count:
        return None
    own = torch.arange(count)
    return Fed(made, text, index, first + own, start + own, tokens, count - 1, 0 if made.number else count, ended)


TIE = 1e-4  # by which logits may differ where two tokens are as good


def exact(name: str, fed: Fed, ours: Tensor, right: Tensor, rows: Tensor) -> HeldPair:
    """Whole numbers, which agree or do not."""
    return HeldPair(name, ours.double().view(-1, 1), right.double().view(-1, 1), fed.labels(rows), exact=True)


def inputs(tapped: Tapped, fed: Fed) -> Iterator[HeldPair]:
    """What the forward was fed, and what attention was told."""
    given, made, batch = fed.forward.tensors, fed.forward, fed.batch
    later = "later " if made.number else ""
    own = torch.arange(len(fed.rows))[fed.rows < len(given.get("tokens", ()))]
    if not len(own):
        return
    rows, positions = fed.rows[own], fed.positions[own]
    is_last = (own == fed.last) & (made.who == DRAFTER and not made.number)
    for name, some in (("last token", own[is_last]), ("tokens", own[~is_last])):
        yield exact(name, fed, given["tokens"][fed.rows[some]], fed.tokens[some], some)
    if (told := given.get("positions")) is not None and told.dim() == 1:
        yield exact(f"{later}positions", fed, told[rows], positions, own)
    # Where the KV of the rows lies; -1 where the scheduler gave no block
    size, blocks = tapped.block_size, torch.tensor((*made.blocks[batch], -1))
    block = blocks[(fed.positions // size).clamp(max=len(blocks) - 1)]
    due = torch.where(block < 0, -1, block * size + fed.positions % size)
    known = own[due[own] >= 0]
    if len(known) and "block_table" in given:
        number = fed.positions[known] // size
        last = min(int(number.max()) + 1, given["block_table"].shape[1])
        same = given["block_table"][batch][:last] == blocks[:last]
        upto = torch.cumprod(same.long(), 0)[number.clamp(max=last - 1)]
        yield exact("block table", fed, 1 - upto, torch.zeros(len(known)), known)
    slots = [x for name, x in given.items() if name.endswith(".slots")] if len(known) else []
    slots = [x[fed.rows[known]] for x in slots if int(fed.rows[known].max()) < len(x)]
    if slots:
        other = next((x for x in slots if bool((x != due[known]).any())), slots[0])
        yield exact("slots", fed, other, due[known], known)
    if "seq_lens" in given:
        start, end = made.starts[batch], made.starts[batch + 1]
        seen = int(given["seq_lens"][batch]) - (end - start) + (rows - start) + 1
        yield exact(f"{later}keys seen", fed, seen, positions + 1, own)


def computed(fed: Fed, right: ReferencePass, rows: Tensor, sizes: dict[str, int]) -> Iterator[HeldPair]:
    """What a model's operations gave, and the cache as attention read it. `rows`: which of the fed ones are known."""
    own, heads = fed.rows[rows], (sizes.get("num_heads", 1), sizes.get("num_kv_heads", 1))
    for name, ours in fed.forward.tensors.items():
        plain, _, batch = name.rpartition(".")
        if name in right.taps and name != "lm_head" and int(own.max()) < len(ours):
            ours, due, labels = ours[own], right.taps[name], right.rows
        elif plain.endswith(" read") and batch == str(fed.batch) and plain in right.taps:
            count, name = min(len(ours), len(right.keys)), plain
            ours, due, labels = ours[:count], right.taps[plain][:count], right.keys[:count]
        else:
            continue
        ours = ours.float().flatten(1) if ours.dim() > 1 else ours.float()[:, None]
        if ours.shape == due.shape:
            yield HeldPair(name, ours, due, labels, heads_of(name, *heads))


def _likeliest(fed: Fed, rows: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """The likeliest tokens at rows of the forward's logits, and these logits, [rows, k] each; None where none is told.

    ids [draft vocabulary]: the target's tokens of a head's own.
    """
    logits, tokens = (fed.forward.tensors.get(name) for name in ("lm_head", "lm_head.tokens"))
    if logits is None or tokens is None or not len(rows) or int(rows.max()) >= len(logits):
        return None
    named = tokens[rows].long()
    return named if ids is None else ids[named], logits[rows].float()


def logits(fed: Fed, at: Tensor, right: Tensor, rows: Tensor, ids: Tensor | None = None) -> Iterator[HeldPair]:
    """The likeliest tokens' logits. at: the rows of the logits; right [rows, V]."""
    if (told := _likeliest(fed, at, ids)) is not None:
        tokens, ours = told
        yield HeldPair("lm_head", ours, right.gather(1, tokens), fed.labels(rows), tokens=tokens)


def target_logit_rows(fed: Fed) -> tuple[Tensor, Tensor]:
    """(rows of the logits, which of the fed rows they are): of each request the row before its drafts, and theirs."""
    made, batch = fed.forward, fed.batch
    counts = [len(drafts) + 1 for drafts in made.drafts]
    first = made.scheduled[batch] - counts[batch]
    rows = torch.arange(made.scheduled[batch])[max(first, 0) : fed.known]
    return sum(counts[:batch]) + rows - first, rows


def choices(fed: Fed, at: Tensor, rows: Tensor, params: SamplingParams, right: Tensor) -> Iterator[HeldPair]:
    """The tokens that were committed behind rows, where nothing but the logits decides. right [rows, V].

    Of a greedy request beside the likeliest by vLLM's own logits; of a sampled one one that top-k and top-p leave.
    """
    text, behind = fed.text, fed.positions[rows] + 1
    kept = (behind >= text.before[fed.index]) & (behind < text.after[fed.index])
    moved = params.penalised or params.logit_bias or params.limited
    if not bool(kept.any()) or moved:
        return
    taken = torch.tensor([text.tokens[place] for place in behind[kept].tolist()])
    if params.temperature > 0:
        yield exact("choice", fed, taken, _left(right[kept], taken, params), rows[kept])
    elif (told := _likeliest(fed, at[kept])) is not None:
        yield _chosen("choice", fed, taken, *told, rows[kept])


def _left(logits: Tensor, taken: Tensor, params: SamplingParams) -> Tensor:
    """Tokens that may have been drawn: those that were, and the likeliest for one that top-k or top-p leaves out."""
    scores = logits / params.temperature
    own = scores.gather(1, taken[:, None])
    ahead = scores > own + TIE
    is_left = torch.ones(len(taken), dtype=torch.bool)
    if params.top_k:
        is_left &= ahead.sum(1) < params.top_k
        lowest = scores.topk(min(params.top_k, scores.shape[1])).values[:, -1:]
        scores = scores.masked_fill(scores < lowest - TIE, -torch.inf)
    is_left &= (scores.softmax(-1) * ahead).sum(1) < params.top_p + TIE
    return torch.where(is_left, taken, scores.argmax(1))


def parameters(fed: Fed) -> Iterator[HeldPair]:
    """Of drafted rows: the temperature, top-k or top-p that each was given, and its request's."""
    given, batch, number = fed.forward.tensors, fed.batch, 0
    while f"parameters.{number}.rows" in given:
        ours, of, ends = (given[f"parameters.{number}.{name}"] for name in ("rows", "of", "ends"))
        if batch < len(ends):
            first, end = 0 if not batch else int(ends[batch - 1]), int(ends[batch])
            place = len(fed.rows) - (end - first) - 1  # the row before the first draft judges it
            if end > first and place >= 0:
                rows = torch.arange(place, place + end - first)
                yield exact("parameters", fed, ours[first:end], of[batch].expand(end - first), rows)
        number += 1


def drafts(fed: Fed, drafted: Tensor | None, ids: Tensor | None) -> Iterator[HeldPair]:
    """The token that a pass drafted greedily, and the likeliest by its logits. drafted [requests, passes]."""
    number, batch, told = fed.forward.number, fed.batch, _likeliest(fed, torch.tensor([fed.batch]), ids)
    if told is not None and fed.ended and drafted is not None and drafted.dim() == 2 and number < drafted.shape[1]:
        yield _chosen("draft", fed, drafted[batch, number].view(1).long(), *told, torch.tensor([fed.last]))


def _chosen(name: str, fed: Fed, taken: Tensor, best: Tensor, scores: Tensor, rows: Tensor) -> HeldPair:
    """Whether a token is the likeliest, or as good as it."""
    good = (best == taken[:, None]) & (scores >= scores[:, :1] - TIE)
    return exact(name, fed, taken, torch.where(good.any(1), taken, best[:, 0]), rows)


ORDER = {name: place for place, name in enumerate(WORDS)}
STAGES = {"parameters": Stage.SAMPLING, "choice": Stage.VERDICT, "draft": Stage.DRAWS}  # of what is no model's own
REPLACED = "(replaced: "
PARTS = {  # by the last part of an operation's name, under which its functions are told
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "value"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("query", "key"), "rotary_emb"),
    **dict.fromkeys(("keys", "values"), "attention"),
    "embedding": "embed_tokens",
}


def rank(name: str) -> tuple[int, float]:
    """The place of an operation in the order of computing: the layer, from 1 on, and the place in it."""
    layer = re.match(r"layers\.(\d+)(?:\.(.*))?$", name)
    inner = re.sub(r"^fc_norm\.\d+", "input_norm", name if layer is None else layer[2] or "")
    place = ORDER.get(inner) or ORDER.get(inner.removesuffix(":in"), ORDER["mlp"]) - inner.endswith(":in") / 2
    if layer is not None:
        return int(layer[1]) + 1, place if inner else len(ORDER)
    return (0 if place < ORDER["input_layernorm"] else 10**6), place


class ComparedPart(NamedTuple):
    """What was compared of a request in a forward, up to what differs of one stage; before it what agrees of others."""

    fed: Fed
    compared: ComparedPass

    @property
    def wrong(self) -> HeldPair:
        assert self.compared.wrong is not None
        return self.compared.wrong

    @property
    def computed(self) -> tuple[int, tuple[int, float]]:
        """When what differs was computed."""
        return self.fed.forward.index, rank(self.wrong.name)


@dataclass
class ComparisonSheet:
    """All that was compared of one model."""

    stage: Stage  # the model's own
    tapped: Tapped
    parts: list[ComparedPart] = field(default_factory=list)

    @property
    def sizes(self) -> dict[str, int]:
        return self.tapped.sizes.get(self.stage, {})

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (self.stage, *([Stage.DRAWS] if self.stage is Stage.DRAFTER else [Stage.SAMPLING, Stage.VERDICT]))

    def add(self, fed: Fed, pairs: Iterable[HeldPair], allowed: float) -> None:
        """One more request in a forward. `allowed`: what rounding explains of an operation."""
        ordered = sorted((pair for pair in pairs if len(pair.rows)), key=lambda pair: rank(pair.name))
        agree: list[Held] = []
        for stage in self.stages:
            own = [pair for pair in ordered if STAGES.get(pair.name, self.stage) is stage]
            rows = max((pair.rows for pair in own if " read" not in pair.name), key=len, default=())
            compared = ComparedPass(stage, fed.where, rows, Allowances({"norm": allowed}), list(agree))
            compared.compare(own)
            if own:
                self.parts.append(ComparedPart(fed, compared))
                agree = [held for held in compared.held if not held.differs]

    def differences(self, stage: Stage) -> list[ComparedPart]:
        """Where a stage differs, in the order of computing."""
        parts = (part for part in self.parts if part.compared.stage is stage and part.compared.wrong is not None)
        return sorted(parts, key=lambda part: part.computed)

    def first(self, stage: Stage | None = None) -> ComparedPart | None:
        """The earliest forward in which a stage, else the model itself, differs."""
        return next(iter(self.differences(stage or self.stage)), None)

    def counts(self, stage: Stage) -> Counter[str]:
        """How many steps of requests differ, by the operation that differs first; where the cache is wrong at places
        that were computed wrong before, by what was."""
        by_step: dict[tuple[str, int], str] = {}
        spoilt: dict[tuple[str, int], str] = {}  # by request and position: what was wrong when it was computed
        for part in self.differences(stage):
            request, name = part.fed.text.request, part.wrong.name
            wrong = [(request, row.position) for row in part.compared.bad]
            if name.endswith(" read") and all(place in spoilt for place in wrong):
                name = spoilt[wrong[0]]
            else:
                spoilt |= dict.fromkeys(wrong, name)
            by_step.setdefault((request, part.fed.forward.step), name)
        return Counter(by_step.values())

    def walk(self, engine: str, reference: str) -> Walk | None:
        """The place of the first difference, or the last one where nothing differs."""
        firsts = [first for stage in self.stages if (first := self.first(stage)) is not None]
        last = max(self.parts, key=lambda part: (part.fed.forward.index, len(part.compared.held)), default=None)
        part = min(firsts, key=lambda first: first.computed, default=last)
        if part is None:
            return None
        held = tuple(replace(each, operation=self._named(each)) for each in part.compared.held)
        return Walk(self.stage, part.fed.where, part.compared.rows, held, engine, reference)

    def located(self, above: ComparisonSheet | None = None) -> Iterator[Located]:
        """The model's own first difference, and that of the choice behind it. `above`: the target's, of a drafter."""
        for stage in self.stages:
            chosen_wrong = stage is Stage.VERDICT and self.first(Stage.SAMPLING) is not None  # by wrong parameters
            if (first := self.first(stage)) is not None and not chosen_wrong and not _handed_down(first, above):
                yield self._located(stage, first)

    def agrees(self) -> str:
        forwards, rows, largest = self.rows()
        rows_of, forwards_of = plural(rows, "row"), plural(forwards, "forward")
        return f"The {self.stage} agrees at {rows_of} of its operations in {forwards_of} of vLLM, to {largest:.1g}"

    def rows(self) -> tuple[int, int, float]:
        """(forwards, rows compared of any operation, the largest error that is no difference)."""
        whole = {id(part.fed): part.compared for part in self.parts}.values()  # of each the last, which has all
        held = [each for compared in whole for each in compared.held]
        fine = [float(each.errors[each.errors <= each.allowed].max(initial=0)) for each in held]
        forwards = {part.fed.forward.index for part in self.parts}
        return len(forwards), sum(each.rows for each in held), max(fine, default=0)

    def _named(self, held: Held) -> Operation:
        """With vLLM's class and method: the function that was replaced, else all that it may be."""
        name, code = held.operation.name, self.tapped.code.get(self.stage, {})
        plain = name.removesuffix(":in").removesuffix(" read")
        head, dot, last = plain.rpartition(".")
        keys = (name, name.removeprefix("later "), plain, f"{head}{dot}{PARTS.get(last, last)}")
        listed = next((code[key] for key in keys if code.get(key)), [])
        replaced = [text for text in listed if REPLACED in text]
        return replace(held.operation, code=" or ".join(replaced[:1] or listed))

    def _located(self, stage: Stage, found: ComparedPart) -> Located:
        counts, pair, (*before, held) = self.counts(stage), found.wrong, found.compared.held
        number, first, where = found.fed.forward.number, found.compared.bad[0], found.fed.where
        which = "the target's forward" if self.stage is Stage.TARGET else f"the drafter's pass {number + 1}"
        smallest = f"{which} of step {where}: position {first.position}, token {first.token}"
        # The layer whose operations were compared, where an operation is known to be the first of it
        region = pair.name.rsplit(".", 2)[0] if pair.name.startswith("layers.") and "." in pair.name[7:] else ""
        certain = pair.exact or not before or any(each.operation.name.startswith(region) for each in before)
        told = self._named(held), sentence([*before, held]), likeness(pair, held.allowed), smallest, where
        return Located(*told, counts[pair.name], counts.total(), "request step", certain)


def _handed_down(found: ComparedPart, above: ComparisonSheet | None) -> bool:
    """Whether a drafter's first pass was only given what the target was given wrong in the same step."""
    first, made = None if above is None else above.first(), found.fed.forward
    is_same = first is not None and made.step == first.fed.forward.step and found.wrong.name == first.wrong.name
    return is_same and made.number == 0 and found.wrong.exact
