"""From step to step: positions, tokens, requests and their KV blocks. Nothing is lost, or mixed up between requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from specscope.analyze.evidence.columns import Columns
from specscope.analyze.evidence.visits import Visit
from specscope.analyze.findings import Finding
from specscope.analyze.verify.exact import Check
from specscope.trace.history.history import History
from specscope.trace.record.privacy import told_ids
from specscope.trace.record.records import FinishReason, RequestEnd

# Each place that a check looked at: the check, the step of the request, and what is wrong there: "" for nothing
Looked = Iterator[tuple[str, Visit, str]]
STEP, REQUEST = "request step", "request"  # of a request one look, numbered by its step
CHECKS = (
    ("step numbers", "a request's steps are numbered one by one", STEP),
    ("requests in a batch", "a request has one part in a step", STEP),
    ("tokens in the cache", "a step begins with the KV that the previous step left, or that it first found", STEP),
    ("positions", "the root's position follows from the tokens before it", STEP),
    ("prompt fed", "before the first token the prompt is fed, each token once", REQUEST),
    ("tokens emitted", "every committed token is emitted, except those past the request's end", STEP),
    ("outputs", "the output is what the steps emitted, and no longer than allowed", REQUEST),
    ("ends", "a request ends exactly where its finish reason says", REQUEST),
    ("what preceded", "each step records correctly what its request did before", STEP),
    ("accepted KV moved", "the KV of accepted nodes is moved to just after the root", STEP),
    ("blocks written", "no two requests write one block in one step", STEP),
    ("blocks kept", "a request keeps its blocks, in order, until it ends or is preempted", STEP),
)


def from_step_to_step(c: Columns) -> Iterator[Finding]:
    every, looked = c.every, {name: dict[int, str]() for name, *_ in CHECKS}
    accounts = [look(account) for account in Account.all(c) for look in (_steps, _emitted, _whole)]
    for name, visit, problem in chain(*accounts, _blocks_written(c), _blocks_kept(c)):
        looked[name][visit.number] = problem
    for name, about, unit in CHECKS:
        problems = looked[name]
        tested, bad = np.zeros((2, len(every)), np.bool_)
        tested[list(problems)] = True
        bad[[place for place, problem in problems.items() if problem]] = True
        note = "the blocks written are not recorded" if "blocks" in name and not problems else ""
        yield Check(c, name, about, unit).of(
            bad, tested, problems.__getitem__, note, lambda place: every[place].reference()
        )


@dataclass(frozen=True)
class Account:
    """One request's steps, and what is known of the run."""

    visits: Sequence[Visit]  # of one request, in order
    history: History
    ours: bool
    whole: bool  # whether its steps are known from the first
    gaps: bool  # whether some of its steps are known to be missing: then a jump proves nothing

    @staticmethod
    def all(c: Columns) -> Iterator[Account]:
        history = c.history
        assert history is not None
        for visits in c.by_request:
            first, last = visits[0].part.index, visits[-1].part.index
            gaps = bool(history.lost) and last - first + 1 != len(visits)
            yield Account(visits, history, c.ours, first == 0, gaps)

    @property
    def told_end(self) -> RequestEnd | None:
        """Its end, where all its steps and its output are in the capture; older ones made with --no-text have none."""
        request, run = self.visits[0].request, self.history.run
        end, last = request.end, -1 if request.ended is None else self.history.steps[request.ended].step
        cut = self.history.lost and self.visits[-1].record.step != last
        told = end is not None and run is not None and (run.tells_text or len(end.output) > 0)
        return end if told and self.whole and not self.gaps and not cut else None

    def pairs(self) -> Iterator[tuple[Visit | None, Visit]]:
        """Each step with the one before it; None for the first, and after a gap."""
        before = None
        for visit in self.visits:
            gap = before is not None and self.gaps and visit.part.index != before.part.index + 1
            yield None if gap else before, visit
            before = visit


