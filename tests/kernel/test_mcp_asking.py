"""Questions that MCP servers ask during calls (elicitation): a person answers them, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from understudy.cluster.client.compiling import compile_spec
from understudy.errors import InvalidInput, NotAsked
from understudy.mcp_servers import McpServer
from understudy.messages import GIVEN_UP
from understudy.spec import AgentSpec

from ..mcp_calls import calls, command, until, until_called
from . import kernel as k


@pytest.fixture(scope="module", autouse=True)
def _package() -> None:
    """The `mcp` package takes seconds to load, on a busy machine longer than a run may stand still here."""
    importlib.import_module("understudy.tool_host.server")


def agent(directory: Path, *wanted: Any, on_crash: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    """The compiled specification of an agent that makes these calls of the test server in one round."""
    timeout = more.pop("timeout", 60)
    server = McpServer("test", command=command(directory), on_crash=on_crash or {}, timeout=timeout)
    spec = AgentSpec(name="agent", instructions=k.script(list(wanted), "done"), mcp_servers=[server], **more)
    return compile_spec(spec, model="offline", profile="offline", pickle=None).spec


def order(questions: int = 1, tool: str = "order") -> tuple[str, dict[str, int]]:
    """A call that asks so many questions."""
    return f"test_{tool}", {"questions": questions}


def go(directory: Path, *numbers: int) -> None:
    """Let the server go on behind these answers."""
    for number in numbers:
        (directory / f"go{number}").touch()


async def begin(kernel: k.Kernel, spec: dict[str, Any]) -> dict[str, Any]:
    """What the session asks, once it has left its frame."""
    await kernel.spawn("s", spec)
    await kernel.send("s")
    [asked] = await kernel.paused("s")
    return asked


async def say(kernel: k.Kernel, asked: dict[str, Any], text: str = '{"count": 3}', decision: str = "ok") -> None:
    """Answer a question."""
    said = {"call_id": asked["call_id"], "asked": asked["asked"], "decision": decision, "text": text}
    await kernel.ask("decide", "s", [said])


def holder(kernel: k.Kernel) -> k.Worker:
    """The frame's process that has the session."""
    found = kernel.holder("s")
    assert found is not None
    return found


@pytest.mark.parametrize("tool", ["order", "check"])
async def test_a_server_asks_a_person_and_gets_the_answer(tool: str, store: str, tmp_path: Path) -> None:
    """A question of a server is one of the session, which leaves its frame; an answer that does not fit is refused, one
    that fits is passed on to the call under way, whose result follows; the host keeps nothing of it."""
    go(tmp_path, 1)
    async with k.running(store, tmp_path, frames=1) as kernel:
        asked = await begin(kernel, agent(tmp_path, order(tool=tool)))
        kernel.check()
        assert asked["kind"] == "question"
        assert asked["form"]["required"] == ["count"]
        assert "How many of 1?" in asked["prompt"]
        for text in ("", "3", "[]", '{"count": 0}', "three", '{"count": "3"}'):
            with pytest.raises(InvalidInput, match="JSON"):
                await say(kernel, asked, text)
        await say(kernel, asked)
        ended = await kernel.end("s")
        results, types = await kernel.results(), await kernel.types("s")
        await until(lambda: kernel.tool_host.servers.held == 0)
        kernel.check()
    assert ended["status"] == "completed"
    assert results == ["accept"]
    assert calls(tmp_path) == ["start", tool, f"{tool} answer 1: accept {{'count': 3}}"]
    assert "tool_in_doubt" not in types


async def test_a_call_may_ask_again(store: str, tmp_path: Path) -> None:
    """Two questions of one call are asked one after the other, each answer is passed on once."""
    go(tmp_path, 1, 2)
    async with k.running(store, tmp_path) as kernel:
        asked = await begin(kernel, agent(tmp_path, order(2)))
        await say(kernel, asked)
        await kernel.until("s", "input_requested", 2)
        [again] = await kernel.paused("s")
        assert (again["call_id"], again["asked"]) == (asked["call_id"], 2)
        kernel.check()
        await say(kernel, again, "no", "error")
        await kernel.end("s")
        assert await kernel.results() == ["accept decline"]
        kernel.check()
    assert calls(tmp_path)[2:] == ["order answer 1: accept {'count': 3}", "order answer 2: decline None"]


