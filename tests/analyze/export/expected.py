"""The rows that records should give, one value at a time: slow, plain, and not the way that the export does it."""

import json

from specscope.trace.history.history import History
from specscope.trace.history.totals import why_undrafted
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import Outcome
from specscope.trace.record.tree import Drawn

PHASES = ("schedule", "draft", "forward", "verify", "commit")
ANY = object()  # a value that does not follow from the records alone


def clean(text):
    return text.encode("utf-8", "backslashreplace").decode()


def piece(vocabulary, token):
    found = vocabulary.pieces.get(token)
    return None if found is None else found.decode("utf-8", "backslashreplace")


def current_steps(records):
    """The steps on the way to the last one."""
    history = History()
    for record in records:
        history.append(record)
    return {record.step for record in history.steps}


def tables(records, run, capture, vocabulary):
    """All tables but `runs` and `tokens`, as lists of rows by name."""
    current = current_steps(records)
    of = {"run": run.run_id, "capture": capture}
    made = {
        "requests": list(requests(records, current, vocabulary)),
        "steps": [],
        "nodes": [],
        "finals": [],
        "intervals": [interval(record) for record in records if record.aggregate],
    }
    lengths = {}
    for record in records:
        lengths |= {info.id: len(info.prompt_tokens) for info in record.admitted}
        for part in record.requests:
            key = {
                "step": record.step,
                "branch": record.branch,
                "current": record.step in current,
                "request": clean(part.request),
                "index": part.index,
            }
            made["steps"].append(key | step(run, record, part, lengths.get(part.request)))
            if part.verdict is not None:
                made["nodes"] += [key | node(part, number, vocabulary) for number in range(len(part.tree))]
                made["finals"].append(key | final(part, vocabulary))
    return {name: [of | row for row in rows] for name, rows in made.items()}


def step(run, record, part, length):
    took = {phase.name: phase.end_ns - phase.start_ns for phase in record.phases}
    verdict, notes, method = part.verdict, part.notes, part.method
    known = verdict is not None and length
    return {
        "start_ns": record.phases[0].start_ns,
        "step_ns": record.phases[-1].end_ns - record.phases[0].start_ns,
        **{f"{name}_ns": took.get(name) for name in PHASES},
        "pass_ns": [one.end_ns - one.start_ns for one in record.passes],
        "device_ns": list(record.device_ns),
        "batch": len(record.requests)
        + (record.left_out.requests if record.left_out else 0)
        + (record.absent.requests or 0 if record.absent else 0),
        **{name: getattr(record, name) for name in ("running", "waiting", "blocks_used", "blocks_free")},
        "speculation": record.speculation,
        "speculation_off": record.speculation_off or None,
        "budget": record.budget,
        "context_len": part.context_len,
        "prefill_tokens": part.prefill_tokens,
        "found": part.found,
        "output_position": part.context_len + part.prefill_tokens + 1 - length if known else None,
        "preceded": part.preceded.value if part.preceded else None,
        "drafter": part.drafter,
        "rule": part.rule,
        "sizing": part.sizing or None,
        "undrafted": why_undrafted(run, record, part),
        "nodes": len(part.tree),
        "depth": part.tree.max_depth,
        "dropped": len(notes.dropped_token) if notes else None,
        "drafter_cached": notes.cached if notes else None,
        "accepted": len(verdict.path) if verdict else None,
        "emitted": part.emitted,
        "kind": verdict.kind.value if verdict else None,
        "forced": bool(len(verdict.forced)) if verdict else None,
        **{
            name: (getattr(method, name) if method else None)
            for name in ("one_pass", "unverified", "match_length", "match_count")
        },
        "match_source": (method.match_source or None) if method else None,
    }


def _drawn(notes, number, sampled):
    """The coin that drew a node's token, and the lower end of its interval, where that is recorded."""
    known = sampled and notes is not None and len(notes.coin) and float(notes.coin[number])
    return {
        "draft_coin": float(notes.coin[number]) if known else None,
        "draft_low": (float(notes.low[number]) if len(notes.low) else 0.0) if known else None,
    }


