"""`specscope bench serve` as people run it, against servers that do what they are told."""

import json
import os
import re
import signal
import subprocess
import sys
from statistics import median

import pytest

from specscope.bench import sweep
from specscope.bench.points import LoadRatio, points, ratios, to_json
from specscope.cli.main import cli
from specscope.errors import UserError
from tests.bench.server import Piece, Reply, Server
from tests.bench.test_endpoint import page
from tests.support.commands import run_here
from tests.waiting import HANG_SECONDS, until

WORDS = ("bench", "serve")


def bench(*words):
    code, out, err = run_here([*WORDS, *map(str, words)])
    assert err == ""
    assert code == 0, out
    return out


def metrics(requests):
    return page(10 * requests, (5 * requests, requests, 0), queries=10 * requests, hits=requests)


def test_one_run_is_a_table_and_vllms_file(tmp_path):
    reply = Reply([Piece("a", 1, 0.02), Piece("b c", 2, 0.01), Piece("d", 1, 0.01)])
    figures = tmp_path / "run.json"
    with Server(lambda number, body: reply, metrics) as server:
        out = bench(server.url, "--requests", 6, "--concurrency", 2, "--warm-up", 3, "--json", figures, "--detailed")
    told = json.loads(figures.read_text())
    assert {name: told[name] for name in ("schema", "source", "exit", "warnings")} == {
        "schema": "specscope.bench.serve/1",
        "source": [server.url],
        "exit": 0,
        "warnings": [],
    }
    assert (told["completed"], told["failed"], told["total_output_tokens"], told["total_input_tokens"]) == (
        6,
        0,
        24,
        42,
    )
    assert len(server.bodies) == 1 + 3 + 6  # a first one, to see that it answers, and the warm-up
    assert len(told["ttfts"]) == 6
    assert told["max_concurrent_requests"] == 2
    assert told["median_ttft_ms"] >= 20
    assert told["median_itl_ms"] >= 10
    assert told["median_itl_per_token_ms"] < told["median_itl_ms"]
    assert told["median_e2el_ms"] >= 40
    assert told["spec_decode_per_position_acceptance_rates"] == [0.5, 0.1, 0.0]
    assert told["spec_decode_num_drafts"] == 60  # those of the warm-up are not among them
    assert told["prompt_tokens_cached"] == 0.1
    assert f"{server.url} (tiny), concurrency 2" in out
    assert "requests: 6 answered, 0 failed" in out
    assert "acceptance length 1.600" in out
    assert "50.0% 10.0% of 60 drafts\n" in out  # no draft got to the third
    assert "prefix cache: 10% of the prompts' tokens were cached" in " ".join(out.split())
    assert "all runs" not in out
    for word in ("TTFT", "TPOT", "ITL per chunk", "ITL per token", "end to end", "median", "p99"):
        assert word in out


def test_a_sweep_is_run_one_after_another_and_drawn(tmp_path):
    figures, plot = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    with Server(lambda number, body: Reply([Piece("a", 1, 0.01)] * 2)) as server:
        out = bench(
            server.url, "--requests=5", "--rate=50,100", "--percentiles=50,99.9", f"--json={figures}", f"--plot={plot}"
        )
    told = json.loads(figures.read_text())
    assert [run["request_rate"] for run in told["runs"]] == [50.0, 100.0]
    assert [row["load"] for row in told["summary"]] == ["rate 50/s", "rate 100/s"]
    assert told["summary"][1]["median_ttft_ms"] == told["runs"][1]["median_ttft_ms"]
    assert told["ratios"] == []
    assert "p99.9_e2el_ms" in told["runs"][0]
    assert "all runs" in out
    assert "side by side" not in out
    rows = re.findall(r"^ +(50|100) .*$", out, re.M)
    assert rows == ["50", "100"]
    drawn = plot.read_text()
    for word in ("time to first token: median, p99.9 dashed", "requests/s", "output tokens/s", server.url):
        assert word in drawn


