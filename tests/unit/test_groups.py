"""What becomes of a group of sub-agents when one of them ends: the rules of docs/supervision.md, as pure decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.ports import GroupDecision, GroupState, Member
from understudy.spec import Supervision
from understudy.supervisor.groups import MICROSECONDS, decide_end

ABNORMAL = ("failed", "quarantined", "round_limit", "budget_exceeded")
START = 1_000_000 * MICROSECONDS


def policy(**fields: Any) -> dict[str, Any]:
    """A policy whose pauses are easy to tell."""
    return Supervision(**{"jitter": 0.0, "max_restarts": 3, "period": 100.0, **fields}).model_dump()


def group(*restarts: str) -> list[Member]:
    """Sub-agents a, b, c, … in the order of their start, all at work."""
    return [Member(chr(ord("a") + number), number, restart) for number, restart in enumerate(restarts)]


def ended(members: list[Member], child_id: str, status: str) -> list[Member]:
    return [replace(member, ended=status) if member.child_id == child_id else member for member in members]


def decide(
    members: list[Member], child_id: str, status: str, state: GroupState | None = None, *, now: int = START,
    **fields: Any,
) -> GroupDecision:  # fmt: skip
    return decide_end(policy(**fields), state or GroupState(), ended(members, child_id, status), child_id, now)


class TestRestartTypes:
    @pytest.mark.parametrize("status", ["completed", "cancelled", *ABNORMAL])
    def test_temporary(self, status: str) -> None:
        """A temporary sub-agent is never started again: its end is its result."""
        decision = decide(group("temporary"), "a", status)
        assert (decision.deliver, decision.start) == (("a",), ())

    @pytest.mark.parametrize("status", ABNORMAL)
    def test_transient_that_ends_badly(self, status: str) -> None:
        """A transient one is started again when it ended badly."""
        decision = decide(group("transient"), "a", status)
        assert (decision.deliver, decision.start) == ((), ("a",))

    def test_transient_that_ends_well(self) -> None:
        """Its answer is its result."""
        assert decide(group("transient"), "a", "completed").deliver == ("a",)

    @pytest.mark.parametrize("status", ["completed", *ABNORMAL])
    def test_permanent(self, status: str) -> None:
        """A permanent one is started again whatever way it ended."""
        assert decide(group("permanent"), "a", status).start == ("a",)

    @pytest.mark.parametrize("restart", ["permanent", "transient"])
    def test_cancelled_by_somebody(self, restart: str) -> None:
        """Who was asked to end is not started again."""
        decision = decide(group(restart), "a", "cancelled")
        assert (decision.deliver, decision.start) == (("a",), ())


class TestStrategies:
    def test_one_for_one(self) -> None:
        """The others go on."""
        decision = decide(group("transient", "transient", "transient"), "b", "failed", strategy="one_for_one")
        assert (decision.start, decision.stop) == (("b",), "")

    def test_one_for_all(self) -> None:
        """The others are stopped one after the other, the last started first; then all start in their order."""
        members, fields = group("transient", "permanent", "transient"), {"strategy": "one_for_all"}
        decision = decide(members, "b", "failed", **fields)
        assert (decision.stop, decision.start) == ("c", ())
        members = ended(members, "b", "failed")
        decision = decide(members, "c", "cancelled", decision.state, **fields)
        assert (decision.stop, decision.start, decision.deliver) == ("a", (), ())
        decision = decide(ended(members, "c", "cancelled"), "a", "cancelled", decision.state, **fields)
        assert (decision.stop, decision.start) == ("", ("a", "b", "c"))
        assert decision.state.plan is None

    def test_rest_for_one(self) -> None:
        """Those started before it go on."""
        members, fields = group("transient", "transient", "transient"), {"strategy": "rest_for_one"}
        decision = decide(members, "b", "failed", **fields)
        assert decision.stop == "c"
        decision = decide(ended(members, "b", "failed"), "c", "cancelled", decision.state, **fields)
        assert decision.start == ("b", "c")

    def test_a_temporary_sibling_is_stopped_and_not_started_again(self) -> None:
        """As in OTP. Its parent hears that it was cancelled."""
        members, fields = group("transient", "temporary"), {"strategy": "one_for_all"}
        decision = decide(members, "a", "failed", **fields)
        decision = decide(ended(members, "a", "failed"), "b", "cancelled", decision.state, **fields)
        assert (decision.deliver, decision.start) == (("b",), ("a",))

    def test_another_failure_during_a_restart_joins_it(self) -> None:
        """It is one more restart, and everybody is started once."""
        members, fields = group("transient", "transient", "transient"), {"strategy": "rest_for_one"}
        decision = decide(members, "b", "failed", **fields)
        members = ended(members, "b", "failed")
        decision = decide(members, "a", "failed", decision.state, **fields)
        assert (len(decision.state.restarts), decision.stop) == (2, "c")
        decision = decide(ended(members, "a", "failed"), "c", "completed", decision.state, **fields)
        assert decision.start == ("a", "b", "c")

    def test_one_that_somebody_asked_to_end(self) -> None:
        """It is waited for, its end is its result, and the others are started again without it, whether it was asked
        before the restart began or after."""
        members, fields = group("transient", "transient"), {"strategy": "one_for_all"}
        before = [members[0], replace(members[1], asked=True)]
        decision = decide(before, "a", "failed", **fields)
        assert (decision.stop, decision.start) == ("b", ())
        state = decide(members, "a", "failed", **fields).state
        for plan in (state, decision.state):
            ends = decide(ended(before, "a", "failed"), "b", "cancelled", plan, **fields)
            assert (ends.deliver, ends.start) == (("b",), ("a",))


class TestIntensity:
    def test_one_more_than_allowed_escalates(self) -> None:
        """Everybody is stopped, results are delivered, and then the supervising run fails."""
        members = group("transient", "transient")
        state = GroupState(restarts=(START, START + 1, START + 2))
        decision = decide(members, "a", "failed", state, now=START + 3)
        assert (decision.deliver, decision.stop, decision.escalate) == (("a",), "b", "")
        decision = decide(ended(members, "a", "failed"), "b", "cancelled", decision.state, now=START + 4)
        assert decision.deliver == ("b",)
        assert "more than 3 times within 100 s" in decision.escalate

    def test_a_new_one_ends_while_the_others_are_stopped(self) -> None:
        """Given a group that is being given up, when a sub-agent that was started since fails, then its end is its
        result, and the supervising run fails all the same."""
        members = group("transient", "transient")
        state = decide(members, "a", "failed", GroupState(restarts=(START, START + 1, START + 2)), now=START + 3).state
        members = ended(group("transient", "transient", "transient"), "a", "failed")
        decision = decide(members, "c", "failed", state, now=START + 200 * MICROSECONDS)
        assert (decision.deliver, decision.start, decision.state.plan) == (("c",), (), state.plan)

    def test_report(self) -> None:
        """With `report` the model reads of the failure, and the others go on."""
        state = GroupState(restarts=(START, START + 1, START + 2))
        decision = decide(group("transient", "transient"), "a", "failed", state, now=START + 3, exceeded="report")
        assert (decision.deliver, decision.stop, decision.escalate) == (("a",), "", "")

    def test_old_restarts_are_forgotten(self) -> None:
        """Only those within the period count."""
        state = GroupState(restarts=(START, START + 1, START + 2))
        assert decide(group("transient"), "a", "failed", state, now=START + 100 * MICROSECONDS).start == ("a",)

    def test_restarts_of_the_future_do_not_count(self) -> None:
        """Given restarts that were noted while the clock was two days ahead, when it is set right, then the next
        failure is the first one, and the pauses start over."""
        ahead = START + 48 * 3_600 * MICROSECONDS
        state = GroupState(restarts=(ahead, ahead + 1, ahead + 2), level=5)
        decision = decide(group("transient"), "a", "failed", state, backoff=1.0)
        assert (decision.start, decision.delay, decision.state.level) == (("a",), MICROSECONDS, 0)
        assert decision.state.restarts == (START,)

    def test_pauses_double_and_start_over(self) -> None:
        """From `backoff` to `backoff_max`; after `reset_after` without a restart from `backoff` again."""
        fields = {"backoff": 1.0, "backoff_max": 5.0, "reset_after": 50.0, "max_restarts": 100}
        state, now, delays = GroupState(), START, []
        for pause in (0, 1, 1, 1, 1, 50):
            now += pause * MICROSECONDS
            decision = decide(group("transient"), "a", "failed", state, now=now, **fields)
            state = decision.state
            delays.append(decision.delay / MICROSECONDS)
        assert delays == [1, 2, 4, 5, 5, 1]

    @given(level=st.integers(0, 500), jitter=st.floats(0, 1), salt=st.text(max_size=5))
    def test_jitter_only_adds_its_share(self, level: int, jitter: float, salt: str) -> None:
        """A pause is between what it would be and that much more; deciding it twice gives the same."""
        rules = policy(jitter=jitter, max_restarts=1000, backoff_max=30.0)
        state = GroupState(restarts=(START,), level=level)
        members = ended(group("transient"), "a", "failed")
        found = [decide_end(rules, state, members, "a", START + 1, salt).delay / MICROSECONDS for _ in range(2)]
        pause = min(30.0, 2.0 ** (level + 1))
        assert found[0] == found[1]
        assert pause - 1e-6 <= found[0] <= pause * (1 + jitter) + 1e-6


@given(
    restarts=st.lists(st.sampled_from(["permanent", "transient", "temporary"]), min_size=1, max_size=5),
    strategy=st.sampled_from(["one_for_one", "one_for_all", "rest_for_one"]),
    exceeded=st.sampled_from(["escalate", "report"]),
    data=st.data(),
)
def test_whatever_happens(restarts: list[str], strategy: str, exceeded: str, data: st.DataObject) -> None:
    """In any history each end is answered once, by a result or by a restart; nobody is both; a temporary one is never
    started again; stops go against the order of starts; restarts keep it, and their number within its bound."""
    fields = {"strategy": strategy, "exceeded": exceeded, "max_restarts": 2, "period": 10.0}
    members = {member.child_id: member for member in group(*restarts)}
    unanswered, state, now = set[str](), GroupState(), START
    asked, escalated, counted = "", False, list[int]()
    for _ in range(12):
        at_work = [member for member in members.values() if member.ended is None]
        if not at_work or escalated:
            break
        asked = asked if asked in members and members[asked].ended is None else ""
        child = asked if asked and data.draw(st.booleans()) else data.draw(st.sampled_from(at_work)).child_id
        status = "cancelled" if child == asked else data.draw(st.sampled_from(["completed", *ABNORMAL]))
        now += data.draw(st.integers(1, 6)) * MICROSECONDS
        members[child] = replace(members[child], ended=status)
        unanswered.add(child)
        before = len(state.restarts)
        decision = decide_end(policy(**fields), state, list(members.values()), child, now)
        state = decision.state
        if state.restarts and state.restarts[-1] == now:
            counted.append(now)
        assert before <= 2
        assert len(set(decision.deliver) | set(decision.start)) == len(decision.deliver) + len(decision.start)
        assert unanswered >= set(decision.deliver) | set(decision.start)
        unanswered -= set(decision.deliver) | set(decision.start)
        assert all(members[name].restart != "temporary" for name in decision.start)
        assert [members[name].order for name in decision.start] == sorted(members[n].order for n in decision.start)
        if decision.stop:
            later = [m for m in members.values() if m.ended is None and state.plan and m.child_id in state.plan.stop]
            assert decision.stop == max(later, key=lambda member: member.order).child_id
        for name in decision.deliver:
            del members[name]
        for name in decision.start:
            members[name] = replace(members[name], ended=None)
        asked, escalated = decision.stop, bool(decision.escalate)
        assert state.plan is not None or not unanswered, "nothing is forgotten once nothing is under way"
    assert all(sum(at - 10 * MICROSECONDS < other <= at for other in counted) <= 2 for at in counted)
    assert not escalated or not unanswered
