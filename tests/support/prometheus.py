"""A real Prometheus: Debian's package, unpacked into a cache folder where the machine has none installed."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from platformdirs import user_cache_path

from tests.processes import free_port
from tests.waiting import HANG_SECONDS, until

SECONDS = 2  # between two scrapes, and as long as one may take


def binary() -> str:
    """The program: that on PATH, or in the cache folder, or fetched into it. Skips the test where it cannot be had."""
    if installed := shutil.which("prometheus"):
        return installed
    cached = user_cache_path("specscope-tests") / "prometheus"
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            try:
                unpacked = fetch(Path(folder))
            except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                why = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
                pytest.skip(f"no prometheus on PATH, and Debian's package cannot be had: {why}")
            os.replace(unpacked, cached)
    return str(cached)


def fetch(folder: Path) -> Path:
    """Download the package into a folder and unpack it: apt's own lists stay as they are, and nothing is installed."""
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    apt = ["apt-get", "-q", "-o", f"Dir::State::lists={folder / 'lists'}", "-o", f"Dir::Cache={folder / 'cache'}"]
    for command in ([*apt, "update"], [*apt, "download", "prometheus"]):
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=HANG_SECONDS)
    [package] = folder.glob("prometheus_*.deb")
    subprocess.run(["dpkg-deb", "-x", package, folder / "x"], check=True, capture_output=True, text=True)
    return folder / "x/usr/bin/prometheus"


class Prometheus:
    """One that scrapes and stores exemplars. `config`: its configuration, without the intervals."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        file, self._log = folder / "prometheus.yml", folder / "prometheus.log"
        intervals = {"scrape_interval": f"{SECONDS}s", "scrape_timeout": f"{SECONDS}s"}
        file.write_text(json.dumps(config | {"global": intervals}))  # JSON is YAML
        port = free_port()
        self._url = f"http://127.0.0.1:{port}/api/v1/"
        command = [binary(), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}", "--log.format=json"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"]
        command += ["--storage.tsdb.retention.time=99y"]  # a store that was made beforehand stays
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(self, path: str, **what: object) -> Any:
        """What its HTTP API answers."""
        url = f"{self._url}{path}?{urllib.parse.urlencode(what)}"
        with urllib.request.urlopen(url, timeout=HANG_SECONDS) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        assert not told.get("warnings"), told
        return told["data"]

    def values(self, query: str) -> list[float]:
        """The values of a query now."""
        return [float(series["value"][1]) for series in self.ask("query", query=query)["result"]]

    def until(self, query: str, value: float) -> None:
        """Wait until it has scraped that."""

        def is_there() -> bool:
            with contextlib.suppress(OSError):  # it starts
                return self.values(query) == [value]
            return False

        until(is_there, says=lambda: f"{query} was {value}: {self.log()}")

    def log(self) -> list[dict[str, str]]:
        """What it has logged."""
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(HANG_SECONDS)


@contextlib.contextmanager
def prometheus(config: dict[str, Any], folder: Path) -> Iterator[Prometheus]:
    """One for the time of a block."""
    started = Prometheus(config, folder)
    try:
        yield started
    finally:
        started.close()
