import pickle
from types import SimpleNamespace

import pytest

from specscope.trace.inside.hooking import ErrorGuard
from specscope.vllm.scheduling import ATTRIBUTE, SchedulerHooks, SchedulerNotes


class Request(SimpleNamespace):
    def get_finished_reason(self):
        return "stop"


class Output:
    """As vLLM's SchedulerOutput: an ordinary object, which is pickled for its workers."""


def request(name, output=()):
    return Request(
        request_id=name,
        trace_headers={"traceparent": "00-1-2-01"},
        arrival_time=2.5,
        stop_reason=None,
        output_token_ids=list(output),
        prompt_token_ids=[1],
        sampling_params=None,
    )


@pytest.fixture
def hooked():
    class Scheduler:
        def __init__(self):
            pool = SimpleNamespace(num_gpu_blocks=11, get_num_free_blocks=lambda: 7)
            self.running, self.waiting, self.kv_cache_manager = [1, 2], [3], SimpleNamespace(block_pool=pool)
            self.unfinished = 1

        def add_request(self, request):
            return "added"

        def _preempt_request(self, request, timestamp):
            return "preempted"

        def _free_request(self, request, delay_free_blocks=False):
            return "freed"

        def schedule(self):
            return Output()

        def update_from_output(self):
            return "updated"

        def get_num_unfinished_requests(self):
            return self.unfinished

    hooks = SchedulerHooks(ErrorGuard())
    hooks.install(SimpleNamespace(Scheduler=Scheduler))
    return hooks, Scheduler()


def test_what_came_about_travels_with_the_next_step_also_to_another_process(hooked):
    _, scheduler = hooked
    assert scheduler.add_request(request("a")) == "added"
    assert scheduler._preempt_request(request("b"), 0.0) == "preempted"
    assert scheduler._free_request(request("c", [4, 5])) == "freed"
    notes = getattr(pickle.loads(pickle.dumps(scheduler.schedule())), ATTRIBUTE)
    assert notes.arrived["a"].arrival_ns == 2_500_000_000
    assert notes.preempted == ["b"]
    assert [(end.request, end.reason, end.output) for end in notes.ended] == [("c", "stop", [4, 5])]
    assert (notes.running, notes.waiting, notes.blocks_used, notes.blocks_free) == (2, 1, 3, 7)
    assert getattr(scheduler.schedule(), ATTRIBUTE).ended == []


def test_a_worker_in_this_process_hears_of_the_last_end_at_once(hooked):
    hooks, scheduler = hooked
    heard: list[SchedulerNotes] = []
    hooks.resting = heard.append
    scheduler.add_request(request("a"))
    scheduler._free_request(request("a", [4]))
    scheduler.update_from_output()
    assert heard == []
    scheduler.unfinished = 0
    assert scheduler.update_from_output() == "updated"
    assert [end.request for end in heard[0].ended] == ["a"]


def test_a_version_without_these_names_is_left_as_it_is():
    class Other:
        def add_request(self, request):
            return "added"

    guard = ErrorGuard()
    SchedulerHooks(guard).install(SimpleNamespace(Scheduler=Other))
    assert guard.errors == 1
    assert Other().add_request(SimpleNamespace()) == "added"