def _steps(account: Account) -> Looked:
    """Each step by the one before it."""
    info, record, gap = account.visits[0].request.info, -1, False  # whether steps before are not known
    # The root is the last token: of the prompt at first, then of what the steps committed
    due = len(info.prompt_tokens) - 1 if account.whole and info is not None and len(info.prompt_tokens) else None
    for before, visit in account.pairs():
        part, verdict, cached = visit.part, visit.part.verdict, visit.part.context_len
        if before is not None:
            index = before.part.index + 1
            yield "step numbers", visit, "" if part.index == index else f"step {part.index} where {index} was due"
        yield "requests in a batch", visit, "twice in one step" if visit.record.step == record else ""
        record = visit.record.step
        begins = (visit.preempted and before is not None) or (before is None and part.index == 0)
        if begins and account.ours:  # others share the KV of a common prefix
            problem = f"{cached} tokens in the cache before any was fed"
            problem += f", {part.found} were found there" if part.found else ""
            yield "tokens in the cache", visit, "" if cached == part.found else problem
        elif before is not None and not begins:
            left = before.part.position + (0 if before.part.verdict is None else 1 + before.part.verdict.accepted)
            problem = f"begins with {cached} tokens in the cache, the step before left {left}"
            yield "tokens in the cache", visit, "" if cached == left else problem
        if before is None and part.index:
            due, gap = None, True
        if verdict is None:
            continue
        if due is not None:
            problem = f"the root is at {part.position}; the tokens before it put it at {due}"
            yield "positions", visit, "" if part.position == due else problem
        due = part.position + 1 + verdict.accepted
        if part.preceded is not None and not gap:
            right = part.preceded is visit.due
            yield "what preceded", visit, "" if right else f"says `{part.preceded}`, it was `{visit.due}`"
        gap = False


def _emitted(account: Account) -> Looked:
    """What each step gave, and where it put the KV of what it gave."""
    last, end = account.visits[-1], account.visits[-1].request.end
    dropped = end is not None and end.reason in (FinishReason.CANCELLED, FinishReason.ERROR)  # while its step ran
    dropped |= end is not None and end.reason is FinishReason.STOP and not account.ours  # found by another process
    for visit in account.visits:
        part, verdict, count = visit.part, visit.part.verdict, visit.part.emitted
        if verdict is None:
            continue
        committed = verdict.accepted + 1
        fine = count == committed or (visit is last and (dropped or count > 0) and count < committed)
        problem = f"{count} of {committed} committed tokens emitted, and the request continued"
        yield "tokens emitted", visit, "" if fine else problem
        path, moved = verdict.path.tolist(), part.moved.tolist()
        elsewhere = {node for place, node in enumerate(path) if node != place}
        if len(part.blocks) and (elsewhere or moved):
            fine = bool(elsewhere) and elsewhere <= set(moved) <= set(path)
            problem = f"moved the KV of nodes {moved}, the accepted path is {path}"
            yield "accepted KV moved", visit, "" if fine else problem


def _whole(account: Account) -> Looked:
    """The request as a whole: its prompt, its output, its end."""
    first, last, info, fed = account.visits[0], account.visits[-1], account.visits[0].request.info, 0
    for visit in account.visits:
        fed += visit.part.prefill_tokens
        if visit.preempted or visit.part.verdict is not None:
            break  # after a preemption it began anew
    prompt = len(info.prompt_tokens) if info is not None and account.whole and not account.gaps else 0
    if prompt and not visit.preempted and visit.part.verdict is not None:
        due = prompt - 1 - (first.part.found if account.ours else first.part.context_len)
        yield "prompt fed", visit, "" if fed == due else f"{fed} prompt tokens fed before the root, {due} were due"
    end, run = account.told_end, account.history.run
    if end is None or run is None:
        return
    parted, wrong = _wrong_output(account, end)
    ends = accumulate(len(visit.part.output()) for visit in account.visits) if wrong else ()
    pairs = zip(account.visits, ends, strict=False)
    yield "outputs", next((visit for visit, through in pairs if through > parted), last), wrong
    own = run.ways.sends_empty and not len(end.output)  # the engine's own request
    told = run.tells_tokens and told_ids(end.output) is not None
    if end.info.params.is_known and not own and (told or end.reason is FinishReason.LENGTH):
        yield "ends", last, _wrong_end(account, end)


def _wrong_output(account: Account, end: RequestEnd) -> tuple[int, str]:
    """The token at which the output is wrong, and what is; "" where nothing is."""
    made = [token for visit in account.visits for token in visit.part.output()]
    output, allowed, count = told_ids(end.output), end.info.params.max_tokens, len(end.output)
    if output is None and len(made) == count:  # without token ids only the count can be checked
        output = made
    if made != output:
        lengths = f"the steps emitted {len(made)} tokens, the output has {count}"
        parted = (i for i, (a, b) in enumerate(zip(made, output or (), strict=False)) if a != b)
        at = min(len(made), count) if output is None else next(parted, min(len(made), count))
        return at, lengths + ("" if output is None else f"; they part at token {at}")
    return count, f"{count} tokens where {allowed} were allowed" if count > allowed else ""


