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
import pytest
from PIL import Image

from specscope.errors import UserError
from specscope.tui import palette
from specscope.web import serve

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
COLOURS = {name: palette.style(name, True).color.triplet for name in ("accepted", "rejected", "recovered")}
SAMPLE = Path(__file__).parent.parent / "traces" / "sampled.jsonl"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def server(*words):
    port = free_port()
    command = [sys.executable, "-m", "specscope.cli", "tui", "--web", "--web-port", str(port), "--", *words]
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
