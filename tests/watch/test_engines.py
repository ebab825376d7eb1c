"""Pages, lines and answers of SGLang and llama.cpp. Those in `tests/data/people` are as people have them."""

import re
from datetime import datetime

import pytest

from specscope.errors import UserError
from specscope.watch.logs import Log, VllmLog
from specscope.watch.pages import Intervals, difference, read_metrics
from specscope.watch.results import Chunks, read_json
from specscope.watch.source import Server
from tests.watch import samples
from tests.watch.samples import PEOPLE, text
from tests.watch.server import Page


def counts(one):
    return one.drafts, one.drafted, one.accepted, one.emitted, one.accepted_at


def only(page):
    (reading,) = read_metrics(page, 1)
    return difference(None, reading).aggregate


def read(path):
    source, told = samples.read(path)
    return source, [one.aggregate for one in told]


def test_ranks_and_the_drafter_of_sglang_are_one_engine():
    one = only((PEOPLE / "prom_sglang.txt").read_text())
    assert (one.engine, one.drafts, one.emitted, one.running) == ("", 21, 60, 2)
    assert (one.averages["sglang:spec_accept_length"], one.averages["sglang:spec_accept_rate"]) == (2.8, 0.6)
    assert one.length == 2.8


def test_data_parallel_ranks_of_sglang_are_engines(tmp_path):
    line = (PEOPLE / "sglang.log").read_text().splitlines()[0]
    (tmp_path / "log").write_text("\n".join(line.replace("TP0", f"DP{rank} TP0") for rank in (0, 1, 0)))
    assert [one.engine for one in read(tmp_path / "log")[1]] == ["DP0", "DP1", "DP0"]


META = {"id": "a", "completion_tokens": 106, "spec_accept_rate": 0.293, "spec_accept_length": 2.4651}
HISTOGRAM = [11, 14, 11, 4, 0, 3]
KEYS = {
    "0.5.10": ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram"),
    "0.5.11": ("spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram"),
    "0.5.12": ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram"),
}


@pytest.mark.parametrize("version", KEYS)
def test_an_answer_of_sglang_under_the_names_of_its_version(version):
    figures = dict(zip(KEYS[version], (63, 215, HISTOGRAM), strict=True))
    (told,) = read_json({"text": "hi", "meta_info": META | {"spec_verify_ct": 43} | figures}, 7)
    one = told.aggregate
    assert (one.drafts, one.drafted, one.accepted, one.emitted) == (43, 215, 63, 106)
    assert one.accepted_at == (32, 18, 7, 3, 3)
    assert one.proposed_at == ()  # its drafts may be trees
    in_chat = {"object": "chat.completion", "choices": [{"meta_info": META | {"spec_verify_ct": 43} | figures}]}
    assert read_json(in_chat, 7)[0].aggregate.accepted_at == (32, 18, 7, 3, 3)
    of_each = {"spec_tokens_details": [META | {"spec_verify_ct": 43} | figures] * 2}
    two = read_json({"id": "f00d", "object": "chat.completion", "choices": [], "sglext": of_each}, 7)
    assert [(each.aggregate.request, each.aggregate.emitted) for each in two] == [("f00d 0", None), ("f00d 1", None)]


def test_a_stream_has_the_drafts_that_the_log_has():
    _, (streamed,) = read(PEOPLE / "llamacpp" / "stream.txt")
    _, logged = read(PEOPLE / "llamacpp" / "steps.log")
    assert streamed.accepted_at == logged[1].accepted_at
    assert streamed.proposed_at == logged[1].proposed_at


def chunk(predicted, drafted, accepted):
    return {"id": "x", "timings": {"predicted_n": predicted, "draft_n": drafted, "draft_n_accepted": accepted}}


def test_chunks_that_may_hold_several_drafts_give_sums_alone():
    chunks = Chunks()
    for each in (chunk(1, 0, 0), chunk(4, 8, 1)):  # two steps in a chunk
        chunks.take(each)
    (told,) = chunks.end(7)
    assert (told.aggregate.drafts, told.aggregate.drafted, told.aggregate.accepted) == (None, 8, 1)
    assert chunks.end(7) == []


def test_what_has_no_counts_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"a list of llama\.cpp's slots, which counts no drafts"):
        read(PEOPLE / "llamacpp" / "slots.json")
    with Page((PEOPLE / "llamacpp" / "slots.json").read_text()) as served, pytest.raises(UserError, match="slots"):
        Server(served.url, 1).open()


DIFFUSION = (
    "INFO 11-25 10:11:12 [metrics.py:100] DiffusionDecoding metrics: Committed token throughput: 80.00 tokens/s, Mean "
    "denoising steps per canvas: 8.00, Mean tokens committed per denoising step: 4.00, Committed: 800 tokens, "
    "Denoising steps: 200, Canvas positions evaluated: 6400\n"
)


