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
from functools import partial
from pathlib import Path

import aiohttp
import aiohttp.web
import psutil
import pytest
from PIL import Image

from specscope.cli.web import SESSIONS, make_server, serve
from specscope.errors import UserError
from specscope.tui import palette
from tests.processes import free_port
from tests.waiting import HANG_SECONDS, comes, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
COLOURS = {name: palette.style(name, True).color.triplet for name in ("accepted", "rejected", "recovered")}
PAPER = (0xFB, 0xFB, 0xF8)  # the light theme's background
SAMPLE = Path(__file__).parents[2] / "traces" / "sampled.jsonl"


def answers(port):
    """Whether somebody listens there, and answers."""
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=HANG_SECONDS).close()
        return True
    return False


@contextlib.contextmanager
def server(*words):
    port = free_port()
    command = [sys.executable, "-m", "specscope", "tui", "--web", "--web-port", str(port), "--", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        until(lambda: answers(port))
        yield f"http://127.0.0.1:{port}/"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(HANG_SECONDS)


def test_the_page_asks_no_other_host_for_anything():
    with server("replay", str(SAMPLE)) as url:
        page = urllib.request.urlopen(url, timeout=HANG_SECONDS).read().decode()
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


async def pictures(port, keys=()):
    """Pictures of the browser's page, one after another, by the DevTools protocol; each key is typed after one."""
    keys = list(keys)
    async with aiohttp.ClientSession() as session:

        async def pages():
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    return [page for page in await answer.json() if page["type"] == "page"]

        page = (await comes(pages))[0]
        async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as wire:

            async def ask(method, **what):
                await wire.send_json({"id": 1, "method": method, "params": what})
                while (message := await wire.receive_json()).get("id") != 1:
                    pass
                return message["result"]

            end = time.monotonic() + HANG_SECONDS
            while time.monotonic() < end:
                picture = await ask("Page.captureScreenshot")
                image = Image.open(io.BytesIO(base64.b64decode(picture["data"]))).convert("RGB")
                if (yield image) and keys:
                    key = keys.pop(0)
                    await ask("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
                    await ask("Input.dispatchKeyEvent", type="keyUp", key=key)


@contextlib.contextmanager
def browser(folder, port, url):
    process = subprocess.Popen(
        browser_arguments(folder, port, url), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(HANG_SECONDS)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
async def test_a_browser_shows_the_tree_and_hears_keys_without_a_click(tmp_path):
    port, shown, light = free_port(), {}, 0
    with server("replay", str(SAMPLE)) as url, browser(tmp_path, port, url):
        seen = pictures(port, "t")
        picture = await anext(seen)
        for _ in range(int(2 * HANG_SECONDS)):
            shown = {name: share(picture, colour) for name, colour in COLOURS.items()}
            if min(shown.values()) > 20:
                break
            picture = await anext(seen)
        picture.save(tmp_path / "page.png")
        assert min(shown.values()) > 20, shown
        picture = await seen.asend(True)  # types t, for the other theme
        while (light := share(picture, PAPER)) < picture.width * picture.height / 2:
            picture = await anext(seen)
    assert light


def ended_by(number, *words):
    """What a server says that a signal ends while a page is open: (exit code, standard output, standard error)."""
    port = free_port()
    command = [sys.executable, "-m", "specscope", "tui", "--web", "--web-port", str(port), "--", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: answers(port))

    async def open_page():
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"http://127.0.0.1:{port}/ws?width=80&height=24") as wire,
        ):
            assert (await wire.receive(timeout=HANG_SECONDS)).type is aiohttp.WSMsgType.BINARY
            process.send_signal(number)
            async for _ in wire:
                pass
            return wire.close_code

    assert asyncio.run(open_page()) == aiohttp.WSCloseCode.GOING_AWAY
    out, error = process.communicate(timeout=HANG_SECONDS)
    return process.returncode, out, error.replace(str(port), "PORT")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_as_a_server_and_only_one_line_is_printed(number):
    code, out, error = ended_by(number, "replay", str(SAMPLE))
    assert (code, out) == (0, "")
    assert error == f"specscope: serving specscope replay {SAMPLE} on http://127.0.0.1:PORT (Ctrl-C to stop)\n"


async def test_a_session_that_cannot_start_closes_its_page():
    async with (
        serving(command="exit 2") as (port, _, session),
        session.ws_connect(f"http://127.0.0.1:{port}/ws") as wire,
    ):
        assert (await wire.receive(timeout=HANG_SECONDS)).type is aiohttp.WSMsgType.CLOSE


def test_a_port_that_is_taken_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="cannot listen on"):
            serve(["run"], "127.0.0.1", taken.getsockname()[1])


