"""When schedules are due: cron over both changes of the clock, periods, jitter, and what passes unnoticed. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice, pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.due_times import AT_ONCE, Step, due_times, fires_at, first_after, step, timing_problem
from understudy.schedules import ALL, LATEST, NewSchedule, Timing

BERLIN = ZoneInfo("Europe/Berlin")
SECOND = 1_000_000
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "America/Havana", "Africa/Cairo", "Australia/Lord_Howe")
"""Among them one whose clocks change at midnight, and one where they change by half an hour."""

CRONS = ("30 2 * * *", "0 0 * * *", "*/20 * * * *", "15 * * * *", "*/15 2 * * *", "5,35 1,2 * * *", "0 3 * * 1-5")


def instant(text: str) -> int:
    """A time with its difference to UTC, in microseconds."""
    return round(datetime.fromisoformat(text).timestamp() * 1e6)


def spoken(moment: int, zone: Any = BERLIN) -> str:
    """A time as clocks there show it."""
    return datetime.fromtimestamp(moment / 1e6, zone).strftime("%d %H:%M%z")


def found(cron: str, after: str, count: int) -> list[str]:
    """The next due times in Berlin."""
    times = due_times(Timing(cron=cron, zone="Europe/Berlin"), 0, instant(after))
    return [spoken(moment) for moment in islice(times, count)]


def test_a_fixed_time_that_does_not_exist_fires_right_after_the_change() -> None:
    """Given a time within the hour that is left out in March, then it is due once that day, when the hour is over; the
    next day it is due at its time again."""
    assert found("30 2 * * *", "2026-03-28T00:00+01:00", 3) == ["28 02:30+0100", "29 03:00+0200", "30 02:30+0200"]


def test_several_fixed_times_that_do_not_exist_are_one() -> None:
    """Given two times within the hour that is left out, and the one right behind it, then all are one due time."""
    assert found("0,30 2,3 * * *", "2026-03-29T00:00+01:00", 3) == ["29 03:00+0200", "29 03:30+0200", "30 02:00+0200"]


def test_a_fixed_time_that_exists_twice_fires_the_first_time() -> None:
    """Given a time within the hour that October has twice, then it is due the first time only; also for who asks
    between the two."""
    assert found("30 2 * * *", "2026-10-25T00:00+02:00", 2) == ["25 02:30+0200", "26 02:30+0100"]
    assert found("30 2 * * *", "2026-10-25T02:45+02:00", 1) == ["26 02:30+0100"]
    assert found("30 2 * * *", "2026-10-25T02:10+01:00", 1) == ["26 02:30+0100"]


@pytest.mark.parametrize("day", ["2026-03-29", "2026-10-25"])
def test_wildcards_keep_real_intervals(day: str) -> None:
    """Given a wildcard in the minute or the hour, then a change of the clock makes no interval longer or shorter."""
    for cron, minutes in (("*/20 * * * *", 20), ("15 * * * *", 60)):
        timing = Timing(cron=cron, zone="Europe/Berlin")
        times = list(islice(due_times(timing, 0, instant(f"{day}T00:00+00:00") - 7_200 * SECOND), 12))
        assert {then - first for first, then in pairwise(times)} == {minutes * 60 * SECOND}


def test_a_wildcard_minute_of_an_hour_that_is_left_out() -> None:
    """Given a wildcard minute in an hour that March leaves out and October has twice, then it is due in no such hour,
    and in both."""
    assert found("*/30 2 * * *", "2026-03-29T00:00+01:00", 1) == ["30 02:00+0200"]
    assert found("*/30 2 * * *", "2026-10-25T00:00+02:00", 4) == [
        "25 02:00+0200", "25 02:30+0200", "25 02:00+0100", "25 02:30+0100",
    ]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    zone=st.sampled_from(ZONES),
    cron=st.sampled_from(CRONS),
    begin=st.integers(instant("2019-01-01T00:00+00:00"), instant("2027-01-01T00:00+00:00")),
    near=st.sampled_from(("2026-03-08T07:00", "2026-03-29T01:00", "2026-10-25T01:00", "2026-11-01T06:00", "")),
    share=st.floats(0, 1),
)
def test_due_times_are_the_same_wherever_one_begins(zone: str, cron: str, begin: int, near: str, share: float) -> None:
    """Given any moment, also right at a change of the clock, then due times rise, and who begins to look in the middle
    of them finds the same ones: after a restart nothing is due that was not before."""
    timing = Timing(cron=cron, zone=zone)
    begin = instant(f"{near}+00:00") - 7_200 * SECOND if near else begin
    times = list(islice(due_times(timing, 0, begin), 12))
    assert all(first < then for first, then in pairwise([begin, *times]))
    middle = begin + int((times[-1] - begin) * share)
    assert first_after(timing, 0, middle) == next(
        (at for at in times if at > middle), first_after(timing, 0, times[-1])
    )
    assert [first_after(timing, 0, at) for at in times[:-1]] == times[1:]


def test_periods_count_from_their_anchor() -> None:
    """Given a period with an anchor, then due times are whole periods from it, none before the start or after the
    end."""
    timing = Timing(every=10.0, until=55 * SECOND)
    assert list(due_times(timing, 5 * SECOND, 12 * SECOND)) == [15 * SECOND, 25 * SECOND, 35 * SECOND, 45 * SECOND,
                                                                55 * SECOND]  # fmt: skip
    assert first_after(Timing(every=10.0, start=100 * SECOND), 100 * SECOND, 0) == 100 * SECOND
    assert first_after(Timing(at=7), 0, 6) == 7
    assert first_after(Timing(at=7), 0, 7) is None


def test_jitter_is_the_same_each_time() -> None:
    """Given a jitter, then a due time fires within it, always at the same time, and another schedule's at another."""
    timing = Timing(every=60.0, jitter=30.0)
    moments = [fires_at("a", timing, at * 60 * SECOND) - at * 60 * SECOND for at in range(200)]
    assert all(0 <= late < 30 * SECOND for late in moments)
    assert len(set(moments)) > 190
    assert moments == [fires_at("a", timing, at * 60 * SECOND) - at * 60 * SECOND for at in range(200)]
    assert moments != [fires_at("b", timing, at * 60 * SECOND) - at * 60 * SECOND for at in range(200)]


