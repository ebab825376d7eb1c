"""`specscope audit` as people run it."""

import json

import pytest

from tests.cli.test_main import model, prompts, specscope  # noqa: F401

LAYERS = ["--drafter", "draft_model", "--draft-model", "self:2", "--tree", "3"]


@pytest.fixture(scope="module")
def captured(tmp_path_factory, prompts, model):  # noqa: F811
    path = tmp_path_factory.mktemp("captured") / "run.jsonl"
    done = specscope("capture", prompts, "-o", path, "--max-tokens", 16, "--temperature", 0.8, *model, *LAYERS)
    assert done.returncode == 0, done.stderr
    return path


def test_a_healthy_capture_passes(captured, tiny):
    done = specscope("audit", captured, "--target", tiny)
    assert done.returncode == 0, done.stderr
    assert "target p" in done.stdout
    assert "drafter p" in done.stdout
    assert "The run agrees with its models." in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_json_and_a_sample(captured, tiny):
    done = specscope("audit", captured, "--target", tiny, "--sample", 5, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == found["exit"] == 0
    assert found["audited"] == 5
    assert found["draft_model"].endswith("first 2 layers")
    assert {one["result"] for one in found["findings"]} == {"passed"}


@pytest.mark.slow
def test_again_by_our_own_engine(captured, tiny):
    done = specscope("audit", captured, "--target", tiny, "--again", "--sample", 6)
    assert done.returncode == 0, done.stderr
    assert "committed tokens" in done.stdout


@pytest.mark.slow
def test_a_changed_p_is_found(captured, tiny, tmp_path):
    """The capture says another p at one node."""
    text = captured.read_text()
    key = '"specscope.verdict.p","value":{"arrayValue":{"values":[{"doubleValue":'
    at = text.find(key)
    assert at > 0, "the capture's format has changed"
    start = at + len(key)
    end = text.index("}", start)
    changed = tmp_path / "changed.jsonl"
    changed.write_text(text[:start] + "0.987" + text[end:])
    done = specscope("audit", changed, "--target", tiny)
    assert done.returncode == 1, done.stderr
    assert "target p differs" in done.stdout
    assert f"specscope replay '{changed}#" in done.stdout.replace("\n", "")


def test_bad_input_is_one_line(captured, tmp_path):
    for words, said in (
        (["audit", captured], "give --target MODEL"),
        (["audit", captured, "--target", tmp_path / "nothing"], "nothing"),
        (["audit", tmp_path / "none.jsonl"], "none.jsonl"),
        (["audit", captured, "--sample", 0], "--sample"),
    ):
        done = specscope(*words)
        assert done.returncode == 2, words
        assert said in done.stderr
        assert "Traceback" not in done.stderr