def test_servers_get_the_same_requests_in_turn(tmp_path):
    """The order turns round from one round to the next; a ratio is of the medians over the rounds, first over other."""
    figures, plot, order = tmp_path / "two.json", tmp_path / "two.png", []

    def after(name, seconds):
        def reply(number, body):
            order.append(name)
            return Reply([Piece("a", 1, seconds)] * 3)

        return reply

    with Server(after("a", 0.04)) as a, Server(after("b", 0.08)) as b:
        words = [
            "--requests=4",
            "--concurrency=2",
            "--temperature=0.7",
            "--warm-up=1",
            f"--json={figures}",
            f"--plot={plot}",
        ]
        out = bench(a.url, b.url, *words)
    assert a.bodies[:2] == b.bodies[:2]
    for server in (a, b):
        rounds = [server.bodies[2 + 4 * at : 6 + 4 * at] for at in range(3)]
        prompts = [sorted((one["messages"][0]["content"], one["seed"]) for one in each) for each in rounds]
        assert prompts[0] == prompts[1] == prompts[2]
        assert len({seed for _, seed in prompts[0]}) == 4
    key = sorted((one["messages"][0]["content"], one["seed"]) for one in a.bodies[2:6])
    assert key == sorted((one["messages"][0]["content"], one["seed"]) for one in b.bodies[2:6])
    assert "".join(order) == "ab" + "a" * 5 + "b" * 5 + "b" * 4 + "a" * 4 + "a" * 4 + "b" * 4
    told = json.loads(figures.read_text())
    assert [(run["label"], run["round"]) for run in told["runs"]] == [
        (url, number) for number, urls in enumerate([(a.url, b.url), (b.url, a.url), (a.url, b.url)]) for url in urls
    ]
    found = {one["figure"]: one for one in told["ratios"]}
    assert all((one["a"], one["b"]) == (a.url, b.url) for one in told["ratios"])
    for name in ("median_e2el_ms", "output_throughput"):
        of = [median(run[name] for run in told["runs"] if run["label"] == server.url) for server in (a, b)]
        assert found[name]["ratio"] == pytest.approx(of[0] / of[1])
    assert f"A: {a.url}" in out
    assert f"B: {b.url}" in out
    assert "concurrency 2  A over B" in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_server_may_be_measured_against_itself():
    with Server() as server:
        out = bench(server.url, server.url, "--requests=3", "--rounds=1")
    assert f"A: {server.url} (1)" in out
    assert f"B: {server.url} (2)" in out


def test_a_dataset_and_completions(tmp_path):
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 5}\n{"prompt": "two", "output_tokens": 6}\n')
    with Server() as server:
        out = bench(server.url, "--dataset", path, "--completions", "--requests=2", "--warm-up=0", "--ignore-eos")
    assert "2 prompts, vLLM's custom layout\n" in out
    assert server.paths.count("/v1/completions") == 3
    sent = {(body["prompt"], body["max_tokens"], body["ignore_eos"]) for body in server.bodies}
    assert sent == {("one", 5, True), ("two", 6, True)}


def test_prompts_that_are_asked_again_are_said(tmp_path):
    path = tmp_path / "few.txt"
    path.write_text("one\ntwo\n")
    with Server() as server:
        out = bench(server.url, "--dataset", path, "--requests=4", "--warm-up=1")
    assert "2 prompts, text; each is asked up to 3 times in a run" in out


