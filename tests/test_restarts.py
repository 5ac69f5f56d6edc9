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
POLICY = {"max_restarts": 3, "period": 60, "stuck_after": 3, "backoff": 0.5, "backoff_max": 4.0}

policies = st.fixed_dictionaries(
    {
        "max_restarts": st.integers(0, 10),
        "period": st.integers(1, 600),
        "stuck_after": st.integers(1, 10),
        "backoff": st.floats(0, 5),
        "backoff_max": st.floats(0, 60),
    }
)
deaths = st.lists(st.tuples(st.integers(0, 100 * SECOND), st.booleans(), st.booleans()), max_size=30)


def life(history: list[tuple[int, bool, bool]], policy: dict[str, Any]) -> list[tuple[Death, Verdict]]:
    """Deaths `(microseconds after the last one, waiting, progress)` one after the other, until quarantine."""
    at, counted, stuck, found = 0, (), 0, []
    for pause, waiting, progress in history:
        at += pause
        death = Death(at, counted, stuck, waiting, progress, policy)
        verdict = decide(death)
        found.append((death, verdict))
        counted, stuck = verdict.deaths, verdict.stuck
        if verdict.action == "quarantine":
            break
    return found


@given(deaths, policies)
def test_a_death_while_waiting_never_counts(history: list[tuple[int, bool, bool]], policy: dict[str, Any]) -> None:
    """It is resumed at once, and neither the count of deaths nor the one without progress grows."""
    for death, verdict in life([(pause, True, progress) for pause, _, progress in history], policy):
        assert verdict == Verdict("resume", deaths=death.deaths, stuck=death.stuck) == Verdict("resume")


@given(deaths, policies)
def test_waits_between_change_no_other_decision(history: list[tuple[int, bool, bool]], policy: dict[str, Any]) -> None:
    """A history without its deaths in waiting leads to the same decisions about the others."""
    with_waits = [(d.at, v.action, v.delay) for d, v in life(history, policy) if not d.waiting]
    at, times = 0, []
    for pause, waiting, progress in history:
        at += pause
        if not waiting:
            times.append((at, progress))
    pauses = [(now - before, False, progress) for (before, _), (now, progress) in zip([(0, 0), *times], times)]  # noqa: B905
    assert with_waits == [(d.at, v.action, v.delay) for d, v in life(pauses, policy)]


@given(st.integers(1, 10))
def test_stuck_after_k_deaths_without_progress(stuck_after: int) -> None:
    """Exactly the K-th death in a row without progress quarantines, however far apart they are."""
    policy = {**POLICY, "stuck_after": stuck_after, "max_restarts": 1000}
    decisions = [verdict.action for _, verdict in life([(100 * SECOND, False, False)] * 20, policy)]
    assert decisions == ["resume"] * (stuck_after - 1) + ["quarantine"]


@given(st.integers(0, 10))
def test_more_than_max_restarts_within_the_period_quarantine(limit: int) -> None:
    """Deaths with progress are not stuck, but more than `max_restarts` of them within `period` are too many."""
    policy = {**POLICY, "max_restarts": limit}
    decisions = [verdict.action for _, verdict in life([(SECOND, False, True)] * 20, policy)]
    assert decisions == ["resume"] * limit + ["quarantine"]
    slow = life([(61 * SECOND, False, True)] * 20, {**policy, "max_restarts": max(1, limit)})
    assert {verdict.action for _, verdict in slow} == {"resume"}


@given(deaths, policies)
def test_backoff_grows_up_to_its_cap_and_progress_resets_it(
    history: list[tuple[int, bool, bool]], policy: dict[str, Any]
) -> None:
    """Delays in a row without progress never shrink nor pass the cap; after progress there is none."""
    last = 0
    for death, verdict in life(history, policy):
        if verdict.action == "quarantine":
            assert verdict.reason
            break
        if death.waiting:
            continue
        assert 0 <= verdict.delay <= policy["backoff_max"] * SECOND
        if death.progress:
            assert (verdict.delay, verdict.stuck) == (0, 0)
            last = 0
        else:
            assert verdict.delay >= last
            last = verdict.delay


def test_the_delays_of_an_example() -> None:
    """`backoff`, doubled for each further death without progress, up to `backoff_max`."""
    policy = {**POLICY, "stuck_after": 100, "max_restarts": 100}
    found = [verdict.delay / SECOND for _, verdict in life([(SECOND, False, False)] * 5, policy)]
    assert found == [0.5, 1.0, 2.0, 4.0, 4.0]


def test_an_incomplete_policy_is_refused() -> None:
    """A field that is missing is named."""
    with pytest.raises(InvalidInput, match="backoff"):
        decide(Death(0, (), 0, False, False, {"max_restarts": 1, "period": 1, "stuck_after": 1}))
