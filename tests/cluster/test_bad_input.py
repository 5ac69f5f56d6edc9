"""Bad input: what users, endpoints, tools and models do wrong is a clear error or an observation; nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy import AgentSpec, Cluster, tool
from understudy.errors import (
    ClusterUnreachable,
    InvalidConfiguration,
    InvalidSpec,
    RunConflict,
    SessionConflict,
    StoreUnreachable,
    UnknownRun,
    UnknownSession,
)
from understudy.events import ToolFinished
from understudy.testing.offline import Faults

from ..faults import PATIENCE, Stage, call, driver, of, output, staged

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def services(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The services of a store that the tests of this module share."""
    dsn = f"sqlite:///{tmp_path_factory.mktemp('store')}/store.db"
    with Cluster.connect(dsn, max_actors=4) as cluster:
        yield dsn
        cluster.shutdown()


@pytest.fixture
def stage(services: str, tmp_path: Path) -> Iterator[Stage]:
    """A client and an endpoint of the test's own."""
    with staged(services, tmp_path / "stage") as found:
        yield found


def lives(stage: Stage, session: Any) -> None:
    """The session works as ever after what went wrong."""
    assert session.send("and now?").result(PATIENCE).text == "offline: and now?"
    stage.check(session)


def test_unknown_session_and_run(stage: Stage) -> None:
    """The error for an unknown id names it, wherever it is used."""
    ghost = stage.cluster.session("ghost")
    for use in (ghost.info, ghost.messages, ghost.events, ghost.tree, lambda: ghost.send("hello"), ghost.cancel):
        with pytest.raises(UnknownSession, match="ghost"):
            use()
    session = stage.spawn()
    with pytest.raises(UnknownRun, match="no-such-run"):
        session.run("no-such-run").result(PATIENCE)
    lives(stage, session)


def test_an_id_used_for_something_else(stage: Stage) -> None:
    """The same id with another spec or input is a conflict, and the first one stands."""
    session = stage.spawn(session_id="taken")
    with pytest.raises(SessionConflict, match="taken"):
        stage.spawn(session_id="taken", instructions="others", on_change="refuse")
    assert session.send("hello", run_id="mine").result(PATIENCE).text == "offline: hello"
    with pytest.raises(RunConflict, match="mine"):
        session.send("goodbye", run_id="mine")
    lives(stage, session)


def test_three_mistakes_in_a_spec(stage: Stage) -> None:
    """All are named at once, before anything is created."""
    with pytest.raises(InvalidSpec) as caught:
        AgentSpec(name="has spaces", max_rounds=0, colour="red")  # type: ignore[call-arg]
    assert {problem["field"] for problem in caught.value.details["problems"]} == {"name", "max_rounds", "colour"}
    for field in ("name", "max_rounds", "colour"):
        assert field in str(caught.value)
    with pytest.raises(InvalidSpec, match="no_such_tool"):
        stage.spawn(tools=["no_such_tool"])


def test_wrong_dsn() -> None:
    """A DSN of a kind that we can't use says which kinds there are; a password in it is not shown."""
    with pytest.raises(InvalidConfiguration, match="postgresql://") as caught:
        Cluster.connect("mysql://me:hunter2@somewhere/db")
    assert "hunter2" not in str(caught.value)


def test_store_not_reachable(ray_cluster: str) -> None:
    """Nobody listens at the address: an error within the timeout, without the password."""
    with pytest.raises(StoreUnreachable, match=r"127\.0\.0\.1") as caught:
        Cluster.connect("postgresql://me:hunter2@127.0.0.1:9/db", timeout=10)
    assert "hunter2" not in str(caught.value)


def test_ray_not_reachable(ray_cluster: str, tmp_path: Path) -> None:
    """The error for an address without a Ray cluster says so."""
    source = """
import json
from understudy import Cluster
from understudy.errors import UnderstudyError
try:
    Cluster.connect("sqlite:///x.db", address="127.0.0.1:9")
except UnderstudyError as error:
    print(json.dumps([error.code, str(error)]))
"""
    code, message = output(driver(tmp_path / "driver", source))
    assert code == ClusterUnreachable.code
    assert "127.0.0.1:9" in message


