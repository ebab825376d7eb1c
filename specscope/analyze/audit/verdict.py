"""What an audit came to, in sentences that name what they cover."""

from __future__ import annotations

from collections.abc import Sequence

from specscope.analyze.audit.tally import Finding
from specscope.analyze.findings import CheckResult
from specscope.trace.history.wording import plural


def verdict(findings: Sequence[Finding], steps: int, unjudged: Sequence[str]) -> str:
    """`steps`: those that were audited. `unjudged`: what was asked for and could not be judged, a sentence each."""
    parts: dict[str, list[Finding]] = {}
    for finding in findings:
        parts.setdefault(_part(finding.check.name), []).append(finding)
    sentences = [_sentence(part, of_part, steps) for part, of_part in parts.items()]
    skipped = [
        f"The drafter was not judged: {one.check.note}."
        for one in parts.get("drafter", [])
        if one.check.result is CheckResult.SKIPPED and not any("drafter" in sentence for sentence in unjudged)
    ]
    said = [sentence for sentence in (*sentences, *skipped, *unjudged) if sentence]
    return " ".join(said) or "Nothing could be judged."


def _part(name: str) -> str:
    return "drafter" if name.startswith("drafter") else name if name in ("context", "committed tokens") else "target"


def _sentence(part: str, findings: Sequence[Finding], steps: int) -> str:
    tested = [one for one in findings if one.check.result is not CheckResult.SKIPPED]
    failed = [one for one in tested if one.check.failed]
    if part == "context":
        return "".join(
            f"{one.check.failed:,} of {plural(one.check.tested, 'step')} cannot follow from what was committed before."
            for one in failed
        )
    if not tested:
        return ""
    whole, verb = ("The committed tokens", "come") if part == "committed tokens" else (f"The {part}", "agrees")
    if failed:
        differ = "; ".join(
            f"{one.check.name} differs at {one.check.failed:,} of {plural(one.check.tested, one.noun)}"
            for one in failed
        )
        return f"{whole} {'do' if verb == 'come' else 'does'} not agree: {differ}."
    nodes = max((one.check.tested for one in tested if one.noun == "node"), default=0)
    count = max(one.check.tested for one in tested) if not nodes else steps
    where = f"{plural(nodes, 'node')} of {plural(count, 'step')}" if nodes else plural(count, "step")
    return f"{whole} {'come out again' if verb == 'come' else verb} at {where}."