def node(part, number, vocabulary):
    tree, verdict, notes, method, parents = part.tree, part.verdict, part.notes, part.method, part.parents
    has_p = verdict.final_p != 0 or len(tree) in verdict.forced.tolist()
    outcome = Outcome(verdict.outcome[number])
    tried = has_p and outcome is not Outcome.UNTRIED
    drawn = Drawn(tree.drawn[number])
    coin = float(verdict.coin[number])
    forced = number in verdict.forced.tolist()
    has_margin = tried and (coin or verdict.margin[number] == 1)
    above = int(tree.parent[number])
    at = parents.node.tolist().index(above) if parents and above in parents.node.tolist() else None
    given, sampled, model = at is not None, drawn is not Drawn.DETERMINISTIC, False
    if given:
        model = bool((parents.draft_top_p[at] > 0).any())  # a head beside a text does not look everywhere

    def of_parent(name, known=True):
        return getattr(parents, name)[at].item() if given and known else None

    def of_list(name, known=True):
        return getattr(parents, name)[at].tolist() if given and known else None

    def of_node(values, known=True):
        return values[number].item() if known else None

    return {
        "node": number,
        "parent": above,
        "depth": len(tree.path_to(number)),
        "sibling": tree.children(above).index(number) + 1,
        "token": int(tree.token[number]),
        "piece": piece(vocabulary, int(tree.token[number])),
        "drawn": drawn.name.lower(),
        "q": of_node(tree.q),
        "outcome": outcome.name.lower(),
        "forced": forced,
        "judged": bool(verdict.judged[number]),
        "p": of_node(verdict.p, has_p),
        **{name: of_node(getattr(verdict, name), tried) for name in ("p_trial", "q_trial", "accept_prob")},
        "coin": coin or None,
        **_drawn(notes, number, sampled),
        "residual_mass": of_node(verdict.residual_mass, has_p and outcome is Outcome.REJECTED),
        "margin": of_node(verdict.margin, has_margin),
        "draft_p": of_node(notes.prob) if notes and not sampled else None,
        "score": of_node(notes.score) if notes else None,
        "confidence": of_node(method.confidence) if method and len(method.confidence) else None,
        "module": of_node(method.module) if method and len(method.module) else None,
        "source": method.source_of(number) if method and len(method.source) else None,
        "raw_p": of_node(parents.raw_p) if given else None,
        "rank": (of_node(parents.rank) or None) if given else None,
        "q_rank": (of_node(parents.q_rank) or None) if given else None,
        "parent_choice": of_parent("choice"),
        "parent_choice_p": of_parent("choice_p"),
        "parent_entropy": of_parent("entropy"),
        "parent_varentropy": of_parent("varentropy"),
        "parent_q_entropy": of_parent("q_entropy", sampled),
        "parent_q_varentropy": of_parent("q_varentropy", sampled),
        "parent_choice_rank": of_parent("choice_rank", model),
        "parent_choice_q": of_parent("choice_q", model),
        "parent_outside": of_parent("outside", model),
        "parent_top": of_list("top"),
        "parent_top_p": of_list("top_p"),
        "parent_draft_top": of_list("draft_top", model),
        "parent_draft_top_p": of_list("draft_top_p", model),
    }


def final(part, vocabulary):
    verdict, parents = part.verdict, part.parents
    forced = len(part.tree) in verdict.forced.tolist()
    return {
        "token": verdict.token,
        "piece": piece(vocabulary, verdict.token),
        "kind": verdict.kind.value,
        "emitted": part.emitted == len(verdict.path) + 1,
        "forced": forced,
        "p": verdict.final_p if verdict.final_p or forced else None,
        "coin": verdict.final_coin or None,
        "margin": verdict.final_margin,
        "entropy": parents.final_entropy if parents else None,
        "varentropy": parents.final_varentropy if parents else None,
        "target_p": parents.final_target_p if parents else None,
    }


