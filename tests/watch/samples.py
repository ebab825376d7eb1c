"""Recorded pages and lines of vLLM; of SGLang (0.5.23), pages written after its source."""

import re
from pathlib import Path

DATA = Path(__file__).parents[1] / "data" / "vllm"
PEOPLE = DATA.parent / "people"


def text(name):
    return (DATA / name).read_text()


def changed(page, **values):
    """A page with other counts: drafts, drafted, accepted, emitted, at (a list), created, engine."""
    names = {
        "drafts": "vllm:spec_decode_num_drafts_total",
        "drafted": "vllm:spec_decode_num_draft_tokens_total",
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        "emitted": "vllm:generation_tokens_total",
        "created": "vllm:spec_decode_num_drafts_created",
    }
    for name, value in values.items():
        if name in names:
            page, times = re.subn(rf"(?m)^({names[name]}\{{.*\}}) .*$", rf"\1 {value}", page)
            assert times == 1, name
    for position, value in enumerate(values.get("at", ())):
        page, times = re.subn(rf'(per_pos_total\{{.*position="{position}"\}}) .*', rf"\1 {value}", page)
        assert times == 1
    if "engine" in values:
        page = page.replace('engine="0"', f'engine="{values["engine"]}"')
    return page


def two_engines(page, other):
    """One page of two engines, as data parallel vLLM writes it: each family once, with samples of both."""
    lines, more = page.splitlines(), changed(other, engine=1).splitlines()
    both = []
    for line, second in zip(lines, more, strict=True):
        both += [line] if line.startswith("#") or line == second else [line, second]
    return "\n".join(both) + "\n"


SGLANG = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 12.0
# HELP sglang:num_queue_reqs The number of requests in the waiting queue.
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 3.0
# HELP sglang:token_usage The token usage.
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 0.28
# HELP sglang:spec_accept_length Mean acceptance length of speculative decoding.
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 2.31
# HELP sglang:spec_accept_rate Speculative acceptance rate.
# TYPE sglang:spec_accept_rate gauge
sglang:spec_accept_rate{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 0.4367
# HELP sglang:gen_throughput The generation throughput (token/s).
# TYPE sglang:gen_throughput gauge
sglang:gen_throughput{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 812.5
"""

SGLANG_RESPONSE = {
    "id": "f00d",
    "object": "chat.completion",
    "created": 1790000000,
    "model": "llama",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 23, "total_tokens": 33},
    "sglext": {
        "spec_tokens_details": {
            "spec_accept_rate": 0.4333,
            "spec_accept_length": 2.3,
            "spec_num_correct_drafts": 13,
            "spec_num_proposed_drafts": 30,
            "spec_verify_ct": 10,
            "spec_correct_drafts_histogram": [3, 3, 2, 2],
        }
    },
}
