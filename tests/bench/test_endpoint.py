"""What a server is asked, and what its counters tell."""

import asyncio
from pathlib import Path

import pytest

from specscope.bench.datasets import LoadRequest
from specscope.bench.endpoint import STREAM_OPTIONS, Page, RequestOptions, base_url, grown
from specscope.bench.endpoint import Endpoint as Client
from specscope.errors import UserError
from specscope.trace.history.stats import measure
from tests.bench.server import Reply, Server

DATA = Path(__file__).parents[1] / "data" / "vllm"
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


def opened(server, *, model=None, key=None, then=None, **request):
    """A client of a server, after its first request; what `then` makes of it."""

    async def go():
        async with Client(server.url, RequestOptions(**request), key=key) as client:
            await client.open(model, LoadRequest("first"))
            return client, (await then(client) if then else None)

    return asyncio.run(go())


def body(ask, number=0, **request):
    client = Client("http://x", RequestOptions(**request))
    client.model = "tiny"
    return client.body(ask, number)


def test_what_a_request_says():
    first = {"model": "tiny", "stream": True, **STREAM_OPTIONS[0], "temperature": 0.0, "max_tokens": 128}
    assert body(LoadRequest("hi")) == first | {"messages": [{"role": "user", "content": "hi"}]}
    assert body(LoadRequest("hi"), chat=False) == first | {"prompt": "hi"}
    assert body(LoadRequest(CHAT))["messages"] == CHAT
    assert body(LoadRequest(CHAT[:1]), chat=False)["prompt"] == "a"
    with pytest.raises(UserError, match="--completions needs prompts of one turn"):
        body(LoadRequest(CHAT), chat=False)


def test_who_decides_how_long_an_answer_may_be():
    assert body(LoadRequest("hi", 9))["max_tokens"] == 9
    assert body(LoadRequest("hi", 9), max_tokens=5)["max_tokens"] == 5
    assert body(LoadRequest("hi", 9), ignore_eos=True)["ignore_eos"] is True


def test_seeds_differ_by_request_and_parameters_of_a_line_win():
    assert [body(LoadRequest("hi"), at, temperature=0.5, seed=2**63 - 1)["seed"] for at in range(2)] == [2**63 - 1, 0]
    assert "seed" not in body(LoadRequest("hi"), 3, seed=7)
    own = body(LoadRequest("hi", None, {"temperature": 1.5, "top_k": 4, "seed": 3}), 5, temperature=0.5)
    assert (own["temperature"], own["top_k"], own["seed"]) == (1.5, 4, 3)


def test_the_first_model_is_asked_for_unless_one_is_named():
    with Server(models=("one", "two")) as server:
        assert opened(server)[0].model == "one"
        assert opened(server, model="two")[0].model == "two"
    assert [sent["model"] for sent in server.bodies] == ["one", "two"]
    with Server(models=None) as server:
        assert opened(server, model="two")[0].model == "two"
        with pytest.raises(UserError, match="/v1/models: the server answers 404"):
            opened(server)
    with Server(models=()) as server, pytest.raises(UserError, match="lists no model: give --model"):
        opened(server)


def test_the_key_is_sent_where_there_is_one():
    with Server() as server:
        opened(server, key="secret")
        opened(server)
    assert [sent.get("authorization") for sent in server.headers] == ["Bearer secret", None]


def test_a_server_that_refuses_options_is_asked_for_less():
    for refused, wanted in (("continuous_usage_stats", STREAM_OPTIONS[1]), ("stream_options", STREAM_OPTIONS[2])):
        with Server(strict_options=(refused,)) as server:
            opened(server, then=lambda client: client.send(LoadRequest("second"), 1))
        assert len(server.bodies) == 2
        assert all({key: sent[key] for key in sent if key == "stream_options"} == wanted for sent in server.bodies)


