"""What the debugger says about a step, and about why a run stopped, as plain text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specscope.debug.answers import BreakpointHit, Stop, StopReason
from specscope.debug.session import Session
from specscope.trace.history.history import History
from specscope.trace.history.place import at, decision_text, ended_by, why_step
from specscope.trace.history.place import why as why_node
from specscope.trace.history.wording import about_method, accepted_text, plural, probability
from specscope.trace.record.aggregate import LeftOut
from specscope.trace.record.draft_vocabulary import NOT_TOLD, draft_tokens, lacks_draft_tokens
from specscope.trace.record.records import PHASES, DraftNotes, RequestStep, RunInfo, StepRecord
from specscope.trace.record.vocabulary import printable
from specscope.trace.words import FLIPS, NEAR_TIE, NODE, about_likeliest, draw_tree, likeliest, node_rows, request_row

TAIL = 12  # tokens of the context that are shown
FED = 12  # rows fed to a head that are shown
NOTHING_LEFT = "nothing is left to run"
AT_THE_END = f"{NOTHING_LEFT} after the last step: goto start goes before the first"


def where(session: Session) -> str:
    """The step, the current request and its verdict in one line; the current node in another."""
    record, part, request = session.record, session.part, session.current_request
    if record is None or part is None or request is None:
        return "before the first step"
    own = session.part_record or record
    absent = "" if own is record else f"step {record.step} without {printable(request.id)}, whose last step was "
    line = f"{absent}step {own.step}  {printable(request.id)}@{part.index}  "
    verdict = part.verdict
    line += accepted_text(part)
    if verdict is None:
        return line
    line += f" → {verdict.kind.value} {session.history.vocabulary.show(verdict.token)}"
    if len(verdict.forced):
        line += "  (forced: not lossless)"
    if len(part.tree) in session.history.near_ties(part):
        line += f"  ({NEAR_TIE}: margin {verdict.final_margin:.1e})"
    return line if session.node is None else line + "\n" + _node_line(session, part, session.node)


def _node_line(session: Session, part: RequestStep, node: int) -> str:
    verdict, vocabulary = part.verdict, session.history.vocabulary
    assert verdict is not None
    token = vocabulary.show(int(part.tree.token[node]))
    line = f"node {node} {token} at depth {int(part.tree.depth[node])}: {decision_text(part, node, vocabulary)}"
    tie = node in session.history.near_ties(part)
    return line + (f"  ({NEAR_TIE}: margin {verdict.margin[node]:.1e})" if tie else "")


def why(session: Session, node: int | None) -> str:
    """Why a node was kept or not; None: the step's path, and what ended it."""
    record, part, request = session.part_record, session.part, session.current_request
    if record is None or part is None or request is None:
        return "nothing has run yet"
    history = session.history
    sentences = why_step(history, record, part) if node is None else why_node(history, part, node)
    about = node if node is not None else ended_by(part)
    return "\n".join([*sentences, *session.typical(part, about)])


def node(session: Session, number: int) -> str:
    """A node: why it was kept or not, what both models thought there, its siblings, the context's tail."""
    part, request = session.part, session.current_request
    assert part is not None
    assert part.verdict is not None
    assert request is not None
    place, show = at(part, number), session.history.vocabulary.show
    lines = [f"node {number} at depth {int(part.tree.depth[number])}", why(session, number)]
    rows = node_rows(session.history, place, show)
    lines += [f"{label}: {text}" if label else text for label, text, _ in rows]
    for name, tokens in likeliest(place):
        lines.append(f"{name}: " + ", ".join(f"{show(top.token)} {probability(top.prob)}" for top in tokens))
    lines += about_likeliest(place, show)
    lines += [f"  sibling: {_node_line(session, part, other)}" for other in place.children if other != number]
    run = session.history.run
    if request.info is not None and (run is None or run.is_ours) and not part.verdict.is_greedy:
        lines.append(f"coins of: seed {request.info.params.seed}, stream verify, position {part.position}")
    step = next(i for i, step in enumerate(request.steps) if step.index == part.index)
    path = [int(part.tree.token[i]) for i in part.tree.path_to(number)][:-1]
    tail = [*request.before(step, TAIL), *path][-TAIL:]
    lines.append("context: … " + " ".join(map(show, tail)))
    return "\n".join(lines)


def begun(session: Session) -> str:
    """What an engine holds between two phases: the trees before they are judged, the logits' size."""
    current = None if session.engine is None else session.engine.current
    if current is None:
        return ""
    lines, has_drafted = [], len(current.phases) > PHASES.index("draft")
    for turn in current.turns:
        tokens = " ".join(session.history.vocabulary.show(int(t)) for t in turn.draft.tree.token)
        drafted = f"{plural(len(turn.draft.tree), 'node')} drafted{': ' + tokens if tokens else ''}"
        lines.append(f"{turn.request.id}: " + (drafted if has_drafted else f"{plural(turn.feed, 'token')} to feed"))
    rows = [plural(len(turn.logits), "row") for turn in current.turns if turn.logits is not None]
    if rows:
        lines.append("logits of " + ", ".join(rows))
    return "\n".join(lines)