def test_tensorrts_log_and_denoising_have_no_acceptance(tmp_path):
    line = (
        "iter = 5, global_rank = 0, rank = 0, num_scheduled_requests = 3, kv_cache_util = 0.100, "
        "currank_total_requests = 1/1, host_step_time = 5.0ms, "
        "states = {'num_ctx_requests': 0, 'num_generation_tokens': 256}\n"
    )
    none = "denoising steps are no speculation"
    for log, why in ((line * 3, "TensorRT-LLM's log has no acceptance"), (DIFFUSION, none)):
        (tmp_path / "v.log").write_text(log)
        with pytest.raises(UserError, match=why):
            read(tmp_path / "v.log")
    page = "# TYPE vllm:diffusion_num_denoising_steps counter\nvllm:diffusion_num_denoising_steps_total 200.0\n"
    with Page(page) as served, pytest.raises(UserError, match=none):
        Server(served.url, 1).open()
    (tmp_path / "v.log").write_text(DIFFUSION + text("log.txt"))
    source, told = read(tmp_path / "v.log")
    assert len(told) == 5
    assert "line 1: `DiffusionDecoding metrics:` lines have no drafts" in source.faults.lines()[0]


def test_a_line_of_sglang_with_all_its_parts(tmp_path):
    """As SGLang 0.5.23 formats it for DSpark."""
    (tmp_path / "s.log").write_text(
        "[2026-11-25 10:11:12 TP0] Decode batch, #running-req: 4, #token: 1830, token usage: 0.03, accept len: 2.31, "
        "accept rate: 0.44, cap len: 4.10, block accept len: 2.52, cuda graph: True, gen throughput (token/s): 812.50, "
        "#queue-req: 2\n"
    )
    (one,) = read(tmp_path / "s.log")[1]
    assert (one.length, one.running, one.waiting, one.kv_usage) == (2.31, 4, 2, 0.03)
    assert one.averages == {
        "sglang:spec_accept_length": 2.31,
        "sglang:spec_accept_rate": 0.44,
        "sglang:spec_cap_length": 4.1,
        "sglang:spec_block_accept_length": 2.52,
        "sglang:gen_throughput": 812.5,
    }


@pytest.mark.parametrize(
    "config", ["SpeculativeConfig(rejection_sample_method='synthetic')", '{"rejection_sample_method": "synthetic"}']
)
def test_vllms_synthetic_acceptance_is_marked(config):
    reader, lines = Log(VllmLog, datetime.now(), []), text("log.txt").splitlines()
    assert reader.take(f"INFO 11-25 10:11:12 [core.py:1] {config}") == []
    told = [one for line in lines for one in reader.take(line)] + reader.rest()
    assert {one.aggregate.source for one in told} == {"vLLM log, synthetic acceptance"}


PAGES = {
    "vLLM": text("metrics_after.txt"),
    "SGLang": (PEOPLE / "prom_sglang.txt").read_text(),
    "llama.cpp": (PEOPLE / "llamacpp" / "metrics_after.txt").read_text(),
}


def times(page, factor):
    """A page whose counters are that many times as large."""
    counter = re.compile(r"(?m)^(\w[\w:]*_total(?:\{[^\n]*\})?) ([0-9][0-9.e+]*)$")
    return counter.sub(lambda match: f"{match[1]} {float(match[2]) * factor:.1f}", page)


@pytest.mark.parametrize("engine", PAGES)
def test_the_page_of_each_engine_grows_and_starts_again(engine):
    page, intervals = PAGES[engine], Intervals()
    since_it_began = only(page)
    told = [
        one.aggregate
        for time_ns, factor in enumerate((1, 2, 5, 5, 1))
        for one in intervals.take(read_metrics(times(page, factor), time_ns))
    ]
    grown, more, idle, again = told
    assert since_it_began.drafts
    assert not since_it_began.rounded
    assert counts(grown) == counts(since_it_began)
    assert more.drafts == 3 * since_it_began.drafts
    assert (idle.drafts, idle.reset) == (0, False)
    assert (counts(again), again.reset) == (counts(since_it_began), True)


@pytest.mark.parametrize("engine", [name for name in PAGES if name != "llama.cpp"])  # it serves one model
def test_two_models_on_a_page_are_two_engines(engine):
    page = PAGES[engine]
    other = re.sub(r'model_name="([^"]*)"', r'model_name="other-\1"', page)
    both = page + "".join(line for line in other.splitlines(keepends=True) if not line.startswith("#"))
    readings = read_metrics(both, 1)
    assert len({reading.model for reading in readings}) == len(readings) == 2
    assert {counts(difference(None, reading).aggregate) for reading in readings} == {counts(only(page))}


@pytest.mark.parametrize("engine", PAGES)
def test_a_gauge_that_is_no_number_is_left_out(engine):
    gauge = re.compile(r"(?m)^(\w[\w:]*(?<!_total)(?<!_created)(?:\{[^\n]*\})?) [0-9][0-9.e+-]*$")
    one = only(gauge.sub(r"\1 NaN", PAGES[engine]))
    assert (one.running, one.waiting, one.kv_usage, one.averages) == (None, None, None, {})
    assert one.drafts == only(PAGES[engine]).drafts
