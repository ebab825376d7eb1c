"""Bad spellings of every kind of value that is read, and command lines that hold one. All are refused in one line."""

from dataclasses import dataclass, field
from pathlib import Path

from tests.support.samples import PLANTED

CAPTURE = ("capture", "good.txt", "-o", "out.jsonl", "--target", "./nothing")  # no model: accepted flags fail as well
GOOD = {"good.txt": b"a prompt\n"}


@dataclass(frozen=True)
class Case:
    """`words` after `specscope`, run in a folder that holds `files`. `says`: part of the message, where it matters."""

    words: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    says: str = ""


# What the readers of one value must refuse.
# fmt: off
NO_NUMBERS = [
    "", " ", "abc", "nan", "inf", "-inf", "1_000", "0x10", "1,5", "٣", "½", "³", "\udcff", "true", "None", "1 2", "--",
    "1e", "1e5x", "NaN", "+", "-", ".", "1..2", "一", "1\u200b", "1\n2", "{}", "[1]", "'1'",
]
HUGE = ["9" * 20, "9" * 400, "9" * 5000, "-" + "9" * 30, "1" + "0" * 50]
NO_WHOLE = ["1.5", "1e3", "1.0", "-0.5", ".5"]
NO_REAL = ["1e999", "-1e999", "9" * 400, "-" + "9" * 400, "1e400"]
NO_CHOICES = ["", "AUTO ", "float", "none", "grpc/http", "\udcff", "9" * 2000, "‮"]
ENDPOINTS = [
    "ftp://x", "http://[::1", "http://x:99999", "http://x:-1", "http://x:0", "http://", "http:///x", "://x", "",
    "http://x:port", "http://a b", "http://\udcff", "x" * 9 + ":1:2", "file:///etc/passwd", "http://[zz]:1",
    "http://x:٣", "javascript:alert(1)://x", "http://x\n", "http://x:1e3", "unix:///tmp/x", "http://😀",
]
ADDRESSES = [
    "", ":", "x", ":4317", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:99999", "127.0.0.1:-1",
    "::1:4317", "[::1]", "[]:4317", "a b:1", "127.0.0.1:٣", "127.0.0.1:" + "9" * 400, "\udcff:1",
    "http://127.0.0.1:4317", "127.0.0.1:4317/path",
]
TREES = [
    "", " ", "0", "0x0", "0x5", "5x0", "-1", "257", "999999", "1000000", "9" * 400, "300x300", "x", "3x", "x3",
    "3x3x3", "3.5", "٣", "3x٣", "½", "1e2", "[", "]", "[]", "()", "[()]", "[(0)]", "[(0,)", "[(0,),]]", "[(1,)]",
    "[(0,), (0,)]", "[(0, 0)]", "[(0,), (0, 1)]", "[(-1,)]", "[(0,), (2,)]", "[(0.5,)]", "[('a',)]", "[(True,)]",
    "[None]", "{}", "{0}", "[0]", "[[0.5]]", "(0,)", "[(0,)] + [(1,)]", "__import__('os')", "[(0,)]*300", "lambda: 0",
    "0or 1", "'\\d'", "1(2)", "[" * 5000, "(" * 5000, "[" + "(0,)," * 300 + "]", "[(" + "9" * 5000 + ",)]",
    "[(0,),(" + "0," * 20000 + ")]", "dynamic", "dynamic:", "dynamic:0", "dynamic:257", "dynamic:5,depth=6",
    "dynamic:24,depth=0", "dynamic:24,depth=33", "dynamic:24,top=0", "dynamic:24,top=33", "dynamic:24,top=4,depth=3",
    "dynamic:24,wide=3", "dynamic:-4", "dynamic:4.5", "dynamic:٣", "dynamic:24,depth=" + "9" * 400, "dynamic:3x4",
    "top", "top:", "top:top:3", "sampled:", "sampled:dynamic:3", "Top:3", "wide:3", ":3", "3:", "top:3:4", "\udcff",
    "5\x1b[2J", "#5", "5;6", "5 5", "0b11", "0x5 ", "1_0",
]
DRAFTERS = ["", "Eagle", "magic", "\udcff", "x" * 5000, "synthetic:0.8"]
LAYERS = ["self:", "self:0", "self:-1", "self:x", "self:٣", "self:" + "9" * 400, "self:1.5", "self:²"]
STOPS = [[""], ["\udcff"], ["x" * 1001], ["x"] * 65]
CONDITIONS = [
    "", "=", "p =", "p = 1", "p ==", "(", ")", "((1)", "1 2", "p <", "and", "not", "p and", "if", "p if", "nosuch",
    "nosuch > 1", "p.real", "p[0]", "p**2", "p @ 1", "p << 1", "p & 1", "~1", "p | q", "lambda: 1", "[1]", "(1, 2)",
    "{1}", "{1: 2}", "__import__('os')", "open('x')", "abs()", "abs(*p)", "max(key=p)", "print(p)", "f'{p}'",
    "'a' * 9", "text * 9", "text + 'a'", "(kind or 'a') % 1", "1j", "b'x'", "...", "True.x", "p := 1", "yield p",
    "await p", "*p", "p; q", "\\", "'a", '"', "(" * 200 + "1" + ")" * 200 + ")", "x" * 501,
    "-" * 600 + "1", "9" * 5000, "\udcff", "p\u200b", "‮p", "р > 1", "1" + "+1" * 300, "p >>> 1", "p <> 1", "p !== 1",
    "p == = 1", "not", "in", "p in", "is", "p is 1", "p is not None", "[x for x in p]", "p?", "$p",
]
COMMANDS = [
    "fly", "x y z", "b", "break", "break nosuch", "break reject p > 1", "break reject if", "break reject if nosuch",
    "tbreak reject", "watch", "watch =", "watch if", "run", "up", "reverse-step",
    "enable 9", "enable x", "disable 9", "delete 9", "delete x", "delete -1", "delete " + "9" * 5000, "commands",
    "commands 9", "info", "info x", "info b x", "print nosuch", "print",
    "print p @ 0", "print 1 @ x", "print 1 @ 999", "print @", "node", "node x", "node 999", "node -1", "node ٣",
    "request", "request r99", "request \udcff", "goto", "goto x", "goto -1", "goto 999", "goto " + "9" * 400, "goto ٣",
    "goto 1.5", "next x", "next 0", "next -1", "next 1.5", "next " + "9" * 5000, "next ٣", "step x", "step 0",
    "reverse-next x", "reverse-next 0", "fork", "fork x", "check", "check kw", "check kv now", "check kv", "fork 'x",
    'fork "', "finish r99", "until", "until =", "until nosuch", "help nosuch", "re", "c" * 9000, "\x1b[2J", "‮", "!ls",
    "`ls`", "help \udcff", "info " + "x" * 5000, "request " + "r" * 5000, "fork " + "x" * 5000, "break " + "x" * 5000,
    "s" * 3, "reverse", "pause", "force accept=0", "forc", "x" * 20_000,
]
# fmt: on

