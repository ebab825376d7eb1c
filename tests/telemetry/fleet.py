"""Real runs, as the engines of a fleet send them: some requests of poor acceptance, some failed, some of a caller."""

import dataclasses
import json
import shutil
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from specscope import SamplingParams
from specscope.trace.history.history import History
from specscope.trace.history.stats import Acceptance
from specscope.trace.history.wording import failures
from specscope.trace.record.params import StructuredOutputs
from specscope.trace.record.records import FinishReason, RequestEnd, RequestStep, RunInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.outputs import Bus, OutputOptions, Outputs
from specscope.trace.wire.reading import CaptureReader, read_capture
from specscope.trace.wire.spans import Encoder, Span, SpanLevel, own_trace
from tests.engines import run_all, tiny_engine

REQUESTS = 84
SERVICE = "fleet"
CALLER = 0xCA11 << 112  # the ids of traces that a caller began
MS = 1_000_000
IN_PART = "a part of its run, "  # what a reader warns of where traces were left out
OF_ENGINE = ("phases", "running", "waiting", "blocks_used", "blocks_free", "speculation", "speculation_off")
NO_TOKEN = "z"  # the one character that none of the model's tokens writes


@dataclass(frozen=True)
class Sent:
    """What an engine did, and so what it sends."""

    run: RunInfo
    vocabulary: Vocabulary
    records: list[StepRecord]

    def send(self, endpoint: str, level: SpanLevel = SpanLevel.TREES) -> None:
        """Send its spans, as the engine does."""
        options = OutputOptions(None, endpoint, None, level, None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_SERVICE_NAME", SERVICE)
            bus = Bus()
            outputs = Outputs(options, bus, self.run, self.vocabulary, None)
            for record in self.records:
                bus.publish(record)
            assert outputs.close() == []

    def spans(self) -> list[Span]:
        """The spans that it sends."""
        encoder = Encoder(self.run, self.vocabulary, SpanLevel.TREES)
        return [span for record in self.records for span in encoder.encode(record)]

    def ends(self) -> dict[str, RequestEnd]:
        """How each request ended."""
        return ends_of(self.records)

    def traces(self) -> dict[str, str]:
        """The id of each request's trace: its caller's, or its own."""
        traces = {}
        for name, end in self.ends().items():
            caller = end.info.traceparent.split("-")[1:2]
            traces[name] = caller[0] if caller else f"{own_trace(self.run.run_id, name):032x}"
        return traces

    def labelled(self, kind: str) -> set[str]:
        """The requests with a label `kind`."""
        return {name for name, end in self.ends().items() if end.info.labels["kind"] == kind}

    def failed(self) -> set[str]:
        """The requests that failed."""
        return {name for name, end in self.ends().items() if end.reason is FinishReason.ERROR}

    def acceptance(self) -> dict[str, Acceptance]:
        """What each request's drafts came to."""
        history = History()
        for record in self.records:
            history.append(record)
        return {name: request.acceptance for name, request in history.requests.items()}

    def poor(self, tau: float, drafts: int) -> set[str]:
        """The requests whose mean acceptance length over so many drafts is below a bound."""
        counts = self.acceptance().items()
        return {name for name, a in counts if a.drafts >= drafts and a.tau is not None and a.tau < tau}

    def milliseconds(self) -> dict[str, int]:
        """From each request's arrival to its end."""
        return {name: (end.finished_ns - end.info.arrival_ns) // MS for name, end in self.ends().items()}


def run_fleet(target: Path, folder: Path) -> list[Sent]:
    """Run 84 requests to their ends on two engines.

    Of each seven one is of random text, one fails (every other while it runs), one is short, and four repeat
    themselves sooner or later.
    """
    model = shutil.copytree(target, folder / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["xx"] = vocabulary.pop(NO_TOKEN)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    half = REQUESTS // 2
    return [_run(model, range(half)), _run(model, range(half, REQUESTS))]


def _run(model: Path, numbers: Iterable[int]) -> Sent:
    # Some prompts are fed in more steps than one
    engine = tiny_engine(model, kv_memory=0.02, drafter="ngram", ngram_min=1, max_step_tokens=64)
    for number in numbers:
        kind, params = "code", SamplingParams(max_tokens=8 if number % 7 == 2 else 32, ignore_eos=True)
        if number % 7 == 0:
            kind, params = "chat", SamplingParams(max_tokens=12, temperature=2.5, ignore_eos=True, seed=number)
        elif number % 7 == 1:
            form = StructuredOutputs(regex="(" if number % 2 else f"hello hello {NO_TOKEN}")
            kind, params = "form", SamplingParams(max_tokens=20, structured_outputs=form)
        caller = f"00-{CALLER + number:032x}-{number + 1:016x}-01" if number % 6 == 0 else ""
        text = f"abcabcabc{number} {number}"
        prompt = [{"role": "user", "content": text}] if kind == "chat" else text
        engine.add(prompt, params, labels={"kind": kind}, traceparent=caller)
    return Sent(engine.run_info, engine.vocabulary, run_all(engine))


def steps_of(records: Iterable[StepRecord]) -> dict[str, list[tuple[int, RequestStep]]]:
    """The steps of each request, with the numbers of their engine steps."""
    steps = defaultdict(list)
    for record in records:
        for part in record.requests:
            steps[part.request].append((record.step, part))
    return dict(steps)


def ends_of(records: Iterable[StepRecord]) -> dict[str, RequestEnd]:
    """The end of each request, but for the sums that its span adds."""
    ends = [end for record in records for end in record.finished]
    return {end.info.id: dataclasses.replace(end, figures=None) for end in ends}


def damage(reader: CaptureReader) -> list[str]:
    """What a reader warns of, but for the traces that were left out and the requests that failed."""
    failed = failures(request.end for request in reader.history.requests.values())
    return [line for line in reader.warnings if line not in failed and not line.startswith(IN_PART)]


def assert_is_all_of(path: Path, sent: Sent) -> None:
    """A file holds a whole run, record by record as it was sent."""
    reader = read_capture(path)
    assert reader.warnings == failures(sent.ends().values())
    assert len(reader.history.steps) == len(sent.records)
    for got, record in zip(reader.history.steps, sent.records, strict=True):
        ends = tuple(dataclasses.replace(end, figures=None) for end in got.finished)
        assert dataclasses.replace(got, finished=ends) == record


def assert_are_those(records: Iterable[StepRecord], requests: set[str], sent: Sent) -> None:
    """Records of a file that holds these requests of a run, whole, and not all others.

    Each says what the engine did in its step, and how many others there were.
    """
    read, steps = list(records), steps_of(sent.records)
    assert steps_of(read) == {name: steps[name] for name in requests if name in steps}
    assert ends_of(read) == {name: sent.ends()[name] for name in requests}
    whole = {record.step: record for record in sent.records}
    for record in read:
        assert record.is_timed or not record.requests
        if record.is_timed:
            assert [getattr(record, name) for name in OF_ENGINE] == [
                getattr(whole[record.step], name) for name in OF_ENGINE
            ]
            assert record.batch == len(whole[record.step].requests)