def wanted(timing: Timing, **rules: Any) -> NewSchedule:
    """A schedule of a session."""
    return NewSchedule(name="n", content="go", timing=timing, session_id="s", **rules)


def test_the_latest_that_was_missed_fires() -> None:
    """Given due times that passed in an outage, when it is over, then the latest fires and the others were missed; if
    all shall be made up for, the first fires."""
    timing = Timing(every=10.0)
    assert step(wanted(timing), 0, 10 * SECOND, 45 * SECOND) == Step(3, 40 * SECOND, 50 * SECOND)
    assert step(wanted(timing, catch_up=ALL), 0, 10 * SECOND, 45 * SECOND) == Step(0, 10 * SECOND, 20 * SECOND)
    assert step(wanted(timing), 0, 10 * SECOND, 10 * SECOND) == Step(0, 10 * SECOND, 20 * SECOND)


def test_what_is_later_than_the_window_was_missed() -> None:
    """Given a window, when an outage has lasted longer, then only what is within it fires."""
    timing = Timing(every=10.0)
    assert step(wanted(timing, window=4), 0, 10 * SECOND, 45 * SECOND) == Step(4, None, 50 * SECOND)
    assert step(wanted(timing, window=6), 0, 10 * SECOND, 45 * SECOND) == Step(3, 40 * SECOND, 50 * SECOND)
    late = step(wanted(timing, window=16, catch_up=ALL), 0, 10 * SECOND, 45 * SECOND)
    assert late == Step(2, 30 * SECOND, 40 * SECOND)


def test_a_year_of_seconds_takes_one_step() -> None:
    """Given a period of a second and an outage of a year, then one step says how many were missed."""
    year = 365 * 86_400
    assert step(wanted(Timing(every=1.0)), 0, SECOND, year * SECOND) == Step(
        year - 1, year * SECOND, (year + 1) * SECOND
    )
    done = step(wanted(Timing(every=1.0, until=100 * SECOND)), 0, SECOND, year * SECOND)
    assert done == Step(99, 100 * SECOND, None)


