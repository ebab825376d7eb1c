"""Sweeps: damaged captures, flags and prompt files through every verb. No traceback, no hang, no silence.

SPECSCOPE_SWEEP=1500 runs so many cases of each.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path

import click
import pytest

from specscope.cli.main import cli
from specscope.errors import UserError
from tests.sweep import SECONDS, cases, hangs, wrong_with
from tests.trace.damage import SAMPLES, damaged, small
from tests.trace.look_at import look_at

pytestmark = [pytest.mark.slow, pytest.mark.timeout(8 * 3600)]
TRACES = Path(__file__).parent.parent / "traces"
WHOLE = str(TRACES / "planted.jsonl")
SCRIPT = "where\ntree\nnode 0\nrequests\ninfo step\ninfo kv\nbreak reject\ncontinue\nwhy\nnext 3\nwhere\n"
JSON = "--json"
# FILE: the damaged capture; NEW: a name that is free. Each a command that reads captures.
READERS = (
    *(("report", "FILE", *more) for more in ((), (JSON,), (JSON, "--branch", "0"))),
    *(("verify", "FILE", *more) for more in ((), (JSON,))),
    *(("diagnose", "FILE", "--no-audit", *more) for more in ((), (JSON,))),
    *(("compare", *two, *more) for two in (("FILE", WHOLE), (WHOLE, "FILE")) for more in ((), (JSON,))),
    *(("why", f"FILE{place}", *more) for place in ("", "#r0", "#r0@2", "#r1@1/0") for more in ((), (JSON,))),
    *(("tune", "FILE", "--no-costs", "--nodes", "4", *more) for more in ((), (JSON,))),
    *(("tune", "FILE", "--costs", str(TRACES.parent / "tests/data/costs.json"), *more) for more in ((), (JSON,))),
    ("export", "FILE", "-o", "NEW"),
    *(("export", f"FILE{place}", "-o", "NEW.jsonl") for place in ("#r0", "#r1@1:3", "#r0@2")),
    ("debug", "FILE", "--commands", "SCRIPT"),
    ("open", "FILE"),
    ("watch", "FILE", "--headless", "-o", "NEW.jsonl"),
    ("capture", "FILE", "-o", "NEW.jsonl", "--target", "./nothing"),
)
PAGES = (  # which take most of the time: of one file in ten
    ("export", "FILE", "-o", "NEW.html"),
    ("export", "FILE", WHOLE, "-o", "NEW.html"),
)


def drawn(path):
    """What is wrong with all that draws a capture, which stands on the screen as on the console; "" for nothing."""
    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        look_at(path)
    except UserError as error:
        return "" if len(str(error).splitlines()) == 1 else f"not one line: {error}"
    except BaseException as error:
        return f"it raised {error!r}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return ""


def through_every_verb(folder, seeds):
    """What went wrong, as it goes wrong, with the damaged captures of some seeds."""
    (folder / "SCRIPT").write_text(SCRIPT)
    lines = [small(name) for name in SAMPLES]
    for seed in seeds:
        (folder / "damaged.jsonl").write_bytes(damaged(lines[seed % len(lines)], 50_000 + seed))
        for words in READERS + (PAGES if seed % 10 == 0 else ()):
            if problem := wrong_with([word.replace("FILE", "damaged.jsonl") for word in words]):
                yield f"seed {seed}: {problem}"
            clear(folder)
        if problem := drawn(folder / "damaged.jsonl"):
            yield f"seed {seed}: drawn: {problem}"


def told(wrong):
    assert not wrong, f"{len(wrong)} went wrong:\n" + "\n".join(wrong)


def clear(folder):
    for path in folder.glob("NEW*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_damaged_captures_through_every_verb(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told(list(through_every_verb(tmp_path, range(cases(60)))))


# Flags

VALUES = ["0", "1", "2", "3", "7", "-1", "0.5", "1e9", "nan", "", "abc", "é", "x" * 300, "5", "3x4", "dynamic:8"]
VALUES += ["top:2x2", "auto", "cpu", "full", "on", "off", "eagle", "ngram", "self:2", "none", "p.txt", "missing.txt"]
VALUES += [".", "/dev/null", "c.jsonl", "127.0.0.1:0", "http://127.0.0.1:1", "a,b", "[(0,)]", "\x1b[31m"]
VALUES += ["tau drops > 1%", "p < 0.1"]
NEVER = {"serve", "vllm", "run", "watch"}  # that would go on for ever: their models and files are not there
OUTPUTS = ("-o", "--output", "--capture")


def commands(group=cli, path=()):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        elif name != "transformers":  # which becomes another program
            yield (*path, name), command


def flags_of(chance, path, command):
    """A verb with some of its flags, each with a value that may be right."""
    words = list(path)
    for one in command.params:
        if isinstance(one, click.Argument):
            pool = ["c.jsonl", "e.jsonl", "p.txt", "missing.jsonl", "c.jsonl#r0@1", "two words"]
            words += chance.choices(pool, [6, 3, 2, 1, 1, 1], k=chance.choice([0, 1, 1, 1, 2]))
        elif one.name != "target" and (one.required or chance.random() < 2.5 / len(command.params)):
            words.append(chance.choice(one.opts + one.secondary_opts))
            if not one.is_flag:
                good = one.type.choices if isinstance(one.type, click.Choice) and chance.random() < 0.8 else VALUES
                words.append(
                    chance.choice([f"NEW{chance.choice(['.svg', '.jsonl', ''])}", *VALUES])
                    if words[-1] in OUTPUTS
                    else str(chance.choice(list(good)))
                )
    return words


def test_flags_of_every_verb(tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECSCOPE_DISABLE", "")
    every, wrong = list(commands()), []
    for number in range(cases(80)):
        for name, source in (("c.jsonl", WHOLE), ("e.jsonl", TRACES / "sampled.jsonl")):
            shutil.copy(source, name)
        Path("p.txt").write_text("a prompt\nand another\n")
        chance = random.Random(f"flags {number}")
        path, command = chance.choice(every)
        words = flags_of(chance, path, command)
        has_target = any("--target" in one.opts for one in command.params)
        if path[0] == "capture":
            words += ["--target", str(tiny), "--max-tokens", "3", "--kv-memory", "0.01", "--threads", "1"]
        elif has_target:
            words += ["--target", "./nothing"]
        elif path[0] in NEVER and path[0] != "run":
            words.append("--no-such-flag")  # they run for minutes, or until they are ended
        if path[0] == "doctor":
            words = ["doctor", *(word for word in words if word == "--json")]
        if problem := wrong_with(words):
            wrong.append(f"case {number}: {problem}")
        clear(tmp_path)
    told(wrong)


# Prompt files

ROWS = [
    {"prompt": "abc"},
    {"prompt": ""},
    {"prompt": None},
    {"prompt": 3},
    {"prompt": [1, 2, 3]},
    {"prompt": ["a", "b"]},
    {"prompt": {"text": "a"}},
    {"messages": []},
    {"messages": [{"role": "user", "content": "hi"}]},
    {"text": "abc"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    {"messages": "hi"},
    {"messages": [3]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"content": "x"}]},
    {"messages": [{"role": "ghost", "content": "x"}]},
    {"messages": [{"role": "assistant", "content": "x"}]},
    {"messages": [{"role": "system", "content": "x"}]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    {"turns": ["a", "b"]},
    {"question_id": 81, "category": "writing", "turns": ["Compose a poem", "Now shorter"]},
    {"instruction": "say x"},
    {"question_id": 1, "category": "qa", "prompt": ["one", "two"], "reference": []},
    {"question": "why?", "answer": "so"},
    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}},
    {"input": "x"},
    {"prompt": "x", "max_tokens": 2, "temperature": 0.7, "seed": 3, "kind": "code"},
    {"prompt": "x", "max_tokens": -1},
    {"prompt": "x", "temperature": "hot"},
    {"prompt": "x", "top_k": 1e9},
    {"prompt": "x", "logit_bias": {"a": 1}},
    {"prompt": "x", "stop": "a"},
    {"prompt": "x", "stop": [""]},
    {"prompt": "x", "structured_outputs": {"regex": "("}},
    {"prompt": "\ud83c\udf05 [b]bold[/b] \x1b[31m"},
    {"prompt": "x", "messages": []},
    {"prompt": "x" * 5000},
    {"prompt": "x", "label": {"deep": [[[1]]]}},
    {"resourceSpans": []},
    {"schema": "specscope.report/1"},
    [],
    "text",
    3,
    None,
    True,
    {"prompt": "x", "logprobs": 3},
    {"prompt": "x", "response_format": {"type": "json_object"}},
    {},
]


def shapes():
    """Files of prompts, and of what is none."""
    texts = [
        "",
        "\n\n",
        "abc",
        "abc\r\ndef\r\n",
        "\ufeffabc\n",
        "a\tb\n",
        "# Title\n\ntext\n",
        "- a\n- b\n",
        "x,y\n1,2\n",
    ]
    texts += [
        "{",
        "[",
        "[1, 2",
        '{"prompt": ',
        "{}\nabc\n",
        "abc\n{}\n",
        "'single'",
        "<html></html>",
        "SELECT 1;",
        "a\0b",
    ]
    texts += [json.dumps(ROWS), json.dumps(ROWS[:2], indent=2), "[" * 3000, '{"prompt":' * 3000, "x" * 100_000]
    texts += ["\x1b[31mred\x1b[0m\n", "\u202eabc\n", "prompt: abc\n", '"abc"\n', "a\u2028b\n", "a\x0bb\x0cc\n"]
    blobs = [text.encode() for text in texts]
    blobs += ["abc\n".encode(code) for code in ("utf-16", "utf-16-le", "utf-32")]
    blobs += [
        b"\xff\xfe\xfd",
        b"PAR1\x00\x01PAR1",
        b"\x1f\x8b\x08\x00abc",
        b"PK\x03\x04zip",
        b"caf\xe9\n",
        b"\x80" * 100,
    ]
    for row in ROWS:
        line = json.dumps(row)
        blobs += [line.encode(), f'{{"prompt": "first"}}\n{line}\n'.encode(), json.dumps([row]).encode()]
        blobs.append(json.dumps({"data": [row]}, indent=1).encode())
    return blobs


def test_prompt_files_of_every_shape(tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    every, wrong, chance = shapes(), [], random.Random(3)
    model = ["--target", str(tiny), "--kv-memory", "0.01", "--max-tokens", "2", "--threads", "1", "--drafter", "ngram"]
    for blob in chance.sample(every, min(cases(40), len(every))):
        for name in ("p.txt", "p.jsonl", "p.json"):
            Path(name).write_bytes(blob)
        name = chance.choice(["p.txt", "p.jsonl", "p.json"])
        for words in (["capture", name, "-o", "NEW.jsonl", *model], ["run", "--file", name, *model]):
            if problem := wrong_with(words):
                wrong.append(f"{blob[:80]!r}: {problem}")
        clear(tmp_path)
    told(wrong)