async def test_all_may_die_while_a_person_thinks_but_the_host(store: str, tmp_path: Path) -> None:
    """Given a question, when the frames and the node service die, then the answer still reaches the call."""
    go(tmp_path, 1)
    async with k.running(store, tmp_path) as kernel:
        asked = await begin(kernel, agent(tmp_path, order()))
        for worker in list(kernel.workers.values()):
            kernel.kill(worker)
        kernel.kill_node()
        await kernel.quiet()
        await say(kernel, asked)
        await kernel.end("s")
        assert await kernel.results() == ["accept"]
        kernel.check()
    assert calls(tmp_path) == ["start", "order", "order answer 1: accept {'count': 3}"]


@pytest.mark.parametrize("tool", ["order", "check"])
async def test_an_answer_is_passed_on_once(tool: str, store: str, tmp_path: Path) -> None:
    """Given a frame that dies behind an answer that it has passed on, then the next one says it again, which changes
    nothing: the server's second question is asked, not answered with it."""
    async with k.running(store, tmp_path) as kernel:
        await say(kernel, await begin(kernel, agent(tmp_path, order(2, tool))))
        await until_called(tmp_path, f"{tool} answer 1: accept {{'count': 3}}")
        kernel.kill(holder(kernel))
        go(tmp_path, 1)
        await kernel.until("s", "input_requested", 2)
        [again] = await kernel.paused("s")
        await say(kernel, again, '{"count": 4}')
        await until_called(tmp_path, f"{tool} answer 2: accept {{'count': 4}}")
        kernel.kill(holder(kernel))
        await kernel.until("s", "session_activated", 5)
        go(tmp_path, 2)
        await kernel.end("s")
        assert await kernel.results() == ["accept accept"]
        kernel.check()
    assert len(calls(tmp_path)) == 4


@pytest.mark.parametrize("victim", ["server", "host"])
@pytest.mark.parametrize("tool", ["order", "check", "ask"])
async def test_a_server_that_dies_while_a_person_thinks(victim: str, tool: str, dsn: str, tmp_path: Path) -> None:
    """Given a question, when the server or its host dies, then the answer finds the call in doubt, and the tool's
    `on_crash` decides: it is reported, made again (and asks again), or asked about."""
    go(tmp_path, 1)
    on_crash = {"order": "ask"} if tool == "ask" else {}
    called = "check" if tool == "check" else "order"
    async with k.running(dsn, tmp_path) as kernel:
        asked = await begin(kernel, agent(tmp_path, order(tool=called), on_crash=on_crash))
        if victim == "server":
            os.kill(await until_called(tmp_path, called), signal.SIGKILL)
            await until(lambda: not any(one.in_flight for one in kernel.tool_host.servers.servers))
        else:
            kernel.tool_host.kill()
        await say(kernel, asked)
        if tool != "order":
            await kernel.until("s", "input_requested", 2)
            [again] = await kernel.paused("s")
            assert again["kind"] == ("question" if tool == "check" else "in_doubt")
            assert again["prompt"].startswith("The MCP server " + ("asks" if tool == "check" else "died while "))
            await say(kernel, again)
        await kernel.end("s")
        [result] = await kernel.results()
        assert (await kernel.types("s")).count("tool_in_doubt") == 1
        kernel.check()
    assert calls(tmp_path).count(called) == (2 if tool == "check" else 1)
    if tool == "order":
        assert result.startswith("interrupted: the MCP server died ")
    else:
        assert result == ("accept" if tool == "check" else '{"count": 3}')


async def test_a_question_that_nobody_answers(dsn: str, tmp_path: Path) -> None:
    """The agent's `answer_timeout` cancels a question of a server, and `answer_default` answers it where that fits."""
    go(tmp_path, 1)
    async with k.running(dsn, tmp_path) as kernel:
        for session_id, default in (("a", None), ("b", "no JSON"), ("c", '{"count": 9}')):
            await kernel.run(session_id, agent(tmp_path, order(), answer_timeout=0.05, answer_default=default))
        results = [await kernel.results(session_id) for session_id in ("a", "b", "c")]
        kernel.check()
    assert results == [["cancel"], ["cancel"], ["accept"]]
    assert calls(tmp_path)[-1] == "order answer 1: accept {'count': 9}"


async def test_the_time_for_an_answer_is_not_the_calls(dsn: str, tmp_path: Path) -> None:
    """A call whose timeout passes while a person thinks goes on with the answer, and has the rest of its time then."""
    async with k.running(dsn, tmp_path) as kernel:
        asked = await begin(kernel, agent(tmp_path, order(), timeout=0.5))
        [server] = kernel.tool_host.servers.servers
        await until(lambda: kernel.tool_host.servers.held == 1)
        await asyncio.sleep(1.0)  # twice the call's time
        assert server.in_flight == 1
        await say(kernel, asked)
        await kernel.end("s")
        [result] = await kernel.results()
    assert "did not finish within 0.5 s" in result
    assert calls(tmp_path)[-1] == "order answer 1: accept {'count': 3}"


