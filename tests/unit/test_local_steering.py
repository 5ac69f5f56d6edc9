"""Steering, merged inputs and forks through the public API, on the cluster in one process."""

from __future__ import annotations

import threading

import pytest

from understudy import AgentSpec, tool
from understudy.errors import InvalidInput, NotRunning, SessionConflict
from understudy.events import RunStarted, SteerDropped
from understudy.testing import LocalCluster

PATIENCE = 30.0


def test_a_session_is_steered_while_its_tool_works() -> None:
    """Given a run whose tool is at work, when the session is steered, then the run that this returns is that one, and
    its answer is to the message."""
    begun, may_end = threading.Event(), threading.Event()

    @tool
    def works() -> str:
        """Work until somebody says so."""
        begun.set()
        may_end.wait(PATIENCE)
        return "worked"

    with LocalCluster() as cluster:
        session = cluster.spawn(AgentSpec(name="a", tools=[works]))
        run = session.send("call works {}")
        assert begun.wait(PATIENCE)
        steered = session.steer("rather this")
        may_end.set()
        assert steered.run_id == run.run_id
        assert steered.result(PATIENCE, check=True).text == "offline: rather this"
        assert [message.origin for message in session.messages()] == ["", "", "", "steer", ""]
        with pytest.raises(NotRunning):
            session.steer("too late")
        with pytest.raises(InvalidInput):
            session.steer(" ")


def test_an_interrupted_tool_is_cancelled() -> None:
    """Given a run whose tool is at work, when the session is interrupted, then the run goes on without the tool."""
    begun, never = threading.Event(), threading.Event()

    @tool(on_crash="rerun")
    async def works() -> str:
        """Work for long."""
        import asyncio

        begun.set()
        await asyncio.sleep(PATIENCE)
        never.set()
        return "worked"

    with LocalCluster() as cluster:
        session = cluster.spawn(AgentSpec(name="a", tools=[works]))
        run = session.send("call works {}")
        assert begun.wait(PATIENCE)
        session.steer("stop that", interrupt=True)
        assert run.result(PATIENCE, check=True).text == "offline: stop that"
        assert not never.is_set()
        assert [message.text for message in session.messages() if message.role == "tool"] == ["cancelled"]


@pytest.mark.parametrize("interrupt", [False, True])
def test_no_death_loses_what_steers_a_run(interrupt: bool) -> None:
    """Given a session that is steered as soon as its run has started, when its process or its node service dies at any
    point, then the message is in the log once, or the log says that it was dropped."""

    def steered(cluster: LocalCluster) -> list[str]:
        session = cluster.spawn(AgentSpec(name="a", tools=["list_jobs"]))
        run = session.send("call list_jobs {}")
        accepted = 0
        for event in run:
            if isinstance(event, RunStarted):
                try:
                    session.steer("rather this", interrupt=interrupt)
                    accepted = 1
                except NotRunning:
                    pass
        assert run.result(PATIENCE).ok
        read = [message.text for message in session.messages() if message.origin == "steer"]
        dropped = [event for event in session.events() if isinstance(event, SteerDropped)]
        assert len(read) + len(dropped) == accepted
        return read

    with LocalCluster() as cluster:
        steered(cluster)
        points = len(cluster.points)
    for point in range(points):
        for service in (None, "node"):
            with LocalCluster() as cluster:
                cluster.kill_at(point, **({"service": service} if service else {}))
                steered(cluster)


def test_a_fork_is_a_session_of_its_own() -> None:
    """Given a session with two inputs, when it is forked before the second one and another is sent, then the fork has
    that, the original stays, and the same id makes no second fork."""
    with LocalCluster() as cluster:
        session = cluster.spawn(AgentSpec(name="a", metadata={"team": "x"}))
        for text in ("one", "two"):
            session.send(text).result(PATIENCE, check=True)
        before = session.messages()
        fork = session.fork(before[1].seq, session_id="f")
        assert fork.id == session.fork(before[1].seq, session_id="f").id == "f"
        with pytest.raises(SessionConflict):
            session.fork(before[0].seq, session_id="f")
        with pytest.raises(InvalidInput):
            session.fork(-1)
        assert fork.send("three").result(PATIENCE, check=True).text == "offline: three"
        assert [message.text for message in fork.messages()] == ["one", "offline: one", "three", "offline: three"]
        assert session.messages() == before
        assert fork.info().metadata == {"team": "x", "forked_from": session.id, "forked_at": str(before[1].seq)}


def test_inputs_that_wait_are_merged_where_the_agent_says_so() -> None:
    """Given an agent that merges follow-ups, when inputs wait as its run ends, then each has the one answer."""
    begun, may_end = threading.Event(), threading.Event()

    @tool(on_crash="rerun")
    def works() -> str:
        """Work until somebody says so."""
        begun.set()
        may_end.wait(PATIENCE)
        return "worked"

    with LocalCluster() as cluster:
        session = cluster.spawn(AgentSpec(name="a", tools=[works], follow_ups="merge"))
        session.send("call works {}")
        assert begun.wait(PATIENCE)
        runs = [session.send(text) for text in ("one", "two")]
        may_end.set()
        assert [run.result(PATIENCE, check=True).text for run in runs] == ["offline: two"] * 2
        assert [run.merged_into for run in session.runs()] == ["", "", runs[0].run_id]
