"""One HTML file: the template, the bundle of scripts and styles, and the runs as inert blocks of data.

Nothing in the file is fetched from anywhere, and its policy forbids it. What people and models wrote stands in JSON and
in base64 only, and the scripts put it into the page as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from specscope import __version__
from specscope.analyze.compare.side import from_history
from specscope.page.columns import Steps, deflated
from specscope.page.run import about_pair, about_run, prompts, token_counts
from specscope.page.words import safe, words
from specscope.trace.history.history import History
from specscope.whole_file import write_parts

HERE = Path(__file__).parent
POLICY = (
    "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


@dataclass(frozen=True)
class PageRun:
    """A run that is shown."""

    source: str
    history: History
    warnings: Sequence[str]
    diagnosed: tuple[bool, Sequence[str]] | None = None  # whether diagnose found something wrong, and what it says


def write_page(path: str, runs: Sequence[PageRun], findings: str = "verify") -> int:
    """Write a page of a run, or of two that are compared; returns its bytes. Raises UserError."""
    return write_parts(path, page(runs, findings))


def page(runs: Sequence[PageRun], findings: str = "verify") -> Iterator[bytes]:
    """The page, part by part."""
    script, style = ((HERE / name).read_text() for name in ("bundle.js", "bundle.css"))
    steps = [Steps.of(run.history) for run in runs]
    filled = {
        "title": escape(safe(" / ".join(Path(run.source).name for run in runs)), quote=False),
        "policy": POLICY.format(script=_digest(script), style=_digest(style)),
        "style": style,
        "script": script,
    }
    template = re.split(r"\$blocks|\$chunks", (HERE / "page.html").read_text())
    before, behind, rest = (Template(part).substitute(filled) for part in template)
    yield before.encode()
    yield _json("head", _head(runs, steps, findings))
    for number, each in enumerate(steps):
        yield _block(f"{number}-overview", each.overview())
    yield behind.encode()
    for number, (run, each) in enumerate(zip(runs, steps, strict=True)):
        yield _block(f"{number}-vocabulary", each.vocabulary(token_counts(run.history)))
        yield _block(f"{number}-output", each.output())
        yield _block(f"{number}-prompts", deflated(json.dumps(safe(prompts(run.history))).encode()))
        for place, chunk in enumerate(each.chunks()):
            yield _block(f"{number}-{place}", chunk)
    yield rest.encode()


def _head(runs: Sequence[PageRun], steps: Sequence[Steps], findings: str) -> dict[str, Any]:
    """What is read when the page opens."""
    told = []
    for run, each in zip(runs, steps, strict=True):
        about = about_run(run.history, each, run.source, run.warnings, verify=findings == "verify")
        if run.diagnosed is not None:
            failed, (*lines, verdict) = run.diagnosed
            found = {"by": "diagnose", "verdict": verdict, "failed": failed, "groups": (), "lines": lines}
            about["findings"] = found
        told.append(about)
    sides = [from_history(run.history, run.source, run.warnings) for run in runs] if len(runs) == 2 else []
    compared = about_pair(sides[0], sides[1]) if sides else None
    return {"made": f"specscope {__version__}", "words": words(), "runs": told, "comparison": compared}


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(name: str, value: object) -> bytes:
    """Data as JSON, which holds nothing that an HTML parser takes for a tag."""
    text = json.dumps(safe(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    inert = text.replace("<", r"\u003c")
    return f'<script type="application/json" id="{name}">{inert}</script>\n'.encode()


def _block(name: str, data: bytes) -> bytes:
    return b'<script type="text/plain" id="block-%s">%s</script>\n' % (name.encode(), base64.b64encode(data))