async def test_nobody_answers_a_call_that_is_cancelled(store: str, tmp_path: Path) -> None:
    """Given a question, when the run is cancelled, then the server gets `cancel`, the call is given up, and an answer
    is refused."""
    go(tmp_path, 1)
    async with k.running(store, tmp_path) as kernel:
        asked = await begin(kernel, agent(tmp_path, order()))
        await kernel.ask("cancel", "s", "r", "enough")
        await kernel.end("s")
        await until_called(tmp_path, "order answer 1: cancel None")
        await until(lambda: kernel.tool_host.servers.held == 0)
        with pytest.raises(NotAsked):
            await say(kernel, asked)
        assert await kernel.results() == [GIVEN_UP]
        kernel.check()


async def test_an_answer_whose_call_is_steered_away_from(dsn: str, tmp_path: Path) -> None:
    """Given an answer for a server that no process has passed on, when a message interrupts the call, then the answer
    is done with as the call is, and the server learns that nobody says anything."""
    go(tmp_path, 1)
    async with k.running(dsn, tmp_path) as kernel:
        asked = await begin(kernel, agent(tmp_path, order()))
        for worker in list(kernel.workers.values()):
            kernel.kill(worker, replace=False)
        await say(kernel, asked)
        await kernel.ask("steer", "s", {"content": "go on without it", "interrupt": True})
        kernel.add_frame()
        [again] = await kernel.paused("s")
        await until_called(tmp_path, "order answer 1: cancel None")
        assert again["call_id"] != asked["call_id"]
        assert await kernel.results() == [GIVEN_UP]
        kernel.check()
        await say(kernel, again)
        await kernel.end("s")


async def test_a_question_that_no_node_service_knows_is_given_up(dsn: str, tmp_path: Path) -> None:
    """Given a question whose node service has died, and whose session then ended without a process, when another
    session needs the host, then the call is given up there, but not that of a session that still waits."""
    go(tmp_path, 1)
    spec = agent(tmp_path, order())
    async with k.running(dsn, tmp_path) as kernel:
        await begin(kernel, spec)
        await kernel.spawn("waits", spec)
        await kernel.send("waits")
        [asked] = await kernel.paused("waits")
        kernel.kill_node()
        await kernel.quiet()
        await kernel.ask("cancel", "s", "r", "enough")
        await kernel.end("s")
        await kernel.spawn("t", spec)
        await kernel.send("t")
        await kernel.paused("t")
        await until(lambda: kernel.tool_host.servers.held == 2)
        said = {"call_id": asked["call_id"], "asked": asked["asked"], "decision": "ok", "text": '{"count": 3}'}
        await kernel.ask("decide", "waits", [said])
        await kernel.end("waits")
        assert await kernel.results("waits") == ["accept"]
        kernel.check()


async def test_a_question_that_is_given_up_is_cancelled(dsn: str, tmp_path: Path) -> None:
    """`abort_pending` sends the server `cancel`, and the call goes on."""
    go(tmp_path, 1)
    async with k.running(dsn, tmp_path) as kernel:
        asked = await begin(kernel, agent(tmp_path, order()))
        await kernel.ask("abort_pending", "s", asked["call_id"])
        await kernel.end("s")
        assert await kernel.results() == ["cancel"]
        kernel.check()


async def test_calls_of_one_round_ask_at_once(dsn: str, tmp_path: Path) -> None:
    """Two calls of one server may ask at the same time: each answer goes to the question that it is to."""
    go(tmp_path, 1)
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.spawn("s", agent(tmp_path, order(), order(tool="check")))
        await kernel.send("s")
        await kernel.until("s", "input_requested", 2)
        for asked in await kernel.paused("s"):
            await say(kernel, asked)
        await kernel.end("s")
        assert await kernel.results() == ["accept", "accept"]
        kernel.check()
    assert len(calls(tmp_path)) == 5


async def test_a_page_to_visit_is_declined(dsn: str, tmp_path: Path) -> None:
    """A question in the form of an address asks nobody."""
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.run("s", agent(tmp_path, ("test_visit", {})))
        assert await kernel.results() == ['{"action": "decline"}']


@pytest.fixture
def dsn(tmp_path: Path) -> str:
    """A store of its own: what differs between the backends is not the subject here."""
    return f"sqlite:///{tmp_path}/store.db"
