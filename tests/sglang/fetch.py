"""Fetches SGLang's sources for the tests, outside of the repository: python -m tests.sglang.fetch FOLDER."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSIONS = ("0.5.21", "0.5.22", "0.5.23")  # that are known


def fetch(folder: Path) -> None:
    """A folder sglang-VERSION for each version that is known, with its .py files alone."""
    for version in VERSIONS:
        place = folder / f"sglang-{version}"
        if place.exists():
            continue
        with tempfile.TemporaryDirectory() as wheels:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels, f"sglang=={version}"]
            subprocess.run(command, check=True)
            (wheel,) = Path(wheels).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(place, [name for name in archive.namelist() if name.endswith(".py")])
    print(f"export SPECSCOPE_SGLANG_SOURCES={folder.resolve()}")


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
