"""Customers of a server under test: what they ask, when they leave, and what they were told."""

import asyncio
import json
import random
import re
import time
from dataclasses import dataclass, field

import httpx2

TEXT = (
    "The harbour woke slowly. Nets were mended, coffee was poured, and somebody told the story of the storm again: how "
    "the lamp went out, how the keeper rowed to the rock with a candle in a jar, and how nobody believed him later. "
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS = [
    ({"regex": "[a-z]{3,8}"}, lambda text: re.fullmatch("[a-z]{3,8}", text)),
    ({"choice": ["left", "right", "neither"]}, lambda text: text in ("left", "right", "neither")),
    ({"json": SCHEMA}, lambda text: set(json.loads(text)) == {"name", "age"}),
    ({"grammar": 'root ::= "<" [0-9]+ ">"'}, lambda text: re.fullmatch("<[0-9]+>", text)),
]
PLAIN = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.9, "min_p": 0.05},
    {"frequency_penalty": 0.6, "presence_penalty": 0.4},
    {"temperature": 0.7, "repetition_penalty": 1.2},
    {"temperature": 0.7, "logit_bias": {"30": 4.0, "31": -4.0}},
    {"stop": ["the", "."]},
    {"logprobs": 3},
    {"min_tokens": 6, "stop": ["a"]},
    {"temperature": 0.8, "n": 2},
]
BAD = [
    {"temperature": -1},
    {"top_p": 0},
    {"max_tokens": "many"},
    {"n": 100_000},
    {"prompt": [1, 10**8]},
    {"prompt": "word " * 20_000},
    {"structured_outputs": {"regex": "(a"}},
    {"structured_outputs": {"json": {"type": "nothing"}}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"suffix": "x"},
]


@dataclass
class Asked:
    """One request to come."""

    body: dict
    path: str = "/v1/completions"
    bad: bool = False  # it is to be refused with status 400
    leaves: float | None = None  # after so many seconds; None for never
    good: object = None  # what the text of a form must satisfy


@dataclass
class Told:
    """What a customer knows of a request."""

    asked: Asked
    id: str = ""
    status: int = 0  # 0: the connection broke first
    error: str = ""
    whole: bool = False  # the answer came to its end
    left_ns: int | None = None  # when the customer left
    texts: dict = field(default_factory=dict)  # by choice
    ends: dict = field(default_factory=dict)  # finish reasons by choice
    logprobs: dict = field(default_factory=dict)  # how many tokens had some, by choice
    tokens: int = 0  # usage.completion_tokens


def draw(rng: random.Random, longest: int, most: int) -> Asked:
    """A request at random: of 40 three are bad, five leave early. `longest`: characters; `most`: output tokens."""
    start = rng.randrange(len(TEXT))
    prompt = (TEXT[start:] + TEXT * 4)[: rng.choice((20, 60, 200, 200, longest))]
    body = {"prompt": prompt, "temperature": 0, "max_tokens": rng.randint(1, most), "seed": rng.randrange(10**6)}
    body["stream"] = rng.random() < 0.6
    kind = rng.randrange(40)
    if kind < 3:
        return Asked({**body, **rng.choice(BAD)}, bad=True)
    if kind < 11:
        form, good = rng.choice(FORMS)
        body |= {"structured_outputs": form, "temperature": rng.choice((0, 0.8)), "max_tokens": min(most, 32)}
        return Asked(body, good=good)
    body |= rng.choice(PLAIN)
    body["max_tokens"] = max(body["max_tokens"], body.get("min_tokens", 1))
    leaves = rng.uniform(0.01, 2.0) if kind < 16 else None
    if kind % 2 and "logprobs" not in body:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        return Asked(body, "/v1/chat/completions", leaves=leaves)
    return Asked(body, leaves=leaves)


async def ask(client: httpx2.AsyncClient, asked: Asked) -> Told:
    """Send it, and take what comes until the end, or until the customer leaves."""
    told = Told(asked)
    stream = {"stream_options": {"include_usage": True}} if asked.body["stream"] else {}
    try:
        async with asyncio.timeout(asked.leaves):
            async with client.stream("POST", asked.path, json={**asked.body, **stream}) as answer:
                told.status = answer.status_code
                async for line in answer.aiter_lines():
                    take(told, line)
    except TimeoutError:
        told.left_ns = time.time_ns()
    except httpx2.HTTPError as error:
        told.error = told.error or repr(error)
    return told


def take(told: Told, line: str) -> None:
    """A line of a stream, or the whole of an answer."""
    streamed = line.startswith("data: ")
    line = line.removeprefix("data: ")
    if line == "[DONE]":
        told.whole = True
    if not line or line == "[DONE]":
        return
    got = json.loads(line)
    told.whole = told.whole or not streamed
    if "error" in got:
        told.error = got["error"]["message"]
        return
    told.id = got["id"]
    if got.get("usage"):
        told.tokens = got["usage"]["completion_tokens"]
    for choice in got["choices"]:
        message = choice.get("message") or choice.get("delta") or choice
        text = message.get("text") or message.get("content") or ""
        index = choice["index"]
        told.texts[index] = told.texts.get(index, "") + text
        assert told.ends.get(index) is None, "something came after the end"
        told.ends[index] = choice.get("finish_reason")
        if choice.get("logprobs"):
            told.logprobs[index] = told.logprobs.get(index, 0) + len(choice["logprobs"]["tokens"])


async def shop(
    url: str, rng: random.Random, longest: int, most: int, requests: int, customers: int, seconds: float
) -> list[Told]:
    """So many customers, one request after another each, until there were so many or the time is over.

    A customer who is refused waits until another has an answer; one who finds nobody there three times goes home.
    """
    told: list[Told] = []
    until, left = time.monotonic() + seconds, iter(range(requests))
    answered, asking = asyncio.Condition(), customers

    async def customer(client: httpx2.AsyncClient) -> None:
        nonlocal asking
        closed = 0
        for _ in left:
            told.append(one := await ask(client, draw(rng, longest, most)))
            closed = closed + 1 if one.status == 0 and one.left_ns is None else 0
            async with answered:
                answered.notify_all()
                if one.status == 429 and asking > 1:
                    asking -= 1
                    await answered.wait()
                    asking += 1
            if closed == 3 or time.monotonic() > until:
                break
        async with answered:
            asking -= 1
            answered.notify_all()

    async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(customer(client) for _ in range(customers)))
    return told