# Lines of prompt files, data sets, whole files.
# fmt: off
LINES = [b'{"prompt": ' + x + b"}" for x in (b'""', b"3", b"null", b"[]", b"{}", b"true", b'"\\ud800"', b'"a\\udc00b"')]
PARAMS = {
    name.decode(): [b'{"prompt": "a", "' + name + b'": ' + value + b"}" for value in values]
    for name, values in {
        b"stop": [
            b"5", b"null", b"true", b"{}", b'""', b'[""]', b"[5]", b'["a", null]', b"[[]]", b'{"a": "b"}', b"1.5",
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
}
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
    b"{", b"{}", b"{broken", b'{"prompt"}', b'{"prompt": "a"', b'{"prompt": "a"} x', b'{"prompt": "a",}', b"{'a': 1}",
    b'{"a": ' * 20000 + b"1" + b"}" * 20000, b'{"prompt": ' + b"[" * 20000, b'{"kind": "x"}', b'{"Prompt": "a"}',
    b'{"prompt": "a", "messages": []}', b'{"prompt": "a\x01"}', b'{"prompt": "a\xff"}', b'{"prompt": "a\xed\xa0\x80"}',
    b'{"prompt": "a", ' + b", ".join(b'"k%d": 1' % i for i in range(100)) + b"}",
    b'{"prompt": "a", "%s": 1}' % (b"k" * 300),
]
ROWS = [b'{"turns": ' + x + b"}" for x in (b"[]", b"null", b'"x"', b"[3]", b'[""]', b'["\\ud800"]', b"{}")]
ROWS += [b'{"question_id": 1, "messages": ' + x + b"}" for x in (b"[]", b"null", b"[3]", b'[{"role": "user"}]')]
ROWS += [b'{"prompt": "x", "output_tokens": ' + x + b"}" for x in (b"0", b"-1", b"1.5", b'"3"', b"null", b"9" * 30)]
ROWS += [b'{"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"]}', b'{"prompt": 3, "output_tokens": 3}']
ARRAYS = [
    b"[", b"[]", b"[1]", b"[[]]", b"[null]", b"[{]", b"[{}", b"[{}]", b"[" * 5000, b"[{},\n]", b"[] []",
    b'[{"conversations": 1}]', b'[{"conversations": [{"value": "\\ud800"}, {"value": "x"}]}]', b"[\xff]",
    b"\xef\xbb\xbf[",
]
FILES = [
    b"", b"\n\n", b" \n\t\n", b"\xff\xfe", b"good\n\xff\n", b"a\x00b", b"\x00" * 100, b"\x7fELF\x02\x01\x01\x00\x00",
    b"\xef\xbb\xbf", "hello".encode("utf-16"), "hello".encode("utf-32"), b"x" * (9 * 2**20),
    b'{"prompt": "' + b"x" * 10_000_000 + b'"}', b"\x89PNG\r\n\x1a\n\x00\x00", b"PK\x03\x04\x14\x00\x00",
    b"\x1f\x8b\x08\x00\x00",
]
# fmt: on

# Beyond the bounds of each flag: all but the spellings that no number has.
BOUNDS = {
    "capture": {
        "--max-batch": ["0", "-1", "1025"],
        "--max-step-tokens": ["0", "15", "-16"],
        "--max-context": ["0", "1", "-2"],
        "--threads": ["0", "-1", "100000"],
        "--top-k": ["-1", str(2**31)],
        "--seed": ["-1", str(2**63)],
        "--max-tokens": ["0", "-1", str(2**31)],
        "--metrics-port": ["-1", "65536", "99999"],
        "--kv-memory": ["0", "-1", "0.0001", "1e300", "1e7"],
        "--temperature": ["-0.1", "1e300", "1001"],
        "--top-p": ["0", "1.1", "-0.5"],
        "--min-p": ["1", "-0.1"],
        "--repetition-penalty": ["0", "-1", "1e-50"],
        "--presence-penalty": ["2.1", "-2.1"],
        "--frequency-penalty": ["2.1", "-2.1"],
    },
    "watch": {"--for": ["0", "-1", "1e9"], "--interval": ["0", "-1", "1e9"]},
    "verify": {"--branch": ["-1"], "--alpha": ["0", "1", "-1"]},
    "diagnose": {"--branch": ["-1"], "--sample": ["0", "-1"]},
    "tune": {"--batch": ["0", "-1", "1025"], "--nodes": ["0", "-1", "1025"]},
}
NO_FILES = [".", "./none", "/dev/zero", "/proc/self/mem", "pipe"]
JUDGES = [
    ("verify",),
    ("diagnose",),
    ("diagnose", "--no-audit"),
    ("compare", PLANTED),
    ("report",),
    ("open",),
    ("why",),
]
JUDGES += [("diagnose", "--only=audit"), ("diagnose", "--only=locate"), ("watch", "--headless"), ("tune", "--no-costs")]
JUDGES += [("export", PLANTED, "-o", "tables"), ("export", "-o", "part.jsonl"), ("why",)]


def judged() -> dict[str, list[Case]]:
    """Each verb that reads captures, over files that are none. The reader that they share has seen the others."""
    cases = {}
    for verb in JUDGES:
        contents = FILES if verb[0] == "watch" else [b"", b"\xff\xfe", b'{"a": 1}\n']
        cases[" ".join(verb[:2])] = [Case((*verb, "c"), {"c": content}, "c") for content in contents]
        cases[" ".join(verb[:2])] += [
            Case((*verb, name)) for name in NO_FILES if (verb[0], name) != ("watch", "pipe")
        ]  # it waits
    return cases


def read() -> dict[str, list[Case]]:
    """One value or more that the reader of each flag refuses, to see that it is the flag's reader; and what is read
    nowhere but in the command."""
    compare, tune = ("compare", PLANTED, PLANTED), ("tune", PLANTED, "--no-costs")
    script = ("debug", PLANTED, "--commands")
    first, bad = b'{"prompt": "fine"}\n\n', b'{"prompt": 3}\n'
    key = ("serve", "--target=./nothing", "--api-key-file=key")
    keys = (b"", b"\n\n", "schl\u00fcssel".encode(), b"a\tb\n", b"x" * 2**17)
    no_paths = ["..", "/", "/dev/null", "/dev/full", "loop/x", *NO_FILES]
    exports = ("./none", "http://", "ftp://x", "http://[", "http://127.0.0.1:1")
    return {
        "trees": [
            *(Case((*words, "0x0"), says="tree") for words in (("tree", "--"), (*tune, "--tree"))),
            Case(("tree", "--", "\udcff"), says="tree"),
            *(Case((*CAPTURE, f"--tree={tree}"), GOOD, "tree") for tree in ("", "x", "5\x1b[2J")),
        ],
        "drafters": [
            *(Case((*CAPTURE, f"--drafter={name}"), GOOD, "drafter") for name in ("", "magic", "\udcff")),
            Case((*CAPTURE, "--draft-model=self:0"), GOOD, "self:N"),
            *(Case((*CAPTURE, f"{flag}="), GOOD, flag) for flag in ("--draft-model", "--device")),
            Case((*CAPTURE[:-2], "--target="), GOOD, "--target"),
        ],
        "places": [
            *(Case((*CAPTURE, f"--otlp-endpoint={url}"), GOOD, "--otlp-endpoint") for url in ("", "ftp://x")),
            *(Case(("watch", f"--listen={place}")) for place in ("", "127.0.0.1:x", "127.0.0.1:65535", "999.1.1.1:0")),
            Case(("watch", "--listen=no.such.host.invalid:0")),
            *(Case(("watch", url, "--headless")) for url in exports),
            *(Case(("debug", name)) for name in (".", "/", "./none", "none.sock", "/dev/null")),
        ],
        "texts": [
            *(Case((*CAPTURE, f"--stop={text}"), GOOD, "stop") for text in ("", "\udcff")),
            *(Case(("run", text), says="prompt") for text in ("", "\udcff", "a\udcffb")),
            *(Case((*compare, f"--fail-if={text}"), says="--fail-if") for text in ("", "tau drops", "\udcff")),
            *(Case((*CAPTURE, f"--dtype={text}"), GOOD, "--dtype") for text in NO_CHOICES),
        ],
        "prompts": [
            Case(("capture", "p.jsonl", *CAPTURE[2:]), {"p.jsonl": first + bad}, "p.jsonl, line 3: "),
            *(Case(("capture", "p", *CAPTURE[2:]), {"p": content}, "p") for content in (b"", b"\xff\xfe")),
            *(Case(("capture", name, *CAPTURE[2:])) for name in no_paths),
        ],
        "scripts": [
            Case((*script, "script"), {"script": b"break reject\n" + line}, "script, line 2: ")
            for line in (b"help \xff", b"x" * 20_000)
        ]
        + [
            *(Case((*script, "script"), {"script": content}, "script") for content in FILES[3:8]),
            *(Case((*script, name)) for name in NO_FILES),
        ],
        "keys": [
            *(Case(key, {"key": content}, "key") for content in keys),
            *(
                Case((*key[:2], f"--api-key-file={name}"), GOOD | {"other": b"\xff", "two": b"one\ntwo\n"}, name)
                for name in ("two", ".", "no/key", "pipe", "other")
            ),
            Case(("serve", "--api-key=a", "--api-key-file=good.txt"), GOOD, "give one of"),
        ],
        "costs": [
            *(Case((*tune, "--costs", "c"), {"c": content}, "c") for content in FILES),
            *(Case(("export", *words)) for words in ((), ("-o", "tables"), (PLANTED,), (PLANTED, "-o"))),
            Case(("export", PLANTED, "-o", "tables", PLANTED)),
            *(Case((verb, PLANTED, "--branch=9"), says="--branch") for verb in ("verify", "diagnose", "report")),
        ],
    }


def outputs() -> dict[str, list[Case]]:
    """Outputs that would hit an input or something else, or that cannot be written."""
    held = {
        "good.txt": b"a prompt\n",
        "other.jsonl": b'{"prompt": "a"}\n',
        "model.gguf": b"GGUF",
        "page.html": b"<p>my own</p>",
        "c.jsonl": Path(PLANTED).read_bytes(),
    }
    same = ["good.txt", "./good.txt", "sub/../good.txt", "soft", "hard", "soft2"]
    places = ["", ".", "..", "sub", "sub/", "new/", "no/where.jsonl", "good.txt/x", "n" * 300, "other.jsonl"]
    places += ["model.gguf", "page.html", "loop", "dangling/x"]
    folders = ["", ".", "sub", "c.jsonl", "c.jsonl/x", "none/tables", "loop", "dangling", "pipe", "/dev/null", "/proc"]
    folders += ["/proc/tables", "n" * 300, "a\ud800b/x", "\udcff/x"]
    kept = ("--no-clobber", "-o", "c.jsonl")
    tune = ("tune", "c.jsonl")
    vllm = {"": "--capture", "sub": "sub", "no/where.jsonl": "no/where.jsonl", "new/": "new"}

    def at(words: tuple[str, ...], *names: str, last: tuple[str, ...] = (), says: str = "") -> list[Case]:
        return [Case((*words[:-1], words[-1] + name, *last), held, says) for name in names]

    input_says = "would overwrite the input"

    return {
        "capture": [
            *at(("capture", "good.txt", "--output="), *same, last=CAPTURE[4:], says=input_says),
            *at(("capture", "good.txt", "--output="), *places, last=CAPTURE[4:]),
            *at(("watch", "c.jsonl", "--headless", "--capture="), "soft-c", "hard-c", says=input_says),
            *at(("export", "c.jsonl#r0", "--output="), "c.jsonl", "./c.jsonl", "sub/../c.jsonl", says=input_says),
            *at(("export", "c.jsonl#r0", "--output="), *places),
            *at(("run", "--file", "good.txt", "--output="), "soft2", "sub", "page.html", last=CAPTURE[4:]),
            *(
                Case(("vllm", f"--capture={x}", "--debug=s", "--", "serve", "m"), held, says)
                for x, says in vllm.items()
            ),
            Case(("capture", "good.txt", *kept, *CAPTURE[4:]), held, "--no-clobber keeps it"),
            Case(("watch", "good.txt", "--headless", *kept), held, "--no-clobber keeps it"),
            Case(("export", "good.txt", *kept), held, "--no-clobber keeps it"),
            Case(("run", "x", "--no-clobber"), {}, "give -o FILE"),
            Case(("watch", "good.txt", "--no-clobber"), held, "give -o FILE"),
            *(Case(("serve", f"--on-full={x}"), {}, "-o FILE") for x in ("stop", "drop")),
            Case((*CAPTURE, "--on-full=full"), GOOD, "--on-full"),
        ],
        "page": [
            *at(("export", "c.jsonl", "--output="), "page.html", "no/x.html"),
            Case(("export", "c.html", "--output=c.html"), {"c.html": Path(PLANTED).read_bytes()}, input_says),
            *at(("export", "c.jsonl", PLANTED, "c2.jsonl", "--output="), "x.html"),
            Case(("export", "c.jsonl", "--findings=none", "--output=tables"), held, "--findings is for a page"),
        ],
        "figures": [
            *at((*tune, "--costs="), "", ".", "good.txt", "c.jsonl", "no/x"),
        ],
        "folder": [
            *at(("export", "c.jsonl", "--output="), *folders, "part.csv", "tables.parquet"),
            Case(("export", "c.jsonl", "--output=part.jsonl"), held, "name a request after #"),
            Case(("export", "c.jsonl#r0", "--output=tables"), held, "names a part of a capture, which needs a file"),
            Case(("export", "c.jsonl", "--no-clobber", "--output=."), held, "is not empty (--no-clobber)"),
        ],
    }
