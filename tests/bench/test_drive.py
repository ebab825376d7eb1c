"""A run: arrivals and concurrency as asked, the client's own lag, and where acceptance comes from."""

import asyncio
import time

import pytest

from specscope.bench.datasets import Load, LoadRequest, arrivals
from specscope.bench.drive import METRICS, RESPONSES, LoadRun, drive
from specscope.bench.endpoint import Endpoint as Client
from specscope.bench.endpoint import RequestOptions
from specscope.bench.figures import figures
from specscope.trace.bench_result import AVERAGE
from tests.bench.server import Piece, Reply, Server
from tests.bench.test_endpoint import page
from tests.bench.test_stream import TELLS
from tests.waiting import HANG_SECONDS


def driven(server, load, count, *, stopped=lambda: False, advance=lambda: None, **request):
    async def go():
        async with Client(server.url, RequestOptions(**request)) as client:
            client.model = "tiny"
            asks = [LoadRequest(f"{number}") for number in range(count)]
            return await drive(LoadRun(client, load, 0, count), asks, stopped, advance)

    return asyncio.run(go())


def prompts(server):
    return [body["messages"][0]["content"] for body in server.bodies]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_as_many_requests_at_once_as_asked_for(concurrency):
    with Server(lambda number, body: Reply([Piece("a", 1, 0.02)])) as server:
        run = driven(server, Load(concurrency=concurrency), 9)
    assert server.most == run.peak == concurrency
    assert sorted(prompts(server)) == [f"{number}" for number in range(9)]
    assert len(run.good) == 9
    assert run.in_flight == 0
    assert run.duration >= 9 / concurrency * 0.02
    assert run.duration >= max(answer.ended for answer in run.answers) - run.start


def test_no_more_requests_than_there_are():
    with Server() as server:
        assert driven(server, Load(concurrency=50), 2).peak <= 2
    assert len(server.bodies) == 2


def test_requests_arrive_at_their_times_whatever_becomes_of_them():
    """The server answers none before all have come."""
    with Server(lambda number, body: Reply(others=8)) as server:
        run = driven(server, Load(rate=20.0), 8, seed=3)
    due = [run.start + at for at in arrivals(8, 20.0, 1.0, seed=3)]
    assert prompts(server) == [f"{number}" for number in range(8)]
    assert run.peak == server.most == 8
    for planned, came in zip(due, server.times, strict=True):
        assert planned <= came <= planned + HANG_SECONDS
    assert len(run.delays) == 1 + 8  # 0 to begin with
    assert 0 <= max(run.delays) <= HANG_SECONDS


def test_a_busy_client_says_so():
    """Each answer holds the event loop up for 60 ms, so that arrivals and looks are late."""

    def busy():
        until = time.process_time() + 0.06
        while time.process_time() < until:
            pass

    with Server() as server:
        run = driven(server, Load(rate=20.0), 6, advance=busy)
    assert run.processor >= 6 * 0.06
    assert run.worst_lag >= 0.04
    assert run.lag > 0.01


def test_when_stopped_it_keeps_what_there_is():
    done = []
    with Server(lambda number, body: Reply([Piece("a", 1, 0.01 if number < 3 else 3600)])) as server:
        run = driven(
            server,
            Load(concurrency=2),
            50,
            stopped=lambda: len(done) == 3 and len(server.bodies) == 5,
            advance=lambda: done.append(1),
        )
    assert len(run.good) == 3
    assert run.in_flight == 2
    assert run.duration < HANG_SECONDS


def test_failures_are_answers_too():
    def reply(number, body):
        return Reply(status=503, body="busy") if number % 2 else Reply()

    with Server(reply) as server:
        run = driven(server, Load(concurrency=1), 6)
    assert [answer.error for answer in run.answers] == ["", "HTTP 503: busy"] * 3
    assert len(run.good) == 3


@pytest.mark.parametrize(
    ("tellers", "source", "tau"), [((0, 1), RESPONSES, 1 + 7 / 6), ((0,), METRICS, 1.6), ((), METRICS, 1.6)]
)
def test_acceptance_comes_from_the_responses_if_all_tell_it(tellers, source, tau):
    def reply(number, body):
        return Reply(last={"metrics": {"speculative_decoding": TELLS}} if number in tellers else {})

    with Server(reply, lambda requests: page(10 * requests, (5 * requests, requests))) as server:
        run = driven(server, Load(concurrency=1), 2)
    assert (run.source, run.acceptance.tau) == (source, pytest.approx(tau))


@pytest.mark.parametrize(("has_page", "source", "tau"), [(True, METRICS, 1.6), (False, RESPONSES, None)])
def test_answers_of_llamacpp_lack_the_drafts_that_its_page_has(has_page, source, tau):
    timings = {"predicted_n": 9, "draft_n": 20, "draft_n_accepted": 12}

    def metrics(requests):
        return page(10 * requests, (5 * requests, requests)).replace("vllm:", "llamacpp:") if has_page else ""

    with Server(lambda number, body: Reply(last={"timings": timings}), metrics) as server:
        run = driven(server, Load(concurrency=1), 2)
    assert (run.source, run.acceptance.tau, run.acceptance.rate) == (
        source,
        tau,
        pytest.approx(0.3 if has_page else 0.6),
    )


def test_a_server_may_tell_no_acceptance():
    with Server() as server:
        assert driven(server, Load(concurrency=1), 2).acceptance is None


def test_averages_of_sglang_are_told_as_what_they_are():
    def metrics(requests):
        labels = '{model_name="m",engine_type="unified",tp_rank="0"}'
        return f"sglang:spec_accept_length{labels} 2.5\nsglang:spec_accept_rate{labels} 0.5\n"

    with Server(metrics=metrics) as server:
        run = driven(server, Load(concurrency=1), 2)
    assert (run.average, run.source) == (2.5, AVERAGE)
    told = figures(run, [99])
    assert told["spec_decode_acceptance_length"] == 2.5
    assert told["spec_decode_acceptance_rate"] is told["spec_decode_num_drafts"] is None
    assert told["spec_decode_per_position_acceptance_rates"] == []
