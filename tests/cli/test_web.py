"""The screen in a browser: a real server on loopback, a real headless Chromium, the tree's colours in its picture."""

import asyncio
import base64
import contextlib
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import aiohttp
import aiohttp.web
import pytest
from PIL import Image

from specscope.cli.web import SESSIONS, make_server, serve
from specscope.errors import UserError
from specscope.tui import palette

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
COLOURS = {name: palette.style(name, True).color.triplet for name in ("accepted", "rejected", "recovered")}
SAMPLE = Path(__file__).parents[2] / "traces" / "sampled.jsonl"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def server(*words):
    port = free_port()
    command = [sys.executable, "-m", "specscope", "tui", "--web", "--web-port", str(port), "--", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1).close()
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(10)


def test_the_page_asks_no_other_host_for_anything():
    with server("replay", str(SAMPLE)) as url:
        page = urllib.request.urlopen(url, timeout=5).read().decode()
    assert "specscope" in page
    others = [part for part in page.split('"') if part.startswith(("http", "ws", "//")) and "127.0.0.1" not in part]
    assert others == []


def share(picture, colour):
    """How many pixels have about this colour."""
    wanted = tuple(colour)
    return sum(
        count
        for count, pixel in picture.getcolors(picture.width * picture.height)
        if all(abs(a - b) < 24 for a, b in zip(pixel, wanted, strict=True))
    )


def browser_arguments(folder, port, url):
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    return [
        CHROMIUM,
        *quiet,
        "--window-size=1300,900",
        f"--user-data-dir={folder}",
        f"--remote-debugging-port={port}",
        url,
    ]


async def pictures(port):
    """Pictures of the browser's page, one after another, by the DevTools protocol."""
    async with aiohttp.ClientSession() as session:
        for _ in range(100):
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    pages = [page for page in await answer.json() if page["type"] == "page"]
                if pages:
                    break
            await asyncio.sleep(0.2)
        async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as wire:
            for number in range(40):
                await wire.send_json({"id": number, "method": "Page.captureScreenshot"})
                message = await wire.receive_json()
                while message.get("id") != number:
                    message = await wire.receive_json()
                yield Image.open(io.BytesIO(base64.b64decode(message["result"]["data"]))).convert("RGB")
                await asyncio.sleep(0.5)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
async def test_a_browser_shows_the_tree(tmp_path):
    port, shown = free_port(), {}
    with server("replay", str(SAMPLE)) as url:
        browser = subprocess.Popen(
            browser_arguments(tmp_path, port, url), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            async for picture in pictures(port):
                shown = {name: share(picture, colour) for name, colour in COLOURS.items()}
                if min(shown.values()) > 20:
                    break
            picture.save(tmp_path / "page.png")
        finally:
            browser.terminate()
            browser.wait(10)
    assert min(shown.values()) > 20, shown


def test_a_port_that_is_taken_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="cannot listen on"):
            serve(["run"], "127.0.0.1", taken.getsockname()[1])


@contextlib.asynccontextmanager
async def serving(host="127.0.0.1"):
    """The real server on a free port, in this process; its sessions are processes that do nothing."""
    port = free_port()
    made, guard = make_server(["doctor"], host, port)
    made.command = "echo __GANGLION__; head -c 1"  # until it is told to quit
    runner = aiohttp.web.AppRunner(await made._make_app(), shutdown_timeout=0.1)
    made.console.quiet = True
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        async with aiohttp.ClientSession() as session:
            yield port, guard, session
    finally:
        await runner.cleanup()


EVIL = [
    {"Host": "evil.example"},
    {"Host": "evil.example:PORT"},
    {"Host": "127.0.0.1"},
    {"Host": "127.0.0.1:1"},
    {"Host": "localhost:PORT.evil.example"},
    {"Host": ""},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://127.0.0.1"},
    {"Origin": "https://127.0.0.1:PORT"},
    {"Origin": "http://localhost:PORT"},  # a name of this server, but not the one that was addressed
    {"Host": "evil.example:PORT", "Origin": "http://evil.example:PORT"},  # DNS rebinding
]


@pytest.mark.parametrize("headers", EVIL, ids=str)
async def test_other_sites_are_refused(headers):
    async with serving() as (port, _, session):
        headers = {name: value.replace("PORT", str(port)) for name, value in headers.items()}
        for path in ("/", "/static/js/textual.js", "/download/x"):
            async with session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as answer:
                assert answer.status == 403
                assert (await answer.text()).startswith("specscope: ")
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(f"http://127.0.0.1:{port}/ws", headers=headers)
        assert refused.value.status == 403


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
async def test_the_user_is_served_by_any_name_of_this_machine(name):
    async with serving() as (port, _, session):
        headers = {"Host": f"{name}:{port}"}
        async with session.get(f"http://127.0.0.1:{port}/", headers=headers) as answer:
            assert answer.status == 200
            assert f'"ws://{name}:{port}/ws"' in await answer.text()
            assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        headers["Origin"] = f"http://{name.lower()}:{port}"
        async with session.ws_connect(f"http://127.0.0.1:{port}/ws", headers=headers) as wire:
            await wire.send_json(["ping", "1"])
            assert await wire.receive_json(timeout=10) == ["pong", "1"]


async def test_where_other_machines_reach_it_a_token_is_needed():
    async with serving("0.0.0.0") as (port, guard, session):
        url = f"http://127.0.0.1:{port}"
        assert len(guard.token) >= 32
        for query in ("", "?token=", "?token=wrong", "?token=%ff"):
            async with session.get(f"{url}/{query}", allow_redirects=False) as answer:
                assert answer.status == 403
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await session.ws_connect(f"{url}/ws")
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as user:
            async with user.get(f"{url}/?token={guard.token}&fontsize=12") as answer:
                assert answer.status == 200
                assert str(answer.url) == f"{url}/?fontsize=12"  # the token is out of sight
            async with user.ws_connect(f"{url}/ws", headers={"Origin": url}) as wire:
                await wire.send_json(["ping", "1"])
                assert await wire.receive_json(timeout=10) == ["pong", "1"]
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await user.ws_connect(f"{url}/ws", headers={"Origin": "http://evil.example"})


async def test_sessions_are_bounded_and_closing_one_makes_room():
    async with serving() as (port, _, session):
        url = f"http://127.0.0.1:{port}/ws"
        wires = [await session.ws_connect(url) for _ in range(SESSIONS)]
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(url)
        assert refused.value.status == 503
        for wire in wires:
            await wire.close()
        for _ in range(50):
            with contextlib.suppress(aiohttp.WSServerHandshakeError):
                await (await session.ws_connect(url)).close()
                return
            await asyncio.sleep(0.1)
        raise AssertionError("a closed session makes no room")


@pytest.mark.parametrize("host", ["", "no.such.host.invalid", "999.1.1.1", "x" * 300, "\udcff"])
def test_a_host_that_is_none_is_one_line(host):
    with pytest.raises(UserError):
        serve(["run"], host, free_port())
