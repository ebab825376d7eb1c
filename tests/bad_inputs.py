"""A corpus of bad inputs: each is a command line with the files that it names. All must be refused in one line."""

import itertools
import random
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

PLANTED = str(Path(__file__).parent.parent / "traces" / "planted.jsonl")
DEBUG_SCRIPT = ("debug", "--over", PLANTED, "--commands", "script", "--stop-on-error")
CAPTURE = ["capture", "good.txt", "-o", "out.jsonl", "--target", "./nothing"]  # no model: accepted flags fail as well
GOOD = {"good.txt": b"a prompt\n"}


@dataclass(frozen=True)
class Case:
    """`words` after `specscope`, run in a folder that holds `files`. `says`: part of the message, where it matters."""

    kind: str
    words: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    says: str = ""

    def __str__(self) -> str:
        text = ascii(" ".join(self.words[-3:]) if not self.files else ascii(min(self.files.values()))[:60])
        return f"{self.kind}-{text[1:60]}"


NO_NUMBERS = [
    "",
    " ",
    "abc",
    "nan",
    "inf",
    "-inf",
    "1_000",
    "0x10",
    "1,5",
    "٣",
    "½",
    "³",
    "\udcff",
    "true",
    "None",
    "1 2",
]
NO_NUMBERS += [
    "--",
    "1e",
    "1e5x",
    "NaN",
    "+",
    "-",
    ".",
    "1..2",
    "一",
    "1\u200b",
    "\x00"[:0] + "1\n2",
    "{}",
    "[1]",
    "'1'",
]
HUGE = ["9" * 20, "9" * 400, "9" * 5000, "-" + "9" * 30, "1" + "0" * 50]
NO_WHOLE = ["1.5", "1e3", "1.0", "-0.5", ".5"]
NO_REAL = ["1e999", "-1e999", "9" * 400, "-" + "9" * 400, "1e400"]