def _wrong_end(account: Account, end: RequestEnd) -> str:
    run, params, output = account.history.run, end.info.params, told_ids(end.output) or []
    assert run is not None
    eos = [] if not params.heeds_eos else [i for i, token in enumerate(output) if token in run.eos_tokens]
    if eos and eos[0] < len(output) - 1:
        return f"{len(output) - 1 - eos[0]} tokens after the end of sequence"
    if eos and end.reason is not FinishReason.EOS:
        return f"ended as `{end.reason}` with the end of sequence"
    if end.reason is FinishReason.EOS and not eos:
        return "ended at the end of sequence, which is not in the output"
    count = len(end.output)
    prompt = len(end.info.prompt_tokens)  # 0 where the request's beginning is not in the file
    full = count >= params.max_tokens or not prompt or prompt + count >= run.max_context
    if end.reason is FinishReason.LENGTH and not full:
        return f"ended at the length limit with {count} of {params.max_tokens} tokens"
    stops = [i for i, token in enumerate(output) if token in params.stop_token_ids]
    if stops and stops[0] < len(output) - 1:
        return f"{len(output) - 1 - stops[0]} tokens after a stop token"
    if end.reason is FinishReason.STOP and not end.stop:
        return "" if stops or not params.stop_token_ids else "ended at a stop token, which is not in the output"
    text = account.history.vocabulary.text
    if end.reason is FinishReason.STOP and run.tells_text and end.stop not in text(output):
        return f"ended at the stop string {end.stop!r}, which is not in the output"
    past = end.reason is FinishReason.STOP and run.tells_text and end.stop in text(output[params.min_tokens : -1])
    return f"continued past the stop string {end.stop!r}" if past else ""


def _blocks_written(c: Columns) -> Looked:
    owner: dict[tuple[int, int], str] = {}
    for visit in c.every:
        part, keys = visit.part, [(id(visit.record), block) for block in visit.part.blocks.tolist()]
        shared = [key for key in keys if owner.setdefault(key, part.request) != part.request]
        if keys:
            problem = f"block {shared[0][1]} is written by {owner[shared[0]]} too" if shared else ""
            yield "blocks written", visit, problem


def _blocks_kept(c: Columns) -> Looked:
    """With what the steps committed. Which block holds it is not known before it was written, and after a gap."""
    history = c.history
    assert history is not None
    size = history.run.block_size if history.run is not None else 0
    tables: dict[str, dict[int, int]] = {}  # of each request the blocks with committed tokens, by entry: some not known
    owner: dict[int, str] = {}  # of each block in them
    visits, gap = iter(c.every), False  # whether something of the step before is not in the file

    def release(blocks: Iterable[int]) -> None:
        for block in blocks:
            owner.pop(block, None)

    for record in history.steps if size else ():
        if record.after is not None or record.rewound or gap or record.absent is not None:
            tables, owner = {}, {}
        gap = record.absent is not None
        here = {part.request for part in record.requests}
        for name in (*record.preempted, *(end.info.id for end in record.finished if end.info.id not in here)):
            release(tables.pop(name, {}).values())
        for _ in range(len(record.requests)):
            visit = next(visits)
            part = visit.part
            blocks, name = part.blocks.tolist(), part.request
            first, table, behind = part.context_len // size, tables.setdefault(name, {}), dict[int, int]()
            while table and next(reversed(table)) >= first:
                behind.update([table.popitem()])
            if blocks:
                yield "blocks kept", visit, _wrong_block(name, blocks, first, behind, table, owner)
            release(behind.values())
            held = blocks[: max(-(-(part.position + len(part.tokens())) // size) - first, 0)]
            table.update(enumerate(held, first))
            owner.update(dict.fromkeys(held, name))
        for end in record.finished:
            release(tables.pop(end.info.id, {}).values())


def _wrong_block(
    request: str, blocks: list[int], first: int, behind: dict[int, int], table: dict[int, int], owner: dict[int, str]
) -> str:
    """`behind`: what the request's table held from entry `first` on; `table`: what it holds before."""
    for entry, block in enumerate(blocks, first):
        if owner.get(block, request) != request:
            return f"writes to block {block}, which holds tokens of {owner[block]}"
        if behind.get(entry, block) != block:
            return f"entry {entry} of its block table is block {behind[entry]}, but it writes to block {block}"
        if block in table.values() or block in blocks[: entry - first]:
            return f"block {block} is in its table twice"
    return ""
