"""A judged tree as plain text, for people who read it in Jaeger, in a log or in a terminal."""

from __future__ import annotations

from specscope.trace.records import Outcome, RequestStep, Verdict
from specscope.trace.tree import ROOT, DraftTree
from specscope.trace.vocabulary import Vocabulary

MARKS = {Outcome.ACCEPTED: "✓", Outcome.REJECTED: "✗", Outcome.UNTRIED: "·"}


def branches(tree: DraftTree) -> list[tuple[int, str]]:
    """(node, the branch characters before it) depth first, siblings in draw order."""
    last = {above: tree.children(above)[-1] for above in {*tree.parent.tolist()}}
    rows: list[tuple[int, str]] = []
    for node, _ in tree.walk():
        path = tree.path_to(node)
        lead = "".join("   " if last[int(tree.parent[a])] == a else "│  " for a in path[:-1])
        rows.append((node, lead + ("└─ " if last[int(tree.parent[node])] == node else "├─ ")))
    return rows


def numbers(tree: DraftTree, verdict: Verdict, node: int) -> str:
    """The evidence of one node in a line: p, q, and for a node that was tried the ratio and the coin."""
    text = f"p={verdict.p[node]:.4f} q={tree.q[node]:.4f}"
    if verdict.outcome[node] != Outcome.UNTRIED:
        text += f" a={verdict.accept_prob[node]:.4f} u={verdict.coin[node]:.4f}"
    return text


def draw_tree(step: RequestStep, vocabulary: Vocabulary) -> str:
    """The tree of a step with every node's verdict, and the final token where it was drawn."""
    verdict = step.verdict
    if verdict is None:
        return f"prefill of {step.prefill_tokens} tokens"
    end = int(verdict.path[-1]) if len(verdict.path) else ROOT
    final = f"{verdict.kind.value} {vocabulary.show(verdict.token)}  p={verdict.final_p:.4f}"
    lines = [f"root @{step.context_len}" + (f"  ⇒ {final}" if end == ROOT else "")]
    for node, lead in branches(step.tree):
        mark = MARKS[Outcome(int(verdict.outcome[node]))]
        token = vocabulary.show(int(step.tree.token[node]))
        tail = f"  ⇒ {final}" if node == end else ""
        lines.append(f"{lead}{mark} {token}  {numbers(step.tree, verdict, node)}{tail}")
    return "\n".join(lines)
