"""The restart decision, as a function of the facts of a death."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import InvalidInput
from understudy.ports import Death, Verdict
from understudy.supervisor.restarts import decide

SECOND = 1_000_000
POLICY = {"max_restarts": 3, "period": 60, "stuck_after": 3, "backoff": 0.5, "backoff_max": 4.0, "jitter": 0.0}

policies = st.fixed_dictionaries(
    {
        "max_restarts": st.integers(0, 10),
        "period": st.integers(1, 600),
        "stuck_after": st.integers(1, 10),
        "backoff": st.floats(0, 5),
        "backoff_max": st.floats(0, 60),
        "jitter": st.floats(0, 1),
        "reset_after": st.none() | st.integers(1, 600),
    }
)
deaths = st.lists(st.tuples(st.integers(0, 100 * SECOND), st.booleans(), st.booleans(), st.integers(0, 3)), max_size=30)
"""Microseconds after the last one, whether it waited, whether there was progress, how many calls were open."""

History = list[tuple[int, bool, bool, int]]


def life(history: History, policy: dict[str, Any]) -> list[tuple[Death, Verdict]]:
    """Deaths one after the other within one run, until quarantine."""
    at, counted, stuck, aborted, found = 0, (), 0, False, []
    for number, (pause, waiting, progress, calls) in enumerate(history):
        at += pause
        death = Death(at, counted, stuck, waiting, progress, policy, calls, aborted, "s", number)
        verdict = decide(death)
        found.append((death, verdict))
        counted, stuck, aborted = verdict.deaths, verdict.stuck, aborted or verdict.action == "abort"
        if verdict.action == "quarantine":
            break
    return found


def actions(history: History, policy: dict[str, Any]) -> list[str]:
    return [verdict.action for _, verdict in life(history, policy)]


@given(deaths, policies)
def test_a_death_while_waiting_never_counts(history: History, policy: dict[str, Any]) -> None:
    """It is resumed at once, and neither the count of deaths nor the one without progress grows."""
    for _, verdict in life([(pause, True, progress, calls) for pause, _, progress, calls in history], policy):
        assert verdict == Verdict("resume")
    before = Death(at=100, deaths=(1, 2), stuck=2, waiting=True, progress=False, policy=policy, open_calls=1)
    assert decide(before) == Verdict("resume", deaths=(1, 2), stuck=2)


@given(deaths, policies)
def test_waits_between_change_no_other_decision(history: History, policy: dict[str, Any]) -> None:
    """A history without its deaths in waiting leads to the same decisions about the others."""
    policy = {**policy, "jitter": 0.0}  # which depends on how many deaths there were
    with_waits = [(d.at, v.action, v.delay) for d, v in life(history, policy) if not d.waiting]
    at, last, others = 0, 0, []
    for pause, waiting, progress, calls in history:
        at += pause
        if not waiting:
            others.append((at - last, False, progress, calls))
            last = at
    assert with_waits == [(d.at, v.action, v.delay) for d, v in life(others, policy)]


@given(st.integers(1, 10))
def test_stuck_after_k_deaths_without_progress(stuck_after: int) -> None:
    """Exactly the K-th death in a row without progress quarantines, however far apart they are."""
    policy = {**POLICY, "stuck_after": stuck_after, "max_restarts": 1000}
    assert actions([(100 * SECOND, False, False, 0)] * 20, policy) == ["resume"] * (stuck_after - 1) + ["quarantine"]


@given(st.integers(1, 6))
def test_open_calls_are_aborted_once_before(stuck_after: int) -> None:
    """With open calls the K-th gives these up and restarts the count; the next time it is the end."""
    policy = {**POLICY, "stuck_after": stuck_after, "max_restarts": 1000}
    once = ["resume"] * (stuck_after - 1)
    found = life([(SECOND, False, False, 1)] * 20, policy)
    assert [verdict.action for _, verdict in found] == [*once, "abort", *once, "quarantine"]
    given_up = found[stuck_after - 1][1]
    assert (given_up.delay, given_up.stuck) == (0, 0)
    assert f"died {stuck_after} times in a row" in given_up.reason


@given(deaths, policies)
def test_calls_are_aborted_at_most_once_and_only_if_there_are_any(history: History, policy: dict[str, Any]) -> None:
    """An abort needs open calls, `stuck_after` deaths without progress, and none of its kind before in the run."""
    found = life(history, policy)
    aborts = [death for death, verdict in found if verdict.action == "abort"]
    assert len(aborts) <= 1
    for death in aborts:
        assert (death.open_calls > 0, death.waiting, death.progress) == (True, False, False)
        assert death.stuck + 1 >= policy["stuck_after"]


@given(st.integers(0, 10))
def test_more_than_max_restarts_within_the_period_quarantine(limit: int) -> None:
    """Deaths with progress are not stuck, but more than `max_restarts` of them within `period` are too many."""
    policy = {**POLICY, "max_restarts": limit}
    assert actions([(SECOND, False, True, 1)] * 20, policy) == ["resume"] * limit + ["quarantine"]
    slow = actions([(61 * SECOND, False, True, 1)] * 20, {**policy, "max_restarts": max(1, limit)})
    assert set(slow) == {"resume"}


@given(deaths, policies)
def test_delays_stay_within_their_bounds(history: History, policy: dict[str, Any]) -> None:
    """No delay passes the cap, none is shorter than jitter allows, and the same facts give the same one."""
    for death, verdict in life(history, policy):
        assert decide(death) == verdict
        if verdict.action == "quarantine":
            assert verdict.reason
            continue
        if death.waiting or death.progress or verdict.action == "abort":
            assert verdict.delay == 0
            continue
        plain = decide(Death(**{**vars(death), "policy": {**policy, "jitter": 0.0}})).delay
        assert plain <= policy["backoff_max"] * SECOND
        assert plain >= int(min(policy["backoff"], policy["backoff_max"]) * SECOND)
        assert plain * (1 - policy["jitter"]) - 1 <= verdict.delay <= plain


def test_jitter_spreads_sessions_that_died_together() -> None:
    """Of a hundred sessions with one delay no two come back at the same time; their delays fill the whole range."""
    policy = {**POLICY, "jitter": 0.5}
    delays = {decide(Death(0, (), 0, False, False, policy, session_id=f"s{number}")).delay for number in range(100)}
    assert len(delays) == 100
    assert 0.25 * SECOND <= min(delays) < 0.3 * SECOND < 0.45 * SECOND < max(delays) <= 0.5 * SECOND


@given(st.lists(st.integers(0, 59 * SECOND), max_size=12))
def test_delays_without_progress_never_shrink_within_the_reset_time(pauses: list[int]) -> None:
    """Each further death that soon doubles the delay, up to the cap."""
    policy = {**POLICY, "stuck_after": 100, "max_restarts": 100}
    found = [verdict.delay / SECOND for _, verdict in life([(pause, False, False, 0) for pause in pauses], policy)]
    assert found == [min(4.0, 0.5 * 2**number) for number in range(len(pauses))]


@pytest.mark.parametrize(("reset_after", "seconds"), [(None, 60), (5, 5), (90, 90)])
def test_the_backoff_begins_again_after_a_time_without_deaths(reset_after: int | None, seconds: int) -> None:
    """After `reset_after` seconds (`period` by default) without a counted death; a wait in between changes nothing."""
    policy = {**POLICY, "stuck_after": 100, "max_restarts": 100, "reset_after": reset_after}
    soon, late = (seconds * SECOND - 1, False, False, 0), (seconds * SECOND, False, False, 0)
    wait = (0, True, False, 0)
    found = [v.delay / SECOND for d, v in life([soon, soon, wait, soon, late, soon], policy) if not d.waiting]
    assert found == [0.5, 1.0, 2.0, 0.5, 1.0]


def test_a_policy_of_an_earlier_version_still_decides() -> None:
    """Sessions keep the policy that they were created with: without `jitter` and `reset_after` there is none."""
    policy = {name: value for name, value in POLICY.items() if name != "jitter"}
    assert decide(Death(0, (), 0, False, False, policy)).delay == 0.5 * SECOND


def test_an_incomplete_policy_is_refused() -> None:
    """A field that is missing is named."""
    with pytest.raises(InvalidInput, match="backoff"):
        decide(Death(0, (), 0, False, False, {"max_restarts": 1, "period": 1, "stuck_after": 1}))
