"""What others wrote reaches a terminal as text: it moves no cursor, is no markup, and is not run where it is pasted."""

import json
import shlex
import shutil
import socket
import threading

import pytest

from specscope.terminal import text_console
from tests.processes import SPECSCOPE
from tests.support.commands import run_here
from tests.support.samples import PLANTED, TRACES
from tests.waiting import HANG_SECONDS

ODD = "r0'; touch X; '\x1b]0;gone\x07\r\u202e[/b] $(touch X)"
VERBS = [
    ["report"],
    ["verify"],
    ["diagnose", "--no-audit"],
    ["why"],
    ["diagnose", "--only", "audit"],
    ["tune", "--no-costs"],
    ["compare", PLANTED],
    ["debug", "--commands", "COMMANDS"],
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The faulty capture, whose first request's client chose its id; what a debugger is told over it."""
    folder = tmp_path_factory.mktemp("hostile")
    path, commands = folder / "it's $(touch X) \x1b[7m.jsonl", folder / "commands"
    text = (TRACES / "planted.jsonl").read_text().replace('"r0"', json.dumps(ODD))
    text = text.replace('emitted","value":{"intValue":"1"', 'emitted","value":{"intValue":"0"', 1)  # not consistent
    path.write_text(text.replace('"fox', json.dumps("\x1b[2J fox")[:-1]))
    commands.write_text("info requests\ngoto 3\ninfo request\ntree\nnode 0\nwhy\nwhere\n")
    return path, commands


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_an_id_and_a_name_are_plain_text_everywhere_and_a_command_that_is_suggested_is_one_command(words, hostile):
    path, commands = hostile
    _, out, err = run_here([str(commands) if word == "COMMANDS" else word for word in words] + [str(path)])
    for line in (out + err).splitlines():
        assert line.isprintable()
    assert "internal error" not in err
    assert out or "audit" in words  # which asks for a model
    found = [line[line.index("specscope ") :] for line in out.splitlines() if "specscope " in line and "touch" in line]
    assert found or words[0] not in ("verify", "diagnose", "why") or "audit" in words
    for command in found:
        name, _, *words = shlex.split(command)
        assert name == "specscope"
        (place,) = words
        assert place.partition("#")[0] == str(path.parent) + "/it's $(touch X) \\x1b[7m.jsonl"


@pytest.mark.parametrize("words", [["verify"], ["compare", PLANTED]], ids=lambda words: words[0])
def test_a_path_is_never_markup(terminal, words, tmp_path):
    """Nor a template of a bar."""
    folder = tmp_path / "a["
    folder.mkdir()
    odd, plain = folder / "b].{0}jsonl", tmp_path / "plain.jsonl"
    for path in (odd, plain):
        shutil.copy(TRACES / "ngram.jsonl", path)
    expected, ended = run_here([*words, str(plain)])[0], run_here([*words, str(odd)])
    assert ended[0] == expected, ended
    shown = terminal(*SPECSCOPE, *words, odd)
    assert shown.process.wait(HANG_SECONDS) == expected, shown.screen


def test_a_capture_to_such_a_path_ends_well(tiny, tmp_path):
    folder = tmp_path / "a["
    folder.mkdir()
    model = ["--target", str(tiny), "--dtype", "float32", "--kv-memory", "0.01", "--threads", "1"]
    code, _, err = run_here(
        ["capture", "abc abc", "-o", str(folder / "b].jsonl"), "--max-tokens", "3", "--raw", *model]
    )
    assert code == 0, err
    assert "a[/b].jsonl" in err


def test_a_console_prints_no_markup_and_no_control_characters(capsys):
    console = text_console()
    console.print("[bold]a[/b]\x1b[31m\x07", highlight=False)
    console.print("two\nlines", highlight=False)
    assert capsys.readouterr().out == "[bold]a[/b]\\x1b[31m\ntwo\nlines\n"


def test_what_listens_on_a_debugger_s_socket_moves_no_cursor(tmp_path):
    path, commands = tmp_path / "s", tmp_path / "commands"
    commands.write_text("info requests\n")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()

    def answer():
        client, _ = listening.accept()
        with client, client.makefile("rb") as lines:
            for _ in range(2):
                client.sendall(json.dumps({"text": "one\n\x1b]52;c;eA==\x07two"}).encode() + b"\n")
                lines.readline()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    code, out, err = run_here(["debug", str(path), "--commands", str(commands)])
    listening.close()
    assert code == 0, err
    assert out.count("one\n\\x1b]52;c;eA==\\x07two") == 2
    assert "\x1b" not in out + err
