"""What a program asks can be called or awaited, and who awaits it keeps its event loop."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from understudy import AgentSpec, Cluster, Run, Session
from understudy.cluster.client import background
from understudy.cluster.client.method import client_method, constructor
from understudy.errors import DeadlineExceeded, UnknownSession
from understudy.testing import LocalCluster

NOT_ASKED = {"Cluster.session", "Cluster.triage_item", "Session.run"}
"""They make an object of an id, and ask nobody."""

PATIENCE = 30.0


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalCluster]:
    """A cluster that answers nothing before the event loop of the test has turned."""
    async with await asyncio.to_thread(LocalCluster) as made:
        here, nodes = asyncio.get_running_loop(), made._connection._homes
        request = nodes.request

        async def slow(*arguments: Any, **options: Any) -> Any:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), here))
            return await request(*arguments, **options)

        monkeypatch.setattr(nodes, "request", slow)
        yield made


@pytest.mark.parametrize("kind", [Cluster, Session, Run, LocalCluster])
def test_everything_that_asks_can_be_awaited(kind: type) -> None:
    """Each public function of the client has `aio`, and says what it does where it is looked up."""
    found = {name: value for name, value in inspect.getmembers_static(kind) if not name.startswith("_")}
    functions = {name for name, value in found.items() if inspect.isfunction(value)} - {"kill_at", "kill_service"}
    assert {f"{kind.__name__.removeprefix('Local')}.{name}" for name in functions} <= NOT_ASKED
    methods = {name for name, value in found.items() if isinstance(value, (client_method, constructor))}
    assert methods
    for name in methods:
        assert getattr(kind, name).__doc__, name
        assert inspect.iscoroutinefunction(getattr(kind, name).aio), name


async def test_a_program_that_awaits_is_never_blocked(cluster: LocalCluster) -> None:
    """Given a cluster that waits for the program's own event loop, then everything that is awaited has its answer."""
    async with asyncio.timeout(PATIENCE):
        session = await cluster.spawn.aio(AgentSpec(name="clerk"), session_id="s")
        run = await session.send.aio("hello", run_id="r")
        types = [event.type async for event in run]
        result = await run
        again = await session.run("r").result.aio(20.0, check=True)
        assert (types[-1], result.status, again.text) == ("run_finished", "completed", result.text)
        assert [message.role for message in await session.messages.aio()] == ["user", "assistant"]
        assert (await session.events.aio())[-1].type == "run_finished"
        assert [span.name for span in await session.trace.aio("r")]
        assert (
            [info.id for info in await session.tree.aio()] == ["s"] == [row.id for row in await cluster.sessions.aio()]
        )
        assert await session.children.aio() == [] == await session.pending.aio() == await session.budgets.aio()
        assert [run.run_id for run in await session.runs.aio()] == ["r"]
        wakeup = await session.schedule.aio("later", 3600.0)
        assert await session.wakeups.aio() == [wakeup]
        assert await session.cancel_wakeup.aio(wakeup.name)
        assert not any([await run.cancel.aio(), await session.cancel.aio(), await session.resume.aio()])
        assert await session.close.aio()
        assert (await session.info.aio()).status == "completed"
        assert [service.role for service in await cluster.services.aio()][:2] == ["supervisor", "node"]
        assert await cluster.drains.aio() == []


async def test_errors_are_the_same(cluster: LocalCluster) -> None:
    """What a call raises is raised where it is awaited."""
    with pytest.raises(UnknownSession):
        await cluster.session("nobody").info.aio()
    session = await cluster.spawn.aio(AgentSpec(name="clerk", instructions='offline-script: [{"delay": 60}]'))
    run = await session.send.aio("hello")
    with pytest.raises(DeadlineExceeded):
        await run.result.aio(0.05)


async def test_who_gives_up_leaves_nothing_behind(cluster: LocalCluster) -> None:
    """Given a program that is cancelled while it waits, then nothing waits on for it."""
    session = await cluster.spawn.aio(AgentSpec(name="clerk", instructions='offline-script: [{"delay": 60}]'))
    run = await session.send.aio("hello")
    waiting = asyncio.create_task(run.result.aio())
    async with asyncio.timeout(PATIENCE):
        while not waits_for_runs():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        waiting.cancel()
        while waits_for_runs():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def waits_for_runs() -> bool:
    """Whether somebody waits for the end of a run, on the client's own loop."""
    return any("Run.result" in repr(task.get_coro()) for task in asyncio.all_tasks(background.loop()))


def test_methods_are_functions_for_whoever_looks() -> None:
    """Help, signatures, calls by the class, comparisons and mocks find what they find of any method."""
    session = Session(None, "s")  # type: ignore[arg-type]
    assert session.send == session.send
    assert session.send.__name__ == "send"  # type: ignore[attr-defined]
    options = ["content", "run_id", "traceparent", "queue", "key", "priority"]
    assert list(inspect.signature(session.send).parameters) == options
    assert list(inspect.signature(Session.send).parameters)[:2] == ["self", "content"]
    assert "store" in inspect.signature(Cluster.connect).parameters
    for function in (session.send, Session.send, Cluster.connect, session.send.aio):
        assert inspect.isfunction(function)
        assert "Raises:" in (function.__doc__ or "")
    assert not inspect.iscoroutinefunction(session.send)
    assert inspect.iscoroutinefunction(session.send.aio)
    MagicMock(spec=Session).send("hello", run_id="r")


MODULE = """
from understudy import AgentSpec, tool
from understudy.cluster.client.compiling import by_value
from understudy.testing import LocalCluster

class Desk:
    @tool
    def lookup(self, city: str) -> str:
        "Look a city up."
        return city

with LocalCluster() as cluster:
    cluster._pickle = by_value  # as a cluster with processes has it
    print(cluster.spawn(AgentSpec(name="clerk", tools=[Desk().lookup]), session_id="s").id)
"""


def test_a_module_may_spawn_while_it_is_imported(tmp_path: Path) -> None:
    """Given a module that a server imports, and that spawns an agent whose tool is pickled with the module, then the
    pickling waits for no other thread's import."""
    (tmp_path / "served.py").write_text(MODULE)
    done = subprocess.run(
        [sys.executable, "-c", "import served"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("s\n", 0), done.stderr


async def test_a_cluster_that_nobody_waits_for_any_more_is_closed() -> None:
    """Given a program that gives up while it connects, then what it would have got is closed when it is there."""
    may_go_on, closed = threading.Event(), threading.Event()

    class Made:
        def close(self) -> None:
            closed.set()

        @constructor
        def make(cls: type[Made]) -> Made:
            assert may_go_on.wait(PATIENCE)
            return cls()

    waiting = asyncio.create_task(Made.make.aio())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    may_go_on.set()
    assert await asyncio.to_thread(closed.wait, PATIENCE)


async def test_closing_ends_though_it_is_cancelled() -> None:
    """Given a program that gives up while a local cluster is closed, then that is closed all the same, and whoever
    closes it again waits for that."""
    threads = {thread.name for thread in threading.enumerate()}
    cluster = await asyncio.to_thread(LocalCluster)
    waiting = asyncio.create_task(cluster.close.aio())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(cluster.close.aio(), cluster.close.aio())
    left = {thread.name for thread in threading.enumerate()} - threads
    assert not [name for name in left if name.startswith("understudy-local")]
