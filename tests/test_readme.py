"""The README's Python example runs as it is written."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_python_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(example.strip().splitlines()) <= 12
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "acceptance length" in printed
    assert "accepted" in printed


def test_every_flag_the_readme_names_exists():
    from specscope.cli.main import cli

    known = {opt for command in _commands(cli) for param in command.params for opt in param.opts}
    known |= {"--help", "--version", "--no-deps", "--lf"}
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", README):
        assert flag in known, flag


def test_the_debuggers_transcript_is_what_it_says():
    from specscope.cli.debug import over_capture

    (block,) = re.findall(r"```console\n(.*?)```", README, re.S)
    first, *rest = re.split(r"^\(specscope\) ", block, flags=re.M)
    commands = over_capture(first.split()[-1])
    assert len(rest) == 4
    for piece in rest:
        line, _, wanted = piece.partition("\n")
        assert commands.run(line) == wanted.rstrip()


def test_the_settings_name_every_action():
    from specscope.tui.keys import ACTIONS

    (listed,) = re.findall(r"The actions: `([^`]*)`", README)
    assert listed.split() == list(ACTIONS)


def _commands(command):
    yield command
    for child in getattr(command, "commands", {}).values():
        yield from _commands(child)