def requests(records, current, vocabulary):
    seen, infos, last, told = {}, {}, {}, set()
    ended, ended_there, there = set(), set(), set()
    for record in records:
        for info in record.admitted:
            infos[info.id] = info
        ends = [end.info.id for end in record.finished]
        for name in [*(i.id for i in record.admitted), *(part.request for part in record.requests), *ends]:
            seen[name], last[name] = True, record.branch
            there |= {name} if record.step in current else set()
        for part in record.requests:
            if part.verdict is not None:
                told |= {part.verdict.token, *part.tree.token.tolist()}
        for end in record.finished:
            ended.add(end.info.id)
            ended_there |= {end.info.id} if record.step in current else set()
            yield request(end.info.id, end.info, end, record.branch, record.step in current, vocabulary, told)
    for name in seen:
        if name not in ended or (name in there and name not in ended_there):
            yield request(name, infos.get(name), None, last[name], name in there, vocabulary, told)


def request(name, info, end, branch, current, vocabulary, told):
    tokens = info.prompt_tokens.tolist()
    known = end is not None and told >= set(end.output.tolist())
    params = info.params
    return {
        "request": name,
        "branch": branch,
        "current": current,
        "arrival_ns": info.arrival_ns,
        "admitted_ns": info.admitted_ns,
        "finished_ns": end.finished_ns if end else None,
        "reason": end.reason.value if end else None,
        "stop": (clean(end.stop) or None) if end else None,
        "error": (clean(end.error) or None) if end else None,
        "title": clean(info.title) or None,
        "prompt": clean(info.prompt) or None,
        "prompt_tokens": tokens or None,
        "prompt_length": len(tokens) or None,
        "output": (vocabulary.text(end.output.tolist()) if known else ANY) if end else None,
        "output_tokens": end.output.tolist() if end else None,
        "output_length": len(end.output) if end else None,
        **{
            field: getattr(params, field)
            for field in (
                *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
                *("frequency_penalty", "seed", "max_tokens", "ignore_eos", "min_tokens", "logprobs"),
            )
        },
        "logit_bias": list(params.logit_bias.items()),
        "stop_strings": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "structured_outputs": params.structured_outputs and json.dumps(params.structured_outputs.to_dict()),
        "left_out": list(params.left_out),
        "labels": list(info.labels.items()),
        "traceparent": info.traceparent or None,
        "sampling": None if end is None or end.sampled is None else end.sampled.reason.value,
        "sampling_ratio": None if end is None or end.sampled is None else end.sampled.ratio or None,
    }


def interval(record):
    told = record.aggregate
    names = ("drafts", "drafted", "accepted", "emitted", "running", "waiting", "kv_usage", "reset", "rounded")
    return {
        "step": record.step,
        "start_ns": record.phases[0].start_ns,
        "end_ns": record.phases[-1].end_ns,
        "source": told.source,
        "engine": told.engine or None,
        "request": told.request or None,
        **{name: getattr(told, name) for name in names},
        "accepted_at": list(told.accepted_at),
        "proposed_at": list(told.proposed_at),
        "averages": list(told.averages.items()),
    }


def run_row(run):
    """The table `runs`, without what is said of the capture."""
    return {
        **{
            name: getattr(run, name)
            for name in (
                *("target", "revision", "drafter", "device", "dtype", "backend", "seed", "max_context", "blocks"),
                *("block_size",),
            )
        },
        "text": run.privacy is Privacy.EVERYTHING,
        "run": run.run_id,
        **{name: getattr(run, name) or None for name in ("draft_model", "tree", "draft_vocab", "evidence")},
        "eos_tokens": list(run.eos_tokens),
        "aux_layers": list(run.aux_layers),
        "versions": list(run.versions.items()),
        "params": json.dumps(dict(run.params), separators=(",", ":")),
        "speculation": json.dumps(dict(run.speculation), separators=(",", ":")),
    }
