"""Help: verbs in groups with examples that parse, `-V`, and completion in a shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

import specscope
from specscope.__main__ import EXTRAS
from specscope.cli.help import VARIABLES, examples
from specscope.cli.main import GROUPS, cli
from specscope.cli.serve import KEY
from specscope.trace.inside import settings
from tests.support.commands import run_here
from tests.waiting import HANG_SECONDS

PAGE = Path(__file__).parents[2] / "docs" / "start.md"


def commands(group=cli, path=()):
    """(words, command) of every command, groups too."""
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


COMMANDS = dict(commands())


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


def test_every_verb_is_in_one_group():
    named = [name for names in GROUPS.values() for name in names]
    assert len(named) == len(set(named))
    assert set(named) - {"why"} == set(cli.commands) - {"why"}


def test_the_help_has_the_verbs_in_groups_with_an_example_each():
    code, out, _ = run_here(["--help"])
    assert code == 0
    lines = out.splitlines()
    assert [line for line in lines if line in [f"{title}:" for title in GROUPS]] == [f"{title}:" for title in GROUPS]
    for name in cli.commands:
        at = next(at for at, line in enumerate(lines) if line.startswith(f"  {name} ") and at > lines.index("Make:"))
        assert any(line.strip().startswith(f"specscope {name}") for line in lines[at + 1 : at + 4]), name
    assert run_here([])[1] == out


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_verbs_help_has_an_example_that_parses(words):
    command, out = COMMANDS[words], run_here([*words, "--help"])[1]
    found = examples(command)
    assert found
    assert all(example in out for example in found)
    assert any(example.startswith(f"specscope {' '.join(words)}") for example in found)
    for example in found:
        said = shlex.split(example)[1:]
        depth = 2 if isinstance(cli.commands[said[0]], click.Group) and len(said) > 1 else 1
        verb = COMMANDS[tuple(said[:depth])]
        verb.make_parser(click.Context(verb)).parse_args(said[depth:])  # an unknown flag raises


def test_the_version():
    assert run_here(["-V"]) == run_here(["--version"]) == (0, f"specscope, version {specscope.__version__}\n", "")


def completed(*words):
    """What bash is told to complete the last word with."""
    environment = {
        **os.environ,
        "_SPECSCOPE_COMPLETE": "bash_complete",
        "COMP_WORDS": shlex.join(["specscope", *words]),
        "COMP_CWORD": str(len(words)),
    }
    command = [sys.executable, "-m", "specscope"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_SECONDS).stdout.split()


def test_completion():
    assert completed("re") == ["plain,report"]
    assert "plain,--branch" in completed("report", "--")
    assert completed("report", "tra") == ["file,tra"]
    assert completed("compare", "a.jsonl", "b") == ["file,b"]


def test_the_script_that_the_readme_names_is_clicks():
    assert 'eval "$(_SPECSCOPE_COMPLETE=bash_source specscope)"' in PAGE.read_text()
    environment = {**os.environ, "_SPECSCOPE_COMPLETE": "bash_source"}
    command = [sys.executable, "-m", "specscope"]
    out = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_SECONDS).stdout
    assert "complete -o nosort -F _specscope_completion specscope" in out


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_verbs_usual_flags_fit_on_a_screen_and_all_are_there_by_group(words):
    short, whole = (run_here([*words, flag])[1].partition("\nOptions:\n")[2] for flag in ("--help", "--help-all"))
    assert len(short.partition("\n\n")[0].splitlines()) <= 27
    assert max(map(len, (short + whole).splitlines())) <= 110
    options = {one.opts[-1] for one in COMMANDS[words].params if isinstance(one, click.Option) and not one.hidden}
    assert not {name for name in options if name not in whole}
    assert {f"plain,{name}" for name in options} <= {*completed(*words, "--"), *completed(*words, "-o")}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_what_leaves_the_process_follows_the_same_variables_in_every_verb(words):
    """Privacy must not depend on the verb; `--sample N` of a judge is another flag than that of traces."""
    for param in COMMANDS[words].params:
        assert param.envvar == {"api_key": KEY, **VARIABLES}.get(param.name) or param.name in ("capture", "debug")
    assert VARIABLES["no_text"] == settings.NO_TEXT