def tree(session: Session) -> str:
    part, record = session.part, session.part_record
    if part is None or record is None:
        return "nothing has run yet"
    which = f"of step {record.step}; a step is in progress, and node N shows its nodes:\n" if session.phase else ""
    return which + draw_tree(part, session.history.vocabulary)


def breakpoints(session: Session) -> str:
    lines = []
    for point in session.breakpoints.points.values():
        hits = f"  (hit {plural(point.hits, 'time')})" if point.hits else ""
        lines.append(f"{point.number:>3}  {point.describe()}{hits}")
    return "\n".join(lines) or "no breakpoints"


def requests(session: Session) -> str:
    """A line for each request, as of the step that ran last: what came later is not shown."""
    lines = []
    for request in session.history.requests.values():
        row = request_row(request, session.position, session.history.vocabulary)
        if row.state == "later":
            continue
        mark = "▸" if session.current_request is request else " "
        figures = "" if row.tau is None else f"τ {row.tau:.2f}"
        line = f"{mark} {printable(row.name):<6} {row.state:<12} {plural(row.steps, 'step'):>11}  {figures:<7}"
        lines.append(f"{line} {printable(row.prompt[:50])}")
    return "\n".join(lines) or "no requests"


def step(session: Session) -> str:
    """Phases and batch of the step that ran last."""
    record = session.record
    if record is None:
        return "nothing has run yet"
    times = "  ".join(
        f"{printable(p.name)} {(p.end_ns - p.start_ns) / 1e6:.2f} ms" for p in (*record.phases, *record.passes)
    )
    parts = "  ".join(f"{printable(part.request)}: {plural(part.emitted, 'token')}" for part in record.requests)
    queue = f"running {record.running}, waiting {record.waiting}  " if record.is_timed else ""
    text = f"step {record.step}: {times}\n{queue}{parts}"
    text += "".join(f"\n{line}" for line in absent_lines(record))
    if record.left_out is not None and record.left_out.requests:
        text += f"\n{left_out_text(record.left_out)}"
    ties = sum(len(session.history.near_ties(part)) for part in record.requests)
    near = f"1 decision is a {NEAR_TIE}: {FLIPS} it" if ties == 1 else f"{ties} decisions are {NEAR_TIE}s: {FLIPS} them"
    return text + (f"\n{near}" if ties else "")


def absent_lines(record: StepRecord) -> list[str]:
    """What of a step its file does not hold, a line each."""
    absent = record.absent
    if absent is None:
        return []
    lines = [f"{plural(absent.steps, 'engine step')} before it not in this file"] if absent.steps else []
    if absent.requests is None:
        return [*lines, "the engine's step is not in this file: its batch, queue, phases and KV blocks are unknown"]
    if absent.requests:
        names = f" ({', '.join(map(printable, absent.names[:8]))}{', ...' if len(absent.names) > 8 else ''})"
        lines.append(
            f"and {plural(absent.requests, 'request')} of the batch not in this file{names if absent.names else ''}"
        )
    return lines


def left_out_text(left_out: LeftOut) -> str:
    """What trace sampling took out of a step: the step's times include these requests."""
    fed = f"{plural(left_out.prefill_tokens, 'prompt token')}, " if left_out.prefill_tokens else ""
    counts = (
        f"{fed}{plural(left_out.drafted, 'node')}, {left_out.accepted:,} accepted, {plural(left_out.emitted, 'token')}"
    )
    return f"and {plural(left_out.requests, 'request')} left out by sampling: {counts}"


def branches(session: Session) -> str:
    """Where each branch begins, and which one this is."""
    lines = []
    for branch in session.history.branches.values():
        mark = "▸" if branch.number == session.history.branch else " "
        lines.append(f"{mark} {branch.number}  {branch.begins()}")
    return "\n".join(lines)


def kv(session: Session) -> str:
    """Blocks of the cache, and what the step wrote and moved; for a live engine, which request holds which blocks."""
    record, run = session.record, session.history.run
    if record is None:
        return "nothing has run yet"
    live = getattr(session.engine, "requests", {})
    cached = f", of which {record.blocks_cached} hold a prefix that may be found" if record.blocks_cached else ""
    lines = [f"{record.blocks_used} blocks used, {record.blocks_free} free{cached}"] if record.is_timed else []
    lines += [_kv_step(part, 0 if run is None else run.block_size) for part in record.requests]
    lines += [f"{printable(name)} lost its blocks and will be computed again" for name in record.preempted]
    lines += [
        f"{request.id}: {request.computed} tokens computed, blocks {request.table.blocks}" for request in live.values()
    ]
    return "\n".join(lines)


