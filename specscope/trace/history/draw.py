"""A judged tree as plain text, for people who read it in Jaeger, in a log or in a terminal."""

from __future__ import annotations

from specscope.trace.history.place import draft_ps, end, last
from specscope.trace.history.wording import acceptance
from specscope.trace.record.records import Outcome, RequestStep, Verdict
from specscope.trace.record.rules import looks_ahead
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.trace.record.vocabulary import Vocabulary

MARKS: dict[int, str] = {Outcome.ACCEPTED: "✓", Outcome.REJECTED: "✗", Outcome.UNTRIED: "·"}

UNTRIED, DETERMINISTIC = int(Outcome.UNTRIED), int(Drawn.DETERMINISTIC)  # looked up once: trees are drawn in every step


def branches(tree: DraftTree) -> list[tuple[int, str]]:
    """(node, the branch characters before it) depth first, siblings in draw order."""
    children: dict[int, list[int]] = {}
    for node, above in enumerate(tree.parent.tolist()):
        children.setdefault(above, []).append(node)
    rows: list[tuple[int, str]] = []

    def below(above: int, lead: str) -> None:
        siblings = children.get(above, [])
        for node in siblings:
            last = node == siblings[-1]
            rows.append((node, lead + ("└─ " if last else "├─ ")))
            below(node, lead + ("   " if last else "│  "))

    below(ROOT, "")
    return rows


def draw_tree(step: RequestStep, vocabulary: Vocabulary) -> str:
    """The tree of a step with every node's verdict, and the final token where it was drawn.

    A node shows p, q and its coin u, and where it was tried its acceptance probability a. Where q is a point mass,
    `draft p` is the probability that the drafter gave the token; where a text drafts beside a model, `from` says whose
    node it is. A node that was accepted because one below it was (rules that look ahead) shows the ratio of its path
    instead of a. A greedy step has no coin that decides: its nodes show the target's raw p.
    """
    verdict, tree = step.verdict, step.tree
    if verdict is None:
        return acceptance(step)
    greedy, ended = verdict.is_greedy, last(verdict)
    final_p = _p(verdict.final_p, end(step).raw_p if greedy else None)
    final = f"  ⇒ {verdict.kind.value} {vocabulary.show(verdict.token)}  {final_p}"
    lines = [f"root @{step.context_len + step.prefill_tokens}" + (final if ended == ROOT else "")]
    token, p, draft = tree.token.tolist(), verdict.p.tolist(), draft_ps(step)
    noted = step.parents if greedy else None
    tried = [] if noted is None else [node for above in noted.node.tolist() for node in tree.children(above)]
    raw = {} if noted is None else {node: float(noted.raw_p[node]) for node in tried}
    outcome, drawn = verdict.outcome.tolist(), tree.drawn.tolist()
    decided = [""] * len(tree) if greedy else _decided(step, verdict)
    forced = verdict.forced.tolist()
    for node, lead in branches(tree):
        text = f"{lead}{MARKS[outcome[node]]} {vocabulary.show(token[node])}  {_p(p[node], raw.get(node))}"
        if not greedy:
            text += f" q={tree.q[node]:.4f}"
        if draft[node] is not None and drawn[node] == DETERMINISTIC:
            text += f" draft p={draft[node]:.4f}"
        source = "" if step.method is None else step.method.source_of(node)
        text += (f" from {source}" if source else "") + decided[node] + (" forced" if node in forced else "")
        lines.append(text + final if node == ended else text)
    if step.notes is not None and len(step.notes.dropped_token):
        lines.append(f"re-ranking dropped {len(step.notes.dropped_token)} more")
    return "\n".join(lines)


def _decided(step: RequestStep, verdict: Verdict) -> list[str]:
    """[n] the text of each node's acceptance probability and coin, where it has them."""
    judged = verdict.judged.tolist() if looks_ahead(verdict.rule) else [True] * len(step.tree)
    rows = zip(verdict.outcome.tolist(), judged, verdict.accept_prob.tolist(), verdict.coin.tolist(), strict=True)
    texts = []
    for outcome, was_judged, accept, coin in rows:
        tried = "" if outcome == UNTRIED else f" a={accept:.4f}" if was_judged else f" ratio={accept:.4f}"
        texts.append(tried + (f" u={coin:.4f}" if coin else ""))
    return texts


def _p(p: float, raw_p: float | None) -> str:
    return f"p={p:.4f}" if raw_p is None else f"raw p={raw_p:.4f}"