def test_many_missed_times_of_a_cron_take_several_steps() -> None:
    """Given a cron of each minute and a long outage, then a step looks at so many, and the next goes on behind them."""
    begin, now = instant("2026-01-01T00:00+00:00"), instant("2026-01-01T05:00:30+00:00")
    schedule = wanted(Timing(cron="* * * * *"))
    first = step(schedule, 0, begin, now)
    assert (first.missed, first.at, first.following) == (AT_ONCE, None, begin + AT_ONCE * 60 * SECOND)
    assert first.following is not None
    assert step(schedule, 0, first.following, now) == Step(300 - AT_ONCE, now - 30 * SECOND, now + 30 * SECOND)


@settings(max_examples=200, deadline=None)
@given(
    every=st.sampled_from((1.0, 7.0, 60.0)),
    jitter=st.sampled_from((0.0, 0.5, 20.0)),
    catch_up=st.sampled_from((LATEST, ALL)),
    window=st.sampled_from((0.0, 3.0, 90.0)),
    until=st.sampled_from((0, 100, 300)),
    outages=st.lists(st.integers(0, 400), max_size=5),
)
def test_each_due_time_fires_or_was_missed(
    every: float, jitter: float, catch_up: str, window: float, until: int, outages: list[int]
) -> None:
    """Given any outages, then each due time fires once or has been missed, in order, and none is forgotten."""
    schedule = wanted(
        Timing(every=every, jitter=jitter, until=until * SECOND), catch_up=catch_up, window=window,
    )  # fmt: skip
    due, fired, missed = first_after(schedule.timing, 0, 0), list[int](), 0
    now = 0
    for outage in [*outages, 0]:
        now += outage * SECOND
        while due is not None and fires_at("n", schedule.timing, due) <= max(now, fires_at("n", schedule.timing, due)):
            now = max(now, fires_at("n", schedule.timing, due))
            done = step(schedule, 0, due, now)
            fired += [done.at] if done.at is not None else []
            missed, due = missed + done.missed, done.following
            if len(fired) > 400 or (due is not None and fires_at("n", schedule.timing, due) > now):
                break
    last = due - 1 if due is not None else until * SECOND
    passed = len(list(_until(schedule.timing, last)))
    assert len(fired) + missed == passed
    assert fired == sorted(set(fired))


def _until(timing: Timing, last: int) -> Any:
    for moment in due_times(timing, 0, 0):
        if moment > last:
            return
        yield moment


@pytest.mark.parametrize(
    ("timing", "said"),
    [
        (Timing(), "give one of cron, every and at, and not none of them."),
        (Timing(cron="0 3 * * *", every=5), "give one of cron, every and at, and not cron and every."),
        (Timing(cron="0 25 * * *"), "cron is '0 25 * * *': bad hour."),
        (Timing(cron="0 0 * * * *"), "must have five fields"),
        (Timing(cron="0 0 31 2 *"), "cron is '0 0 31 2 *': bad day-of-month."),
        (Timing(cron="@daily", zone="Europe/Atlantis"), "zone is 'Europe/Atlantis', and must be the IANA name"),
        (Timing(cron="@daily", zone="../x"), "zone is '../x', and must be the IANA name"),
        (Timing(every=0.5), "every is 0.5, and must be 1 to"),
        (Timing(every=float("nan")), "every is nan"),
        (Timing(at=-1), "at must be a time between 1970 and 2100."),
        (Timing(every=5, jitter=-1), "jitter is -1"),
    ],
)
def test_what_is_no_timing(timing: Timing, said: str) -> None:
    """Given a timing with a mistake, then what is wrong with it is said."""
    assert said in (timing_problem(timing) or "")


@pytest.mark.parametrize("cron", ["@hourly", "@daily", "@weekly", "@monthly", "@yearly", "0 3 * * mon", "0 0 L * *"])
def test_what_is_one(cron: str) -> None:
    """Given names of days, the last of the month or a nickname, then nothing is wrong, and it is due."""
    timing = Timing(cron=cron, zone="Asia/Tokyo")
    assert timing_problem(timing) is None
    assert first_after(timing, 0, round(datetime(2026, 5, 1, tzinfo=UTC).timestamp() * 1e6)) is not None