def test_failures_are_listed_with_their_reasons():
    def reply(number, body):
        return Reply(status=500, body={"error": {"message": f"[red]fault {number % 7}"}}) if number else Reply()

    with Server(reply) as server:
        out = bench(server.url, "--requests=14", "--warm-up=0")
    assert "requests: 0 answered, 14 failed" in out
    assert "! 2 requests failed: HTTP 500: [red]fault 1" in out
    assert "! others failed for 2 other reasons" in out


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "usual")
    monkeypatch.setenv("OTHER_KEY", "special")
    with Server() as server:
        bench(server.url, "--requests=1", "--warm-up=0")
        bench(server.url, "--requests=1", "--warm-up=0", "--api-key-env=OTHER_KEY")
    assert [sent["authorization"] for sent in server.headers] == ["Bearer usual"] * 2 + ["Bearer special"] * 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("http://x", "--rate=1", "--concurrency=1"), "give either --rate or --concurrency"),
        (("http://x", "--detailed"), "--detailed needs --json FILE"),
        (("http://x", "--rate=1,,2"), "--rate must be"),
        (("http://x", "--concurrency=0"), "--concurrency must be between 1 and 10000, not 0"),
        (("http://x", "--concurrency=" + ",".join(["1"] * 65)), "--concurrency takes at most 64 numbers"),
        (("http://x",) * 9, "at most 8 servers"),
        (("http://x", "localhost:8000"), "'localhost:8000' is no address of a server"),
        (("http://127.0.0.1:9",), "http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_what_cannot_be_run_is_refused(words, says):
    code, _, err = run_here([*WORDS, *words])
    assert code == 2
    assert err.startswith("specscope: error: ")
    assert err.count("\n") == 1
    assert says in err


def test_ctrl_c_prints_what_there_is(tmp_path):
    figures = tmp_path / "stopped.json"
    slow = Reply([Piece("a", 1, 3600)])
    with Server(lambda number, body: Reply() if number < 5 else slow) as server:
        words = ["--requests=50", "--concurrency=3", "--warm-up=0", "--json", str(figures)]
        process = subprocess.Popen(
            [sys.executable, "-m", "specscope", *WORDS, server.url, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        until(lambda: server.at_once >= 3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130, err
    assert b"requests: 4 answered, 0 failed, 3 dropped at Ctrl-C" in out
    told = json.loads(figures.read_text())
    assert (told["completed"], told["failed"], told["dropped"]) == (4, 0, 3)


def test_ctrl_c_before_the_first_answer_ends_it_too():
    with Server(lambda number, body: Reply(silent=True)) as server:
        process = subprocess.Popen([sys.executable, "-m", "specscope", *WORDS, server.url], stdout=subprocess.PIPE)
        until(lambda: server.at_once)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130


def test_it_runs_without_torch_and_says_what_is_missing():
    code = "import sys; import specscope.bench.sweep, specscope.bench.show; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys; sys.modules['httpx2'] = None; from specscope.__main__ import main; main()"
    words = [sys.executable, "-c", code, *WORDS, "http://127.0.0.1:9"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "specscope: error: this needs httpx2: pip install 'specscope[bench]'\n"


def test_ratios_are_of_medians_and_their_interval_is_of_the_rounds():
    names = ("request_throughput", "output_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms")

    def run(label, value, concurrency=1):
        about = {"label": label, "request_rate": "inf", "max_concurrency": concurrency}
        return about | dict.fromkeys(names, value)

    rounds = zip((1.0, 3.0, 2.0), (4.0, 4.0, 8.0), strict=True)
    runs = [run(label, value) for pair in rounds for label, value in zip("AB", pair, strict=True)]
    runs += [run("A", 5.0, 2), run("B", None, 2), run("A", 9.0, 3)]
    found = list(ratios(points(runs)))
    assert [one.figure for one in found] == list(names)
    for one in found:
        assert isinstance(one, LoadRatio)
        assert (one.load.concurrency, one.a, one.b, one.values) == (1, "A", "B", (2.0, 4.0))
        assert one.ratio == 0.5
        assert one.interval == (0.25, 0.75)
    assert to_json(runs)["summary"][0]["median_ttft_ms"] == 2.0
    assert to_json(runs[:1]) is runs[0]
    assert list(ratios([])) == []


def test_the_plan_is_that_of_the_flags(monkeypatch):
    seen = []
    monkeypatch.setattr(sweep, "run_serve", lambda plan, json_file, plot: seen.append(plan) or 0)
    run_here([*WORDS, "http://x"])
    run_here([*WORDS, "http://x", "http://y", "--burstiness=0.5", "--timeout=3", "--seed=4"])
    first, second = seen
    assert (first.requests, first.warm_up, first.rounds, first.percentiles) == (100, 4, 1, (99.0,))
    assert ([load.name for load in first.loads], first.request.chat) == (["concurrency 1"], True)
    assert (second.rounds, second.burstiness, second.request.timeout, second.request.seed) == (3, 0.5, 3.0, 4)


def test_help_names_the_verb():
    assert "serve" in cli.commands["bench"].commands
    with pytest.raises(UserError, match=r"--plot x\.pdf: write a name that ends in"):
        cli.main([*WORDS, "http://x", "--plot=x.pdf"], standalone_mode=False)
