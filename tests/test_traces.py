"""The sample captures: readable by us, valid OTLP JSON by its own schema, small, and free of anybody's paths."""

import runpy

import pytest
from opentelemetry.proto_json.trace.v1.trace import TracesData

from specscope.speculate.drafters.text import NgramDrafter
from specscope.trace.wire.reading import read_capture
from tests.support.samples import TRACES


@pytest.mark.parametrize("name", ["eagle.jsonl", "ngram.jsonl", "sampled.jsonl", "evidence.jsonl"])
def test_a_sample_capture_is_whole_and_valid(name):
    path = TRACES / name
    assert path.stat().st_size < 1_200_000
    reader = read_capture(path)
    assert reader.warnings == []
    assert len(reader.history.requests) == 3
    assert all(request.end is not None for request in reader.history.requests.values())
    spans = 0
    for line in path.read_text().splitlines():
        for by_resource in TracesData.from_json(line).resource_spans:
            spans += sum(len(by_scope.spans or ()) for by_scope in by_resource.scope_spans)
    assert spans >= len(reader.history.steps) + sum(len(each.steps) for each in reader.history.requests.values())
    assert "/root" not in path.read_text()
    if name == "sampled.jsonl":  # it shows every kind of decision
        assert {kind.value for kind in reader.history.acceptance.kinds} >= {"bonus", "recovered"}
        assert reader.history.acceptance.accepted > 0


def test_the_planted_bug_can_be_made_anew(tmp_path):
    """README, "A bug found with four commands": with the drafter as it is now."""
    script = tmp_path / "planted.py"
    script.write_text((TRACES / "planted.py").read_text())
    assert issubclass(runpy.run_path(str(script), run_name="imported")["Shifted"], NgramDrafter)


@pytest.mark.parametrize("name", ["eagle", "ngram", "sampled", "evidence", "planted"])
def test_the_samples_of_an_older_version_are_the_same_runs(name):
    """tests/data/samples, which `benchmarks freeze` reads: before requests had figures and phases were attributes."""

    def decided(path):
        steps = [step for request in read_capture(path).history.requests.values() for step in request.steps]
        return [
            (step.request, step.tree.token.tolist(), step.verdict.outcome.tolist(), step.tokens()) for step in steps
        ]

    assert decided(TRACES.parent / f"tests/data/samples/{name}.jsonl") == decided(TRACES / f"{name}.jsonl")
