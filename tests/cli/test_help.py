"""Help: verbs in groups with examples that parse, `-V`, and completion in a shell."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete

import specscope
from specscope.__main__ import EXTRAS
from specscope.cli.help import examples
from specscope.cli.main import GROUPS, cli
from specscope.cli.serve import KEY
from specscope.trace.inside import settings
from tests.support.commands import run_here
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
    code, out, _ = run_here(["--help"])
    assert code == 0
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