SESSION = "echo __GANGLION__; head -c 1"  # a session that does nothing until it is told to quit


@contextlib.asynccontextmanager
async def serving(host="127.0.0.1", command=SESSION):
    """The real server on a free port, in this process; `command` is what its sessions run."""
    port = free_port()
    made, guard = make_server(["doctor"], host, port)
    made.command = command
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
    {"Host": "127.0.0.1.evil.example"},
    {"Host": "evil.example", "Origin": "http://127.0.0.1:PORT"},
    {"Host": "localhost:PORT.evil.example"},
    {"Host": ""},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://127.0.0.1"},
    {"Origin": "https://127.0.0.1:PORT"},
    {"Host": "127.0.0.1:1", "Origin": "http://127.0.0.1:PORT"},
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
            assert await wire.receive_json(timeout=HANG_SECONDS) == ["pong", "1"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9"])
async def test_the_port_may_be_another_one_such_as_of_a_tunnel(host):
    async with serving() as (port, _, session):
        headers = {"Host": host, "Origin": f"http://{host}"}
        async with session.get(f"http://127.0.0.1:{port}/", headers=headers) as answer:
            assert answer.status == 200
            assert f'"ws://{host}/ws"' in await answer.text()
        async with session.ws_connect(f"http://127.0.0.1:{port}/ws", headers=headers) as wire:
            await wire.send_json(["ping", "1"])
            assert await wire.receive_json(timeout=HANG_SECONDS) == ["pong", "1"]


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
                assert await wire.receive_json(timeout=HANG_SECONDS) == ["pong", "1"]
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

        async def connects():
            with contextlib.suppress(aiohttp.WSServerHandshakeError):
                await (await session.ws_connect(url)).close()
                return True

        await comes(connects)  # a closed session made room


LINGERING = f"{SESSION}; exec >&- 2>&-; sleep 1"  # it goes on for a while when it has said all that it has to say


async def process_of(wire):
    """The process of a session, which is there when a message is answered."""
    await wire.send_json(["ping", "1"])
    assert await wire.receive_json(timeout=HANG_SECONDS) == ["pong", "1"]
    (child,) = (child for child in psutil.Process().children() if LINGERING in command_of(child))
    return child


def command_of(process):
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # ended, of another test: a zombie has no command line
        return []


@pytest.mark.parametrize("leaving", [True, False], ids=["the page is closed", "the server ends"])
async def test_a_session_has_ended_when_its_process_has(leaving):
    """One that outlives the server's event loop is waited for by nobody: "Event loop is closed"."""
    async with serving(command=LINGERING) as (port, _, session):
        wire = await session.ws_connect(f"http://127.0.0.1:{port}/ws")
        child = await process_of(wire)
        if leaving:
            await wire.close()
    assert not child.is_running()


@pytest.mark.parametrize("host", ["", "no.such.host.invalid", "999.1.1.1", "x" * 300, "\udcff"])
def test_a_host_that_is_none_is_one_line(host):
    with pytest.raises(UserError):
        serve(["run"], host, free_port())


async def test_a_session_ends_when_its_server_was_killed():
    """No other end tells it: it would go on for ever, unseen."""
    port = free_port()
    command = [sys.executable, "-m", "specscope", "tui", "--web", "--web-port", str(port), "--", "replay", str(SAMPLE)]
    hears = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # under nohup it is meant to go on
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=hears)
    try:
        async with asyncio.timeout(HANG_SECONDS), aiohttp.ClientSession() as session:

            async def connected():
                with contextlib.suppress(aiohttp.ClientError):
                    return await session.ws_connect(f"http://127.0.0.1:{port}/ws")

            wire = await comes(connected)
            await wire.send_json(["ping", "1"])
            while (await wire.receive()).type is not aiohttp.WSMsgType.BINARY:
                pass  # the screen is there when it has drawn something
        family = psutil.Process(process.pid).children(recursive=True)
        assert family
    finally:
        process.kill()
        process.wait(HANG_SECONDS)
    assert psutil.wait_procs(family, timeout=HANG_SECONDS)[1] == []
