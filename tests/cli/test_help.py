"""Help: verbs in groups with examples that parse, `-V`, completion; no text is cut in a pipe, or lost if narrow."""

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete
from rich.cells import cell_len
from rich.console import Console

import specscope
from specscope.__main__ import EXTRAS
from specscope.analyze.table import Table
from specscope.analyze.text import TableBlock
from specscope.cli.help import examples
from specscope.cli.main import GROUPS, cli
from specscope.cli.serve import KEY
from specscope.trace.inside import settings
from tests.support.commands import run_here, said
from tests.support.samples import EAGLE, PLANTED, ROOT, SAMPLED
from tests.waiting import HANG_SECONDS

PAGE = Path(__file__).parents[2] / "docs" / "start.md"


VARIABLES = {  # whose value an option has where its flag is not given
    "api_key": KEY,
    "otlp_endpoint": settings.ENDPOINT,
    "otlp_protocol": settings.PROTOCOL,
    "trace_level": settings.LEVEL,
    "ratio": settings.SAMPLE,
    "evidence": settings.EVIDENCE,
    "no_text": settings.NO_TEXT,
    "no_tokens": settings.NO_TOKENS,
}


WITHOUT = """
import sys

class Lacks:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {lacks}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Lacks())
from specscope.cli.main import cli
print(*(cli.commands[name].name for name in cli.commands))
"""


def test_an_installation_without_extras_has_every_verb():
    """As in vLLM's environment: what a verb needs of an extra is imported when it runs."""
    lacks = set(EXTRAS) - {"grpc"}  # which opentelemetry's exporter brings
    done = subprocess.run([sys.executable, "-c", WITHOUT.format(lacks=lacks)], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (list(cli.commands), "")


def test_the_help_has_the_verbs_in_groups_with_an_example_each():
    out = said(["--help"])[0]
    lines = out.splitlines()
    assert [line for line in lines if line in [f"{title}:" for title in GROUPS]] == [f"{title}:" for title in GROUPS]
    for name in cli.commands:
        at = next(at for at, line in enumerate(lines) if line.startswith(f"  {name} ") and at > lines.index("Make:"))
        assert any(line.strip().startswith(f"specscope {name}") for line in lines[at + 1 : at + 4]), name
    assert run_here([])[1] == out


def test_the_version():
    assert run_here(["-V"]) == run_here(["--version"]) == (0, f"specscope, version {specscope.__version__}\n", "")


def completed(*words):
    """What bash is told to complete the last word with."""
    shell = BashComplete(cli, {}, "specscope", "_SPECSCOPE_COMPLETE")
    return [f"{item.type},{item.value}" for item in shell.get_completions([*words[:-1]], words[-1])]


def test_completion():
    """As a shell asks for it, and as the script that the page names does."""
    assert completed("report", "tra") == ["file,tra"]
    assert completed("compare", "a.jsonl", "b") == ["file,b"]
    assert 'eval "$(_SPECSCOPE_COMPLETE=bash_source specscope)"' in PAGE.read_text()
    asked = {"COMP_WORDS": "specscope re", "COMP_CWORD": "1"}
    for what, says in (("bash_complete", "plain,report\n"), ("bash_source", "complete -o nosort -F _specscope_comp")):
        env = {**os.environ, "_SPECSCOPE_COMPLETE": what, **asked}
        command = [sys.executable, "-m", "specscope"]
        assert says in subprocess.run(command, capture_output=True, text=True, env=env, timeout=HANG_SECONDS).stdout


@pytest.mark.parametrize("name", cli.commands)
def test_a_verbs_usual_flags_fit_on_a_screen_all_are_there_by_group_and_its_examples_parse(name):
    """What leaves the process follows the same variables in every verb: privacy must not depend on it."""
    short, whole = (run_here([name, flag])[1].partition("\nOptions:\n")[2] for flag in ("--help", "--help-all"))
    assert len(short.partition("\n\n")[0].splitlines()) <= 27
    assert max(map(len, (short + whole).splitlines())) <= 110
    options = {one.opts[-1] for one in cli.commands[name].params if isinstance(one, click.Option) and not one.hidden}
    assert not {option for option in options if option not in whole}
    assert {f"plain,{option}" for option in options} <= {*completed(name, "--"), *completed(name, "-o")}
    for param in cli.commands[name].params:
        assert param.envvar == VARIABLES.get(param.name) or param.name in ("capture", "debug")
    found = examples(cli.commands[name])
    assert all(example in run_here([name, "--help"])[1] for example in found)
    assert any(example.startswith(f"specscope {name}") for example in found)
    for example in found:
        _, verb, *words = shlex.split(example)
        cli.commands[verb].make_parser(click.Context(cli.commands[verb])).parse_args(words)  # an unknown flag raises


def shown(table: Table, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(TableBlock(table))
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
