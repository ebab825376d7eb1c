"""Text in a pipe is never cut or wrapped; in a narrow terminal it folds, and no key column is lost."""

import io
import json

import pytest
from rich.cells import cell_len
from rich.console import Console

from specscope.analyze.table import Table
from specscope.analyze.text import table_block
from tests.support.commands import run_here
from tests.support.samples import EAGLE, PLANTED, ROOT, SAMPLED


def shown(table: Table, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(table_block(table))
    return [line.rstrip() for line in out.getvalue().splitlines()]


PIPED = [
    ("report", EAGLE),
    ("compare", EAGLE, SAMPLED),
    ("verify", PLANTED),
    ("diagnose", PLANTED, "--no-audit"),
    ("tune", EAGLE, "--no-costs", "--nodes", "12"),
    ("watch", str(ROOT / "tests/data/vllm/chat_greedy.json"), "--headless"),
]


@pytest.mark.parametrize("words", PIPED, ids=[words[0] for words in PIPED])
def test_piped_text_is_never_cut(words, monkeypatch):
    """Not at 80 columns, and not where a shell exports its own width."""
    monkeypatch.setenv("COLUMNS", "40")
    out = run_here(words)[1]
    monkeypatch.setenv("COLUMNS", "80")
    assert run_here(words)[1] == out
    lines = out.splitlines()
    assert max(map(len, lines)) > 80
    if words[0] == "tune":
        trees = [row["tree"] for row in json.loads(run_here([*words, "--json"])[1])["trees"]]
        assert max(map(len, trees)) > 40
        assert [tree for tree in trees if tree not in out] == []
    if words[0] == "compare":
        assert "dynamic:16,depth=5,top=4" in out
        assert "…" not in out.split("Where outputs part")[0]
    assert [line for line in lines if line != line.rstrip() and len(line) > 200] == []  # nor padded to some width


FIGURES = ("vLLM", "corrected", "conditional", "proposed", "tried", "accepted")
DEPTHS = Table("Per position", ("depth", *FIGURES), [(str(n), *(f"{n}{at}.0%" for at in range(6))) for n in (1, 2)])


@pytest.mark.parametrize("width", [30, 40, 60, 68, 69, 200])
def test_a_table_without_room_goes_on_below_with_its_key(width):
    """Every figure is there in full, and each part begins with the key column."""
    lines = shown(DEPTHS, width)
    assert max(map(cell_len, lines)) <= width
    heads = [at for at, line in enumerate(lines) if line.startswith("depth")]
    assert [name for at in heads for name in lines[at].split()[1:]] == list(FIGURES)
    for number, at in ((1, 2), (2, 3)):
        cells = [cell for head in heads for cell in lines[head + at].split()]
        assert [cell for cell in cells if cell == str(number)] == [str(number)] * len(heads)
        assert [cell for cell in cells if "%" in cell] == list(DEPTHS.rows[number - 1][1:])
    assert (len(heads) == 1) is (width >= 69)


def test_words_fold_and_what_is_long_by_nature_is_cut():
    columns, words = ("key", "n", "condition", "prompt"), frozenset(["condition", "prompt"])
    row = ("k" * 30, "1", "when depth > 3 and q < 0.2", "p" * 90)
    folding = Table("", columns, [row], words=words, cut=frozenset(["prompt"]))
    lines = shown(folding, 60)
    text = "\n".join(lines)
    assert text.count("k") == 30 + 1
    for word in ("when", "depth", "> 3", "and", "q <", "0.2"):
        assert word in text
    assert sum("p…" in line for line in lines) == 1
    assert "p" * 90 in "\n".join(shown(folding, 300))
