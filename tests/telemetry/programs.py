"""The real OpenTelemetry Collector and Jaeger: built once, by their own means, and started on free ports.

`make telemetry-tools` builds them beforehand. They are kept in SPECSCOPE_TEST_TOOLS, else in the user's cache.
"""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from tests.waiting import HANG_SECONDS, until

HERE = Path(__file__).parent
BUILDER = "go.opentelemetry.io/collector/cmd/builder@v0.161.0"
PARTS = HERE / "collector-builder.yaml"
JAEGER = "github.com/jaegertracing/jaeger/cmd/jaeger"
JAEGER_VERSION = "v1.76.0"  # of the module: the program is 2.13
UNREACHABLE = "dial tcp|i/o timeout|lookup disabled by GOPROXY"  # what Go says where it reaches no module proxy
READY = "Everything is ready"  # what either logs when its ports are open


class NotHereError(Exception):
    """What a program is built with is not on this machine, or not to be had."""


def collector() -> Path:
    """The collector with the parts that traces/collector.yaml names; three minutes where it is not built yet.

    Raises NotHereError.
    """
    return _built("otelcol", BUILDER + PARTS.read_text(), _build_collector)


def jaeger() -> Path:
    """Jaeger without its page; eight minutes where it is not built yet. Raises NotHereError."""
    return _built("jaeger", JAEGER + JAEGER_VERSION, _build_jaeger)


def _built(name: str, recipe: str, build: Callable[[Path], Path]) -> Path:
    tools = Path(os.environ.get("SPECSCOPE_TEST_TOOLS") or user_cache_path("specscope") / "test-tools")
    program = tools / f"{name}-{hashlib.blake2b(recipe.encode(), digest_size=4).hexdigest()}"
    if program.exists():
        return program
    if shutil.which("go") is None:
        raise NotHereError(f"{name} is built with Go, which is not installed")
    tools.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tools) as folder:
        os.replace(build(Path(folder)), program)
    return program


def _build_collector(folder: Path) -> Path:
    _run(folder, "go", "install", BUILDER)
    _run(folder, str(folder / "builder"), "--config", str(PARTS))
    return folder / "collector" / "otelcol"


def _build_jaeger(folder: Path) -> Path:
    _run(folder, "go", "mod", "init", "tools")
    _run(folder, "go", "get", "-tool", f"{JAEGER}@{JAEGER_VERSION}")
    _run(folder, "go", "build", "-o", "jaeger", JAEGER)
    return folder / "jaeger"


def _run(folder: Path, *words: str) -> None:
    """A command of a build. Raises NotHereError where it needs modules that it cannot fetch."""
    environment = {**os.environ, "GOBIN": str(folder), "GOWORK": "off"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    for line in done.stderr.splitlines() if done.returncode else ():
        if re.search(UNREACHABLE, line):
            raise NotHereError(f"Go modules cannot be fetched: {line.strip()}")
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


@dataclass
class Running:
    """A program that has been started, and what it has logged so far."""

    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def complaints(self) -> list[str]:
        """Lines of its log that are warnings or worse, and what is no line of its log: a panic."""
        return [line for line in self.text().splitlines() if "\tinfo\t" not in line.lower()]

    def stop(self) -> None:
        """Let it end by itself: it decides and writes what it holds."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(HANG_SECONDS) == 0, self.text()


@contextlib.contextmanager
def running(
    program: Path, configs: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Start a collector, or Jaeger, which is one, and wait until it is ready. It is stopped at the latest at the end.

    `configs`: files, or single settings such as `yaml:exporters::file::format: proto`.
    """
    words = [str(program), *(f"--config={config}" for config in configs)]
    with log.open("wb") as out:
        started = subprocess.Popen(words, stdout=out, stderr=out, env={**os.environ, **(environment or {})})
    here = Running(started, log)
    try:
        until(lambda: READY in here.text() or started.poll() is not None, says=here.text)
        assert started.poll() is None, here.text()
        yield here
        if started.poll() is None:
            here.stop()
    finally:
        if started.poll() is None:
            started.kill()
            started.wait()


if __name__ == "__main__":
    for build in (collector, jaeger):
        print(build())