def test_endpoint_that_answers_html(stage: Stage) -> None:
    """The run fails and says what the address must be; once it is right, the session goes on."""
    session = stage.spawn()
    stage.server.faults = Faults(html=True)
    result = session.send("hello").result(PATIENCE)
    assert result.status == "failed"
    assert result.error is not None
    assert result.error["code"] == "model_protocol"
    stage.server.faults = Faults()
    lives(stage, session)


def test_endpoint_that_refuses(stage: Stage) -> None:
    """A request that the endpoint refuses is not repeated, and its reason reaches the user."""
    session = stage.spawn(instructions="offline-script: no JSON")
    result = session.send("hello").result(PATIENCE)
    assert result.status == "failed"
    assert result.error is not None
    assert result.error["code"] == "model_refused"
    assert "not JSON" in result.error["message"]
    assert stage.server.stats.requests == 1


def test_tool_that_raises(stage: Stage) -> None:
    """The model receives the error; the process and the session live on."""

    @tool
    def broken() -> str:
        """Fail."""
        raise ValueError("the disk is made of cheese")

    session = stage.spawn(tools=[broken])
    assert "made of cheese" in session.send(call("broken")).result(PATIENCE).text
    assert [event.outcome for event in of(session.events(), ToolFinished)] == ["error"]
    lives(stage, session)


def test_tool_that_kills_its_process(stage: Stage) -> None:
    """A segmentation fault or an exit in a tool costs its process; the run goes on and the model learns of it."""

    @tool
    def deadly() -> str:
        """End the process."""
        import os

        os._exit(7)

    session = stage.spawn(tools=[deadly])
    result = session.send(call("deadly")).result(PATIENCE)
    assert result.ok
    assert "interrupted" in result.text
    lives(stage, session)


def test_tool_that_blocks_for_ever(stage: Stage) -> None:
    """After its timeout the process is replaced, and the run goes on with that as the observation."""

    @tool(timeout=1)
    def stuck() -> str:
        """Never end."""
        import threading

        threading.Event().wait()
        return ""

    session = stage.spawn(tools=[stuck])
    run = session.send(call("stuck"))
    result = run.result(PATIENCE)
    assert result.ok
    assert "did not finish within 1 s" in result.text
    assert [event.outcome for event in of(session.events(), ToolFinished)] == ["timeout"]
    lives(stage, session)


def test_tool_that_blocks_the_event_loop(stage: Stage) -> None:
    """An async tool that never yields can't be cancelled: the probes find its process, and it is replaced."""

    @tool(timeout=1)
    async def greedy() -> str:
        """Never yield."""
        import time

        time.sleep(600)  # noqa: ASYNC251 - that is the point
        return ""

    session = stage.spawn(tools=[greedy])
    result = session.send(call("greedy")).result(PATIENCE)
    assert result.ok
    assert "interrupted" in result.text
    lives(stage, session)


def test_tool_that_returns_ten_megabytes(stage: Stage) -> None:
    """Its beginning and end are kept, a million characters in all; the middle is left out. How much of it the model is
    shown: `kernel/test_context.py`."""

    @tool
    def huge() -> str:
        """Return a lot."""
        return "begin" + "x" * 10_000_000 + "end"

    session = stage.spawn(tools=[huge])
    assert session.send(call("huge")).result(PATIENCE).ok
    [observation] = [message.text for message in session.messages() if message.role == "tool"]
    assert observation.startswith("begin")
    assert observation.endswith("end")
    assert len(observation) <= 1_000_000
    lives(stage, session)


def test_model_that_asks_for_a_tool_that_does_not_exist(stage: Stage) -> None:
    """It receives an error that says so, and which tools there are."""
    session = stage.spawn()
    result = session.send(call("teleport", where="home")).result(PATIENCE)
    assert result.ok
    assert "teleport" in result.text
    assert "act, look" in result.text
    lives(stage, session)


def test_model_that_writes_unreadable_arguments(stage: Stage) -> None:
    """Nothing is executed, and the model receives what is wrong."""
    session = stage.spawn()
    result = session.send("call act {not json").result(PATIENCE)
    assert "not valid JSON" in result.text
    assert session.send('call act {"colour": "red"}').result(PATIENCE).ok
    assert [event.outcome for event in of(session.events(), ToolFinished)] == ["invalid", "invalid"]
    assert stage.effects() == []
    lives(stage, session)
