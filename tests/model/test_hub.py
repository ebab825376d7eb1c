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
for name in sys.argv[1:]:
    try:
        load_tokenizer(name)
        print("layers", len(load_model(name, torch.device("cpu"), torch.float32).layers))
    except UserError as error:
        print("refused", error)
    print(len(asked))
    asked.clear()
"""


@pytest.mark.parametrize(
    ("endpoint", "offline"),
    [
        ("http://127.0.0.1:9", {}),
        pytest.param("http://no-such-host.invalid", {}, marks=pytest.mark.slow),
        pytest.param("http://127.0.0.1:9", {"HF_HUB_OFFLINE": "1"}, marks=pytest.mark.slow),
    ],
)
def test_without_a_network_what_was_fetched_is_loaded_and_else_a_name_is_refused(tiny, tmp_path, endpoint, offline):
    """Soon, in one line."""
    repository, commit = tmp_path / "hub" / "models--some--body", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(tiny, repository / "snapshots" / commit)
    kept = {key: value for key, value in os.environ.items() if "OFFLINE" not in key}
    environment = {**kept, "HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint, **offline}
    command = [sys.executable, "-c", LOAD, "hf/none", "some/body"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_SECONDS)
    assert done.stderr == ""
    refused, attempts, loaded, more = done.stdout.splitlines()
    assert refused.startswith("refused cannot load hf/none: it is not a folder, is not in the cache, and ")
    assert offline or endpoint in refused
    assert int(attempts) <= (0 if offline else 1)  # the library would try each file six times, for a minute
    assert loaded == "layers 3"
    assert int(more) < (1 if offline else 6)  # the hub is asked once a minute
