"""Sums of a server that gives no evidence, and how vLLM finds who takes them."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.reading import read_capture
from specscope.vllm import aggregates
from specscope.vllm.aggregates import Sums, run_of_sums

GROUP = "vllm.stat_logger_plugins"


def stats(drafts, drafted, accepted_at, **others):
    """vLLM's SchedulerStats."""
    spec = SimpleNamespace(
        num_drafts=drafts,
        num_draft_tokens=drafted,
        num_accepted_tokens=sum(accepted_at),
        num_accepted_tokens_per_pos=accepted_at,
        num_draft_tokens_per_pos=[drafts] * len(accepted_at),
    )
    return SimpleNamespace(
        spec_decoding_stats=spec, num_running_reqs=2, num_waiting_reqs=1, kv_cache_usage=0.25, **others
    )


def test_sums_of_an_interval():
    records = []
    sums = Sums("1", records.append)
    sums.add(stats(2, 6, [2, 1, 0]), SimpleNamespace(num_generation_tokens=5))
    sums.add(stats(1, 3, [1, 1, 1]), SimpleNamespace(num_generation_tokens=4))
    sums.add(SimpleNamespace(spec_decoding_stats=None, num_running_reqs=3), None)  # a step without drafts
    assert records == []
    sums.end()
    (record,) = records
    told = record.aggregate
    assert (told.drafts, told.drafted, told.accepted, told.emitted) == (3, 9, 6, 9)
    assert (told.accepted_at, told.proposed_at) == ((3, 2, 1), (3, 3, 3))
    assert (told.engine, told.running, told.waiting, told.kv_usage) == ("1", 3, 1, 0.25)
    assert told.length == 3
    sums.end()
    assert len(records) == 1  # nothing came about


def test_intervals_end_by_themselves(monkeypatch):
    monkeypatch.setattr(aggregates, "SECONDS", 0)
    records = []
    sums = Sums("0", records.append)
    for _ in range(3):
        sums.add(stats(1, 2, [1, 0]), None)
    assert [record.step for record in records] == [0, 1, 2]
    assert records[0].aggregate.emitted is None  # not told, and not 0


def test_steps_without_drafts_are_counted():
    """An interval of them has no drafts, which is not the same as not telling how many."""
    records = []
    sums = Sums("0", records.append, depth=2)
    sums.add(SimpleNamespace(spec_decoding_stats=None), SimpleNamespace(num_generation_tokens=1))
    sums.end()
    told = records[0].aggregate
    assert (told.drafts, told.accepted, told.emitted, told.accepted_at) == (0, 0, 1, (0, 0))


def test_statistics_of_another_version():
    """What is not there is not told."""
    records = []
    sums = Sums("0", records.append)
    sums.add(SimpleNamespace(spec_decoding_stats=SimpleNamespace(num_drafts=2, num_accepted_tokens=3)), None)
    sums.end()
    assert (records[0].aggregate.drafts, records[0].aggregate.drafted) == (2, None)
    assert records[0].aggregate.accepted_at == ()


def test_sums_become_a_capture(tmp_path):
    model = SimpleNamespace(served_model_name=None, model="/models/Tiny/")
    run = run_of_sums(SimpleNamespace(model_config=model), "0.99.0", {"method": "eagle3"})
    writer = CaptureWriter(tmp_path / "a.jsonl", run, Vocabulary())
    records = []
    sums = Sums("0", lambda record: (records.append(record), writer(record)))
    sums.add(stats(2, 6, [2, 1, 0]), SimpleNamespace(num_generation_tokens=5))
    sums.end()
    writer.close()
    reader = read_capture(tmp_path / "a.jsonl")
    assert reader.history.steps == records
    assert (reader.history.run.target, reader.history.run.evidence) == ("Tiny", "counts")


def test_vllm_finds_nothing_unless_it_is_offered():
    """A logger of statistics makes vLLM compute them even if told not to: nothing may be there by itself."""
    assert [one for one in entry_points(group=GROUP) if "specscope" in one.value] == []
    code = (
        "from importlib.metadata import entry_points\n"
        "from specscope.vllm.aggregates import offer\n"
        "offer(); offer()\n"
        f"print([(one.name, one.value) for one in entry_points(group={GROUP!r})])\n"
        "from importlib.metadata import version; print(version('specscope') != '1')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[('specscope', 'specscope.vllm.stat_logger:StatLogger')]", "True"]


@pytest.mark.parametrize(
    ("variables", "offered"),
    [
        ({}, False),
        ({"SPECSCOPE_AGGREGATES": "1"}, False),  # nowhere to send them
        ({"SPECSCOPE_AGGREGATES": "1", "SPECSCOPE_CAPTURE": "a.jsonl"}, True),
        ({"SPECSCOPE_CAPTURE": "a.jsonl"}, True),  # this is no vLLM that is known
    ],
)
def test_the_plugin_offers_them(variables, offered, tmp_path):
    code = (
        "from specscope.vllm.plugin import register\nregister()\n"
        "from importlib.metadata import entry_points\n"
        f"print(len(entry_points(group={GROUP!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=variables
    )
    assert done.stdout.strip() == str(int(offered))
    assert ("no evidence" in done.stderr) is (offered)


def test_what_every_process_of_a_vllm_finds_is_said_once(tmp_path):
    code = (
        "import multiprocessing\n"
        "from specscope.vllm.plugin import register\n"
        "register()\n"
        "worker = multiprocessing.get_context('fork').Process(target=register)\n"
        "worker.start(); worker.join(); print(worker.exitcode)"
    )
    variables = os.environ | {"SPECSCOPE_AGGREGATES": "1", "SPECSCOPE_CAPTURE": "a.jsonl"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=variables
    )
    assert (done.stdout.strip(), done.stderr.count("specscope: ")) == ("0", 1)