WHOLE = {
    "--max-batch": ["0", "-1", "1025"],
    "--max-step-tokens": ["0", "15", "-16"],
    "--max-context": ["0", "1", "-2"],
    "--threads": ["0", "-1", "100000"],
    "--top-k": ["-1", str(2**31)],
    "--seed": ["-1", str(2**63)],
    "--max-tokens": ["0", "-1", str(2**31)],
    "--metrics-port": ["-1", "65536", "99999"],
}
REAL = {
    "--kv-memory": ["0", "-1", "0.0001", "1e300", "1e7"],
    "--temperature": ["-0.1", "1e300", "1001"],
    "--top-p": ["0", "1.1", "-0.5"],
    "--min-p": ["1", "-0.1"],
    "--repetition-penalty": ["0", "-1", "1e-50"],
    "--presence-penalty": ["2.1", "-2.1"],
    "--frequency-penalty": ["2.1", "-2.1"],
}
TRAIN_WHOLE = {
    "--self-synthesise": ["0", "-5"],
    "--draft-vocab": ["3"],
    "--steps": ["0", "17"],
    "--batch-tokens": ["15"],
    "--seed": ["-1", str(2**31)],
    "--rows": ["0"],
    "--longest": ["31"],
}
TRAIN_REAL = {"--epochs": ["0", "-1"], "--learning-rate": ["0", "-1e-3", "11"]}
CHOICES = ["--dtype", "--backend", "--graphs", "--otlp-protocol", "--trace-level"]
NO_CHOICES = ["", "AUTO ", "float", "none", "grpc/http", "\udcff", "9" * 2000, "‮"]
ENDPOINTS = [
    "ftp://x",
    "http://[::1",
    "http://x:99999",
    "http://x:-1",
    "http://x:0",
    "http://",
    "http:///x",
    "://x",
    "",
]
ENDPOINTS += ["http://x:port", "http://a b", "http://\udcff", "x" * 9 + ":1:2", "file:///etc/passwd", "http://[zz]:1"]
ENDPOINTS += ["http://x:٣", "javascript:alert(1)://x", "http://x\n", "http://x:1e3", "unix:///tmp/x", "http://😀"]
ADDRESSES = ["", ":", "x", ":4317", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:99999", "127.0.0.1:65535", "127.0.0.1:-1"]
ADDRESSES += [
    "::1:4317",
    "[::1]",
    "[]:4317",
    "a b:1",
    "127.0.0.1:٣",
    "127.0.0.1:" + "9" * 400,
    "999.1.1.1:0",
    "\udcff:1",
]
ADDRESSES += ["http://127.0.0.1:4317", "no.such.host.invalid:0", "127.0.0.1:4317/path"]

TREES = [
    "",
    " ",
    "0",
    "0x0",
    "0x5",
    "5x0",
    "-1",
    "257",
    "999999",
    "1000000",
    "9" * 400,
    "300x300",
    "x",
    "3x",
    "x3",
    "3x3x3",
]
TREES += [
    "3.5",
    "٣",
    "3x٣",
    "½",
    "1e2",
    "[",
    "]",
    "[]",
    "()",
    "[()]",
    "[(0)]",
    "[(0,)",
    "[(0,),]]",
    "[(1,)]",
    "[(0,), (0,)]",
]
TREES += [
    "[(0, 0)]",
    "[(0,), (0, 1)]",
    "[(-1,)]",
    "[(0,), (2,)]",
    "[(0.5,)]",
    "[('a',)]",
    "[(True,)]",
    "[None]",
    "{}",
    "{0}",
]
TREES += [
    "[0]",
    "[[0.5]]",
    "(0,)",
    "[(0,)] + [(1,)]",
    "__import__('os')",
    "[(0,)]*300",
    "lambda: 0",
    "0or 1",
    "'\\d'",
    "1(2)",
]
TREES += ["[" * 5000, "(" * 5000, "[" + "(0,)," * 300 + "]", "[(" + "9" * 5000 + ",)]", "[(0,),(" + "0," * 20000 + ")]"]
TREES += [
    "dynamic",
    "dynamic:",
    "dynamic:0",
    "dynamic:257",
    "dynamic:5,depth=6",
    "dynamic:24,depth=0",
    "dynamic:24,depth=33",
]
TREES += [
    "dynamic:24,top=0",
    "dynamic:24,top=33",
    "dynamic:24,top=4,depth=3",
    "dynamic:24,wide=3",
    "dynamic:-4",
    "dynamic:4.5",
]
TREES += [
    "dynamic:٣",
    "dynamic:24,depth=" + "9" * 400,
    "dynamic:3x4",
    "top",
    "top:",
    "top:top:3",
    "sampled:",
    "sampled:dynamic:3",
]
TREES += [
    "Top:3",
    "wide:3",
    ":3",
    "3:",
    "top:3:4",
    "\udcff",
    "5\x1b[2J",
    "#5",
    "5;6",
    "5 5",
    "0b11",
    "0x5 ",
    "1_0",
]

LINES = [b'{"prompt": ' + x + b"}" for x in (b'""', b"3", b"null", b"[]", b"{}", b"true", b'"\\ud800"', b'"a\\udc00b"')]
LINES += [
    b'{"prompt": "a", "' + name + b'": ' + value + b"}"
    for name, values in {
        b"stop": [
            b"5",
            b"null",
            b"true",
            b"{}",
            b'""',
            b'[""]',
            b"[5]",
            b'["a", null]',
            b"[[]]",
            b'{"a": "b"}',
            b"1.5",
        ],
        b"seed": [b"9" * 400, b"9" * 20, b"-1", b"1.5", b'"1"', b"null", b"true", b"[]", b"1e3"],
        b"max_tokens": [b"9" * 400, b"0", b"-1", b"1.5", b'"1"', b"null", b"false", b"{}", b"4294967296"],
        b"temperature": [b"-1", b"NaN", b"Infinity", b"1e999", b'"hot"', b"null", b"true", b"[]", b"9" * 400, b"1001"],
        b"top_k": [b"-1", b"1.5", b'"3"', b"null", b"true", b"9" * 30],
        b"top_p": [b"0", b"1.1", b"-1", b'"x"', b"null", b"true", b"1e-999x"],
        b"min_p": [b"1", b"-0.1", b'"x"', b"null"],
        b"repetition_penalty": [b"0", b"-1", b"null", b"1e-300"],
        b"presence_penalty": [b"3", b'"x"', b"null"],
        b"frequency_penalty": [b"-3", b"null", b"{}"],
        b"logit_bias": [b"3", b"null", b"[]", b'{"a": 1}', b'{"-1": 1}', b'{"1": "x"}', b'{"1": null}', b'{"1": 1e9}'],
        b"min_tokens": [b"-1", b"1.5", b'"1"', b"null", b"9" * 30, b"129"],
        b"logprobs": [b"-1", b"21", b'"1"', b"true", b"[]"],
        b"stop_token_ids": [b"3", b"null", b"[-1]", b'["a"]', b"[" + b"1," * 64 + b"1]"],
        b"structured_outputs": [
            *(b"3", b"[]", b"{}", b'{"regexp": "a"}', b'{"regex": ""}', b'{"regex": "a", "choice": ["b"]}'),
            *(b'{"json": "{"}', b'{"json": []}', b'{"json": "3"}', b'{"choice": "ab"}', b'{"choice": [""]}'),
            *(b'{"choice": []}', b'{"grammar": ""}', b'{"json_object": 1}', b'{"regex": "a\\u0000"}'),
            b'{"json": ' + b'{"a":' * 70 + b"1" + b"}" * 70 + b"}",
        ],
        b"ignore_eos": [b"1", b"0", b"null", b'"true"', b"[]"],
        b"label": [b"[" * 500 + b"]" * 500 + b"x", b'"' + b"x" * 20000 + b'"', b'"\\ud83d"', b"[" * 1000 + b"]" * 1000],
    }.items()
    for value in values
]
LINES += [
    b'{"messages": ' + x + b"}"
    for x in (
        *(b"[]", b"null", b"3", b'"hi"', b"{}", b"[null]", b"[[]]", b'["hi"]', b"[{}]", b'[{"role": "user"}]'),
        *(b'[{"content": "x"}]', b'[{"role": 3, "content": "x"}]', b'[{"role": "user", "content": null}]'),
        *(b'[{"role": "", "content": "x"}]', b'[{"role": "user", "content": "\\ud800"}]'),
        b"[" + b'{"role": "user", "content": "x"},' * 20000 + b'{"role": "user", "content": "x"}]',
        b'[{"role": "user", "content": [{"type": "text", "text": "x"}]}]',
    )
]
LINES += [
    b"{",
    b"{}",
    b"{broken",
    b'{"prompt"}',
    b'{"prompt": "a"',
    b'{"prompt": "a"} x',
    b'{"prompt": "a",}',
    b"{'a': 1}",
]
LINES += [b'{"a": ' * 20000 + b"1" + b"}" * 20000, b'{"prompt": ' + b"[" * 20000, b'{"kind": "x"}', b'{"Prompt": "a"}']
LINES += [
    b'{"prompt": "a", "messages": []}',
    b'{"prompt": "a\x01"}',
    b'{"prompt": "a\xff"}',
    b'{"prompt": "a\xed\xa0\x80"}',
]
LINES += [
    b'{"prompt": "a", ' + b", ".join(b'"k%d": 1' % i for i in range(100)) + b"}",
    b'{"prompt": "a", "%s": 1}' % (b"k" * 300),
]

ROWS = [b'{"turns": ' + x + b"}" for x in (b"[]", b"null", b'"x"', b"[3]", b'[""]', b'["\\ud800"]', b"{}")]
ROWS += [b'{"question_id": 1, "messages": ' + x + b"}" for x in (b"[]", b"null", b"[3]", b'[{"role": "user"}]')]
ROWS += [b'{"prompt": "x", "output_tokens": ' + x + b"}" for x in (b"0", b"-1", b"1.5", b'"3"', b"null", b"9" * 30)]
ROWS += [b'{"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"]}', b'{"prompt": 3, "output_tokens": 3}']
ARRAYS = [b"[", b"[]", b"[1]", b"[[]]", b"[null]", b'["x"]', b"[{]", b"[{}", b"[{}]", b"[" * 5000, b"[{},\n]", b"[] []"]
ARRAYS += [b'[{"conversations": 1}]', b'[{"conversations": [{"value": "\\ud800"}, {"value": "x"}]}]', b"[\xff]"]
ARRAYS += [b"\xef\xbb\xbf["]

FILES = [
    b"",
    b"\n\n",
    b" \n\t\n",
    b"\xff\xfe",
    b"good\n\xff\n",
    b"a\x00b",
    b"\x00" * 100,
    b"\x7fELF\x02\x01\x01\x00\x00",
    b"\xef\xbb\xbf",
]
FILES += [
    "hello".encode("utf-16"),
    "hello".encode("utf-32"),
    b"x" * (9 * 2**20),
    b'{"prompt": "' + b"x" * 10_000_000 + b'"}',
]
FILES += [b"\x89PNG\r\n\x1a\n\x00\x00", b"PK\x03\x04\x14\x00\x00", b"\x1f\x8b\x08\x00\x00"]

CONDITIONS = [
    "",
    "=",
    "p =",
    "p = 1",
    "p ==",
    "(",
    ")",
    "((1)",
    "1 2",
    "p <",
    "and",
    "not",
    "p and",
    "if",
    "p if",
    "nosuch",
    "nosuch > 1",
]
CONDITIONS += [
    "p.real",
    "p[0]",
    "p**2",
    "p @ 1",
    "p << 1",
    "p & 1",
    "~1",
    "p | q",
    "lambda: 1",
    "[1]",
    "(1, 2)",
    "{1}",
    "{1: 2}",
]
CONDITIONS += [
    "__import__('os')",
    "open('x')",
    "abs()",
    "abs(*p)",
    "max(key=p)",
    "print(p)",
    "f'{p}'",
    "'a' * 9",
    "text * 9",
    "text + 'a'",
]
CONDITIONS += [
    "(kind or 'a') % 1",
    "1j",
    "b'x'",
    "...",
    "True.x",
    "p := 1",
    "yield p",
    "await p",
    "*p",
    "p; q",
    "p # q\n and",
    "\\",
    "'a",
    '"',
]
CONDITIONS += [
    "(" * 200 + "1" + ")" * 200 + ")",
    "x" * 501,
    "-" * 600 + "1",
    "9" * 5000,
    "\udcff",
    "p\u200b",
    "‮p",
    "р > 1",
    "1" + "+1" * 300,
]
CONDITIONS += [
    "p >>> 1",
    "p <> 1",
    "p !== 1",
    "p == = 1",
    "not",
    "in",
    "p in",
    "is",
    "p is 1",
    "p is not None",
    "[x for x in p]",
    "p?",
    "$p",
]

COMMANDS = [
    "fly",
    "x y z",
    "b",
    "break",
    "break nosuch",
    "break reject p > 1",
    "break reject if",
    "break reject if nosuch",
    "tbreak 5",
    "watch",
]
COMMANDS += [
    "watch =",
    "watch if",
    "ignore",
    "ignore 1",
    "ignore 9 9",
    "ignore x y",
    "ignore 1 2 3",
    "enable 9",
    "enable x",
    "disable 9",
    "delete 9",
]
COMMANDS += [
    "delete x",
    "delete -1",
    "delete " + "9" * 5000,
    "commands",
    "commands 9",
    "commands x",
    "commands 1,2 tree",
    "info",
    "info x",
    "info b x",
]
COMMANDS += [
    "print nosuch",
    "print",
    "print p @ 0",
    "print 1 @ x",
    "print 1 @ 999",
    "print @",
    "node",
    "node x",
    "node 999",
    "node -1",
    "node ٣",
]
COMMANDS += [
    "request",
    "request r99",
    "request \udcff",
    "goto",
    "goto x",
    "goto -1",
    "goto 999",
    "goto " + "9" * 400,
    "goto ٣",
    "goto 1.5",
    "next x",
]
COMMANDS += [
    "next 0",
    "next -1",
    "next 1.5",
    "next " + "9" * 5000,
    "next ٣",
    "step x",
    "step 0",
    "reverse-next x",
    "reverse-next 0",
    "fork",
    "fork x",
    "check",
    "check kw",
    "check kv now",
    "check kv",  # over a recording
]
COMMANDS += [
    "fork 'x",
    'fork "',
    "finish r99",
    "until",
    "until =",
    "until nosuch",
    "help nosuch",
    "re",
    "c" * 9000,
    "\x1b[2J",
    "‮",
    "!ls",
    "`ls`",
]
COMMANDS += [
    "help \udcff",
    "info " + "x" * 5000,
    "request " + "r" * 5000,
    "fork " + "x" * 5000,
    "break " + "x" * 5000,
    "s" * 3,
    "reverse",
]
COMMANDS += ["pause", "force", "force accept=0", "force token=x", "forc"]  # of a recording
COMMANDS += ["commands 1", "x" * 20_000]  # lines that have no end; a line that is too long

SETTINGS = [
    "theme",
    "theme =",
    "theme = 1",
    "theme = 'pink'",
    "theme = ''",
    "theme = ['dark']",
    "colour = 1",
    "fps = 0",
    "fps = 61",
    "fps = -1",
]
SETTINGS += [
    "fps = nan",
    "fps = inf",
    "fps = '10'",
    "fps = true",
    "fps = []",
    "fps = 1" + "0" * 400,
    "fps = 1" + "0" * 5000,
    "keys = 3",
    "keys = []",
]
SETTINGS += [
    "keys = ''",
    "[keys]\nfly = 'f'",
    "[keys]\npause = 5",
    "[keys]\npause = ''",
    "[keys]\npause = ','",
    "[keys]\npause = ['f5']",
    "[[keys]]",
]
SETTINGS += [
    "[keys]\npause = 'q'",
    "[keys]\npause = 'f5'\npause = 'f6'",
    "[theme]\nx = 1",
    "x = " + "[" * 5000,
    "a.b.c = 1",
    "= 1",
    "[",
    "\x00",
    "\x01",
]
SETTINGS += [
    "# " + "x" * 2_000_000,
    "[keys]\n" + "x" * 5000 + " = 'f'",
    "[keys]\npause = '" + "f" * 300 + "'",
    "theme = 'dark'\ntheme = 'light'",
]


def flags() -> list[Case]:
    """Each flag with each value that it must not take."""
    cases = []
    for table, bad in ((WHOLE, NO_NUMBERS + NO_WHOLE + HUGE), (REAL, NO_NUMBERS + NO_REAL)):
        for flag, own in table.items():
            cases += [Case("flag", (*CAPTURE, f"{flag}={value}"), GOOD, flag) for value in [*bad, *own]]
    for table, bad in ((TRAIN_WHOLE, NO_NUMBERS + NO_WHOLE + HUGE), (TRAIN_REAL, NO_NUMBERS + NO_REAL)):
        for flag, own in table.items():
            start = ("train", "eagle3", "-o", "out", "--target", "./nothing", "--data", "good.txt")
            cases += [Case("train", (*start, f"{flag}={value}"), GOOD, flag) for value in [*bad, *own]]
    start = ("train", "p-eagle", "-o", "out", "--target", "./nothing", "--data", "good.txt")
    own = {"--depths": [*NO_NUMBERS, *NO_WHOLE, "0", "17"], "--keep-ratio": [*NO_NUMBERS, *NO_REAL, "0", "1.1"]}
    cases += [Case("train", (*start, f"{flag}={x}"), GOOD, flag) for flag, bad in own.items() for x in bad]
    cases += [Case("choice", (*CAPTURE, f"{flag}={value}"), GOOD, flag) for flag in CHOICES for value in NO_CHOICES]
    cases += [Case("port", ("tui", "--web", f"--web-port={value}"), {}, "--web-port") for value in ["0", *NO_NUMBERS]]
    cases += [Case("port", ("tui", "--listen=x:1", f"--http-port={x}"), {}, "--http-port") for x in ["-1", *NO_NUMBERS]]
    return cases


def values() -> list[Case]:
    """Endpoints, addresses, trees, drafters, stop strings, prompts."""
    cases = [Case("endpoint", (*CAPTURE, f"--otlp-endpoint={x}"), GOOD, "--otlp-endpoint") for x in ENDPOINTS]
    cases += [Case("address", ("tui", f"--listen={x}"), {}) for x in ADDRESSES]
    cases += [Case("tree", ("tree", "--", x), {}, "tree") for x in TREES]
    cases += [Case("tree flag", (*CAPTURE, f"--tree={x}"), GOOD, "tree") for x in TREES]
    for rates in ("", "x", "nan", "2", "-1", "0.5,0.9", "0.5,", ",", "1e999", "1," * 300 + "1"):
        cases.append(Case("drafter", (*CAPTURE, f"--drafter=synthetic:{rates}"), GOOD))
    for name in ("", "Eagle", "magic", "\udcff", "x" * 5000, "synthetic"):
        cases.append(Case("drafter", (*CAPTURE, f"--drafter={name}"), GOOD, "drafter"))
    for name in ("self:", "self:0", "self:-1", "self:x", "self:٣", "self:" + "9" * 400, "self:1.5", "self:²"):
        cases.append(Case("drafter", (*CAPTURE, f"--draft-model={name}"), GOOD, "self:N"))
    cases += [Case("stop", (*CAPTURE, f"--stop={x}"), GOOD, "stop") for x in ("", "\udcff", "x" * 1001)]
    cases.append(Case("stop", (*CAPTURE, *["--stop=x"] * 65), GOOD, "stop"))
    cases += [Case("prompt", ("run", x), {}, "prompt") for x in ("", "\udcff", "a\udcffb")]
    cases += [
        Case("empty", (*CAPTURE[:-2], f"{flag}="), GOOD, flag) for flag in ("--target", "--draft-model", "--device")
    ]
    return cases


def prompts() -> list[Case]:
    """Prompt files, and lines of them behind a good one."""
    first = b'{"prompt": "fine"}\n\n'
    cases = [
        Case("line", ("capture", "p.jsonl", *CAPTURE[2:]), {"p.jsonl": first + line + b"\n"}, "p.jsonl, line 3: ")
        for line in LINES
    ]
    cases += [Case("file", ("capture", "p", *CAPTURE[2:]), {"p": content}, "p") for content in FILES]
    for name in (
        ".",
        "..",
        "/",
        "./none",
        "/dev/null",
        "/dev/zero",
        "/dev/full",
        "/proc/self/mem",
        "n" * 300,
        "pipe",
        "loop",
    ):
        cases.append(Case("path", ("capture", name, *CAPTURE[2:]), {}))
    return cases


def scripts() -> list[Case]:
    """The debugger over a recording: a line that cannot be run."""

    def case(kind: str, *lines: str) -> Case:
        content = "\n".join(lines).encode("utf-8", "surrogateescape")
        return Case(kind, DEBUG_SCRIPT, {"script": content}, "script")

    cases = [case("command", "break reject", line) for line in COMMANDS]
    for text in CONDITIONS:
        cases += [case("condition", f"break reject if {text}"), case("condition", f"until {text}")]
    for name in (".", "/", "./none", "/dev/null", "n" * 300, "pipe", PLANTED):
        cases.append(Case("socket", ("debug", "--attach", name), {}))
    cases += [case("condition", "next 4", f"print {text}") for text in CONDITIONS if text and "@" not in text]
    cases += [Case("script", DEBUG_SCRIPT, {"script": x}) for x in FILES[3:8]]
    for name in (".", "./none", "/dev/zero", "/proc/self/mem", "pipe"):
        cases.append(Case("script", ("debug", "--over", PLANTED, "--commands", name), {}))
    return cases


def judges() -> list[Case]:
    """The verbs that read captures: files that are none, and flags out of range."""
    verbs = [("verify",), ("audit",), ("diagnose",), ("diagnose", "--no-audit"), ("compare", PLANTED), ("report",)]
    cases = [Case("judge", (*verb, "c"), {"c": content}, "c") for verb in verbs for content in FILES]
    for name in (".", "./none", "/dev/zero", "/proc/self/mem", "pipe"):
        cases += [Case("judge", (*verb, name), {}) for verb in verbs]
    start = ("export", PLANTED, "-o", "tables")
    cases += [Case("export", (*start, "c"), {"c": content}, "c") for content in FILES]
    for name in (".", "./none", "/dev/zero", "/proc/self/mem", "pipe", PLANTED):
        cases.append(Case("export", (*start, name)))
    cases += [Case("export", ("export", *words)) for words in ((), ("-o", "tables"), (PLANTED,), (PLANTED, "-o"))]
    cases += [Case("watch", ("watch", "c", "--headless"), {"c": content}, "c") for content in FILES]
    for name in (".", "./none", "/dev/zero", "/proc/self/mem", "http://", "ftp://x", "http://[", "http://127.0.0.1:1"):
        cases.append(Case("watch", ("watch", name, "--headless")))
    for value in ["0", "-1", "1e9", *NO_NUMBERS]:
        cases += [
            Case("watch flag", ("watch", "c", f"--{flag}={value}"), {}, f"--{flag}") for flag in ("for", "interval")
        ]
    cases += [Case("judge", ("diagnose", PLANTED, "--no-audit", "--against", "c"), {"c": x}) for x in FILES]
    for value in ["-1", "9", *NO_NUMBERS]:
        cases += [Case("judge flag", (*verb, PLANTED, f"--branch={value}"), {}, "--branch") for verb in verbs[:4:3]]
    for value in ["0", "-1", *NO_NUMBERS]:
        cases += [
            Case("judge flag", (verb, PLANTED, f"--sample={value}"), {}, "--sample") for verb in ("audit", "diagnose")
        ]
    for value in ["0", "1", "-1", *NO_NUMBERS]:
        cases.append(Case("judge flag", ("verify", PLANTED, f"--alpha={value}"), {}, "--alpha"))
    tune = ("tune", PLANTED, "--no-costs")
    cases += [Case("tune", ("tune", "c", "--no-costs"), {"c": content}, "c") for content in FILES]
    cases += [Case("tune", ("tune", PLANTED, "--costs", "c"), {"c": content}, "c") for content in FILES]
    cases += [Case("tune", ("tune", name, "--no-costs")) for name in (".", "./none", "/dev/zero", "pipe")]
    cases += [Case("tune", (*tune, f"--tree={tree}"), {}, "tree") for tree in TREES]
    for value in ["0", "-1", "1025", *NO_NUMBERS]:
        cases += [Case("tune", (*tune, f"--{flag}={value}"), {}, f"--{flag}") for flag in ("batch", "nodes")]
    for text in (
        "",
        "x",
        "tau",
        "tau drops",
        "tau drops > ",
        "tau drops > x%",
        "tau drops 2%",
        "p drops > 2%",
        "\udcff",
    ):
        cases.append(Case("judge flag", ("compare", PLANTED, PLANTED, f"--fail-if={text}"), {}, "--fail-if"))
    return cases


def loads() -> list[Case]:
    """Datasets, addresses and numbers of a load bench; nothing is sent before all of them are read."""
    bench = ("bench", "serve")
    first = b'{"prompt": "fine"}\n\n'
    ask = (*bench, "http://127.0.0.1:9", "--dataset")
    cases = [Case("load line", (*ask, "p"), {"p": first + line + b"\n"}, "p, line 3: ") for line in LINES]
    cases += [Case("load row", (*ask, "p"), {"p": first + line + b"\n"}, "p, line 3: ") for line in ROWS]
    cases += [Case("load array", (*ask, "p"), {"p": content}, "p") for content in ARRAYS]
    cases += [Case("load file", (*ask, "p"), {"p": content}, "p") for content in FILES]
    cases += [Case("load path", (*ask, name)) for name in (".", "./none", "/dev/zero", "pipe", "loop", "dangling", "")]
    cases += [Case("load address", (*bench, "--", url), {}, "address") for url in [*ENDPOINTS, "http://u:p@x", "x?y"]]
    lists = [*NO_NUMBERS, "1,", ",1", "1,,2", "1, 2", "1;2"]
    for flag in ("--rate", "--concurrency", "--percentiles"):
        cases += [Case("load number", (*ask[:-1], f"{flag}={x}"), {}, flag) for x in lists if x != "1,5"]
    for flag in ("--requests", "--warm-up", "--rounds", "--timeout", "--burstiness", "--max-tokens", "--seed"):
        cases += [Case("load number", (*ask[:-1], f"{flag}={x}"), {}, flag) for x in ["-1", *NO_NUMBERS]]
    return cases


def outputs() -> list[Case]:
    """Outputs that would hit an input or something else, or that cannot be written."""
    held = {
        "good.txt": b"a prompt\n",
        "other.jsonl": b'{"prompt": "a"}\n',
        "model.gguf": b"GGUF",
        "page.html": b"<p>my own</p>",
    }
    held["c.jsonl"] = Path(PLANTED).read_bytes()
    same = ["good.txt", "./good.txt", "sub/../good.txt", "soft", "hard", "soft2"]
    places = [
        "",
        ".",
        "..",
        "sub",
        "sub/",
        "new/",
        "no/where.jsonl",
        "good.txt/x",
        "n" * 300,
        "other.jsonl",
        "model.gguf",
    ]
    places += ["page.html", "loop", "dangling/x"]
    cases = [
        Case("output", ("capture", "good.txt", f"-o{x}" if x else "-o=", *CAPTURE[4:]), held)
        for x in [*same, *places[1:]]
    ]
    cases.append(Case("output", ("capture", "good.txt", "--output=", *CAPTURE[4:]), held, "-o"))
    cases += [Case("output", ("run", "--file", "good.txt", "-o", x, *CAPTURE[4:]), held) for x in [*same, *places[1:]]]
    kept = ("--no-clobber", "-o", "c.jsonl")
    cases.append(Case("no-clobber", ("capture", "good.txt", *kept, *CAPTURE[4:]), held, "--no-clobber keeps it"))
    cases.append(Case("no-clobber", ("watch", "good.txt", "--headless", *kept), held, "--no-clobber keeps it"))
    cases.append(Case("no-clobber", ("run", "x", "--no-clobber"), {}, "give -o FILE"))
    cases.append(Case("no-clobber", ("watch", "good.txt", "--no-clobber"), held, "give -o FILE"))
    cases += [Case("on-full", ("serve", f"--on-full={x}"), {}, "-o FILE") for x in ("stop", "drop")]
    cases.append(Case("on-full", (*CAPTURE, "--on-full=full"), GOOD, "--on-full"))
    two = held | {"good.txt": b"one\ntwo\n", "model.gguf": b"\xff"}
    for name in ("good.txt", ".", "no/key", "pipe", "model.gguf"):
        cases.append(Case("key file", ("serve", "--target=./nothing", f"--api-key-file={name}"), two, name))
    for content in (b"", b"\n\n", "schl\u00fcssel".encode(), b"a\tb\n", b"x" * 2**17):
        cases.append(Case("key file", ("serve", "--target=./nothing", "--api-key-file=key"), {"key": content}, "key"))
    cases.append(Case("key file", ("serve", "--api-key=a", "--api-key-file=good.txt"), held, "give one of"))
    for name in ("", "sub", "no/where.jsonl", "new/"):
        cases.append(
            Case(
                "vllm",
                ("vllm", f"--capture={name}", "--debug=s", "--", "serve", "m"),
                held,
                "--capture" if not name else name.strip("/"),
            )
        )
    pages = ["c.jsonl", "./c.jsonl", "soft-c", "hard-c", "good.txt", "other.jsonl", *places[1:9]]
    cases += [Case("page", ("report", "c.jsonl", f"--html={x}"), held) for x in ["", *pages]]
    cases += [Case("page", ("compare", "c.jsonl", PLANTED, f"--html={x}"), held) for x in ["", *pages]]
    cases += [
        Case("figures", ("bench", "serve", "http://127.0.0.1:9", f"--json={x}"), held)
        for x in ("", ".", "good.txt", "other.jsonl", "c.jsonl", "no/x")
    ]
    folders = ("", ".", "sub", "c.jsonl", "c.jsonl/x", "none/tables", "loop", "dangling", "pipe", "/dev/null", "/proc")
    folders = (*folders, "/proc/tables", "n" * 300, "a\ud800b/x", "\udcff/x")
    cases += [Case("export folder", ("export", "c.jsonl", f"--output={x}"), held) for x in folders]
    tune = ("tune", "c.jsonl", "--no-costs")
    cases += [Case("plot", (*tune, f"--plot={x}"), held) for x in ("", ".", "good.txt", "x.gif", "no/x.svg", "c.jsonl")]
    cases += [Case("costs", (*tune[:2], f"--save-costs={x}"), held) for x in ("", ".", "good.txt", "c.jsonl", "no/x")]
    train = ("train", "eagle3", "--target", "./nothing", "--data", "good.txt")
    cases += [
        Case("folder", (*train, f"--output={x}"), held) for x in ("", ".", "good.txt", "sub", "soft", "good.txt/x")
    ]
    cases.append(
        Case("folder", ("train", "eagle3", "--target", "sub", "--data", "good.txt", "-o", "sub"), held, "overwrite")
    )
    return cases


def generated(count: int, seed: int = 11) -> list[Case]:
    """Good inputs with a few characters changed, of which only those are kept that must be refused."""
    draw = random.Random(seed)
    alphabet = "0123456789xX,()[]{}=:.+-*/\"'\\ \t#;!<>&|~^%$@_aé٣½\u2028\u202e\udcff"

    def spoil(text: str) -> str:
        chars = list(text)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(chars) + 1)
            chars[at : at + draw.randint(0, 2)] = draw.choice(alphabet)
        return "".join(chars)

    cases: list[Case] = []
    trees = ["5", "3x4", "[(0,), (1,), (0, 0)]", "dynamic:24,depth=6,top=4", "top:3x4", "sampled:5"]
    lines = [
        '{"prompt": "a", "stop": ["x"], "seed": 3}',
        '{"messages": [{"role": "user", "content": "b"}], "top_p": 0.5}',
    ]
    for tree, line in itertools.islice(zip(itertools.cycle(trees), itertools.cycle(lines), strict=False), count):
        cases.append(Case("spoilt tree", ("tree", "--", spoil(tree))))
        content = b'{"prompt": "fine"}\n' + spoil(line).encode("utf-8", "surrogateescape") + b"\n"
        cases.append(Case("spoilt line", ("capture", "p.jsonl", *CAPTURE[2:]), {"p.jsonl": content}))
        condition = spoil(
            draw.choice(["depth == 1 and p < 0.1", "kind == 'bonus'", "abs(p - q) > 0.5 or nodes in (1)"])
        )
        command = spoil(draw.choice(["next 2", "goto 3", "print p @ 0", "commands 1 where", "finish r0", "info step"]))
        script = f"break reject if {condition}\n{command}\n".encode("utf-8", "surrogateescape")
        cases.append(
            Case(
                "spoilt script",
                DEBUG_SCRIPT,
                {"script": script},
            )
        )
    return cases


def settings() -> list[str]:
    """Settings files that must be refused."""
    for text in SETTINGS[:2]:
        try:
            tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            continue
        raise AssertionError(f"{text!r} was meant to be no TOML")
    return SETTINGS


CASES = [*flags(), *values(), *prompts(), *loads(), *scripts(), *judges(), *outputs()]
