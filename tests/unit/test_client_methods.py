"""What a program asks can be called or awaited, and who awaits it keeps its event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest

from understudy import AgentSpec, Cluster, Run, Session
from understudy.cluster.client import background
from understudy.cluster.client.method import Method, client_method, constructor
from understudy.errors import DeadlineExceeded, UnknownSession
from understudy.testing import LocalCluster

NOT_ASKED = {"Cluster.session", "Session.run"}
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
    functions = {name for name, value in found.items() if inspect.isfunction(value)} - {"kill_at"}
    assert {f"{kind.__name__.removeprefix('Local')}.{name}" for name in functions} <= NOT_ASKED
    methods = {name: value for name, value in found.items() if isinstance(value, (client_method, constructor))}
    assert methods
    for name, value in methods.items():
        assert value.__doc__, name
        assert inspect.signature(getattr(value, "__wrapped__")).parameters, name  # noqa: B009


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
        assert [row["run_id"] for row in await session.runs.aio()] == ["r"]
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


def test_a_method_is_found_by_its_object() -> None:
    """A method of an object can be called, of a class it is what makes it; both constructors can be awaited."""
    session = Session(None, "s")  # type: ignore[arg-type]
    assert isinstance(session.info, Method)
    assert isinstance(Session.info, client_method)
    assert isinstance(Cluster.connect, Method)
    assert inspect.iscoroutinefunction(Cluster.connect.aio)
