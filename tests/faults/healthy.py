"""Runs without a fault: every drafter, greedy and sampled, alone and in a batch, with preemption and in chunks."""

from tests.faults.settings import DRAFTERS, Setting

SAMPLING = {
    "greedy": {},
    "warm": {"temperature": 0.8},
    "rules": {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
}


def _sizes(number: int) -> dict:
    """How crowded a run is: alone, in a batch of three, with few KV blocks, with prompts in chunks."""
    return (
        {"batch": 1, "requests": 6},
        {"batch": 3, "requests": 9},
        {"batch": 3, "requests": 9, "blocks": 18},
        {"batch": 3, "requests": 9, "step_tokens": 32, "prompt": 120},
    )[number % 4]


HEALTHY: dict[str, Setting] = {
    f"{drafter}, {how}": Setting(drafter, SAMPLING[how], tokens=60, **_sizes(i + 3 * j))
    for i, drafter in enumerate(DRAFTERS)
    for j, how in enumerate(SAMPLING)
} | {
    f"{drafter}, {how}, crowded": Setting(drafter, SAMPLING[how], tokens=60, **_sizes(i + 3 * j + 2))
    for i, drafter in enumerate(name for name in DRAFTERS if name != "none")
    for j, how in enumerate(("greedy", "warm"))
}
