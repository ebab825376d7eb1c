"""Hub names on a machine without a network: one line, soon; what was fetched earlier is still loaded."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.waiting import HANG_SECONDS

LOAD = """
import sys, torch
from specscope.errors import UserError
from specscope.model.loader import load_model, load_tokenizer
asked = []  # addresses, by name where the library looks the name up
sys.addaudithook(lambda event, args: asked.append(args) if event == "socket.connect" else None)
try:
    load_tokenizer(sys.argv[1])
    print("layers", len(load_model(sys.argv[1], torch.device("cpu"), torch.float32).layers))
except UserError as error:
    print("refused", error)
print(len(asked))
"""


def load(name, home, endpoint, **environment):
    """(what was said, attempts to connect, standard error) of a hub name loaded where the network may be used."""
    kept = {key: value for key, value in os.environ.items() if "OFFLINE" not in key}
    environment = {**kept, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, **environment}
    command = [sys.executable, "-c", LOAD, name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_SECONDS)
    said, attempts = done.stdout.splitlines()
    return said, int(attempts), done.stderr


@pytest.mark.parametrize(
    "endpoint", ["http://127.0.0.1:9", pytest.param("http://no-such-host.invalid", marks=pytest.mark.slow)]
)
def test_without_a_network_a_hub_name_is_refused_soon_in_one_line(endpoint, tmp_path):
    said, attempts, error = load("hf/none", tmp_path, endpoint)
    assert said.startswith("refused cannot load hf/none: it is not a folder, is not in the cache, and " + endpoint)
    assert attempts <= 1  # the library would try each file six times, for a minute
    assert error == ""


@pytest.mark.parametrize("offline", [{}, pytest.param({"HF_HUB_OFFLINE": "1"}, marks=pytest.mark.slow)])
def test_what_was_fetched_earlier_is_loaded_without_a_network(tiny, tmp_path, offline):
    repository = tmp_path / "hub" / "models--some--body"
    commit = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(tiny, repository / "snapshots" / commit)
    said, attempts, error = load("some/body", tmp_path, "http://127.0.0.1:9", **offline)
    assert said == "layers 3"
    assert error == ""
    assert attempts < (1 if offline else 6)  # the hub is asked once a minute; the library tries six times for each file
