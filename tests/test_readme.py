"""What README and BENCHMARKS say can be done can be done."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "BENCHMARKS.md").read_text()


def test_the_python_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(example.strip().splitlines()) <= 12
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "acceptance length" in printed
    assert "accepted" in printed


def test_every_flag_the_readme_names_exists():
    from specscope.cli.main import cli

    params = [param for command in _commands(cli) for param in command.params]
    known = {opt for param in params for opt in (*param.opts, *param.secondary_opts)}
    known |= {"--help", "--version", "--no-deps", "--lf", "--speculative-config"}  # pip's, pytest's and vLLM's
    known |= {"--otlp-traces-endpoint", "--enable-trace", "--save-result", "--tail"}  # vLLM's, SGLang's and docker's
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", README + BENCHMARKS):
        assert flag in known, flag


def test_every_test_and_file_the_readme_names_exists():
    tests = [word for command in re.findall(r"`pytest ([^`]*)`", README) for word in command.split() if "/" in word]
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README + BENCHMARKS) if "://" not in link]
    assert len(tests) > 10
    assert len(links) > 5
    for path in (*tests, *links):
        assert (ROOT / path).exists(), path


def test_every_command_the_readme_shows_is_one():
    from specscope.cli.main import cli

    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.S))
    shown = [line.split("#")[0].split() for line in re.findall(r"^specscope (.*)$", blocks, re.M)]
    assert len(shown) > 10
    for verb, *rest in shown:
        command = cli.commands[verb]
        known = {opt for param in command.params for opt in param.opts} | set(getattr(command, "commands", ()))
        assert not [word for word in rest[: 1 if verb in ("train", "bench") else 0] if word not in known]


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


def test_the_diagnosis_is_what_it_says():
    from tests.test_bad_input import run_here

    (block,) = re.findall(r"```text\n\$ specscope (diagnose .*?)```", README, re.S)
    command, _, shown = block.partition("\n")
    code, out, _ = run_here(command.split())
    assert code == 1
    assert out.split() == shown.split()  # which is as wide as a terminal