@pytest.mark.parametrize(
    ("status", "message", "says"),
    [
        (400, "prompt too long", "HTTP 400: prompt too long"),
        (401, "no key", "HTTP 401: no key: set the variable that --api-key-env names"),
        (404, "no such model", "HTTP 404: no such model"),
    ],
)
def test_a_server_that_does_not_answer_is_said_at_once(status, message, says):
    with Server(lambda number, body: Reply(status=status, body={"error": {"message": message}})) as server:
        with pytest.raises(UserError) as refused:
            opened(server)
        assert str(refused.value) == f"{server.url} does not answer a first request: {says}"
    assert len(server.bodies) == (3 if status == 400 else 1)


def test_nobody_there():
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9 cannot be reached: "):
        opened(type("Gone", (), {"url": "http://127.0.0.1:9"}))


def pages(*texts):
    """What a server's pages tell, one after the other."""
    left = list(texts)

    async def read(client):
        return [await client.page() for _ in texts]

    with Server(metrics=lambda requests: left.pop(0)) as server:
        return opened(server, then=read)[1]


def test_counters_of_vllm_are_subtracted():
    before, after = pages((DATA / "metrics_before.txt").read_text(), (DATA / "metrics_after.txt").read_text())
    told, _ = grown(before, after)
    (reading,), (then,) = after.engines.values(), before.engines.values()
    assert len(told) == 1
    for name in ("drafts", "drafted", "accepted"):
        assert getattr(told[0], name) == reading.counters[name] - then.counters[name] > 0
    assert measure(told).tau == pytest.approx(1 + told[0].accepted / told[0].drafts)


def page(drafts, accepted, *, hits=0, queries=0, engine=0, created=1.0):
    label = f'{{engine="{engine}",model_name="m"}}'
    counters = {"spec_decode_num_drafts": drafts, "spec_decode_num_draft_tokens": 2 * drafts}
    counters |= {"spec_decode_num_accepted_tokens": sum(accepted)}
    counters |= {"prefix_cache_queries": queries, "prefix_cache_hits": hits}
    lines = [f"vllm:{name}_total{label} {value}.0" for name, value in counters.items()]
    for at, value in enumerate(accepted):
        position = f'engine="{engine}",model_name="m",position="{at}"'
        lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{position}}} {value}.0")
    lines.append(f"vllm:spec_decode_num_drafts_created{label} {created}")
    return "\n".join(lines) + "\n"


def test_engines_are_put_together_and_prefix_caches_told():
    before = page(10, (5, 1), queries=100, hits=0) + page(20, (8, 8), engine=1, queries=50, hits=50)
    after = page(20, (11, 3), queries=200, hits=30) + page(50, (28, 18), engine=1, queries=150, hits=80)
    told, cached = grown(*pages(before, after))
    found = measure(told)
    assert (found.drafts, found.drafted, found.accepted) == (40, 80, 38)
    assert found.per_position == [26 / 40, 12 / 40]
    assert cached == 60 / 200


def test_a_server_that_was_restarted_in_between_counts_from_there():
    told, cached = grown(*pages(page(10, (5, 1), queries=9, hits=9), page(4, (2, 1), created=2.0)))
    assert (measure(told).drafts, measure(told).accepted) == (4, 3)
    assert cached is None


def test_counters_that_appear_later_count_from_nothing():
    told, cached = grown(*pages("# nothing yet\n", page(4, (2, 1))))
    assert measure(told).accepted == 3
    assert cached is None


def test_servers_without_counters():
    assert pages("", "vllm:num_requests_running 3\n") == [Page(), Page()]
    assert pages("{not prometheus", page(1, (1, 0)).replace("1.0", "x")) == [None, None]
    with Server() as server:
        assert opened(server, then=lambda client: client.page())[1] is None
    assert grown(None, Page()) == ([], None)
    assert grown(Page(), None) == ([], None)


def test_addresses():
    for text in ("http://x:8000", "http://x:8000/", "http://x:8000/v1", "http://x:8000/v1/"):
        assert base_url(text) == "http://x:8000"
    assert base_url("https://host/some/path/v1") == "https://host/some/path"
    for text in (
        "x:8000",
        "http://",
        "ftp://x",
        "http://x:0",
        "http://x:99999",
        "http://u:p@x",
        "http://x?a=1",
        "http://x y",
    ):
        with pytest.raises(UserError, match="is no address of a server"):
            base_url(text)
