"""Alerts: when a figure is beyond a limit for long enough, and what that makes happen."""

import pytest

from specscope.analyze.compare.failif import parse as parse_limits
from specscope.errors import UserError
from specscope.trace.history.interval import interval_record
from specscope.trace.record.aggregate import Aggregate
from specscope.watch.alert import Alerts, parse
from tests.support.commands import run_here
from tests.watch.samples import DATA

SECOND = 10**9


def raised(conditions, taus, seconds=30, engine="e"):
    """The numbers of the intervals that raise an alert; each has 100 drafts of two tokens."""
    alerts, numbers = Alerts(parse(conditions)), []
    for number, tau in enumerate(taus):
        accepted = None if tau is None else round(100 * (tau - 1))
        drafts = 0 if tau is None else 100
        one = Aggregate("x", drafts=drafts, drafted=2 * drafts, accepted=accepted or 0)
        record = interval_record(number, number * seconds * SECOND, (number + 1) * seconds * SECOND, one)
        numbers += [number] * len(alerts.take(engine, record))
    return numbers


@pytest.mark.parametrize(
    ("condition", "taus", "numbers"),
    [
        ("tau < 1.5", [1.4, 1.4, 1.6, 1.4], [0, 3]),  # again after it was within the limit
        ("tau < 1.5 for 2m", [1.4] * 6, [3]),
        ("tau < 1.5 for 2m", [1.4, 1.4, 1.4, 1.6, 1.4, 1.4, 1.4, 1.4], [7]),
        ("tau < 1.5 for 2m", [1.4, None, 1.4, None, 1.4], [4]),  # idle intervals change nothing
        ("tau > 1.5 for 1m", [1.5, 1.6, 1.6], [2]),
        ("rate < 25%", [1.6, 1.4], [1]),
        ("rate < .25 or tau < 1.3", [1.4, 1.2], [0, 1]),
        ("depth 3 rate < 0.5", [1.4], []),  # not told
        ("drafts < 1 for 1m", [1.4, None, None, None], [2]),  # nothing is drafted any more
        ("accepted > 45", [1.4, 1.5], [1]),
        ("tau drops > 20% for 1m", [*([1.8, 1.7, 1.75] * 4), 1.1, 1.1, 1.1, 1.7, 1.1, 1.1], [13, 17]),
        ("tau drops > 20%", [1.8, 1.7, 1.1], []),  # there is too little before
        ("tau drops > 20%", [*([1.9, 1.5] * 6), 1.3], []),  # among those before it is nothing special
        ("tau rises > 20%", [*([1.4, 1.42] * 6), 1.1, 1.9], [13]),
        ("tau differs > .2", [*([1.4, 1.42] * 6), 1.1, 1.4, 1.9], [12, 14]),
    ],
)
def test_when_an_alert_is_raised(condition, taus, numbers):
    assert raised(condition, taus) == numbers


def test_engines_are_looked_at_one_by_one():
    alerts = Alerts(parse("tau < 1.5 for 1m"))
    one = Aggregate("x", drafts=100, accepted=20)
    lines = []
    for number, engine in enumerate("abab"):
        lines += alerts.take(engine, interval_record(number, number * 30 * SECOND, (number + 1) * 30 * SECOND, one))
    assert [line.split(":")[1].strip() for line in lines] == ["a", "b"]


@pytest.mark.parametrize(
    "text",
    [
        "tau",
        "tau < ",
        "tau < 1.5 for",
        "tau < 1.5 for 2",
        "speed < 3",
        "tau where kind is x < 2",
        "tau < 1e9",
        "tau < 5%",
    ],
)
def test_a_condition_that_is_none_is_refused(text):
    with pytest.raises(UserError, match=r"^--alert .*: (write FIGURE|tau is a number|there is no figure)"):
        parse(text)


@pytest.mark.parametrize("text", ["tau drops > 2%", "depth 2 rate < 0.5 or drafts > 7", "rate differs > 1%"])
def test_the_conditions_are_those_of_a_comparison(text):
    assert parse(text) == parse_limits(text)


def test_an_alert_is_a_line_a_code_and_a_command(tmp_path):
    script = tmp_path / "tell"
    script.write_text(f'#!/bin/sh\necho "$SPECSCOPE_ALERT" >> {tmp_path}/alerts\n')
    script.chmod(0o755)
    log = str(DATA / "log.txt")
    code, _, err = run_here(["watch", log, "--headless", "--alert", "tau < 1.5", "--exec", str(script)])
    (line,) = [line for line in err.splitlines() if line.startswith("alert: ")]
    assert code == 1
    assert "tau < 1.5: " in line
    assert (tmp_path / "alerts").read_text() == f"{line}\n"
    code, _, err = run_here(["watch", log, "--headless", "--alert", "tau < 1.0"])
    assert (code, "alert" in err) == (0, False)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--exec", "true"], "--exec runs at an alert"),
        (["--alert", "tau < 1", "--exec", "no-such-command-here"], "there is no such command"),
        (["--alert", "tau < 1", "--exec", "'"], "No closing quotation"),
        (["--alert", "tau"], "write FIGURE"),
        (["--alert", "speed < 3"], "use tau, rate, depth N rate, drafts, drafted, accepted, output tokens or requests"),
    ],
)
def test_bad_words_are_one_line(words, why):
    code, _, err = run_here(["watch", str(DATA / "log.txt"), "--headless", *words])
    assert code == 2
    assert why in err