def _kv_step(part: RequestStep, block_size: int) -> str:
    """What one request's step fed, into which slots, and the moves that were made; older captures have no slots."""
    start, nodes = part.context_len, len(part.tree)
    end = start + part.prefill_tokens + (part.verdict is not None) + nodes
    text = f"{printable(part.request)}@{part.index}: {end - start} rows fed after a context of {start}"
    slots = np.zeros(0, np.int64)
    if block_size and len(part.blocks) > (end - 1) // block_size - start // block_size:
        positions = np.arange(start, end)  # no more than the blocks hold
        slots = part.blocks[positions // block_size - start // block_size] * block_size + positions % block_size
        runs = np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1)
        text += ", slots " + ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    if part.verdict is not None and nodes:
        text += f"; {part.verdict.accepted} of {plural(nodes, 'node')} kept"
    first = part.position + 1 - start
    moved = [(slots[first + node], slots[first + i]) for i, node in enumerate(part.moved.tolist()) if len(slots)]
    pairs = [f"{a} to {b}" for a, b in moved if a != b]
    return text + (f"; moved slot {', '.join(pairs)}" if pairs else "")


def drafter(session: Session) -> str:
    """What drafts, what feeds it, and what it did in the step of the current request."""
    run, part = session.history.run, session.part
    if run is None:
        return "the run's header is missing: its drafter is unknown"
    named = f"{printable(run.drafter)} {printable(run.draft_model)}".rstrip()
    lines = [named + (f", tree {printable(run.tree)}" if run.tree else "")]
    if run.aux_layers:
        lines.append(f"fed by the target's hidden states at layers {', '.join(map(printable, run.aux_layers))}")
    if run.draft_vocab:
        lines.append(_vocabulary(run))
    if part is not None and part.notes is not None and len(part.notes.rows):
        rows = ", ".join(map(str, part.notes.rows.tolist()))
        cached = plural(part.notes.cached, "token")
        lines.append(f"{printable(part.request)}@{part.index}: {cached} in its cache; rows fed in each pass: {rows}")
        lines += _features(part.notes, run.aux_layers, session)
    if part is not None and part.method is not None and (method_lines := about_method(part.method)):
        lines.append(f"{printable(part.request)}@{part.index}: {', '.join(method_lines)}")
    return "\n".join(lines)


def _vocabulary(run: RunInfo) -> str:
    """How many tokens the drafter knows, and among which."""
    known = draft_tokens(run)
    text = f"it knows {plural(run.draft_vocab, 'token')}"
    if lacks_draft_tokens(run):
        return f"{text} of the target's: {NOT_TOLD}"
    if known is None or not len(known):
        return text
    return f"{text} of the target's, with ids from {int(known.min()):,} to {int(known.max()):,}"


def _features(notes: DraftNotes, layers: Sequence[str], session: Session) -> list[str]:
    """The rows that fed a head in its first pass: position, token, and the norm of each layer's hidden state."""
    count = len(notes.fed_token)
    if not count:
        return []
    shown = range(max(count - FED, 0), count)
    named = [f"layer {printable(name)}" for name in layers] or [
        f"layer {i + 1}" for i in range(notes.fed_norms.shape[1])
    ]
    head = f"fed in the first pass, {'the last ' + str(FED) + ' of ' if count > FED else ''}{plural(count, 'row')}: "
    lines = [head + f"position, norms of the features ({', '.join(named)}), token"]
    for row in shown:
        norms = "  ".join(f"{norm:>9.4g}" for norm in notes.fed_norms[row].tolist())
        token = session.history.vocabulary.show(int(notes.fed_token[row]))
        lines.append(f"  {int(notes.fed_position[row]):>6}  {norms}  {token}")
    return lines


def names(session: Session) -> str:
    """The fields that conditions can use."""
    width = max(map(len, NODE))
    return "\n".join(f"{name:<{width}}  {field.about}" for name, field in NODE.items())


def why_text(stop: Stop) -> str:
    """Why the run stopped; empty where the place itself says it."""
    match stop.reason:
        case StopReason.BREAKPOINT:
            return "\n".join(map(hit_text, stop.hits))
        case StopReason.PHASE:
            return f"{stop.phase or 'nothing'} done, of step {stop.step}"
        case StopReason.UNTIL:
            return f"{stop.condition} holds for {printable(stop.request)}"
        case StopReason.FINISHED:
            return f"{printable(stop.request)} has ended"
        case StopReason.END:
            return NOTHING_LEFT if stop.moved or stop.step < 0 else AT_THE_END
        case StopReason.START:
            return "the first step: no breakpoint before" if stop.step >= 0 else ""
        case StopReason.INTERRUPTED:
            return "interrupted"
        case StopReason.STEP:
            return ""


def hit_text(hit: BreakpointHit) -> str:
    node = "" if hit.node is None else f", node {hit.node}"
    return f"breakpoint {hit.number} ({hit.text}) at step {hit.step}, {printable(hit.request)}{node}"


def place_text(stop: Stop, session: Session) -> str:
    """Where the run stopped, as the session stands: its step, request and node; within a step, what there is of it."""
    return begun(session) if stop.reason is StopReason.PHASE else where(session)


def stop_text(stop: Stop, history: History) -> str:
    """Why and where an engine in another process stopped, by its history here."""
    position = history.position_of(stop.step)
    if position is None:
        return why_text(stop)
    session = Session(history, position=position)
    if stop.hits:
        session.request, session.node = stop.hits[0].request, None
        session.node = stop.hits[0].node
    return "\n".join(text for text in (why_text(stop), where(session)) if text)
