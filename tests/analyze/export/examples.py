"""The blocks of EXAMPLES.md and what they print. `python -m tests.analyze.export.examples` writes the outputs anew.

With --print it prints them as JSON. The test runs it so: DuckDB complains of leaks when an interpreter ends that has
run many other tests.
"""

import contextlib
import io
import json
import re
import shlex
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "specscope" / "analyze" / "export" / "EXAMPLES.md"
BLOCK = re.compile(r"```(\w+)\n(.*?)```\n", re.S)


def printed(page):
    """(block, what it prints) of each block that is run, in the order of the page, in a folder of its own."""
    import pandas as pd

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), pd.option_context("display.width", 110):
        Path("traces").symlink_to(ROOT / "traces")
        names = {}
        for language, text in BLOCK.findall(page):
            if language != "text":
                yield text, {"sh": shell, "sql": sql, "python": python}[language](text, names)


def shell(text, _):
    from tests.support.commands import said

    for line in text.splitlines():
        name, *words = shlex.split(line, comments=True)
        assert name == "specscope"
        out = said(words)[0]
        assert out == ""
    return ""


def sql(text, _):
    import duckdb

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        duckdb.sql(text).show(max_width=110)
    return out.getvalue().strip("\n") + "\n"


def python(text, names):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, "EXAMPLES.md", "exec"), names)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def shown(page):
    """(block, the output that stands behind it) likewise."""
    blocks = BLOCK.findall(page)
    for at, (language, text) in enumerate(blocks):
        if language != "text":
            behind = blocks[at + 1] if at + 1 < len(blocks) else ("", "")
            yield text, behind[1] if behind[0] == "text" else ""


def rewritten(page):
    """The page with the outputs as they are."""
    outputs = iter([*printed(page)])
    pieces, end = [], 0
    for block in BLOCK.finditer(page):
        if block[1] == "text":
            pieces.append(page[end : block.start()].rstrip("\n") + "\n")  # dropped: the output is put behind its block
        else:
            out = next(outputs)[1]
            pieces.append(page[end : block.end()] + (f"\n```text\n{out}```\n" if out else ""))
        end = block.end()
    return re.sub(r"\n{3,}", "\n\n", "".join(pieces) + page[end:])


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(json.dumps(list(printed(PAGE.read_text()))))
    else:
        PAGE.write_text(rewritten(PAGE.read_text()))
