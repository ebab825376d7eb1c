"""A judged tree as plain text, for people who read it in Jaeger, in a log or in a terminal."""

from __future__ import annotations

from specscope.trace.records import Outcome, RequestStep
from specscope.trace.rules import looks_ahead
from specscope.trace.tree import ROOT, DraftTree, Drawn
from specscope.trace.vocabulary import Vocabulary
from specscope.trace.wording import acceptance

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
    `draft` is the probability that the drafter gave the token; where a text drafts beside a model, `from` says whose
    node it is. A node that was accepted because one below it was (rules
    that look ahead) shows the ratio of its path instead of a.
    """
    verdict, tree = step.verdict, step.tree
    if verdict is None:
        return acceptance(step)
    end = int(verdict.path[-1]) if len(verdict.path) else ROOT
    final = f"  ⇒ {verdict.kind.value} {vocabulary.show(verdict.token)}  p={verdict.final_p:.4f}"
    lines = [f"root @{step.context_len + step.prefill_tokens}" + (final if end == ROOT else "")]
    token, q, p, outcome = tree.token.tolist(), tree.q.tolist(), verdict.p.tolist(), verdict.outcome.tolist()
    accept, coin = verdict.accept_prob.tolist(), verdict.coin.tolist()
    draft = [] if step.notes is None else step.notes.prob.tolist()
    drawn, forced = tree.drawn.tolist(), verdict.forced.tolist()
    judged = verdict.judged.tolist() if looks_ahead(verdict.rule) else [True] * len(tree)
    for node, lead in branches(tree):
        text = f"{lead}{MARKS[outcome[node]]} {vocabulary.show(token[node])}  p={p[node]:.4f} q={q[node]:.4f}"
        source = "" if step.method is None else step.method.source_of(node)
        if draft and drawn[node] == DETERMINISTIC and source != "text":
            text += f" draft={draft[node]:.4f}"
        text += f" from {source}" if source else ""
        if outcome[node] != UNTRIED:
            text += f" a={accept[node]:.4f}" if judged[node] else f" ratio={accept[node]:.4f}"
        text += (f" u={coin[node]:.4f}" if coin[node] else "") + (" forced" if node in forced else "")
        lines.append(text + final if node == end else text)
    if step.notes is not None and len(step.notes.dropped_token):
        lines.append(f"re-ranking dropped {len(step.notes.dropped_token)} more")
    return "\n".join(lines)
