"""From step to step: positions, tokens, requests and their KV blocks. Nothing is lost, or mixed up between requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specscope.analyze.evidence.columns import Columns
from specscope.analyze.evidence.visits import Visit
from specscope.analyze.findings import Finding
from specscope.analyze.verify.exact import Check
from specscope.trace.history.history import History
from specscope.trace.record.privacy import told_ids
from specscope.trace.record.records import FinishReason, RequestEnd

Looked = Iterator[tuple[Visit, str]]  # each place that was looked at, and what is wrong there: "" for nothing


def from_step_to_step(c: Columns) -> Iterator[Finding]:
    """All checks, over every step of every request."""
    accounts = list(Account.all(c))
    for name, about, unit, look in OF_REQUESTS:
        yield _found(Check(c, name, about, unit), (seen for account in accounts for seen in look(account)))
    for name, about, look_at_all in OF_BLOCKS:
        note = "the capture does not tell which blocks were written"
        yield _found(Check(c, name, about, STEP), look_at_all(c), note)


def _found(check: Check, looked: Iterable[tuple[Visit, str]], note: str = "") -> Finding:
    every, places = check.c.every, list(looked)
    problems = {visit.number: problem for visit, problem in places if problem}
    tested, bad = np.zeros((2, len(every)), np.bool_)
    tested[[visit.number for visit, _ in places]] = True
    bad[list(problems)] = True
    why = "" if places else note
    return check.of(bad, tested, problems.__getitem__, why, lambda place: every[place].reference())


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
        """Those of all requests."""
        history = c.history
        assert history is not None
        for visits in c.by_request:
            first, last = visits[0].part.index, visits[-1].part.index
            gaps = bool(history.lost) and last - first + 1 != len(visits)
            yield Account(visits, history, c.ours, first == 0, gaps)

    @property
    def told_end(self) -> RequestEnd | None:
        """Its end, where all its steps are known and its output is in the capture.

        Older captures made with --no-text have none.
        """
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


def _step_numbers(account: Account) -> Looked:
    for before, visit in account.pairs():
        if before is not None:
            due = before.part.index + 1
            yield visit, "" if visit.part.index == due else f"step {visit.part.index} where {due} was due"


def _once_in_a_batch(account: Account) -> Looked:
    last = -1
    for visit in account.visits:
        yield visit, "twice in one step" if visit.record.step == last else ""
        last = visit.record.step


def _cached(account: Account) -> Looked:
    """A step begins with the KV that the one before left; the first, or after a preemption, with what was found."""
    for before, visit in account.pairs():
        here = visit.part.context_len
        if (visit.preempted and before is not None) or (before is None and visit.part.index == 0):
            if account.ours:  # others share the KV of a common prefix
                reused = visit.part.found
                problem = f"{here} tokens in the cache before any was fed"
                yield visit, "" if here == reused else problem + (f", {reused} were found there" if reused else "")
        elif before is not None:
            part = before.part
            left = part.position + (0 if part.verdict is None else 1 + part.verdict.accepted)
            yield visit, "" if here == left else f"begins with {here} tokens in the cache, the step before left {left}"


def _positions(account: Account) -> Looked:
    """The root is the last token: of the prompt at first, then of what the steps committed."""
    info = account.visits[0].request.info
    due: int | None = None
    if account.whole and info is not None and len(info.prompt_tokens):
        due = len(info.prompt_tokens) - 1
    for before, visit in account.pairs():
        if before is None and visit.part.index:
            due = None
        if visit.part.verdict is not None:
            here = visit.part.position
            if due is not None:
                yield visit, "" if here == due else f"the root is at {here}, the tokens before put it at {due}"
            due = here + 1 + visit.part.verdict.accepted


def _prefill(account: Account) -> Looked:
    info = account.visits[0].request.info
    if not account.whole or account.gaps or info is None or not len(info.prompt_tokens):
        return
    fed = 0
    for visit in account.visits:
        if visit.preempted:
            return  # it began anew
        fed += visit.part.prefill_tokens
        if visit.part.verdict is not None:
            first = account.visits[0].part
            due = len(info.prompt_tokens) - 1 - (first.found if account.ours else first.context_len)
            yield visit, "" if fed == due else f"{fed} prompt tokens fed before the root, {due} were due"
            return


def _emitted(account: Account) -> Looked:
    last, end = account.visits[-1], account.visits[-1].request.end
    dropped = end is not None and end.reason in (FinishReason.CANCELLED, FinishReason.ERROR)  # while its step ran
    for visit in account.visits:
        verdict, count = visit.part.verdict, visit.part.emitted
        if verdict is None:
            continue
        committed = verdict.accepted + 1
        fine = count == committed or (visit is last and (dropped or count > 0) and count < committed)
        yield visit, "" if fine else f"{count} of {committed} committed tokens emitted, and the request went on"


def _outputs(account: Account) -> Looked:
    end, last = account.told_end, account.visits[-1]
    if end is None:
        return
    made = [token for visit in account.visits for token in visit.part.output()]
    output = told_ids(end.output)
    if output is None and len(made) == len(end.output):  # without token ids only the count can be checked
        output = made
    allowed = end.info.params.max_tokens
    if output is None:
        yield last, f"the steps emitted {len(made)} tokens, the output has {len(end.output)}"
    elif made != output:
        parted = [i for i, (a, b) in enumerate(zip(made, output, strict=False)) if a != b]
        same = parted[0] if parted else min(len(made), len(output))
        yield last, f"the steps emitted {len(made)} tokens, the output has {len(output)}; they part at token {same}"
    else:
        yield last, f"{len(output)} tokens where {allowed} were allowed" if len(output) > allowed else ""


def _ends(account: Account) -> Looked:
    end, run = account.told_end, account.history.run
    if end is None or run is None or not end.info.params.is_known or (run.ways.sends_empty and not len(end.output)):
        return  # without output it is the engine's own request
    if run.tells_tokens or end.reason is FinishReason.LENGTH:
        yield account.visits[-1], _wrong_end(account, end)


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
    if end.reason is FinishReason.STOP and run.tells_text:
        text = account.history.vocabulary.text(output)
        if end.stop not in text:
            return f"ended at the stop string {end.stop!r}, which is not in the output"
        if end.stop in account.history.vocabulary.text(output[params.min_tokens : -1]):
            return f"went on behind the stop string {end.stop!r}"
    return ""


def _preceded(account: Account) -> Looked:
    gap = False  # steps before are not known
    for before, visit in account.pairs():
        gap |= before is None and visit.part.index > 0
        if visit.part.verdict is None:
            continue
        if visit.part.preceded is not None and not gap:
            right = visit.part.preceded is visit.due
            yield visit, "" if right else f"says `{visit.part.preceded}`, it was `{visit.due}`"
        gap = False


def _moved(account: Account) -> Looked:
    """Accepted nodes whose KV lay elsewhere are moved to the slots after the root."""
    for visit in account.visits:
        part = visit.part
        if part.verdict is None or not len(part.blocks):
            continue
        path = part.verdict.path
        elsewhere = path[path != np.arange(len(path))].tolist()
        if elsewhere or len(part.moved):
            moved = part.moved.tolist()
            fine = elsewhere and set(elsewhere) <= set(moved) <= set(path.tolist())
            yield visit, "" if fine else f"moved the KV of nodes {moved}, the accepted path is {path.tolist()}"


def _blocks_written(c: Columns) -> Looked:
    owner: dict[tuple[int, int], str] = {}
    for visit in c.every:
        part, keys = visit.part, [(id(visit.record), block) for block in visit.part.blocks.tolist()]
        shared = [key for key in keys if owner.setdefault(key, part.request) != part.request]
        if keys:
            yield visit, f"block {shared[0][1]} is written by {owner[shared[0]]} too" if shared else ""


def _blocks_kept(c: Columns) -> Looked:
    """With what the steps committed. Which block holds it is not known before it was written, and after a gap."""
    history = c.history
    assert history is not None
    size = history.run.block_size if history.run is not None else 0
    tables: dict[str, dict[int, int]] = {}  # of each request the blocks with committed tokens, by entry: some not known
    owner: dict[int, str] = {}  # of each block in them
    gap = False  # something of the step before is not in the file
    visits = iter(c.every)

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
                yield visit, _wrong_block(name, blocks, first, behind, table, owner)
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


STEP, REQUEST = "request step", "request"  # of a request one look, numbered by its step
OF_REQUESTS = (
    ("step numbers", "a request's steps are numbered one by one", STEP, _step_numbers),
    ("requests in a batch", "a request has one part in a step", STEP, _once_in_a_batch),
    (
        "tokens in the cache",
        "a step begins with the KV that the one before left, or that it found at first",
        STEP,
        _cached,
    ),
    ("positions", "the root lies where the tokens before it put it", STEP, _positions),
    ("prompt fed", "before the first token the prompt is fed, each token once", REQUEST, _prefill),
    ("tokens emitted", "every committed token is emitted, except those past the request's end", STEP, _emitted),
    ("outputs", "the output is what the steps emitted, and no longer than allowed", REQUEST, _outputs),
    ("ends", "a request ends where its reason says, and no sooner", REQUEST, _ends),
    ("what preceded", "each step says what its request did before", STEP, _preceded),
    ("accepted KV moved", "accepted nodes that lay elsewhere are moved behind the root", STEP, _moved),
)
OF_BLOCKS = (
    ("blocks written", "no block is written by two requests in one step", _blocks_written),
    ("blocks kept", "a request's blocks stay its own, in their order, until it ends or is preempted", _blocks_kept),
)
